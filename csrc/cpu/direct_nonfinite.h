// What the sums over live windows leave out where values are not finite. The dense gradient of the
// convolution's output is 0 at every place that is no winner, and 0 * inf and 0 * NaN are NaN. The
// gradients that meet a value of x (or of the weight) that is not finite are summed densely here.
// Only called when there is one.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "direct_windows.h"

namespace memopt::cpu {

// The dense gradient of the convolution's output, of one image and filter at a time.
template <typename T>
class DenseGradient {
 public:
  using Acc = acc_t<T>;

  explicit DenseGradient(const DirectShape& shape)
      : shape_(shape), sums_(shape.height.input * shape.width.input) {}

  void fill(const BackwardInputs<T>& in, int64_t image, int64_t filter) {
    const WindowAxis &height = shape_.height, &width = shape_.width;
    const int bits = code_bits(shape_.states());
    const int64_t plane = plane_bytes(shape_.outputs(), bits);
    const uint8_t* codes = in.codes + (image * shape_.groups * shape_.filters + filter) * plane;
    const T* dy = in.dy + image * in.dys.image + filter * in.dys.channel;
    const Acc slope = static_cast<Acc>(shape_.activation.derivative(1));
    std::fill(sums_.begin(), sums_.end(), Acc(0));
    for (int64_t o = 0; o < shape_.outputs(); ++o) {
      const int64_t code = load_code(codes, o, bits);
      if (code >= shape_.states()) continue;
      const int64_t p = code % shape_.positions();
      const int64_t oh = o / width.output, ow = o % width.output;
      const int64_t h = oh * height.stride - height.padding + p / width.kernel * height.dilation;
      const int64_t w = ow * width.stride - width.padding + p % width.kernel * width.dilation;
      if (h < 0 || h >= height.input || w < 0 || w >= width.input) continue;
      const Acc grad = static_cast<Acc>(dy[oh * in.dys.row + ow * in.dys.column]);
      sums_[h * width.input + w] += code == p ? grad : grad * slope;
    }
    for (Acc& sum : sums_) sum = static_cast<Acc>(static_cast<T>(sum));
  }
  bool finite() const { return all_finite(sums_.data(), static_cast<int64_t>(sums_.size())); }
  Acc operator()(int64_t h, int64_t w) const { return sums_[h * shape_.width.input + w]; }

 private:
  const DirectShape& shape_;
  std::vector<Acc> sums_;
};

// The input that a tap of a convolution's output reads.
inline int64_t input_of(const WindowAxis& axis, int64_t output, int64_t tap) {
  return output * axis.stride - axis.padding + tap * axis.dilation;
}

// Calls use(output row, output column, input row, input column) for every place that tap (r, s)
// reads within the input.
template <typename Use>
void for_each_place(const DirectShape& shape, int64_t r, int64_t s, const Use& use) {
  const WindowAxis &height = shape.conv_height, &width = shape.conv_width;
  for (int64_t h = height.first_output(r); h < height.last_output(r); ++h) {
    for (int64_t w = width.first_output(s); w < width.last_output(s); ++w) {
      use(h, w, input_of(height, h, r), input_of(width, w, s));
    }
  }
}

// dw (K, C, R, S): the sum anew of every weight that meets a value of x that is not finite. Of the
// images only those count that hold one, or a gradient that is not finite.
template <typename T>
void repair_weight_grad(const DirectShape& shape, const BackwardInputs<T>& in, T* dw,
                        const Strides4& dws) {
  using Acc = acc_t<T>;
  const int64_t columns = shape.conv_width.kernel, taps = shape.taps();
  const auto value = [&](int64_t image, int64_t channel, int64_t h, int64_t w) {
    return static_cast<Acc>(in.x[image * shape.x.image + channel * shape.x.channel +
                                 h * shape.x.row + w * shape.x.column]);
  };
  // (image, channel, tap): whether the tap reads a value that is not finite.
  const int64_t channels = shape.groups * shape.channels;
  std::vector<uint8_t> meets(shape.images * channels * taps);
  torch::stable::parallel_for(0, shape.images, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * channels; i < end * channels; ++i) {
      for (int64_t t = 0; t < taps; ++t) {
        for_each_place(shape, t / columns, t % columns,
                       [&](int64_t, int64_t, int64_t h, int64_t w) {
                         if (!std::isfinite(value(i / channels, i % channels, h, w)))
                           meets[i * taps + t] = 1;
                       });
      }
    }
  });
  std::vector<uint8_t> met(channels * taps);
  for (std::size_t i = 0; i < meets.size(); ++i) met[i % met.size()] |= meets[i];
  torch::stable::parallel_for(0, shape.groups * shape.filters, 1, [&](int64_t begin, int64_t end) {
    DenseGradient<T> grad(shape);
    for (int64_t k = begin; k < end; ++k) {
      const int64_t first = k / shape.filters * shape.channels;  // of the group
      std::vector<Acc> sums(shape.channels * taps);
      for (int64_t image = 0; image < shape.images; ++image) {
        const uint8_t* here = meets.data() + (image * channels + first) * taps;
        grad.fill(in, image, k);
        const bool finite = grad.finite();
        for (int64_t i = 0; i < shape.channels * taps; ++i) {
          const bool counts = here[i] || (!finite && met[first * taps + i]);
          if (!counts || std::isnan(sums[i])) continue;
          const int64_t channel = first + i / taps, t = i % taps;
          for (int64_t oh = 0; oh < shape.height.input; ++oh) {
            const int64_t h = input_of(shape.conv_height, oh, t / columns);
            for (int64_t ow = 0; ow < shape.width.input; ++ow) {
              const int64_t w = input_of(shape.conv_width, ow, t % columns);
              // The padding holds zeros, and inf * 0 is NaN.
              const bool inside =
                  h >= 0 && h < shape.conv_height.input && w >= 0 && w < shape.conv_width.input;
              sums[i] += grad(oh, ow) * (inside ? value(image, channel, h, w) : Acc(0));
            }
          }
        }
      }
      for (int64_t i = 0; i < shape.channels * taps; ++i) {
        if (!met[first * taps + i]) continue;
        dw[k * dws.image + i / taps * dws.channel + i % taps / columns * dws.row +
           i % columns * dws.column] = static_cast<T>(sums[i]);
      }
    }
  });
}

// dx (N, C, H, W): the sum anew of every place that meets a weight that is not finite.
template <typename T>
void repair_input_grad(const DirectShape& shape, const BackwardInputs<T>& in, T* dx,
                       const Strides4& dxs) {
  using Acc = acc_t<T>;
  struct Weight {
    int64_t filter, channel, r, s;  // channel of all groups
    Acc value;
  };
  std::vector<Weight> all, infinite;
  for (int64_t k = 0; k < shape.groups * shape.filters; ++k) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      for (int64_t t = 0; t < shape.taps(); ++t) {
        const int64_t r = t / shape.conv_width.kernel, s = t % shape.conv_width.kernel;
        const Acc value = static_cast<Acc>(
            in.weight[k * in.ws.image + c * in.ws.channel + r * in.ws.row + s * in.ws.column]);
        all.push_back({k, k / shape.filters * shape.channels + c, r, s, value});
        if (!std::isfinite(value)) infinite.push_back(all.back());
      }
    }
  }
  const int64_t width = shape.conv_width.input, plane = shape.conv_height.input * width;
  torch::stable::parallel_for(0, shape.images, 1, [&](int64_t begin, int64_t end) {
    DenseGradient<T> grad(shape);
    std::vector<Acc> sums(shape.groups * shape.channels * plane);
    std::vector<uint8_t> met(sums.size());
    for (int64_t image = begin; image < end; ++image) {
      std::fill(sums.begin(), sums.end(), Acc(0));
      std::fill(met.begin(), met.end(), uint8_t{0});
      bool finite = true;
      const auto add = [&](const std::vector<Weight>& weights, bool meet) {
        int64_t filled = -1;
        for (const Weight& weight : weights) {
          if (weight.filter != filled) {
            grad.fill(in, image, filled = weight.filter);
            finite = grad.finite() && finite;
          }
          for_each_place(shape, weight.r, weight.s,
                         [&](int64_t oh, int64_t ow, int64_t h, int64_t w) {
                           const int64_t i = weight.channel * plane + h * width + w;
                           sums[i] += grad(oh, ow) * weight.value;
                           met[i] |= meet;
                         });
        }
      };
      add(infinite, true);
      for (int64_t k = 0; k < shape.groups * shape.filters && finite; ++k) {
        grad.fill(in, image, k);
        finite = grad.finite();
      }
      if (!finite) add(all, false);  // the finite weights' share is not finite either
      for (int64_t i = 0; i < static_cast<int64_t>(sums.size()); ++i) {
        if (!met[i]) continue;
        T& to = dx[image * dxs.image + i / plane * dxs.channel + i % plane / width * dxs.row +
                   i % width * dxs.column];
        to = static_cast<T>(sums[i]);
      }
    }
  });
}

}  // namespace memopt::cpu
