// The arguments of conv_relu_pool2d and 3d, checked before any memory is touched.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "aten_convolution.h"
#include "max_pool_codes.h"

namespace memopt::cpu {

using torch::headeronly::MemoryFormat;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// In the order of the ops' schemas.
struct ConvPoolArguments {
  Ints stride, padding, dilation;
  int64_t groups;
  Ints pool_kernel_size, pool_stride, pool_padding, pool_dilation;
  bool ceil_mode;
  std::string activation;
  double alpha, beta;
};

struct ConvPoolProblem {
  ConvolutionParameters convolution;
  WindowAxis depth{1, 1, 1, 0, 1, 1}, height, width;  // of the convolution, over the input
  PoolShape pool;                                     // its input is the convolution's output
  bool channels_last = false;
  int64_t images_per_chunk = 1;
};

// Bytes of convolution output worked on at once: what the second-level cache of two threads holds.
constexpr int64_t kChunkBytes = int64_t{1} << 20;

// Element strides of (N, C, H, W) or (N, C, D, H, W).
inline Strides5 strides5(const Tensor& t) {
  if (t.dim() == 4) return {t.stride(0), t.stride(1), 0, t.stride(2), t.stride(3)};
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3), t.stride(4)};
}

// Whether a tensor's strides say channels_last: PyTorch's own rule, so that the result has eager's
// memory format.
inline bool suggests_channels_last(const Tensor& t) {
  int64_t least = 0;
  if (t.stride(1) == 0) return false;
  const auto follows = [&](int64_t d) {
    const int64_t size = t.size(d), stride = t.stride(d);
    if (size == 0 || stride < least || (d == 0 && least == t.stride(1))) return false;
    least = size > 1 ? stride * size : stride;
    return true;
  };
  if (!follows(1)) return false;
  for (int64_t d = t.dim() - 1; d >= 2; --d) {
    if (!follows(d)) return false;
  }
  return follows(0);
}

inline Tensor empty_like_images(const ConvPoolProblem& problem, Ints sizes, ScalarType dtype) {
  const MemoryFormat last =
      sizes.size() == 4 ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d;
  return torch::stable::empty(sizes, dtype, std::nullopt, std::nullopt, std::nullopt,
                              problem.channels_last ? last : MemoryFormat::Contiguous);
}

// (images, channels, [depth,] height, width) of a pool's outputs or of its input.
inline Ints pool_sizes(const PoolShape& pool, int64_t images, int dims,
                       int64_t WindowAxis::* length) {
  Ints sizes{images, pool.channels};
  if (dims == 3) sizes.push_back(pool.depth.*length);
  sizes.push_back(pool.height.*length);
  sizes.push_back(pool.width.*length);
  return sizes;
}

inline void check_numbers(const char* op, int dims, const char* name, const Ints& values,
                          int64_t least) {
  MEMOPT_CHECK(static_cast<int>(values.size()) == dims, op, ": ", name, " has ", values.size(),
               " numbers, needs ", dims);
  for (const int64_t v : values) {
    MEMOPT_CHECK(v >= least && v < (int64_t{1} << 31), op, ": ", name, " has ", v,
                 ", needs integers of at least ", least, " and below 2^31");
  }
}

inline Activation make_activation(const char* op, const std::string& name, double alpha,
                                  double beta) {
  if (name == "identity") return {ActivationKind::kIdentity, 0, 0};
  if (name == "relu") return {ActivationKind::kRelu, 0, 0};
  if (name == "leaky_relu") return {ActivationKind::kLeakyRelu, alpha, 0};
  if (name == "relu6") return {ActivationKind::kHardtanh, 0, 6};
  MEMOPT_CHECK(name == "hardtanh", op, ": activation is '", name,
               "', needs 'relu', 'leaky_relu', 'relu6', 'hardtanh' or 'identity'");
  return {ActivationKind::kHardtanh, alpha, beta};
}

inline void check_tensors(const char* op, int dims, const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, int64_t groups) {
  MEMOPT_CHECK(input.dim() == dims + 2, op, ": input has ", input.dim(), " dimensions, needs ",
               dims + 2);
  MEMOPT_CHECK(weight.dim() == dims + 2, op, ": weight has ", weight.dim(), " dimensions, needs ",
               dims + 2);
  MEMOPT_CHECK(weight.is_cpu(), op, ": weight must be on the CPU, as input is");
  MEMOPT_CHECK(weight.scalar_type() == input.scalar_type(), op, ": input has dtype ",
               toString(input.scalar_type()), " and weight ", toString(weight.scalar_type()),
               ", needs the same dtype");
  const int64_t channels = input.size(1), filters = weight.size(0);
  MEMOPT_CHECK(groups > 0 && filters > 0 && filters % groups == 0, op, ": groups is ", groups,
               ", needs a positive divisor of weight's ", filters, " filters");
  // Compared by division: groups comes from outside and a product could overflow.
  MEMOPT_CHECK(channels % groups == 0 && weight.size(1) == channels / groups && channels > 0, op,
               ": input has ", channels, " channels, but weight expects ", groups, " groups of ",
               weight.size(1));
  if (!bias.has_value()) return;
  MEMOPT_CHECK(bias->is_cpu(), op, ": bias must be on the CPU, as input is");
  MEMOPT_CHECK(bias->dim() == 1 && bias->size(0) == filters, op, ": bias has ", bias->numel(),
               " elements in ", bias->dim(), " dimensions, needs shape (", filters, ",)");
  MEMOPT_CHECK(bias->scalar_type() == input.scalar_type(), op, ": input has dtype ",
               toString(input.scalar_type()), " and bias ", toString(bias->scalar_type()),
               ", needs the same dtype");
}

inline ConvPoolProblem make_problem(const char* op, int dims, const Tensor& input,
                                    const Tensor& weight, const std::optional<Tensor>& bias,
                                    const ConvPoolArguments& a) {
  check_tensors(op, dims, input, weight, bias, a.groups);
  check_numbers(op, dims, "stride", a.stride, 1);
  check_numbers(op, dims, "padding", a.padding, 0);
  check_numbers(op, dims, "dilation", a.dilation, 1);
  check_numbers(op, dims, "pool_kernel_size", a.pool_kernel_size, 1);
  check_numbers(op, dims, "pool_stride", a.pool_stride, 1);
  check_numbers(op, dims, "pool_padding", a.pool_padding, 0);
  check_numbers(op, dims, "pool_dilation", a.pool_dilation, 1);

  ConvPoolProblem problem;
  problem.convolution = {a.stride, a.padding, a.dilation, a.groups};
  for (int d = 0; d < dims; ++d) {
    // A kernel of 1 has none; oneDNN's float16 convolution crashes when it is given one.
    if (weight.size(2 + d) == 1) problem.convolution.dilation[d] = 1;
  }
  problem.pool.images = input.size(0);
  problem.pool.channels = weight.size(0);
  problem.pool.activation = make_activation(op, a.activation, a.alpha, a.beta);
  int64_t positions = 1, image_bytes = static_cast<int64_t>(input.element_size());
  bool overflow = __builtin_mul_overflow(image_bytes, weight.size(0), &image_bytes);
  for (int d = 0; d < dims; ++d) {
    MEMOPT_CHECK(weight.size(2 + d) > 0, op, ": weight has an empty kernel");
    WindowAxis axis{input.size(2 + d), weight.size(2 + d), a.stride[d], a.padding[d],
                    problem.convolution.dilation[d]};
    axis.set_output(false);
    MEMOPT_CHECK(axis.input > 0 && axis.output > 0, op, ": the kernel reaches over ", axis.reach(),
                 " of a padded input of ", axis.input + 2 * axis.padding,
                 "; the convolution's output would be empty");
    WindowAxis pool{axis.output, a.pool_kernel_size[d], a.pool_stride[d], a.pool_padding[d],
                    a.pool_dilation[d]};
    MEMOPT_CHECK(pool.padding <= pool.kernel / 2, op, ": pool_padding is ", pool.padding,
                 ", needs at most half of pool_kernel_size, which is ", pool.kernel);
    pool.set_output(a.ceil_mode);
    MEMOPT_CHECK(pool.output > 0, op, ": the pool's window reaches over ", pool.reach(),
                 " of the convolution's output of ", axis.output, "; its output would be empty");
    const int side = d + 3 - dims;  // 0 is the depth
    (side == 0 ? problem.depth : side == 1 ? problem.height : problem.width) = axis;
    (side == 0 ? problem.pool.depth : side == 1 ? problem.pool.height : problem.pool.width) = pool;
    overflow |= __builtin_mul_overflow(positions, pool.kernel, &positions);
    overflow |= __builtin_mul_overflow(image_bytes, axis.output, &image_bytes);
  }
  MEMOPT_CHECK(!overflow && positions < (int64_t{1} << 31) - 1, op,
               ": pool_kernel_size has more than 2^31 - 2 positions, or the convolution's output "
               "overflows");
  // Far below 2^63, so that the bits of an image's codes can be counted too.
  MEMOPT_CHECK(image_bytes < (int64_t{1} << 56), op,
               ": the convolution's output of an image would exceed 2^56 bytes");
  problem.channels_last =
      input.size(0) > 0 && (suggests_channels_last(input) || suggests_channels_last(weight));
  problem.images_per_chunk = std::max<int64_t>(1, kChunkBytes / image_bytes);
  return problem;
}

// What the backward op is given besides: input, and grad of the forward op's output.
inline void check_grad(const char* op, int dims, const ConvPoolProblem& problem, const Tensor& grad,
                       const Tensor& input) {
  const ScalarType dtype = input.scalar_type();
  MEMOPT_CHECK(input.is_cpu() && grad.is_cpu(), op, ": input must be on the CPU, as grad is");
  MEMOPT_CHECK(grad.scalar_type() == dtype, op, ": grad has dtype ", toString(grad.scalar_type()),
               ", needs input's ", toString(dtype));
  const Ints sizes = pool_sizes(problem.pool, problem.pool.images, dims, &WindowAxis::output);
  bool same = grad.dim() == dims + 2;
  for (int64_t d = 0; same && d < dims + 2; ++d) same = grad.size(d) == sizes[d];
  MEMOPT_CHECK(same, op, ": grad has the wrong shape, needs that of the forward pass's output");
}

// And the codes as the forward op made them.
inline void check_saved(const char* op, int dims, const ConvPoolProblem& problem,
                        const Tensor& grad, const Tensor& input, const Tensor& codes) {
  check_grad(op, dims, problem, grad, input);
  const PoolShape& pool = problem.pool;
  MEMOPT_CHECK(codes.is_cpu(), op, ": codes must be on the CPU, as grad is");
  MEMOPT_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 3 &&
                   codes.size(0) == pool.images && codes.size(1) == pool.channels &&
                   codes.size(2) == pool.code_bytes(),
               op, ": codes has the wrong shape or dtype, needs uint8 of shape (", pool.images,
               ", ", pool.channels, ", ", pool.code_bytes(),
               "); the forward pass makes them with save_codes=True");
}

// The forward pass's results: the output, and the codes or an empty tensor in their place.
inline std::tuple<Tensor, Tensor> empty_results(const ConvPoolProblem& problem, int dims,
                                                ScalarType dtype, bool save_codes) {
  const PoolShape& pool = problem.pool;
  return {
      empty_like_images(problem, pool_sizes(pool, pool.images, dims, &WindowAxis::output), dtype),
      torch::stable::empty({pool.images, pool.channels, save_codes ? pool.code_bytes() : 0},
                           ScalarType::Byte)};
}

// The backward pass's results. Those that are not asked for are empty tensors of shape (0,).
struct ConvPoolGradients {
  bool has_dx, has_dw, has_db;
  Tensor dx, dw, db;

  ConvPoolGradients(const ConvPoolProblem& problem, const Tensor& input, const Tensor& weight,
                    bool input_grad, bool weight_grad, bool bias_grad)
      : has_dx(input_grad),
        has_dw(weight_grad),
        has_db(bias_grad),
        dx(input_grad ? empty_like_images(problem, Ints(input.sizes().begin(), input.sizes().end()),
                                          input.scalar_type())
                      : torch::stable::empty({0}, input.scalar_type())),
        dw(weight_grad ? torch::stable::empty_like(weight)
                       : torch::stable::empty({0}, input.scalar_type())),
        db(torch::stable::empty({bias_grad ? weight.size(0) : 0}, input.scalar_type())) {}
};

}  // namespace memopt::cpu
