#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "aten_convolution.h"
#include "max_pool_codes.h"

namespace memopt::cpu {
using torch::headeronly::MemoryFormat;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// Bytes of convolution output worked on at once: what the second-level cache of two threads holds.
constexpr int64_t kChunkBytes = int64_t{1} << 20;

struct Problem {
  ConvolutionParameters convolution;
  PoolShape pool;  // its input is the convolution's output
  bool channels_last = false;
  int64_t images_per_chunk = 1;
};

inline void check_pair(const std::string& op, const char* name, const Ints& values, int64_t least) {
  MEMOPT_CHECK(values.size() == 2, op, name, " has ", values.size(), " numbers, needs 2");
  for (const int64_t v : values) {
    MEMOPT_CHECK(v >= least && v < (int64_t{1} << 31), op, name, " is ", values[0], ", ", values[1],
                 ", needs integers of at least ", least, " and below 2^31");
  }
}

// Whether a 4-D tensor's strides say channels_last: PyTorch's own rule, so that the result has
// eager's memory format.
inline bool suggests_channels_last(const Tensor& t) {
  int64_t least = 0;
  if (t.stride(1) == 0) return false;
  for (const int64_t d : {1, 3, 2, 0}) {
    const int64_t size = t.size(d), stride = t.stride(d);
    if (size == 0 || stride < least || (d == 0 && least == t.stride(1))) return false;
    least = size > 1 ? stride * size : stride;
  }
  return true;
}

inline Problem make_problem(const std::string& name, const Tensor& input, const Tensor& weight,
                            const std::optional<Tensor>& bias, const Ints& stride,
                            const Ints& padding, const Ints& dilation, int64_t groups,
                            const Ints& pool_kernel_size, const Ints& pool_stride,
                            const Ints& pool_padding, const Ints& pool_dilation, bool ceil_mode,
                            const std::string& activation) {
  const std::string op = name + ": ";
  MEMOPT_CHECK(input.dim() == 4, op, "input has ", input.dim(), " dimensions, needs (N, C, H, W)");
  MEMOPT_CHECK(weight.dim() == 4, op, "weight has ", weight.dim(),
               " dimensions, needs (K, C, R, S)");
  MEMOPT_CHECK(weight.is_cpu(), op, "weight must be on the CPU, as input is");
  MEMOPT_CHECK(weight.scalar_type() == input.scalar_type(), op, "input has dtype ",
               toString(input.scalar_type()), " and weight ", toString(weight.scalar_type()),
               ", needs the same dtype");
  const int64_t channels = input.size(1), filters = weight.size(0);
  MEMOPT_CHECK(groups > 0 && filters > 0 && filters % groups == 0, op, "groups is ", groups,
               ", needs a positive divisor of weight's ", filters, " filters");
  // Compared by division: groups comes from outside and a product could overflow.
  MEMOPT_CHECK(channels % groups == 0 && weight.size(1) == channels / groups && channels > 0, op,
               "input has ", channels, " channels, but weight expects ", groups, " groups of ",
               weight.size(1));
  if (bias.has_value()) {
    MEMOPT_CHECK(bias->is_cpu(), op, "bias must be on the CPU, as input is");
    MEMOPT_CHECK(bias->dim() == 1 && bias->size(0) == filters, op, "bias has ", bias->numel(),
                 " elements in ", bias->dim(), " dimensions, needs shape (", filters, ",)");
    MEMOPT_CHECK(bias->scalar_type() == input.scalar_type(), op, "input has dtype ",
                 toString(input.scalar_type()), " and bias ", toString(bias->scalar_type()),
                 ", needs the same dtype");
  }
  check_pair(op, "stride", stride, 1);
  check_pair(op, "padding", padding, 0);
  check_pair(op, "dilation", dilation, 1);
  check_pair(op, "pool_kernel_size", pool_kernel_size, 1);
  check_pair(op, "pool_stride", pool_stride, 1);
  check_pair(op, "pool_padding", pool_padding, 0);
  check_pair(op, "pool_dilation", pool_dilation, 1);
  MEMOPT_CHECK(activation == "relu", op, "activation is '", activation, "', needs 'relu'");

  Problem problem;
  problem.convolution = {stride, padding, dilation, groups};
  problem.pool.images = input.size(0);
  problem.pool.channels = filters;
  for (const int d : {0, 1}) {
    MEMOPT_CHECK(weight.size(2 + d) > 0, op, "weight has an empty kernel");
    WindowAxis axis{input.size(2 + d), weight.size(2 + d), stride[d], padding[d], dilation[d]};
    axis.set_output(false);
    MEMOPT_CHECK(axis.input > 0 && axis.output > 0, op, "the kernel reaches over ", axis.reach(),
                 " of a padded input of ", axis.input + 2 * axis.padding,
                 "; the convolution's output would be empty");
    WindowAxis pool{axis.output, pool_kernel_size[d], pool_stride[d], pool_padding[d],
                    pool_dilation[d]};
    MEMOPT_CHECK(pool.padding <= pool.kernel / 2, op, "pool_padding is ", pool.padding,
                 ", needs at most half of pool_kernel_size, which is ", pool.kernel);
    pool.set_output(ceil_mode);
    MEMOPT_CHECK(pool.output > 0, op, "the pool's window reaches over ", pool.reach(),
                 " of the convolution's output of ", axis.output, "; its output would be empty");
    (d == 0 ? problem.pool.height : problem.pool.width) = pool;
  }
  MEMOPT_CHECK(problem.pool.positions() < (int64_t{1} << 32) - 1, op,
               "pool_kernel_size has more than 2^32 - 2 positions");
  problem.channels_last =
      input.size(0) > 0 && (suggests_channels_last(input) || suggests_channels_last(weight));
  int64_t image_bytes = static_cast<int64_t>(input.element_size());
  bool overflow = __builtin_mul_overflow(image_bytes, filters, &image_bytes);
  overflow |= __builtin_mul_overflow(image_bytes, problem.pool.height.input, &image_bytes);
  overflow |= __builtin_mul_overflow(image_bytes, problem.pool.width.input, &image_bytes);
  // Far below 2^63, so that the bits of an image's codes can be counted too.
  MEMOPT_CHECK(!overflow && image_bytes < (int64_t{1} << 56), op, "the convolution's output of ",
               filters, " x ", problem.pool.height.input, " x ", problem.pool.width.input,
               " an image would exceed 2^56 bytes");
  problem.images_per_chunk = std::max<int64_t>(1, kChunkBytes / image_bytes);
  return problem;
}

inline Tensor empty_4d(const Problem& problem, int64_t n, int64_t c, int64_t h, int64_t w,
                       ScalarType dtype) {
  return torch::stable::empty(
      {n, c, h, w}, dtype, std::nullopt, std::nullopt, std::nullopt,
      problem.channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
}

inline Strides4 strides_of(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// Calls body(first image, images) for every chunk of the batch.
template <typename Body>
void for_each_chunk(const Problem& problem, const Body& body) {
  for (int64_t n = 0; n < problem.pool.images; n += problem.images_per_chunk) {
    body(n, std::min(problem.images_per_chunk, problem.pool.images - n));
  }
}

// total += part, in the accumulator's dtype. Both contiguous.
template <typename T>
void accumulate(const Tensor& part, acc_t<T>* total) {
  const Tensor dense = torch::stable::contiguous(part);
  const T* values = dense.const_data_ptr<T>();
  torch::stable::parallel_for(0, dense.numel(), 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) total[i] += static_cast<acc_t<T>>(values[i]);
  });
}

template <typename T>
constexpr ScalarType acc_dtype() {
  return std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
}

}  // namespace memopt::cpu
