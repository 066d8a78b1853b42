// Max-pooling of relu(x) to a value and a code per window, and the scatter back from the codes.
//
// Work is cut into tasks of (image, block of channels). A task's lanes are what the inner loop runs
// over: in NCHW one channel and a row of outputs, in channels_last one output and a block of
// channels; either way neighbours in memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../common/dispatch.h"
#include "../common/pool.h"
#include "simd.h"

namespace memopt::cpu {

// Element (n, c, h, w) of a tensor lies at n * image + c * channel + h * row + w * column.
struct Strides4 {
  int64_t image, channel, row, column;
};

struct PoolShape {
  int64_t images = 0, channels = 0;
  WindowAxis height, width;

  int64_t positions() const { return height.kernel * width.kernel; }
  int64_t outputs() const { return height.output * width.output; }
  int bits() const { return code_bits(positions()); }
  int64_t code_bytes() const { return plane_bytes(outputs(), bits()); }
  bool overlaps() const { return height.stride < height.reach() || width.stride < width.reach(); }
};

constexpr int64_t kChannelBlock = 32;

// Takes the lanes [i, lanes) of a strided row into the running maximum, N at a time, and returns
// where fewer than N remain. As in eager the first of equal values wins, and any NaN wins over
// everything before it. relu(-0.0) is -0.0, as in eager.
template <int N, int64_t kStep, typename T>
int64_t take_lanes(int64_t i, const T* x, int64_t step, int64_t lanes, uint32_t position,
                   acc_t<T>* best, unsigned_t<acc_t<T>>* codes) {
  using Values = Vector<acc_t<T>, N>;
  using Codes = Vector<unsigned_t<acc_t<T>>, N>;
  const Values zero = {};
  const Codes here = Codes{} + position;
  for (; i + N <= lanes; i += N) {
    const Values value = load_strided<N, kStep>(x + i * step, step);
    const Values r = value < zero ? zero : value;
    const Values most = load<Values>(best + i);
    const auto wins = (r > most) | (r != r);
    store(best + i, wins ? r : most);
    store(codes + i, wins ? here : load<Codes>(codes + i));
  }
  return i;
}

template <int64_t kStep, typename T>
void take_row(const T* x, int64_t step, int64_t lanes, uint32_t position, acc_t<T>* best,
              unsigned_t<acc_t<T>>* codes) {
  int64_t i = 0;
  if constexpr (kFloatLanes >= 16) {
    i = take_lanes<16, kStep>(i, x, step, lanes, position, best, codes);
  }
  if constexpr (kFloatLanes >= 8) {
    i = take_lanes<8, kStep>(i, x, step, lanes, position, best, codes);
  }
  i = take_lanes<4, kStep>(i, x, step, lanes, position, best, codes);
  take_lanes<1, kStep>(i, x, step, lanes, position, best, codes);
}

template <typename T>
void take_position(const T* x, int64_t step, int64_t lanes, uint32_t position, acc_t<T>* best,
                   unsigned_t<acc_t<T>>* codes) {
  if (step == 1) return take_row<1>(x, 1, lanes, position, best, codes);
  if (step == 2) return take_row<2>(x, 2, lanes, position, best, codes);
  take_row<0>(x, step, lanes, position, best, codes);
}

// Values of one row of lanes to the output; windows that ReLU cut get the dead code.
template <typename T, typename Acc>
void finish_row(const Acc* best, unsigned_t<Acc>* codes, int64_t lanes, uint32_t dead, T* y,
                int64_t step) {
  for (int64_t i = 0; i < lanes; ++i) {
    y[i * step] = static_cast<T>(best[i]);
    codes[i] = best[i] <= Acc(0) ? dead : codes[i];
  }
}

// x (images, channels, H, W) -> y (images, channels, OH, OW), codes (images, channels, code_bytes);
// codes may be null. The base pointers are those of the first image of the chunk.
template <typename T>
void max_pool_relu(const PoolShape& shape, const T* x, const Strides4& xs, T* y, const Strides4& ys,
                   uint8_t* codes) {
  using Acc = acc_t<T>;
  using Code = unsigned_t<Acc>;
  const WindowAxis &vertical = shape.height, &horizontal = shape.width;
  const bool channel_lanes = xs.channel == 1 && shape.channels > 1;
  const int64_t block = channel_lanes ? kChannelBlock : 1;
  const int64_t blocks = (shape.channels + block - 1) / block;
  const uint32_t dead = dead_code(shape.bits());
  const int64_t outputs = shape.outputs(), grain = std::max<int64_t>(1, 4096 / (outputs * block));

  torch::stable::parallel_for(0, shape.images * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> best(std::max(block, horizontal.output));
    std::vector<Code> won(outputs * block), plane(channel_lanes ? outputs : 0);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / blocks, first = task % blocks * block;
      const int64_t lanes = channel_lanes ? std::min(block, shape.channels - first) : 0;
      const T* x_task = x + image * xs.image + first * xs.channel;
      T* y_task = y + image * ys.image + first * ys.channel;
      for (int64_t oh = 0; oh < vertical.output; ++oh) {
        const int64_t top = oh * vertical.stride - vertical.padding;
        const auto for_each_row = [&](auto&& use) {
          for (int64_t kh = 0; kh < vertical.kernel; ++kh) {
            const int64_t h = top + kh * vertical.dilation;
            if (h >= 0 && h < vertical.input) use(x_task + h * xs.row, kh * horizontal.kernel);
          }
        };
        if (channel_lanes) {
          for (int64_t ow = 0; ow < horizontal.output; ++ow) {
            Code* codes_here = won.data() + (oh * horizontal.output + ow) * block;
            std::fill_n(best.data(), lanes, -std::numeric_limits<Acc>::infinity());
            std::fill_n(codes_here, lanes, dead);
            const int64_t left = ow * horizontal.stride - horizontal.padding;
            for_each_row([&](const T* row, int64_t position) {
              for (int64_t kw = 0; kw < horizontal.kernel; ++kw) {
                const int64_t w = left + kw * horizontal.dilation;
                if (w < 0 || w >= horizontal.input) continue;
                take_position(row + w * xs.column, 1, lanes, position + kw, best.data(),
                              codes_here);
              }
            });
            finish_row(best.data(), codes_here, lanes, dead, y_task + oh * ys.row + ow * ys.column,
                       ys.channel);
          }
          continue;
        }
        Code* codes_here = won.data() + oh * horizontal.output;
        std::fill_n(best.data(), horizontal.output, -std::numeric_limits<Acc>::infinity());
        std::fill_n(codes_here, horizontal.output, dead);
        for_each_row([&](const T* row, int64_t position) {
          for (int64_t kw = 0; kw < horizontal.kernel; ++kw) {
            const int64_t from = horizontal.first_output(kw), to = horizontal.last_output(kw);
            if (from >= to) continue;
            const int64_t w =
                from * horizontal.stride - horizontal.padding + kw * horizontal.dilation;
            take_position(row + w * xs.column, horizontal.stride * xs.column, to - from,
                          position + kw, best.data() + from, codes_here + from);
          }
        });
        finish_row(best.data(), codes_here, horizontal.output, dead, y_task + oh * ys.row,
                   ys.column);
      }
      if (codes == nullptr) continue;
      uint8_t* bytes = codes + (image * shape.channels + first) * shape.code_bytes();
      if (!channel_lanes) {
        store_codes(won.data(), outputs, shape.bits(), bytes);
        continue;
      }
      for (int64_t c = 0; c < lanes; ++c, bytes += shape.code_bytes()) {
        for (int64_t o = 0; o < outputs; ++o) plane[o] = won[o * block + c];
        store_codes(plane.data(), outputs, shape.bits(), bytes);
      }
    }
  });
}

// The gradient of the convolution's output for a chunk of images: dy at each window's winner, zero
// elsewhere, summed in float32 (float64) where windows overlap. Codes may come from outside and are
// not trusted: one that points out of the input is taken for dead.
//   dy (images, channels, OH, OW), codes -> dx (images, channels, H, W), all of it written
template <typename T>
void scatter_from_codes(const PoolShape& shape, const T* dy, const Strides4& ys,
                        const uint8_t* codes, T* dx, const Strides4& xs) {
  using Acc = acc_t<T>;
  const WindowAxis &vertical = shape.height, &horizontal = shape.width;
  const bool channel_lanes = xs.channel == 1 && shape.channels > 1;
  const int64_t block = channel_lanes ? kChannelBlock : 1;
  const int64_t blocks = (shape.channels + block - 1) / block;
  const int64_t area = vertical.input * horizontal.input;
  const int bits = shape.bits();
  const int64_t grain = std::max<int64_t>(1, 4096 / (area * block));

  torch::stable::parallel_for(0, shape.images * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> sums(area * block);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / blocks, first = task % blocks * block;
      const int64_t lanes = channel_lanes ? std::min(block, shape.channels - first) : 1;
      std::fill(sums.begin(), sums.end(), Acc(0));
      for (int64_t c = 0; c < lanes; ++c) {
        const uint8_t* bytes = codes + (image * shape.channels + first + c) * shape.code_bytes();
        const T* dy_plane = dy + image * ys.image + (first + c) * ys.channel;
        int64_t output = 0;
        for (int64_t oh = 0; oh < vertical.output; ++oh) {
          for (int64_t ow = 0; ow < horizontal.output; ++ow, ++output) {
            const uint32_t code = load_code(bytes, output, bits);
            if (code >= shape.positions()) continue;
            const int64_t h = oh * vertical.stride - vertical.padding +
                              code / horizontal.kernel * vertical.dilation;
            const int64_t w = ow * horizontal.stride - horizontal.padding +
                              code % horizontal.kernel * horizontal.dilation;
            if (h < 0 || h >= vertical.input || w < 0 || w >= horizontal.input) continue;
            sums[(h * horizontal.input + w) * block + c] +=
                static_cast<Acc>(dy_plane[oh * ys.row + ow * ys.column]);
          }
        }
      }
      T* dx_task = dx + image * xs.image + first * xs.channel;
      for (int64_t h = 0; h < vertical.input; ++h) {
        for (int64_t w = 0; w < horizontal.input; ++w) {
          const Acc* from = sums.data() + (h * horizontal.input + w) * block;
          T* to = dx_task + h * xs.row + w * xs.column;
          for (int64_t c = 0; c < lanes; ++c) to[c * xs.channel] = static_cast<T>(from[c]);
        }
      }
    }
  });
}

// The bias gradient of a chunk: sums[c] += dy over the windows of channel c that are not dead.
template <typename T>
void add_live(const PoolShape& shape, const T* dy, const Strides4& ys, const uint8_t* codes,
              acc_t<T>* sums) {
  const int bits = shape.bits();
  torch::stable::parallel_for(0, shape.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t n = 0; n < shape.images; ++n) {
        const uint8_t* bytes = codes + (n * shape.channels + c) * shape.code_bytes();
        const T* dy_plane = dy + n * ys.image + c * ys.channel;
        acc_t<T> sum = 0;  // one partial sum an image: the error grows with its root only
        int64_t output = 0;
        for (int64_t oh = 0; oh < shape.height.output; ++oh) {
          for (int64_t ow = 0; ow < shape.width.output; ++ow, ++output) {
            if (load_code(bytes, output, bits) >= shape.positions()) continue;
            sum += static_cast<acc_t<T>>(dy_plane[oh * ys.row + ow * ys.column]);
          }
        }
        sums[c] += sum;
      }
    }
  });
}

}  // namespace memopt::cpu
