// conv_batch_norm_relu_pool2d: y = max_pool(relu(batch_norm(conv(x, w) + b))) in training.
//
// The convolution's output is the one full-size tensor, in channels_last, which the stock
// convolution is fastest in. It is read once for its statistics and once more to be normalised, cut
// and pooled. Backward sums from the codes, then rebuilds the gradient of the convolution's output,
// which batch norm makes dense, chunk by chunk of images for the stock convolution's backward.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "batch_norm_pool.h"
#include "batch_norm_statistics.h"
#include "conv_dense_chunks.h"

namespace memopt::cpu {
namespace {

const char* const kForward = "conv_batch_norm_relu_pool2d";
const char* const kBackward = "conv_batch_norm_relu_pool2d_backward";

ScalarType acc_dtype_of(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A channel parameter's dtype is the input's, or float32 where that is shorter.
void check_channels(const char* op, const char* name, const std::optional<Tensor>& t,
                    int64_t channels, ScalarType dtype, ScalarType or_dtype) {
  if (!t.has_value()) return;
  MEMOPT_CHECK(t->is_cpu(), op, ": ", name, " must be on the CPU, as input is");
  MEMOPT_CHECK(t->dim() == 1 && t->size(0) == channels, op, ": ", name, " has ", t->numel(),
               " elements in ", t->dim(), " dimensions, needs shape (", channels, ",)");
  MEMOPT_CHECK(t->scalar_type() == dtype || t->scalar_type() == or_dtype, op, ": ", name,
               " has dtype ", toString(t->scalar_type()), ", needs ", toString(dtype), " or ",
               toString(or_dtype));
}

void check_convolved(const Tensor& t, const PoolShape& pool, ScalarType dtype) {
  MEMOPT_CHECK(t.is_cpu() && t.scalar_type() == dtype && t.dim() == 4 && t.size(0) == pool.images &&
                   t.size(1) == pool.channels && t.size(2) == pool.height.input &&
                   t.size(3) == pool.width.input,
               kBackward, ": convolved has the wrong shape, dtype or device, needs ",
               toString(dtype), " of shape (", pool.images, ", ", pool.channels, ", ",
               pool.height.input, ", ", pool.width.input, ") on the CPU");
}

// The elements of a 1-D tensor, or `missing` for each channel.
std::vector<double> channel_values(const std::optional<Tensor>& t, int64_t channels,
                                   double missing) {
  std::vector<double> values(channels, missing);
  if (!t.has_value()) return values;
  dispatch_floating(t->scalar_type(), kForward, "a channel parameter", [&](auto zero) {
    using T = decltype(zero);
    const T* from = t->const_data_ptr<T>();
    for (int64_t c = 0; c < channels; ++c) values[c] = static_cast<double>(from[c * t->stride(0)]);
  });
  return values;
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward conv_batch_norm_relu_pool2d(const Tensor& input, const Tensor& weight,
                                    const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& bn_weight,
                                    const std::optional<Tensor>& bn_bias, Ints stride, Ints padding,
                                    Ints dilation, int64_t groups, Ints pool_kernel_size,
                                    Ints pool_stride, Ints pool_padding, Ints pool_dilation,
                                    bool ceil_mode, double eps, bool save_codes) {
  const ConvPoolProblem problem =
      make_problem(kForward, 2, input, weight, bias,
                   {stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding,
                    pool_dilation, ceil_mode, "relu", 0, 0});
  const PoolShape& pool = problem.pool;
  const ScalarType dtype = input.scalar_type(), acc = acc_dtype_of(dtype);
  check_channels(kForward, "bn_weight", bn_weight, pool.channels, dtype, acc);
  check_channels(kForward, "bn_bias", bn_bias, pool.channels,
                 bn_weight ? bn_weight->scalar_type() : dtype,
                 bn_weight ? bn_weight->scalar_type() : acc);
  MEMOPT_CHECK(eps > 0, kForward, ": eps is ", eps, ", needs to be positive");

  auto results = empty_results(problem, 2, dtype, save_codes);
  Tensor &output = std::get<0>(results), &codes = std::get<1>(results);
  uint8_t* bytes = save_codes ? codes.mutable_data_ptr<uint8_t>() : nullptr;
  Tensor mean = torch::stable::empty({pool.channels}, acc);
  Tensor invstd = torch::stable::empty({pool.channels}, acc);
  Tensor variance = torch::stable::empty({pool.channels}, acc);
  const Tensor convolved =
      pool.images == 0
          ? empty_channels_last({0, pool.channels, pool.height.input, pool.width.input}, dtype)
          : to_channels_last(
                convolution(input, channels_last_weight(weight), bias, problem.convolution));
  const auto gamma = channel_values(bn_weight, pool.channels, 1);
  const auto beta = channel_values(bn_bias, pool.channels, 0);
  dispatch_floating(dtype, kForward, "input", [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* x = convolved.const_data_ptr<T>();
    const ChannelStatistics statistics =
        channel_statistics(x, pool.images, pool.height.input * pool.width.input, pool.channels);
    std::vector<Acc> scale(pool.channels), shift(pool.channels);
    Acc* means = mean.mutable_data_ptr<Acc>();
    Acc* invstds = invstd.mutable_data_ptr<Acc>();
    Acc* variances = variance.mutable_data_ptr<Acc>();
    for (int64_t c = 0; c < pool.channels; ++c) {
      means[c] = static_cast<Acc>(statistics.mean(c));
      invstds[c] = static_cast<Acc>(1 / std::sqrt(statistics.variance(c) + eps));
      variances[c] = static_cast<Acc>(statistics.unbiased_variance(c));
      scale[c] = static_cast<Acc>(static_cast<double>(invstds[c]) * gamma[c]);
      shift[c] = static_cast<Acc>(beta[c] - statistics.mean(c) * static_cast<double>(scale[c]));
    }
    batch_norm_relu_pool<T>(pool, x, scale.data(), shift.data(), output.mutable_data_ptr<T>(),
                            strides5(output), bytes);
  });
  return {output, codes,  save_codes ? convolved : torch::stable::empty({0}, dtype),
          mean,   invstd, variance};
}

// Gradients that are not asked for come back as empty tensors of shape (0,).
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward conv_batch_norm_relu_pool2d_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight,
    const std::optional<Tensor>& bn_weight, const Tensor& convolved, const Tensor& codes,
    const Tensor& mean, const Tensor& invstd, Ints stride, Ints padding, Ints dilation,
    int64_t groups, Ints pool_kernel_size, Ints pool_stride, Ints pool_padding, Ints pool_dilation,
    bool ceil_mode, bool input_grad, bool weight_grad, bool bias_grad, bool bn_weight_grad,
    bool bn_bias_grad) {
  const ConvPoolProblem problem =
      make_problem(kBackward, 2, input, weight, std::nullopt,
                   {stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding,
                    pool_dilation, ceil_mode, "relu", 0, 0});
  const PoolShape& pool = problem.pool;
  const ScalarType dtype = input.scalar_type(), acc = acc_dtype_of(dtype);
  check_channels(kBackward, "bn_weight", bn_weight, pool.channels, dtype, acc);
  check_channels(kBackward, "mean", mean, pool.channels, acc, acc);
  check_channels(kBackward, "invstd", invstd, pool.channels, acc, acc);
  check_saved(kBackward, 2, problem, grad, input, codes);
  check_convolved(convolved, pool, dtype);

  ConvPoolGradients grads(problem, input, weight, input_grad, weight_grad, bias_grad);
  Tensor dgamma = torch::stable::empty({bn_weight_grad ? pool.channels : 0}, acc);
  Tensor dbeta = torch::stable::empty({bn_bias_grad ? pool.channels : 0}, acc);
  const Tensor packed = torch::stable::contiguous(codes), dense = to_channels_last(convolved);
  const auto gamma = channel_values(bn_weight, pool.channels, 1);
  const auto means = channel_values(mean, pool.channels, 0);
  const auto invstds = channel_values(invstd, pool.channels, 0);

  dispatch_floating(dtype, kBackward, "input", [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T *dy = grad.const_data_ptr<T>(), *x = dense.const_data_ptr<T>();
    const uint8_t* bytes = packed.const_data_ptr<uint8_t>();
    GradientTerms<Acc> terms(static_cast<size_t>(pool.channels));
    for (int64_t c = 0; c < pool.channels; ++c) terms.mean[c] = static_cast<Acc>(means[c]);
    const GradientSums sums = sum_live(pool, dy, strides5(grad), bytes, x, terms.mean.data());
    const double count = static_cast<double>(pool.images) * pool.height.input * pool.width.input;
    for (int64_t c = 0; c < pool.channels && count > 0; ++c) {
      terms.offset[c] = static_cast<Acc>(sums.grads[c] / count);
      terms.slope[c] = static_cast<Acc>(sums.products[c] * invstds[c] * invstds[c] / count);
      terms.scale[c] = static_cast<Acc>(gamma[c] * invstds[c]);
    }
    for (int64_t c = 0; c < pool.channels; ++c) {
      // Batch norm takes the mean away, and the bias with it; what is not finite stays.
      const Acc nothing = (terms.offset[c] + terms.slope[c] * terms.mean[c]) * terms.scale[c] * 0;
      if (bias_grad) grads.db.mutable_data_ptr<T>()[c] = static_cast<T>(nothing);
      if (bn_bias_grad) dbeta.mutable_data_ptr<Acc>()[c] = static_cast<Acc>(sums.grads[c]);
      if (bn_weight_grad) {
        dgamma.mutable_data_ptr<Acc>()[c] = static_cast<Acc>(sums.products[c] * invstds[c]);
      }
    }
    if (!input_grad && !weight_grad) return;

    const int64_t image_size = pool.channels * pool.height.input * pool.width.input;
    backward_dense_chunks<T>(problem, input, weight, grads, [&](int64_t n, int64_t images, T* dc) {
      PoolShape chunk = pool;
      chunk.images = images;
      batch_norm_gradient<T>(chunk, dy + n * grad.stride(0), strides5(grad),
                             bytes + n * pool.channels * pool.code_bytes(), x + n * image_size,
                             terms, dc);
    });
  });
  return {grads.dx, grads.dw, grads.db, dgamma, dbeta};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("conv_batch_norm_relu_pool2d", TORCH_BOX(&conv_batch_norm_relu_pool2d));
  m.impl("conv_batch_norm_relu_pool2d_backward", TORCH_BOX(&conv_batch_norm_relu_pool2d_backward));
}

}  // namespace memopt::cpu
