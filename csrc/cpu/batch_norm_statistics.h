// The mean and the variance of every channel of a channels_last tensor.
//
// In float64, as the stock batch norm's: each block of pixels takes its own mean first, and blocks
// are merged by their means (Chan, Golub, LeVeque). Blocks depend on the shape alone, so the result
// is the same for any number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "max_pool_codes.h"
#include "simd.h"

namespace memopt::cpu {

struct ChannelStatistics {
  double count = 0;                      // of elements in a channel
  std::vector<double> sums, deviations;  // by channel; deviations squared, from the mean

  double mean(int64_t c) const { return count > 0 ? sums[c] / count : 0; }
  double variance(int64_t c) const { return count > 0 ? deviations[c] / count : 0; }
  double unbiased_variance(int64_t c) const { return count > 0 ? deviations[c] / (count - 1) : 0; }
};

// Merges `count` elements with their sum and squared deviations into a total of `seen` elements.
template <typename V>
void merge_moments(double count, V sum, V deviations, double seen, V* total_sum,
                   V* total_deviations) {
  if (seen > 0) {
    const V apart = sum / count - *total_sum / seen;
    deviations += apart * apart * (count * seen / (count + seen));
  }
  *total_sum += sum;
  *total_deviations += deviations;
}

// Lanes [i, lanes) of a block of pixels, N at a time; returns where fewer than N remain.
template <int N, typename T>
int64_t add_moments(int64_t i, const T* x, int64_t step, int64_t pixels, int64_t lanes, double seen,
                    double* sums, double* deviations) {
  using V = Vector<double, N>;
  const auto at = [&](int64_t p) {
    return __builtin_convertvector((load_strided<N, 1>(x + p * step + i, 1)), V);
  };
  for (; i + N <= lanes; i += N) {
    V sum = {}, squares = {};
    for (int64_t p = 0; p < pixels; ++p) sum += at(p);
    const V mean = sum / static_cast<double>(pixels);
    for (int64_t p = 0; p < pixels; ++p) {
      const V d = at(p) - mean;
      squares += d * d;
    }
    V total = load<V>(sums + i), total_squares = load<V>(deviations + i);
    merge_moments(static_cast<double>(pixels), sum, squares, seen, &total, &total_squares);
    store(sums + i, total);
    store(deviations + i, total_squares);
  }
  return i;
}

// x: dense (images, area, channels)
template <typename T>
ChannelStatistics channel_statistics(const T* x, int64_t images, int64_t area, int64_t channels) {
  constexpr int64_t kPixels = 128;  // of kChannelBlock channels: they stay in the first-level cache
  const int64_t blocks = (channels + kChannelBlock - 1) / kChannelBlock;
  std::vector<double> sums(images * channels, 0), deviations(images * channels, 0);
  torch::stable::parallel_for(0, images * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / blocks, first = task % blocks * kChannelBlock;
      const int64_t lanes = std::min(kChannelBlock, channels - first);
      double* sum = sums.data() + image * channels + first;
      double* squares = deviations.data() + image * channels + first;
      for (int64_t p = 0; p < area; p += kPixels) {
        const T* from = x + (image * area + p) * channels + first;
        const int64_t pixels = std::min(kPixels, area - p);
        const double seen = static_cast<double>(p);
        int64_t i = add_moments<16>(0, from, channels, pixels, lanes, seen, sum, squares);
        i = add_moments<4>(i, from, channels, pixels, lanes, seen, sum, squares);
        add_moments<1>(i, from, channels, pixels, lanes, seen, sum, squares);
      }
    }
  });

  ChannelStatistics total;
  total.count = static_cast<double>(images) * static_cast<double>(area);
  total.sums.assign(channels, 0);
  total.deviations.assign(channels, 0);
  for (int64_t image = 0; image < images; ++image) {
    const double count = static_cast<double>(area), seen = static_cast<double>(image * area);
    for (int64_t c = 0; c < channels; ++c) {
      merge_moments(count, sums[image * channels + c], deviations[image * channels + c], seen,
                    &total.sums[c], &total.deviations[c]);
    }
  }
  return total;
}

}  // namespace memopt::cpu
