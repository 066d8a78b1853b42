// The gradient of max_pool_codes.h's pool: from codes and dy back to the pool's input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "max_pool_codes.h"

namespace memopt::cpu {

// Calls use(place in the pool's input, gradient) for every live window of one plane of dy, the
// gradient times the activation's derivative. Codes may come from outside and are not trusted: one
// that points out of the input is dead.
template <typename T>
class WinnerWalk {
 public:
  explicit WinnerWalk(const PoolShape& shape) : shape_(shape) {
    for (int64_t p = 0; p < shape.positions(); ++p) {
      const int64_t row = p / shape.width.kernel;
      steps_.push_back({row / shape.height.kernel * shape.depth.dilation,
                        row % shape.height.kernel * shape.height.dilation,
                        p % shape.width.kernel * shape.width.dilation});
    }
  }

  template <typename Use>
  void walk(const T* dy, const Strides5& ys, const uint8_t* codes, const Use& use) const {
    const WindowAxis &deep = shape_.depth, &vertical = shape_.height, &horizontal = shape_.width;
    const int bits = shape_.bits();
    const int64_t positions = shape_.positions(), states = shape_.states();
    const acc_t<T> slope = static_cast<acc_t<T>>(shape_.activation.derivative(1));
    int64_t output = 0;
    for (int64_t od = 0; od < deep.output; ++od) {
      const int64_t front = od * deep.stride - deep.padding;
      for (int64_t oh = 0; oh < vertical.output; ++oh) {
        const int64_t top = oh * vertical.stride - vertical.padding;
        const T* row = dy + od * ys.depth + oh * ys.row;
        for (int64_t ow = 0; ow < horizontal.output; ++ow, ++output) {
          const int64_t code = load_code(codes, output, bits);
          if (code >= states) continue;
          const bool second = code >= positions;  // branch of the activation
          const Step& step = steps_[second ? code - positions : code];
          const int64_t d = front + step.d, h = top + step.h;
          const int64_t w = ow * horizontal.stride - horizontal.padding + step.w;
          if (d < 0 || d >= deep.input || h < 0 || h >= vertical.input || w < 0 ||
              w >= horizontal.input) {
            continue;
          }
          const acc_t<T> grad = static_cast<acc_t<T>>(row[ow * ys.column]);
          use((d * vertical.input + h) * horizontal.input + w, second ? grad * slope : grad);
        }
      }
    }
  }

 private:
  struct Step {
    int64_t d, h, w;
  };
  const PoolShape& shape_;
  std::vector<Step> steps_;
};

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
  const WinnerWalk<T> winners(shape);
  const int64_t grain = std::max<int64_t>(1, 4096 / (size * block));

  torch::stable::parallel_for(0, shape.images * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> sums(size * block);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / blocks, first = task % blocks * block;
      const int64_t lanes = channel_lanes ? std::min(block, shape.channels - first) : 1;
      std::fill(sums.begin(), sums.end(), Acc(0));
      for (int64_t c = 0; c < lanes; ++c) {
        winners.walk(dy + image * ys.image + (first + c) * ys.channel, ys,
                     codes + (image * shape.channels + first + c) * shape.code_bytes(),
                     [&](int64_t place, Acc grad) { sums[place * block + c] += grad; });
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
  const WinnerWalk<T> winners(shape);
  torch::stable::parallel_for(0, shape.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t n = 0; n < shape.images; ++n) {
        Acc sum = 0;  // one partial sum an image: the error grows with its root only
        winners.walk(dy + n * ys.image + c * ys.channel, ys,
                     codes + (n * shape.channels + c) * shape.code_bytes(),
                     [&](int64_t, Acc grad) { sum += grad; });
        sums[c] += sum;
      }
    }
  });
}

}  // namespace memopt::cpu
