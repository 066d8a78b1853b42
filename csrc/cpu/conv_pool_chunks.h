// conv_relu_pool by the stock convolution, a few images at a time.
//
// Images go through it in chunks that stay in cache; each chunk is pooled to values and codes while
// hot, so the convolution's output never exists in full. Backward rebuilds its gradient from the
// codes, chunk by chunk, and hands it to the stock convolution's backward.
#pragma once

#include <algorithm>
#include <vector>

#include "conv_pool_problem.h"
#include "max_pool_gradient.h"

namespace memopt::cpu {

// Calls body(first image, images) for every chunk of the batch.
template <typename Body>
void for_each_chunk(const ConvPoolProblem& problem, const Body& body) {
  for (int64_t n = 0; n < problem.pool.images; n += problem.images_per_chunk) {
    body(n, std::min(problem.images_per_chunk, problem.pool.images - n));
  }
}

// codes may be null.
template <typename T, typename Act>
void forward_chunks(const ConvPoolProblem& problem, const Act& act, Tensor input,
                    const Tensor& weight, const std::optional<Tensor>& bias, Tensor& output,
                    uint8_t* codes) {
  const PoolShape& pool = problem.pool;
  T* y = output.mutable_data_ptr<T>();
  for_each_chunk(problem, [&](int64_t first, int64_t count) {
    const Tensor convolved = convolution(torch::stable::narrow(input, 0, first, count), weight,
                                         bias, problem.convolution);
    PoolShape chunk = pool;
    chunk.images = count;
    max_pool_codes<T>(chunk, act, convolved.const_data_ptr<T>(), strides5(convolved),
                      y + first * output.stride(0), strides5(output),
                      codes ? codes + first * pool.channels * pool.code_bytes() : nullptr);
  });
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
void backward_chunks(const ConvPoolProblem& problem, const Tensor& grad, Tensor input,
                     const Tensor& weight, const uint8_t* codes, ConvPoolGradients& grads) {
  using Acc = acc_t<T>;
  const PoolShape& pool = problem.pool;
  const int dims = static_cast<int>(input.dim()) - 2;
  const T* dy = grad.const_data_ptr<T>();
  const ScalarType wide = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  Tensor dw_sum = torch::stable::empty(weight.sizes(), wide);
  std::vector<Acc> db_sum(pool.channels, 0);
  Acc* dw_total = dw_sum.template mutable_data_ptr<Acc>();
  std::fill_n(dw_total, dw_sum.numel(), Acc(0));
  Tensor buffer = empty_like_images(
      problem,
      pool_sizes(pool, std::min(problem.images_per_chunk, pool.images), dims, &WindowAxis::input),
      input.scalar_type());
  for_each_chunk(problem, [&](int64_t first, int64_t count) {
    PoolShape chunk = pool;
    chunk.images = count;
    const T* dy_chunk = dy + first * grad.stride(0);
    const uint8_t* codes_chunk = codes + first * pool.channels * pool.code_bytes();
    if (grads.has_db) add_live<T>(chunk, dy_chunk, strides5(grad), codes_chunk, db_sum.data());
    if (!grads.has_dx && !grads.has_dw) return;
    scatter_from_codes<T>(chunk, dy_chunk, strides5(grad), codes_chunk,
                          buffer.mutable_data_ptr<T>(), strides5(buffer));
    const auto [dx_part, dw_part] = convolution_backward(
        torch::stable::narrow(buffer, 0, 0, count), torch::stable::narrow(input, 0, first, count),
        weight, problem.convolution, grads.has_dx, grads.has_dw);
    if (grads.has_dw) accumulate<T>(dw_part, dw_total);
    if (grads.has_dx) {
      Tensor target = torch::stable::narrow(grads.dx, 0, first, count);
      torch::stable::copy_(target, dx_part);
    }
  });
  if (grads.has_dw) torch::stable::copy_(grads.dw, dw_sum);
  if (grads.has_db) {
    T* values = grads.db.mutable_data_ptr<T>();
    for (int64_t c = 0; c < pool.channels; ++c) values[c] = static_cast<T>(db_sum[c]);
  }
}

}  // namespace memopt::cpu
