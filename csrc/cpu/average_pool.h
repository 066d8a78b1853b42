// Average-pooling of an activation of x, the activation's mask, and the gradient back, in two or
// three dimensions (in two, the depth is 1). x is dense channels_last.
//
// Work is cut into tasks of (image, block of channels), whose channels are the vector's lanes.
// Values of a window are added in row-major order and divided once, as in eager.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "../common/bits.h"
#include "../common/dispatch.h"
#include "../common/pool.h"
#include "activations.h"
#include "channel_blocks.h"
#include "simd.h"

namespace memopt::cpu {

struct AveragePool {
  PoolShape shape;
  bool count_include_pad = true;
  std::optional<int64_t> divisor_override;

  int64_t area() const { return shape.depth.input * shape.height.input * shape.width.input; }
  int64_t mask_bytes() const {
    return shape.activation.kind == ActivationKind::kIdentity ? 0 : bytes_for_bits(area());
  }
};

// The inputs [begin, end) of one output along an axis, and how many positions its window has in
// the input and the padding together.
struct Span {
  int64_t begin, end, padded;

  Span(const WindowAxis& axis, int64_t output) {
    begin = output * axis.stride - axis.padding;
    end = std::min(begin + axis.kernel, axis.input + axis.padding);
    padded = end - begin;
    begin = std::max<int64_t>(begin, 0);
    end = std::min(end, axis.input);
  }
};

struct Window {
  Span d, h, w;

  int64_t divisor(const AveragePool& pool) const {
    if (pool.divisor_override) return *pool.divisor_override;
    if (pool.count_include_pad) return d.padded * h.padded * w.padded;
    return (d.end - d.begin) * (h.end - h.begin) * (w.end - w.begin);
  }
};

// Calls body(output, its offset in a tensor of strides `s`, window) for every output, in row-major
// order.
template <typename Body>
void for_each_window(const PoolShape& shape, const Strides5& s, const Body& body) {
  int64_t output = 0;
  for (int64_t od = 0; od < shape.depth.output; ++od) {
    for (int64_t oh = 0; oh < shape.height.output; ++oh) {
      for (int64_t ow = 0; ow < shape.width.output; ++ow) {
        body(output++, od * s.depth + oh * s.row + ow * s.column,
             Window{{shape.depth, od}, {shape.height, oh}, {shape.width, ow}});
      }
    }
  }
}

// act(x) of N lanes, rounded as a tensor of T would hold it.
template <int N, typename T, typename Act>
Vector<acc_t<T>, N> activated(const Act& act, const T* x) {
  auto v = act.after(act.before(load_strided<N, 1>(x, 1)));
  if constexpr (Act::kBranches) {
    for (int k = 0; k < N; ++k) v[k] = static_cast<acc_t<T>>(static_cast<T>(v[k]));
  }
  return v;
}

// x (images, D, H, W, channels) -> y (images, channels, OD, OH, OW)
template <typename T, typename Act>
void average_pool(const AveragePool& pool, const Act& act, const T* x, T* y, const Strides5& ys) {
  using Acc = acc_t<T>;
  const PoolShape& shape = pool.shape;
  const int64_t height = shape.height.input, width = shape.width.input;
  for_each_channel_block(shape, [&](int64_t image, int64_t first, int64_t lanes) {
    const T* from = x + image * pool.area() * shape.channels + first;
    T* y_task = y + image * ys.image + first * ys.channel;
    for_each_window(shape, ys, [&](int64_t, int64_t offset, const Window& window) {
      const Acc divisor = static_cast<Acc>(window.divisor(pool));
      T* to = y_task + offset;
      for_each_lanes(lanes, [&](auto size, int64_t i) {
        constexpr int N = decltype(size)::value;
        Vector<Acc, N> sum = {};
        for (int64_t d = window.d.begin; d < window.d.end; ++d) {
          for (int64_t h = window.h.begin; h < window.h.end; ++h) {
            const T* row = from + ((d * height + h) * width + window.w.begin) * shape.channels + i;
            for (int64_t w = window.w.begin; w < window.w.end; ++w, row += shape.channels) {
              sum += activated<N>(act, row);
            }
          }
        }
        sum /= divisor;
        for (int k = 0; k < N; ++k) to[(i + k) * ys.channel] = static_cast<T>(sum[k]);
      });
    });
  });
}

// One bit for each element of x: leaky_relu's positive side, or a derivative that is not 0. Planes
// of whole bytes, in row-major order: mask (images, channels, mask_bytes).
template <typename T, typename Act>
void activation_mask(const AveragePool& pool, const Act& act, const T* x, uint8_t* mask) {
  using Acc = acc_t<T>;
  const PoolShape& shape = pool.shape;
  const int64_t area = pool.area(), bytes = pool.mask_bytes();
  for_each_channel_block(shape, [&](int64_t image, int64_t first, int64_t lanes) {
    const T* from = x + image * area * shape.channels + first;
    uint8_t* to = mask + (image * shape.channels + first) * bytes;
    for (int64_t place = 0; place < area; place += 8) {
      const int count = static_cast<int>(std::min<int64_t>(8, area - place));
      for_each_lanes(lanes, [&](auto size, int64_t i) {
        constexpr int N = decltype(size)::value;
        using Bits = Vector<unsigned_t<Acc>, N>;
        Bits bits = {};
        for (int k = 0; k < count; ++k) {
          const auto v = load_strided<N, 1>(from + (place + k) * shape.channels + i, 1);
          Bits off;
          if constexpr (Act::kBranches) {
            off = reinterpret_cast<Bits>(act.branch(v));
          } else {
            off = reinterpret_cast<Bits>(act.dead(v));
          }
          bits |= ~off & (unsigned_t<Acc>{1} << k);
        }
        for (int k = 0; k < N; ++k) to[(i + k) * bytes + place / 8] = static_cast<uint8_t>(bits[k]);
      });
    }
  });
}

// The outputs [begin, end) whose windows hold a place along an axis.
struct Cover {
  int64_t begin, end;

  Cover(const WindowAxis& axis, int64_t place) {
    const int64_t least = place + axis.padding - axis.kernel + 1;
    begin = least <= 0 ? 0 : (least + axis.stride - 1) / axis.stride;
    end = std::min((place + axis.padding) / axis.stride + 1, axis.output);
  }
};

// The gradient of x for a chunk of images, and its sum over each channel of each image.
//   dy (images, channels, OD, OH, OW), mask -> dx (images, D, H, W, channels), all of it written,
//   sums (images, channels)
template <typename T>
void average_pool_gradient(const AveragePool& pool, const T* dy, const Strides5& ys,
                           const uint8_t* mask, T* dx, double* sums) {
  using Acc = acc_t<T>;
  const PoolShape& shape = pool.shape;
  const int64_t area = pool.area(), bytes = pool.mask_bytes();
  const int64_t columns = shape.width.output, rows = shape.height.output;
  const bool masked = bytes > 0;
  const Acc slope = shape.activation.kind == ActivationKind::kLeakyRelu
                        ? static_cast<Acc>(shape.activation.alpha)
                        : Acc(0);
  const bool sloped = shape.activation.kind == ActivationKind::kLeakyRelu;
  std::vector<Cover> across, down, deep;
  for (int64_t w = 0; w < shape.width.input; ++w) across.emplace_back(shape.width, w);
  for (int64_t h = 0; h < shape.height.input; ++h) down.emplace_back(shape.height, h);
  for (int64_t d = 0; d < shape.depth.input; ++d) deep.emplace_back(shape.depth, d);

  for_each_channel_block(shape, [&](int64_t image, int64_t first, int64_t lanes) {
    std::vector<Acc> shares(shape.outputs() * kChannelBlock);  // of each of a window's elements
    const T* dy_task = dy + image * ys.image + first * ys.channel;
    for_each_window(shape, ys, [&](int64_t output, int64_t offset, const Window& window) {
      const Acc divisor = static_cast<Acc>(window.divisor(pool));
      const T* from = dy_task + offset;
      Acc* share = shares.data() + output * kChannelBlock;
      for (int64_t c = 0; c < lanes; ++c) {
        share[c] = static_cast<Acc>(from[c * ys.channel]) / divisor;
      }
    });
    const uint8_t* planes = mask + (image * shape.channels + first) * bytes;
    T* to = dx + image * area * shape.channels + first;
    double* sum = sums + image * shape.channels + first;
    std::fill_n(sum, lanes, 0.0);
    unsigned_t<Acc> bits[kChannelBlock];
    Acc total[kChannelBlock];  // over eight places at most
    int64_t place = 0;
    const auto finish = [&](const Cover& d, const Cover& h, const Cover& w) {
      const int64_t bit = place % 8;
      if (bit == 0) {
        for (int64_t c = 0; c < lanes; ++c) bits[c] = masked ? planes[c * bytes + place / 8] : 255;
        std::fill_n(total, lanes, Acc(0));
      }
      for_each_lanes(lanes, [&](auto size, int64_t i) {
        constexpr int N = decltype(size)::value;
        using V = Vector<Acc, N>;
        using Bits = Vector<unsigned_t<Acc>, N>;
        V grad = {};
        for (int64_t od = d.begin; od < d.end; ++od) {
          for (int64_t oh = h.begin; oh < h.end; ++oh) {
            const Acc* share = shares.data() + (od * rows + oh) * columns * kChannelBlock + i;
            for (int64_t ow = w.begin; ow < w.end; ++ow) {
              grad += load<V>(share + ow * kChannelBlock);
            }
          }
        }
        const auto live = (load<Bits>(bits + i) >> bit & 1) != 0;
        const V other = sloped ? grad * slope : V{};
        grad = live ? grad : other;
        store(total + i, load<V>(total + i) + grad);
        for (int k = 0; k < N; ++k) to[i + k] = static_cast<T>(grad[k]);
      });
      ++place, to += shape.channels;
      if (bit == 7 || place == area) {
        for (int64_t c = 0; c < lanes; ++c) sum[c] += static_cast<double>(total[c]);
      }
    };
    for (const Cover& d : deep) {
      for (const Cover& h : down) {
        for (const Cover& w : across) finish(d, h, w);
      }
    }
  });
}

}  // namespace memopt::cpu
