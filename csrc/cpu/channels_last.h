// Tensors whose channels are neighbours in memory: what the stock convolution is fastest in, and
// what kernels with channels in their vector lanes read.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "conv_pool_problem.h"

namespace memopt::cpu {

// sizes: (N, C, [D,] H, W)
inline Tensor empty_channels_last(const Ints& sizes, ScalarType dtype) {
  return torch::stable::empty(
      sizes, dtype, std::nullopt, std::nullopt, std::nullopt,
      sizes.size() == 4 ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d);
}

// Whether the elements lie in the order (N, [D,] H, W, C) without gaps.
inline bool is_dense_channels_last(const Tensor& t) {
  int64_t step = 1;
  const auto follows = [&](int64_t d) {
    const bool fits = t.size(d) == 1 || t.stride(d) == step;
    step *= t.size(d);
    return fits;
  };
  if (!follows(1)) return false;
  for (int64_t d = t.dim() - 1; d >= 2; --d) {
    if (!follows(d)) return false;
  }
  return follows(0);
}

inline Tensor copy_channels_last(const Tensor& t) {
  Tensor copy = empty_channels_last(Ints(t.sizes().begin(), t.sizes().end()), t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
}

// The tensor itself where it is dense already.
inline Tensor to_channels_last(const Tensor& t) {
  return is_dense_channels_last(t) ? t : copy_channels_last(t);
}

// The stock convolution works in channels_last when the weight's strides say so.
inline Tensor channels_last_weight(const Tensor& weight) {
  return suggests_channels_last(weight) ? weight : copy_channels_last(weight);
}

}  // namespace memopt::cpu
