// Batch norm, ReLU and max-pooling of a channels_last tensor in one pass, and the way back.
//
// Work is cut into tasks of (image, block of channels). A task slides over the rows of its image
// and keeps only those that a window reaches over, in float32 (float64): forward the normalised
// ones, backward the gradient's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common/dispatch.h"
#include "../common/pool.h"
#include "channel_blocks.h"

namespace memopt::cpu {

// A window's rows, by the row's number; each is (width, kChannelBlock).
template <typename Acc>
class SlidingRows {
 public:
  explicit SlidingRows(const PoolShape& shape) : size_(shape.width.input * kChannelBlock) {
    int64_t rows = 1;  // a power of two: the remainder is a mask
    while (rows < std::min(shape.height.reach(), shape.height.input)) rows *= 2;
    mask_ = rows - 1;
    data_.assign(rows * size_, Acc(0));
  }

  Acc* row(int64_t h) { return data_.data() + (h & mask_) * size_; }

 private:
  int64_t size_, mask_;
  std::vector<Acc> data_;
};

// to[w][c] = x[w][c] * scale[c] + shift[c], rounded to T as the stock op's result is.
template <typename T>
void normalize_row(const T* __restrict x, int64_t step, int64_t pixels, int64_t lanes,
                   const acc_t<T>* __restrict scale, const acc_t<T>* __restrict shift,
                   acc_t<T>* __restrict to) {
  using Acc = acc_t<T>;
  for (int64_t w = 0; w < pixels; ++w, x += step, to += kChannelBlock) {
    for (int64_t c = 0; c < lanes; ++c) {
      to[c] = static_cast<Acc>(static_cast<T>(static_cast<Acc>(x[c]) * scale[c] + shift[c]));
    }
  }
}

// x dense (images, H, W, channels) -> y (images, channels, OH, OW), codes (images, channels,
// code_bytes); codes may be null.
template <typename T>
void batch_norm_relu_pool(const PoolShape& shape, const T* x, const acc_t<T>* scale,
                          const acc_t<T>* shift, T* y, const Strides5& ys, uint8_t* codes) {
  using Acc = acc_t<T>;
  using Code = unsigned_t<Acc>;
  const WindowAxis &vertical = shape.height, &horizontal = shape.width;
  const int64_t row_size = horizontal.input * shape.channels, outputs = shape.outputs();
  const WindowMaximum<Acc, Relu<Acc>> maximum(shape, Relu<Acc>(shape.activation));

  for_each_channel_block(shape, [&](int64_t image, int64_t first, int64_t lanes) {
    SlidingRows<Acc> rows(shape);
    std::vector<Acc> best(kChannelBlock);
    std::vector<Code> won(outputs * kChannelBlock), plane(codes ? outputs : 0);
    const T* x_task = x + image * vertical.input * row_size + first;
    int64_t next = 0;  // the first row that is not normalised yet
    for (int64_t oh = 0; oh < vertical.output; ++oh) {
      const int64_t top = oh * vertical.stride - vertical.padding;
      const int64_t below = std::min(top + vertical.reach(), vertical.input);
      for (next = std::max(next, top); next < below; ++next) {
        normalize_row(x_task + next * row_size, shape.channels, horizontal.input, lanes,
                      scale + first, shift + first, rows.row(next));
      }
      for (int64_t ow = 0; ow < horizontal.output; ++ow) {
        Code* code = won.data() + (oh * horizontal.output + ow) * kChannelBlock;
        maximum.start(lanes, best.data(), code);
        const int64_t left = ow * horizontal.stride - horizontal.padding;
        for (int64_t kh = 0; kh < vertical.kernel; ++kh) {
          const int64_t h = top + kh * vertical.dilation;
          if (h < 0 || h >= vertical.input) continue;
          const Acc* row = rows.row(h);
          for (int64_t kw = 0; kw < horizontal.kernel; ++kw) {
            const int64_t w = left + kw * horizontal.dilation;
            if (w < 0 || w >= horizontal.input) continue;
            maximum.take(row + w * kChannelBlock, 1, lanes, kh * horizontal.kernel + kw,
                         best.data(), code);
          }
        }
        maximum.finish(best.data(), code, lanes,
                       y + image * ys.image + first * ys.channel + oh * ys.row + ow * ys.column,
                       ys.channel);
      }
    }
    if (codes == nullptr) return;
    uint8_t* bytes = codes + (image * shape.channels + first) * shape.code_bytes();
    for (int64_t c = 0; c < lanes; ++c, bytes += shape.code_bytes()) {
      for (int64_t o = 0; o < outputs; ++o) plane[o] = won[o * kChannelBlock + c];
      store_codes(plane.data(), outputs, shape.bits(), bytes);
    }
  });
}

// Finds where the windows' winners are. Codes may come from outside and are not trusted: one that
// points out of the input is taken for dead.
class Winners {
 public:
  explicit Winners(const PoolShape& shape)
      : shape_(shape),
        bits_(shape.bits()),
        columns_(static_cast<uint64_t>(shape.width.kernel)),
        reciprocal_(~uint64_t{0} / columns_ + 1) {}

  // Calls use(ow, h, w) for every live window of one row of outputs of a plane of codes.
  template <typename Use>
  void for_each(const uint8_t* plane, int64_t oh, const Use& use) const {
    const WindowAxis &vertical = shape_.height, &horizontal = shape_.width;
    const int64_t top = oh * vertical.stride - vertical.padding;
    int64_t left = -horizontal.padding;
    for (int64_t ow = 0; ow < horizontal.output; ++ow, left += horizontal.stride) {
      const uint32_t code = load_code(plane, oh * horizontal.output + ow, bits_);
      if (code >= shape_.positions()) continue;
      const uint64_t row = row_of(code);
      const int64_t h = top + static_cast<int64_t>(row) * vertical.dilation;
      const int64_t w = left + static_cast<int64_t>(code - row * columns_) * horizontal.dilation;
      if (h >= 0 && h < vertical.input && w >= 0 && w < horizontal.input) use(ow, h, w);
    }
  }

 private:
  // code / columns_ by one multiplication: exact, since both are below 2^32.
  uint64_t row_of(uint32_t code) const {
    if (columns_ == 1) return code;
    return static_cast<uint64_t>(static_cast<unsigned __int128>(code) * reciprocal_ >> 64);
  }

  PoolShape shape_;
  int bits_;
  uint64_t columns_, reciprocal_;
};

template <typename T>
void prefetch_row(const T* x, int64_t step, int64_t pixels, int64_t lanes) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t w = 0; w < pixels; ++w, x += step) {
    for (int64_t c = 0; c < lanes; c += kLine) __builtin_prefetch(x + c);
  }
}

// By channel: the sum of dy over live windows, and of dy (x - mean) with x at the winner. These are
// the two sums of batch norm's backward, whose gradient is zero everywhere else.
struct GradientSums {
  std::vector<double> grads, products;
};

template <typename T>
GradientSums sum_live(const PoolShape& shape, const T* dy, const Strides5& ys, const uint8_t* codes,
                      const T* x, const acc_t<T>* mean) {
  const Winners winners(shape);
  const int64_t row_size = shape.width.input * shape.channels;
  std::vector<double> grads(shape.images * shape.channels), products(grads.size());
  for_each_channel_block(shape, [&](int64_t image, int64_t first, int64_t lanes) {
    const T* x_task = x + image * shape.height.input * row_size + first;
    double* grad_sums = grads.data() + image * shape.channels + first;
    double* product_sums = products.data() + image * shape.channels + first;
    int64_t next = 0;  // the first row that is not asked for yet
    for (int64_t oh = 0; oh < shape.height.output; ++oh) {
      // Winners lie at random: ask for the rows of the windows after this one in time.
      const int64_t top = (oh + 1) * shape.height.stride - shape.height.padding;
      const int64_t below = std::min(top + shape.height.reach(), shape.height.input);
      for (next = std::max(next, top); next < below; ++next) {
        prefetch_row(x_task + next * row_size, shape.channels, shape.width.input, lanes);
      }
      for (int64_t c = 0; c < lanes; ++c) {
        const uint8_t* plane = codes + (image * shape.channels + first + c) * shape.code_bytes();
        const T* dy_row = dy + image * ys.image + (first + c) * ys.channel + oh * ys.row;
        const double center = static_cast<double>(mean[first + c]);
        double grad_sum = 0, product_sum = 0;
        winners.for_each(plane, oh, [&](int64_t ow, int64_t h, int64_t w) {
          const double grad = static_cast<double>(dy_row[ow * ys.column]);
          const T value = x_task[h * row_size + w * shape.channels + c];
          grad_sum += grad;
          product_sum += grad * (static_cast<double>(value) - center);
        });
        grad_sums[c] += grad_sum;
        product_sums[c] += product_sum;
      }
    }
  });
  GradientSums total{std::vector<double>(shape.channels, 0),
                     std::vector<double>(shape.channels, 0)};
  for (int64_t image = 0; image < shape.images; ++image) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      total.grads[c] += grads[image * shape.channels + c];
      total.products[c] += products[image * shape.channels + c];
    }
  }
  return total;
}

// By channel: dx = (dz - offset - (x - mean) * slope) * scale.
template <typename Acc>
struct GradientTerms {
  explicit GradientTerms(size_t channels)
      : mean(channels), scale(channels), offset(channels), slope(channels) {}
  std::vector<Acc> mean, scale, offset, slope;
};

// A row of dx from a row of dz (width, kChannelBlock), which is left zero.
template <typename T>
void finish_gradient_row(const GradientTerms<acc_t<T>>& terms, int64_t first, int64_t lanes,
                         int64_t pixels, int64_t step, const T* __restrict x,
                         acc_t<T>* __restrict dz, T* __restrict dx) {
  using Acc = acc_t<T>;
  const Acc* __restrict mean = terms.mean.data() + first;
  const Acc* __restrict scale = terms.scale.data() + first;
  const Acc* __restrict offset = terms.offset.data() + first;
  const Acc* __restrict slope = terms.slope.data() + first;
  for (int64_t w = 0; w < pixels; ++w, x += step, dx += step, dz += kChannelBlock) {
    for (int64_t c = 0; c < lanes; ++c) {
      const Acc centered = static_cast<Acc>(x[c]) - mean[c];
      dx[c] = static_cast<T>((dz[c] - offset[c] - centered * slope[c]) * scale[c]);
      dz[c] = 0;
    }
  }
}

// The gradient of batch norm's input for a chunk of images; dz is dy at each window's winner,
// summed where windows overlap.   x, dx dense (images, H, W, channels), dx all of it written
template <typename T>
void batch_norm_gradient(const PoolShape& shape, const T* dy, const Strides5& ys,
                         const uint8_t* codes, const T* x, const GradientTerms<acc_t<T>>& terms,
                         T* dx) {
  using Acc = acc_t<T>;
  const Winners winners(shape);
  const WindowAxis &vertical = shape.height, &horizontal = shape.width;
  const int64_t row_size = horizontal.input * shape.channels;
  for_each_channel_block(shape, [&](int64_t image, int64_t first, int64_t lanes) {
    SlidingRows<Acc> rows(shape);
    const int64_t start = image * vertical.input * row_size + first;
    const auto finish = [&](int64_t h) {  // a row that no later window touches
      finish_gradient_row(terms, first, lanes, horizontal.input, shape.channels,
                          x + start + h * row_size, rows.row(h), dx + start + h * row_size);
    };
    int64_t next = 0;
    for (int64_t oh = 0; oh < vertical.output; ++oh) {
      const int64_t top = std::min(oh * vertical.stride - vertical.padding, vertical.input);
      for (; next < top; ++next) finish(next);
      for (int64_t c = 0; c < lanes; ++c) {
        const uint8_t* plane = codes + (image * shape.channels + first + c) * shape.code_bytes();
        const T* dy_row = dy + image * ys.image + (first + c) * ys.channel + oh * ys.row;
        winners.for_each(plane, oh, [&](int64_t ow, int64_t h, int64_t w) {
          rows.row(h)[w * kChannelBlock + c] += static_cast<Acc>(dy_row[ow * ys.column]);
        });
      }
    }
    for (; next < vertical.input; ++next) finish(next);
  });
}

}  // namespace memopt::cpu
