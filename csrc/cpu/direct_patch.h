// Gradients of the direct convolution from codes. The gradient of the convolution's output has one
// nonzero at most in each window of the pool, so that both gradients are sums over live windows of
// whole patches, the inputs under the kernel at the winner's place:
//
//   dW[k] += dy * patch of x          dx patch += dy * W[k]
//
// The dense gradient of the convolution's output is 0 elsewhere, and 0 * x is 0 where x is finite;
// direct_nonfinite.h sees to the rest.
//
// A block of at most kLanes channels is kept channels innermost, so that a row of a patch is one
// run of kernel width * channels neighbours: a few registers, the last perhaps partly beyond the
// run.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "direct_shape.h"

namespace memopt::cpu {

// Registers of accumulators that fit beside a broadcast gradient.
constexpr int kMaxSums = kRegisters > 16 ? 25 : 12;
constexpr int kMaxRun = 8;   // registers of a patch's row in one pass
constexpr int kMaxRows = 7;  // rows of a patch in one pass

// A channel block of padded input rows: (rows, columns, channels).
template <typename Acc>
struct PatchLayout {
  int64_t first_channel = 0, channels = 0;  // of the group
  int64_t columns = 0;                      // padded
  int64_t kernel_rows = 0;
  // A patch's row is one run of taps and channels, or, where the kernel is dilated, one register
  // for each tap. In elements:
  bool dilated = false;
  int64_t run = 0;        // of a run, in its last register perhaps less than that
  int64_t registers = 0;  // registers of a patch's row
  int64_t step = 0;       // from a register's elements to the next one's
  int64_t row = 0;        // from a row to the next
  int64_t tap_row = 0;    // from a row of the kernel to the next

  PatchLayout(const DirectShape& shape, int64_t block)
      : first_channel(block * kLanes<Acc>),
        channels(std::min<int64_t>(kLanes<Acc>, shape.channels - first_channel)),
        columns((shape.columns() - 1) * shape.conv_width.stride + shape.conv_width.reach()),
        kernel_rows(shape.conv_height.kernel),
        dilated(shape.conv_width.dilation > 1 && shape.conv_width.kernel > 1),
        run(dilated ? channels : shape.conv_width.kernel * channels),
        registers(dilated ? shape.conv_width.kernel : (run + kLanes<Acc> - 1) / kLanes<Acc>),
        step(dilated ? shape.conv_width.dilation * channels : kLanes<Acc>),
        row(columns * channels),
        tap_row(row * shape.conv_height.dilation) {}

  int64_t patch() const { return kernel_rows * registers * kLanes<Acc>; }
  // Place of a weight in its row of a patch.
  int64_t place(int64_t tap, int64_t channel) const {
    return tap * (dilated ? kLanes<Acc> : channels) + channel;
  }
  // Padded input rows under `count` rows of windows.
  static int64_t rows(const DirectShape& shape, int64_t count) {
    return ((count - 1) * shape.height.stride + shape.height.reach() - 1) *
               shape.conv_height.stride +
           shape.conv_height.reach();
  }
  // Elements from the patch at a window's first position to that of each code.
  std::vector<int32_t> positions(const DirectShape& shape) const {
    std::vector<int32_t> offsets(std::max<int64_t>(16, shape.states()), 0);
    for (int64_t code = 0; code < shape.states(); ++code) {
      const int64_t p = code % shape.positions();
      const int64_t h = p / shape.width.kernel * shape.height.dilation * shape.conv_height.stride;
      const int64_t w = p % shape.width.kernel * shape.width.dilation * shape.conv_width.stride;
      offsets[code] = static_cast<int32_t>(h * row + w * channels);
    }
    return offsets;
  }
  // Elements from the layout's first row, which is the padded input's under window row `from`, to
  // the first position of a window. Negative where that lies in the pool's padding.
  int32_t window(const DirectShape& shape, int64_t oh, int64_t ow, int64_t from) const {
    const int64_t h = (oh - from) * shape.height.stride * shape.conv_height.stride;
    const int64_t w = (ow * shape.width.stride - shape.width.padding) * shape.conv_width.stride;
    return static_cast<int32_t>(h * row + w * channels);
  }
};

template <typename Acc>
int64_t channel_blocks(const DirectShape& shape) {
  return (shape.channels + kLanes<Acc> - 1) / kLanes<Acc>;
}

// Whether offsets into a padded channel block of an image fit into 32 bits.
template <typename Acc>
bool suits_direct_backward(const DirectShape& shape) {
  const PatchLayout<Acc> patch(shape, 0);
  const int64_t rows = PatchLayout<Acc>::rows(shape, shape.height.output);
  const int64_t filters = shape.filters * patch.patch();
  return shape.images > 0 && rows < (int64_t{1} << 31) / patch.row &&
         filters < (int64_t{1} << 31) && shape.states() < (int64_t{1} << 20);
}

// A part of a patch that one pass holds in registers.
struct Segment {
  int64_t first_row, rows, first_register, registers;
};

template <typename Acc>
std::vector<Segment> segments(const PatchLayout<Acc>& patch) {
  std::vector<Segment> parts;
  for (int64_t v = 0; v < patch.registers; v += kMaxRun) {
    const int64_t registers = std::min<int64_t>(kMaxRun, patch.registers - v);
    const int64_t most = std::clamp<int64_t>(kMaxSums / registers, 1, kMaxRows);
    for (int64_t r = 0; r < patch.kernel_rows; r += most) {
      parts.push_back({r, std::min(most, patch.kernel_rows - r), v, registers});
    }
  }
  return parts;
}

// The instance of Kernel::run<rows, registers> for a segment's sizes.
template <typename Kernel>
auto segment_kernel(const Segment& part) {
  using Function = decltype(&Kernel::template run<1, 1>);
  static constexpr auto kTable = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    constexpr auto choose = []<int kRows, int kRun>() -> Function {
      if constexpr (kRows == 1 || kRows * kRun <= kMaxSums) {
        return &Kernel::template run<kRows, kRun>;
      } else {
        return nullptr;
      }
    };
    return std::array<Function, sizeof...(kIndex)>{
        choose.template operator()<kIndex / kMaxRun + 1, kIndex % kMaxRun + 1>()...};
  }(std::make_index_sequence<kMaxRows * kMaxRun>());
  return kTable[(part.rows - 1) * kMaxRun + part.registers - 1];
}

}  // namespace memopt::cpu
