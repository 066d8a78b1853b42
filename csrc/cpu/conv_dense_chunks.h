// The convolution's gradients where that of its output is dense: it exists for a few images at a
// time, in channels_last, and goes through the stock convolution's backward.
#pragma once

#include <algorithm>

#include "channels_last.h"
#include "conv_pool_chunks.h"

namespace memopt::cpu {

// Calls make(first image, images, gradient of the convolution's output, to be written) for every
// chunk; dW is summed over the chunks in float32 (float64).
template <typename T, typename Make>
void backward_dense_chunks(const ConvPoolProblem& problem, Tensor input, const Tensor& weight,
                           ConvPoolGradients& grads, const Make& make) {
  using Acc = acc_t<T>;
  const PoolShape& pool = problem.pool;
  const Tensor filters = channels_last_weight(weight);
  Tensor dw_sum = torch::stable::empty(
      weight.sizes(), std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float);
  Acc* dw_total = dw_sum.template mutable_data_ptr<Acc>();
  std::fill_n(dw_total, dw_sum.numel(), Acc(0));
  Tensor buffer =
      empty_channels_last(pool_sizes(pool, std::min(problem.images_per_chunk, pool.images),
                                     static_cast<int>(input.dim()) - 2, &WindowAxis::input),
                          input.scalar_type());
  for_each_chunk(problem, [&](int64_t first, int64_t count) {
    make(first, count, buffer.mutable_data_ptr<T>());
    if (!grads.has_dx && !grads.has_dw) return;
    const auto [dx_part, dw_part] = convolution_backward(
        torch::stable::narrow(buffer, 0, 0, count), torch::stable::narrow(input, 0, first, count),
        filters, problem.convolution, grads.has_dx, grads.has_dw);
    if (grads.has_dw) accumulate<T>(dw_part, dw_total);
    if (grads.has_dx) {
      Tensor target = torch::stable::narrow(grads.dx, 0, first, count);
      torch::stable::copy_(target, dx_part);
    }
  });
  if (grads.has_dw) torch::stable::copy_(grads.dw, dw_sum);
}

}  // namespace memopt::cpu
