// The gradient of max_pool_codes.h's pool: from codes and dy back to the pool's input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "max_pool_codes.h"

namespace memopt::cpu {

// Where a pooled element's gradient goes.
struct Winner {
  int64_t d, h, w;
  int64_t branch;  // of the activation
};

// Codes may come from outside and are not trusted: one that points out of the input is dead.
inline std::optional<Winner> winner(const PoolShape& shape, int64_t output, int64_t code) {
  if (code >= shape.states()) return std::nullopt;
  const WindowAxis &deep = shape.depth, &vertical = shape.height, &horizontal = shape.width;
  const int64_t position = code % shape.positions();
  const int64_t ow = output % horizontal.output, rows = output / horizontal.output;
  const auto place = [](const WindowAxis& axis, int64_t o, int64_t k) {
    return o * axis.stride - axis.padding + k * axis.dilation;
  };
  const Winner at{
      place(deep, rows / vertical.output, position / (horizontal.kernel * vertical.kernel)),
      place(vertical, rows % vertical.output, position / horizontal.kernel % vertical.kernel),
      place(horizontal, ow, position % horizontal.kernel), code / shape.positions()};
  const bool inside = at.d >= 0 && at.d < deep.input && at.h >= 0 && at.h < vertical.input &&
                      at.w >= 0 && at.w < horizontal.input;
  return inside ? std::optional(at) : std::nullopt;
}

// The gradient of the convolution's output for a chunk of images: dy times the activation's
// derivative at each window's winner, zero elsewhere, summed in float32 (float64) where windows
// overlap.
//   dy (images, channels, OD, OH, OW), codes -> dx (images, channels, D, H, W), all of it written
template <typename T>
void scatter_from_codes(const PoolShape& shape, const T* dy, const Strides5& ys,
                        const uint8_t* codes, T* dx, const Strides5& xs) {
  using Acc = acc_t<T>;
  const WindowAxis &deep = shape.depth, &vertical = shape.height, &horizontal = shape.width;
  const bool channel_lanes = xs.channel == 1 && shape.channels > 1;
  const int64_t block = channel_lanes ? kChannelBlock : 1;
  const int64_t blocks = (shape.channels + block - 1) / block;
  const int64_t size = deep.input * vertical.input * horizontal.input;
  const int bits = shape.bits();
  const int64_t grain = std::max<int64_t>(1, 4096 / (size * block));

  torch::stable::parallel_for(0, shape.images * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> sums(size * block);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / blocks, first = task % blocks * block;
      const int64_t lanes = channel_lanes ? std::min(block, shape.channels - first) : 1;
      std::fill(sums.begin(), sums.end(), Acc(0));
      for (int64_t c = 0; c < lanes; ++c) {
        const uint8_t* bytes = codes + (image * shape.channels + first + c) * shape.code_bytes();
        const T* dy_plane = dy + image * ys.image + (first + c) * ys.channel;
        for (int64_t output = 0; output < shape.outputs(); ++output) {
          const auto at = winner(shape, output, load_code(bytes, output, bits));
          if (!at) continue;
          const int64_t ow = output % horizontal.output, rows = output / horizontal.output;
          const Acc grad =
              static_cast<Acc>(dy_plane[rows / vertical.output * ys.depth +
                                        rows % vertical.output * ys.row + ow * ys.column]);
          sums[((at->d * vertical.input + at->h) * horizontal.input + at->w) * block + c] +=
              at->branch ? grad * static_cast<Acc>(shape.activation.derivative(1)) : grad;
        }
      }
      T* dx_task = dx + image * xs.image + first * xs.channel;
      const Acc* from = sums.data();
      for (int64_t d = 0; d < deep.input; ++d) {
        for (int64_t h = 0; h < vertical.input; ++h) {
          for (int64_t w = 0; w < horizontal.input; ++w, from += block) {
            T* to = dx_task + d * xs.depth + h * xs.row + w * xs.column;
            for (int64_t c = 0; c < lanes; ++c) to[c * xs.channel] = static_cast<T>(from[c]);
          }
        }
      }
    }
  });
}

// The bias gradient of a chunk: sums[c] += dy times the activation's derivative over the windows of
// channel c.
template <typename T>
void add_live(const PoolShape& shape, const T* dy, const Strides5& ys, const uint8_t* codes,
              acc_t<T>* sums) {
  using Acc = acc_t<T>;
  const WindowAxis &vertical = shape.height, &horizontal = shape.width;
  const int bits = shape.bits();
  torch::stable::parallel_for(0, shape.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t n = 0; n < shape.images; ++n) {
        const uint8_t* bytes = codes + (n * shape.channels + c) * shape.code_bytes();
        const T* dy_plane = dy + n * ys.image + c * ys.channel;
        Acc sum = 0;  // one partial sum an image: the error grows with its root only
        for (int64_t output = 0; output < shape.outputs(); ++output) {
          const auto at = winner(shape, output, load_code(bytes, output, bits));
          if (!at) continue;
          const int64_t ow = output % horizontal.output, rows = output / horizontal.output;
          const Acc grad =
              static_cast<Acc>(dy_plane[rows / vertical.output * ys.depth +
                                        rows % vertical.output * ys.row + ow * ys.column]);
          sum += at->branch ? grad * static_cast<Acc>(shape.activation.derivative(1)) : grad;
        }
        sums[c] += sum;
      }
    }
  });
}

}  // namespace memopt::cpu
