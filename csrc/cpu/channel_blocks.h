// Kernels whose vector lanes are the channels of a channels_last tensor.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "max_pool_codes.h"

namespace memopt::cpu {

// Calls body(image, first channel, channels) for every image and block of channels, in parallel.
template <typename Body>
void for_each_channel_block(const PoolShape& shape, const Body& body) {
  const int64_t blocks = (shape.channels + kChannelBlock - 1) / kChannelBlock;
  torch::stable::parallel_for(0, shape.images * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % blocks * kChannelBlock;
      body(task / blocks, first, std::min(kChannelBlock, shape.channels - first));
    }
  });
}

// Calls body(integral_constant<int, N>, first lane) for groups of N lanes that cover all.
template <typename Body>
void for_each_lanes(int64_t lanes, const Body& body) {
  int64_t i = 0;
  const auto groups = [&](auto size) {
    for (; i + size <= lanes; i += size) body(size, i);
  };
  groups(std::integral_constant<int, 16>());
  groups(std::integral_constant<int, 8>());
  groups(std::integral_constant<int, 4>());
  groups(std::integral_constant<int, 2>());
  groups(std::integral_constant<int, 1>());
}

}  // namespace memopt::cpu
