// Linear layer whose input is stored quantised for the weight's gradient:
//   y = x W^T + b      (packed, scale, minimum) = quantize(x)      dW = g^T dequantize(packed, ...)
// dW is summed over tiles of rows, so the restored input never exists in full.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "quantize.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;

// A tile of the restored input stays in the L2 cache, but is high enough for an efficient product.
constexpr int64_t kTileBytes = 2 << 20;
constexpr int64_t kMinTileRows = 512;
constexpr int64_t kGrain = 32 * 1024;  // elements restored per task; a multiple of 8

Tensor aten_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(input),
                                    torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// sum += a b
void add_product(const Tensor& sum, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(sum.get(), sum.get(), a.get(), b.get(), 1.0, 1.0));
}

void check_same(const Tensor& tensor, const char* name, const Tensor& input) {
  MEMOPT_CHECK(tensor.scalar_type() == input.scalar_type(), "linear: ", name, " has dtype ",
               toString(tensor.scalar_type()), ", needs that of input, ",
               toString(input.scalar_type()));
  MEMOPT_CHECK(tensor.is_cpu(), "linear: ", name, " must be on the CPU, as input is");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear(const Tensor& input, const Tensor& weight,
                                                  const std::optional<Tensor>& bias, int64_t bits,
                                                  int64_t group_size,
                                                  const std::optional<Tensor>& seed) {
  MEMOPT_CHECK(weight.dim() == 2, "linear: weight has ", weight.dim(), " dimensions, needs 2");
  MEMOPT_CHECK(input.dim() >= 1, "linear: input has no dimensions, needs at least 1");
  const int64_t features = input.size(input.dim() - 1);
  MEMOPT_CHECK(features == weight.size(1), "linear: input has ", features,
               " features, needs the weight's ", weight.size(1));
  check_same(weight, "weight", input);
  if (bias) {
    MEMOPT_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "linear: bias has ",
                 bias->numel(), " elements in ", bias->dim(), " dimensions, needs ", weight.size(0),
                 " in one");
    check_same(*bias, "bias", input);
  }
  auto [packed, scale, minimum] = quantize_tensor("linear", input, bits, group_size, seed);
  return {aten_linear(input, weight, bias), packed, scale, minimum};
}

template <typename T>
void decode_tile(const QuantizedView& input, int64_t begin, int64_t end, const Tensor& tile) {
  T* out = tile.mutable_data_ptr<T>();
  const int64_t tasks = (end - begin + kGrain - 1) / kGrain;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    const int64_t from = begin + first * kGrain, to = std::min(begin + last * kGrain, end);
    input.decode_range(from, to, out + (from - begin));
  });
}

// The gradient of the weight, accumulated in T.
template <typename T>
Tensor weight_gradient(const Tensor& grad, const QuantizedView& input, int64_t rows, int64_t out,
                       int64_t in, ScalarType dtype) {
  Tensor sum = torch::stable::empty({out, in}, dtype);
  torch::stable::zero_(sum);
  if (rows == 0 || out == 0 || in == 0) return sum;
  int64_t tile_rows = std::max<int64_t>(kMinTileRows, kTileBytes / (in * int64_t{sizeof(T)}));
  tile_rows = std::min(tile_rows / 8 * 8, rows);  // every tile begins at a multiple of 8 elements
  Tensor tile = torch::stable::empty({tile_rows, in}, dtype);
  Tensor g = torch::stable::reshape(grad, {rows, out});
  for (int64_t row = 0; row < rows; row += tile_rows) {
    const int64_t count = std::min(tile_rows, rows - row);
    decode_tile<T>(input, row * in, (row + count) * in, tile);
    Tensor g_tile = torch::stable::narrow(g, 0, row, count);
    if (grad.scalar_type() != dtype) g_tile = torch::stable::to(g_tile, dtype);
    add_product(sum, torch::stable::transpose(g_tile, 0, 1),
                torch::stable::narrow(tile, 0, 0, count));
  }
  return sum;
}

Tensor linear_backward_weight(const Tensor& grad, const Tensor& packed, const Tensor& scale,
                              const Tensor& minimum, int64_t in_features, int64_t bits,
                              int64_t group_size) {
  MEMOPT_CHECK(grad.dim() >= 1, "linear_backward_weight: grad has no dimensions, needs 1 or more");
  MEMOPT_CHECK(in_features >= 0, "linear_backward_weight: in_features is ", in_features,
               ", needs to be at least 0");
  const int64_t out_features = grad.size(grad.dim() - 1);
  int64_t rows = 1, numel = 0;
  for (int64_t d = 0; d + 1 < grad.dim(); ++d) rows *= grad.size(d);
  MEMOPT_CHECK(!__builtin_mul_overflow(rows, in_features, &numel), "linear_backward_weight: ", rows,
               " rows of ", in_features, " features would exceed 2^63 elements");
  const QuantizedView input("linear_backward_weight", packed, scale, minimum, numel, bits,
                            group_size);
  Tensor result = grad;
  dispatch_floating(grad.scalar_type(), "linear_backward_weight", "grad", [&](auto zero) {
    using T = acc_t<decltype(zero)>;
    constexpr ScalarType kAccumulated =
        std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
    result = weight_gradient<T>(grad, input, rows, out_features, in_features, kAccumulated);
  });
  if (result.scalar_type() == grad.scalar_type()) return result;
  return torch::stable::to(result, grad.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_backward_weight", TORCH_BOX(&linear_backward_weight));
}

}  // namespace memopt::cpu
