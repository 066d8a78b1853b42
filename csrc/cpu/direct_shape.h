// The problem as the direct kernels see it, and the scratch copy of the input that they read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "max_pool_codes.h"
#include "registers.h"

namespace memopt::cpu {

// Element (n, c, h, w) of a tensor lies at n * image + c * channel + h * row + w * column.
struct Strides4 {
  int64_t image, channel, row, column;
};

struct DirectShape {
  int64_t images = 0, groups = 1;
  int64_t channels = 0, filters = 0;   // of one group
  WindowAxis conv_height, conv_width;  // over the input
  WindowAxis height, width;            // of the pool, over the convolution's output
  Activation activation;
  Strides4 x;

  int64_t taps() const { return conv_height.kernel * conv_width.kernel; }
  int64_t positions() const { return height.kernel * width.kernel; }
  int64_t states() const { return positions() * activation.branches(); }
  int64_t outputs() const { return height.output * width.output; }
  // Columns of the convolution's output that some window of the pool reads.
  int64_t columns() const {
    return std::min(width.input, (width.output - 1) * width.stride - width.padding + width.reach());
  }
};

// Memory for the kernels' own use, aligned to a register. A register may be loaded from its last
// element on. Not initialised unless zeroed.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : memory_(static_cast<std::size_t>(size + 2 * kSlack)),
        data_(reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.data()) + kAlign - 1) /
                                   kAlign * kAlign)) {}
  T* data() { return data_; }
  const T* data() const { return data_; }

 private:
  static constexpr int64_t kAlign = 64, kSlack = kAlign / static_cast<int64_t>(sizeof(T)) + 1;
  std::vector<T> memory_;
  T* data_;
};

// `lanes` rows of `count` elements, at most kLanes each, read across: out[i] holds element i of
// every row. Rows and elements that are not there read as 0.
template <typename T>
void gather_transposed(const T* from, int64_t row_step, int64_t lanes, int64_t step, int64_t count,
                       Register<acc_t<T>>* out) {
  constexpr int kWidth = kLanes<acc_t<T>>;
  for (int64_t i = 0; i < kWidth; ++i) {
    out[i] = Register<acc_t<T>>{};
    if (i >= lanes) continue;
    const T* row = from + i * row_step;
    if (step == 1 && count == kWidth) {
      out[i] = load_strided<kWidth, 1>(row, 1);
    } else if (step == 1 && std::is_same_v<T, acc_t<T>>) {
      out[i] = load_first(reinterpret_cast<const acc_t<T>*>(row), count);
    } else {
      for (int64_t e = 0; e < count; ++e) out[i][e] = static_cast<acc_t<T>>(row[e * step]);
    }
  }
  transpose<acc_t<T>, kWidth>(out);
}

// Layout of a band of input rows, padded, in the accumulator's type: (channels, rows, columns,
// unit). Columns are sorted by their phase, column % stride, so that neighbouring outputs of a
// strided convolution read neighbouring elements.
struct BandLayout {
  int64_t channels = 0, rows = 0, unit = 1;
  int64_t stride = 1, phase_length = 0;

  BandLayout(const DirectShape& shape, int64_t conv_rows, int64_t unit_)
      : channels(shape.channels),
        rows((conv_rows - 1) * shape.conv_height.stride + shape.conv_height.reach()),
        unit(unit_),
        stride(shape.conv_width.stride),
        phase_length(((shape.columns() - 1) * stride + shape.conv_width.reach() + stride - 1) /
                     stride) {}

  int64_t column(int64_t w) const { return w % stride * phase_length + w / stride; }
  int64_t row() const { return stride * phase_length * unit; }
  int64_t plane() const { return rows * row(); }
  int64_t size() const { return channels * plane(); }

  // Elements from a pixel to each of the convolution's taps.
  std::vector<int64_t> taps(const DirectShape& shape) const {
    std::vector<int64_t> offsets;
    for (int64_t r = 0; r < shape.conv_height.kernel; ++r) {
      for (int64_t s = 0; s < shape.conv_width.kernel; ++s) {
        offsets.push_back(r * shape.conv_height.dilation * row() +
                          column(s * shape.conv_width.dilation) * unit);
      }
    }
    return offsets;
  }
};

// Fills a band with `lanes` images from its row `top` on, which may lie in the padding. The band's
// memory was zeroed when it was made; only what lies inside the input and rows that may have been
// filled before are written.
template <typename T>
void fill_band(const DirectShape& shape, const BandLayout& band, const T* x, int64_t lanes,
               int64_t top, acc_t<T>* to) {
  using Acc = acc_t<T>;
  constexpr int64_t kWidth = kLanes<Acc>;
  const int64_t pad = shape.conv_width.padding, height = shape.conv_height.input;
  // Of the input's columns, those that the band holds.
  const int64_t held = (shape.columns() - 1) * band.stride + shape.conv_width.reach() - pad;
  int64_t width = std::min(shape.conv_width.input, held), rows = band.rows;
  const bool channels_last = shape.x.channel == 1 && band.channels > 1;
  Register<Acc> block[kWidth];
  if (!channels_last && band.stride == 1 && top >= 0 && top + rows <= height &&
      width * band.unit == band.row() && shape.x.row == width * shape.x.column) {
    width *= rows;  // rows follow each other without a gap, here and there: one long row
    rows = 1;
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t h = top + i;
    Acc* row = to + i * band.row();
    if (h < 0 || h >= height) {
      for (int64_t c = 0; c < band.channels; ++c) {
        std::fill_n(row + c * band.plane(), band.row(), Acc(0));
      }
      continue;
    }
    const T* from = x + h * shape.x.row;
    if (band.unit > 1 && channels_last) {  // (images, channels) of a pixel -> (channels, images)
      for (int64_t w = 0; w < width; ++w) {
        for (int64_t c = 0; c < band.channels; c += kWidth) {
          const int64_t count = std::min(kWidth, band.channels - c);
          gather_transposed(from + w * shape.x.column + c, shape.x.image, lanes, 1, count, block);
          Acc* pixel = row + c * band.plane() + band.column(w + pad) * kWidth;
          for (int64_t k = 0; k < count; ++k) store(pixel + k * band.plane(), block[k]);
        }
      }
      continue;
    }
    if (band.unit > 1) {  // (images, columns) of a row -> (columns, images)
      for (int64_t c = 0; c < band.channels; ++c) {
        for (int64_t w = 0; w < width; w += kWidth) {
          const int64_t count = std::min(kWidth, width - w);
          gather_transposed(from + c * shape.x.channel + w * shape.x.column, shape.x.image, lanes,
                            shape.x.column, count, block);
          for (int64_t k = 0; k < count; ++k) {
            store(row + c * band.plane() + band.column(w + k + pad) * kWidth, block[k]);
          }
        }
      }
      continue;
    }
    if (channels_last) {  // (columns, channels) of a row -> (channels, columns)
      for (int64_t w = 0; w < width; w += kWidth) {
        const int64_t columns = std::min(kWidth, width - w);
        for (int64_t c = 0; c < band.channels; c += kWidth) {
          const int64_t count = std::min(kWidth, band.channels - c);
          gather_transposed(from + w * shape.x.column + c, shape.x.column, columns, 1, count,
                            block);
          for (int64_t k = 0; k < count; ++k) {
            Acc* line = row + (c + k) * band.plane();
            for (int64_t e = 0; e < columns; ++e) line[band.column(w + e + pad)] = block[k][e];
          }
        }
      }
      continue;
    }
    for (int64_t c = 0; c < band.channels; ++c) {
      const T* source = from + c * shape.x.channel;
      Acc* line = row + c * band.plane();
      if (band.stride == 1 && shape.x.column == 1) {
        for (int64_t w = 0; w < width; ++w) line[w + pad] = static_cast<Acc>(source[w]);
        continue;
      }
      for (int64_t phase = 0; phase < band.stride; ++phase) {
        // The input's first column of this phase, and its place.
        int64_t w = (phase - pad) % band.stride;
        if (w < 0) w += band.stride;
        Acc* place = line + band.column(w + pad);
        for (; w < width; w += band.stride) *place++ = static_cast<Acc>(source[w * shape.x.column]);
      }
    }
  }
}

}  // namespace memopt::cpu
