// log_softmax(x W^T + b) row by row, in the memory of its own result:
//   y = z - max z - log(sum exp(z - max z))
//   dz = dy - exp(y) sum(dy), formed in chunks of rows, each multiplied out while it exists
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "linear_gradients.h"
#include "softmax_rows.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;

// y = log_softmax(z) for (count, columns) rows; z is overwritten, and may be y.
template <typename T, typename R>
void log_softmax_rows(T* z, R* y, int64_t count, int64_t columns) {
  torch::stable::parallel_for(0, count, row_grain(columns), [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> scratch;
    for (int64_t r = begin; r < end; ++r) {
      using A = acc_t<T>;
      A* row = load_row(z + r * columns, columns, scratch);
      const A max = row_max(row, columns);
      const A log_sum = static_cast<A>(std::log(sum_exp(row, columns, max)));
      for (int64_t k = 0; k < columns; ++k) row[k] = row[k] - max - log_sum;
      store_row(row, columns, y + r * columns);
    }
  });
}

// dz = dy - exp(y) sum(dy) for (count, columns) rows
template <typename T, typename R>
void gradient_rows(const R* dy, const R* y, T* dz, int64_t count, int64_t columns) {
  torch::stable::parallel_for(0, count, row_grain(columns), [&](int64_t begin, int64_t end) {
    using A = acc_t<T>;
    for (int64_t r = begin; r < end; ++r) {
      const R *g = dy + r * columns, *p = y + r * columns;
      T* out = dz + r * columns;
      const A sum =
          static_cast<A>(sum_row<A>(columns, [=](int64_t k) { return static_cast<A>(g[k]); }));
      for (int64_t k = 0; k < columns; ++k) {
        const A probability = exp_nonpositive(static_cast<A>(p[k]));
        out[k] = static_cast<T>(static_cast<A>(g[k]) - probability * sum);
      }
    }
  });
}

// Calls body(T{}, R{}) for the dtypes of the operands and of the result, which is the same or
// float32.
template <typename Body>
void dispatch_result(const char* op, ScalarType dtype, ScalarType result, const Body& body) {
  MEMOPT_CHECK(result == dtype || (result == ScalarType::Float && dtype != ScalarType::Double), op,
               ": the result has dtype ", toString(result), ", needs ", toString(dtype),
               " or a wider float32");
  dispatch_floating(dtype, op, "input", [&](auto zero) {
    if (result == dtype) {
      body(zero, zero);
    } else {
      body(zero, float{});
    }
  });
}

Tensor linear_log_softmax(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                          int64_t chunk_rows) {
  check_linear("linear_log_softmax", input, weight, bias, chunk_rows);
  const int64_t N = input.size(0), V = weight.size(0);
  const ScalarType dtype = input.scalar_type(), result = out_dtype.value_or(dtype);
  Tensor output = torch::stable::empty({N, V}, result);
  dispatch_result("linear_log_softmax", dtype, result, [&](auto t, auto r) {
    using T = decltype(t);
    using R = decltype(r);
    R* y = output.mutable_data_ptr<R>();
    if constexpr (std::is_same_v<T, R>) {
      linear_out(output, input, weight, bias);
      log_softmax_rows(y, y, N, V);
    } else {
      const Tensor w = as_operand(weight);
      const Tensor buffer = torch::stable::empty({std::min(N, chunk_rows), V}, dtype);
      for (int64_t begin = 0; begin < N; begin += chunk_rows) {
        const int64_t n = std::min(chunk_rows, N - begin);
        linear_out(rows_of(buffer, 0, n), rows_of(input, begin, n), w, bias);
        log_softmax_rows(buffer.mutable_data_ptr<T>(), y + begin * V, n, V);
      }
    }
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> linear_log_softmax_backward(
    const Tensor& grad, const Tensor& output, const Tensor& input, const Tensor& weight,
    bool want_input, bool want_weight, bool want_bias, int64_t chunk_rows) {
  constexpr const char* kOp = "linear_log_softmax_backward";
  check_linear(kOp, input, weight, std::nullopt, chunk_rows);
  const int64_t N = input.size(0), V = weight.size(0);
  for (const auto& [name, t] : {std::pair{"grad", &grad}, std::pair{"output", &output}}) {
    MEMOPT_CHECK(t->dim() == 2 && t->size(0) == N && t->size(1) == V, kOp, ": ", name, " has ",
                 t->numel(), " elements in ", t->dim(), " dimensions, needs (", N, ", ", V, ")");
    MEMOPT_CHECK(t->is_cpu(), kOp, ": ", name, " must be on the CPU");
    MEMOPT_CHECK(t->scalar_type() == output.scalar_type(), kOp, ": ", name, " has dtype ",
                 toString(t->scalar_type()), ", needs ", toString(output.scalar_type()),
                 ", the dtype of output");
  }
  LinearGradients gradients(input, weight, {want_input, want_weight, want_bias});
  const Tensor y = torch::stable::contiguous(output);
  const Tensor buffer = torch::stable::empty({std::min(N, chunk_rows), V}, input.scalar_type());
  dispatch_result(kOp, input.scalar_type(), output.scalar_type(), [&](auto t, auto r) {
    using T = decltype(t);
    using R = decltype(r);
    for (int64_t begin = 0; begin < N; begin += chunk_rows) {
      const int64_t n = std::min(chunk_rows, N - begin);
      // An expanded gradient, such as sum()'s, becomes dense for one chunk at a time.
      const Tensor dy = torch::stable::contiguous(rows_of(grad, begin, n));
      gradient_rows(dy.const_data_ptr<R>(), y.const_data_ptr<R>() + begin * V,
                    buffer.mutable_data_ptr<T>(), n, V);
      gradients.add(begin, rows_of(buffer, 0, n));
    }
  });
  return gradients.finish();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("linear_log_softmax", TORCH_BOX(&linear_log_softmax));
  m.impl("linear_log_softmax_backward", TORCH_BOX(&linear_log_softmax_backward));
}

}  // namespace memopt::cpu
