// Max-pooling of an activation of x to a value and a code per window, and the scatter back from the
// codes, in two or three dimensions (in two, the depth is 1).
//
// Work is cut into tasks of (image, block of channels). A task's lanes are what the inner loop runs
// over: in NCHW one channel and a row of outputs, in channels_last one output and a block of
// channels; either way neighbours in memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "../common/dispatch.h"
#include "../common/pool.h"
#include "activations.h"
#include "simd.h"

namespace memopt::cpu {

// Element (n, c, d, h, w) of a tensor lies at n * image + c * channel + d * depth + h * row +
// w * column.
struct Strides5 {
  int64_t image, channel, depth, row, column;
};

struct PoolShape {
  int64_t images = 0, channels = 0;
  WindowAxis depth{1, 1, 1, 0, 1, 1}, height, width;
  Activation activation;

  int64_t positions() const { return depth.kernel * height.kernel * width.kernel; }
  int64_t states() const { return positions() * activation.branches(); }
  int64_t outputs() const { return depth.output * height.output * width.output; }
  int bits() const { return code_bits(states()); }
  int64_t code_bytes() const { return plane_bytes(outputs(), bits()); }
};

constexpr int64_t kChannelBlock = 32;

// Takes the lanes [i, lanes) of a strided row into the running maximum, N at a time, and returns
// where fewer than N remain. As in eager the first of equal values wins, any NaN wins over
// everything before it, and a window's first value wins over none. `dead` is the code of a window
// without values.
template <int N, int64_t kStep, typename T, typename Act>
int64_t take_lanes(int64_t i, const T* x, int64_t step, int64_t lanes, uint32_t position,
                   uint32_t positions, uint32_t dead, const Act& act, acc_t<T>* best,
                   unsigned_t<acc_t<T>>* codes) {
  using Values = Vector<acc_t<T>, N>;
  using Codes = Vector<unsigned_t<acc_t<T>>, N>;
  Codes here = Codes{} + position;
  for (; i + N <= lanes; i += N) {
    const Values value = load_strided<N, kStep>(x + i * step, step);
    Values r = act.before(value);
    if constexpr (Act::kBranches) {
      for (int k = 0; k < N; ++k) r[k] = static_cast<acc_t<T>>(static_cast<T>(r[k]));
      here = Codes{} + position + (reinterpret_cast<Codes>(act.branch(value)) & positions);
    }
    const Values most = load<Values>(best + i);
    const Codes code = load<Codes>(codes + i);
    const auto wins = (r > most) | (r != r) | (code == dead);
    store(best + i, wins ? r : most);
    store(codes + i, wins ? here : code);
  }
  return i;
}

// The rows of one position of the windows, taken into running maxima.
template <typename T, typename Act>
class WindowMaximum {
 public:
  WindowMaximum(const PoolShape& shape, const Act& act)
      : act_(act),
        positions_(static_cast<uint32_t>(shape.positions())),
        dead_(dead_code(shape.bits())) {}

  void start(int64_t lanes, acc_t<T>* best, unsigned_t<acc_t<T>>* codes) const {
    std::fill_n(best, lanes, -std::numeric_limits<acc_t<T>>::infinity());
    std::fill_n(codes, lanes, dead_);
  }

  void take(const T* x, int64_t step, int64_t lanes, int64_t position, acc_t<T>* best,
            unsigned_t<acc_t<T>>* codes) const {
    if (step == 1) return take_row<1>(x, 1, lanes, position, best, codes);
    if (step == 2) return take_row<2>(x, 2, lanes, position, best, codes);
    take_row<0>(x, step, lanes, position, best, codes);
  }

  // Values to the output. A window without values stays at -inf.
  template <typename Out>
  void finish(const acc_t<T>* best, unsigned_t<acc_t<T>>* codes, int64_t lanes, Out* y,
              int64_t step) const {
    using One = Vector<acc_t<T>, 1>;
    for (int64_t i = 0; i < lanes; ++i) {
      const One most = {best[i]};
      const bool empty = codes[i] == dead_;
      y[i * step] = static_cast<Out>(empty ? best[i] : act_.after(most)[0]);
      codes[i] = act_.dead(most)[0] ? dead_ : codes[i];
    }
  }

 private:
  template <int64_t kStep>
  void take_row(const T* x, int64_t step, int64_t lanes, int64_t position, acc_t<T>* best,
                unsigned_t<acc_t<T>>* codes) const {
    int64_t i = 0;
    const uint32_t p = static_cast<uint32_t>(position);
    const auto take = [&](auto size) {
      i = take_lanes<decltype(size)::value, kStep>(i, x, step, lanes, p, positions_, dead_, act_,
                                                   best, codes);
    };
    if constexpr (kFloatLanes >= 16) take(std::integral_constant<int, 16>());
    if constexpr (kFloatLanes >= 8) take(std::integral_constant<int, 8>());
    take(std::integral_constant<int, 4>());
    take(std::integral_constant<int, 1>());
  }

  Act act_;
  uint32_t positions_, dead_;
};

// x (images, channels, D, H, W) -> y (images, channels, OD, OH, OW), codes (images, channels,
// code_bytes); codes may be null. The base pointers are those of the first image of the chunk.
template <typename T, typename Act>
void max_pool_codes(const PoolShape& shape, const Act& act, const T* x, const Strides5& xs, T* y,
                    const Strides5& ys, uint8_t* codes) {
  using Acc = acc_t<T>;
  using Code = unsigned_t<Acc>;
  const WindowAxis &deep = shape.depth, &vertical = shape.height, &horizontal = shape.width;
  const bool channel_lanes = xs.channel == 1 && shape.channels > 1;
  const int64_t block = channel_lanes ? kChannelBlock : 1;
  const int64_t blocks = (shape.channels + block - 1) / block;
  const WindowMaximum<T, Act> maximum(shape, act);
  const int64_t outputs = shape.outputs(), grain = std::max<int64_t>(1, 4096 / (outputs * block));

  torch::stable::parallel_for(0, shape.images * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> best(std::max(block, horizontal.output));
    std::vector<Code> won(outputs * block), plane(channel_lanes ? outputs : 0);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / blocks, first = task % blocks * block;
      const int64_t lanes = channel_lanes ? std::min(block, shape.channels - first) : 0;
      const T* x_task = x + image * xs.image + first * xs.channel;
      T* y_task = y + image * ys.image + first * ys.channel;
      for (int64_t row = 0; row < deep.output * vertical.output; ++row) {
        const int64_t od = row / vertical.output, oh = row % vertical.output;
        T* y_row = y_task + od * ys.depth + oh * ys.row;
        const auto for_each_row = [&](auto&& use) {
          for (int64_t kd = 0; kd < deep.kernel; ++kd) {
            const int64_t d = od * deep.stride - deep.padding + kd * deep.dilation;
            if (d < 0 || d >= deep.input) continue;
            for (int64_t kh = 0; kh < vertical.kernel; ++kh) {
              const int64_t h = oh * vertical.stride - vertical.padding + kh * vertical.dilation;
              if (h < 0 || h >= vertical.input) continue;
              use(x_task + d * xs.depth + h * xs.row,
                  (kd * vertical.kernel + kh) * horizontal.kernel);
            }
          }
        };
        if (channel_lanes) {
          for (int64_t ow = 0; ow < horizontal.output; ++ow) {
            Code* codes_here = won.data() + (row * horizontal.output + ow) * block;
            maximum.start(lanes, best.data(), codes_here);
            const int64_t left = ow * horizontal.stride - horizontal.padding;
            for_each_row([&](const T* from, int64_t position) {
              for (int64_t kw = 0; kw < horizontal.kernel; ++kw) {
                const int64_t w = left + kw * horizontal.dilation;
                if (w < 0 || w >= horizontal.input) continue;
                maximum.take(from + w * xs.column, 1, lanes, position + kw, best.data(),
                             codes_here);
              }
            });
            maximum.finish(best.data(), codes_here, lanes, y_row + ow * ys.column, ys.channel);
          }
          continue;
        }
        Code* codes_here = won.data() + row * horizontal.output;
        maximum.start(horizontal.output, best.data(), codes_here);
        for_each_row([&](const T* from, int64_t position) {
          for (int64_t kw = 0; kw < horizontal.kernel; ++kw) {
            const int64_t first_ow = horizontal.first_output(kw);
            const int64_t last_ow = horizontal.last_output(kw);
            if (first_ow >= last_ow) continue;
            const int64_t w =
                first_ow * horizontal.stride - horizontal.padding + kw * horizontal.dilation;
            maximum.take(from + w * xs.column, horizontal.stride * xs.column, last_ow - first_ow,
                         position + kw, best.data() + first_ow, codes_here + first_ow);
          }
        });
        maximum.finish(best.data(), codes_here, horizontal.output, y_row, ys.column);
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

}  // namespace memopt::cpu
