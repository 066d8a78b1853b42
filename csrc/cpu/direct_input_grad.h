// dx from codes: every live window adds dy times its filter to its patch of dx. Windows of the same
// output whose filters share a winner share the patch, so they are summed in registers first.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "direct_buckets.h"
#include "direct_nonfinite.h"
#include "direct_sums.h"

namespace memopt::cpu {

constexpr int64_t kFilterBytes = 120 << 10;  // of a block of filters: in the second-level cache

// weight -> (groups, channel blocks, filters, patch), zeros beyond a row's run.
template <typename T>
std::vector<int64_t> pack_filters(const DirectShape& shape, const BackwardInputs<T>& in,
                                  Scratch<acc_t<T>>& packed) {
  using Acc = acc_t<T>;
  std::vector<int64_t> starts;  // of each (group, channel block), and the end
  Acc* to = packed.data();
  for (int64_t group = 0; group < shape.groups; ++group) {
    for (int64_t block = 0; block < channel_blocks<Acc>(shape); ++block) {
      const PatchLayout<Acc> patch(shape, block);
      const int64_t row = patch.registers * kLanes<Acc>;
      starts.push_back(to - packed.data());
      for (int64_t k = 0; k < shape.filters; ++k) {
        const T* filter = in.weight + (group * shape.filters + k) * in.ws.image +
                          patch.first_channel * in.ws.channel;
        for (int64_t r = 0; r < patch.kernel_rows; ++r, to += row) {
          std::fill_n(to, row, Acc(0));
          for (int64_t i = 0; i < shape.conv_width.kernel * patch.channels; ++i) {
            const int64_t tap = i / patch.channels, c = i % patch.channels;
            to[patch.place(tap, c)] =
                static_cast<Acc>(filter[c * in.ws.channel + r * in.ws.row + tap * in.ws.column]);
          }
        }
      }
    }
  }
  starts.push_back(to - packed.data());
  return starts;
}

// The padded gradient of one channel block of an image, and how patches are added to it.
template <typename Acc>
class PatchAdder {
 public:
  PatchAdder(const DirectShape& shape, const PatchLayout<Acc>& patch, const Acc* filters, Acc* dx)
      : patch_(patch), sum_(patch), positions_(patch.positions(shape)), filters_(filters), dx_(dx) {
    constexpr int kLane = kLanes<Acc>;
    const int64_t last = patch.dilated ? patch.run : patch.run - (patch.registers - 1) * kLane;
    for (int64_t i = 0; i < kLane; ++i) tail_[i] = i < last ? ~unsigned_t<Acc>{0} : 0;
  }

  const std::vector<int32_t>& positions() const { return positions_; }

  // The patch at `place` += sum of grads[i] * filters[offsets[i]].
  void add(int64_t place, const int32_t* offsets, const Acc* grads, int64_t count) {
    constexpr int kLane = kLanes<Acc>;
    for (std::size_t i = 0; i < sum_.parts.size(); ++i) {
      const Segment& part = sum_.parts[i];
      const bool last = part.first_register + part.registers == patch_.registers;
      sum_.kernels[i](
          filters_ + (part.first_row * patch_.registers + part.first_register) * kLane,
          patch_.registers * kLane, offsets, grads, count, last || patch_.dilated ? tail_ : whole_,
          dx_ + place + part.first_row * patch_.tap_row + part.first_register * patch_.step,
          patch_.tap_row, patch_.step);
    }
  }

 private:
  const PatchLayout<Acc>& patch_;
  PatchKernels<Acc, AddFilters> sum_;
  std::vector<int32_t> positions_;
  const Acc* filters_;
  Acc* dx_;
  CodeRegister<Acc> whole_ = ~CodeRegister<Acc>{}, tail_ = {};
};

// Adds the windows of all filters of a group for codes of any width, one by one.
template <typename T>
void add_each(const DirectShape& shape, const BackwardInputs<T>& in, int64_t image,
              int64_t first_filter, const PatchLayout<acc_t<T>>& patch,
              const std::vector<int32_t>& windows, PatchAdder<acc_t<T>>& adder) {
  using Acc = acc_t<T>;
  const int64_t outputs = shape.outputs(), filters = shape.groups * shape.filters;
  const int64_t plane = plane_bytes(outputs, code_bits(shape.states()));
  Scratch<Acc> dy(outputs), grads(outputs);
  Scratch<int32_t> places(outputs);
  for (int64_t k = 0; k < shape.filters; ++k) {
    const Acc* passed = unpack_planes(shape, in, image, first_filter + k, 1, nullptr, dy.data());
    const int64_t live =
        live_windows(shape, in.codes + (image * filters + first_filter + k) * plane, 0, passed,
                     windows.data(), adder.positions(), outputs, places.data(), grads.data());
    const int32_t filter = static_cast<int32_t>(k * patch.patch());
    for (int64_t i = 0; i < live; ++i) {
      adder.add(places.data()[i], &filter, grads.data() + i, 1);
    }
  }
}

// The same for codes of 4 bits: the filters of a block with the same winner are summed first.
template <typename T>
void add_sorted(const DirectShape& shape, const BackwardInputs<T>& in, int64_t image,
                int64_t first_filter, const PatchLayout<acc_t<T>>& patch,
                const std::vector<int32_t>& windows, const std::vector<int32_t>& valid,
                PatchAdder<acc_t<T>>& adder) {
  using Acc = acc_t<T>;
  constexpr int64_t kLane = kLanes<Acc>;
  const int64_t outputs = shape.outputs();
  // A multiple of the lanes.
  const int64_t fit = kFilterBytes / (patch.patch() * static_cast<int64_t>(sizeof(Acc)));
  const int64_t needed = (shape.filters + kLane - 1) / kLane * kLane;
  const int64_t pitch = std::clamp<int64_t>(fit / kLane * kLane, kLane, needed);
  Scratch<Acc> dy(pitch * outputs);
  Scratch<uint8_t> codes(pitch * outputs);
  Buckets<Acc> buckets(pitch);
  const Branch<Acc> second(shape);
  std::vector<int32_t> filters(pitch);
  for (int64_t first = 0; first < shape.filters; first += pitch) {
    for (int64_t k = 0; k < pitch; k += kLane) {
      const int64_t count = std::clamp<int64_t>(shape.filters - first - k, 0, kLane);
      unpack_across(shape, in, image, first_filter + first + k, count, pitch, codes.data() + k,
                    dy.data() + k);
    }
    for (int64_t k = 0; k < pitch; ++k) {
      filters[k] = static_cast<int32_t>((first + k) * patch.patch());
    }
    for (int64_t o = 0; o < outputs; ++o) {
      buckets.sort(codes.data() + o * pitch, dy.data() + o * pitch, filters.data(), pitch,
                   shape.states(), valid[o], second);
      for (int64_t p = 0; p < shape.states(); ++p) {
        if (buckets.sizes[p] == 0) continue;
        adder.add(windows[o] + adder.positions()[p], buckets.offsets.data() + p * buckets.capacity,
                  buckets.grads.data() + p * buckets.capacity, buckets.sizes[p]);
      }
    }
  }
}

// The inside of a padded gradient (rows, columns, channels) to dx.
template <typename T>
void store_patches(const DirectShape& shape, const PatchLayout<acc_t<T>>& patch, int64_t rows,
                   const acc_t<T>* from, T* dx, const Strides4& dxs) {
  using Acc = acc_t<T>;
  constexpr int64_t kLane = kLanes<Acc>;
  const int64_t pad_h = shape.conv_height.padding, pad_w = shape.conv_width.padding;
  Register<Acc> block[kLane];
  for (int64_t h = 0; h < shape.conv_height.input; ++h) {
    const bool held = h + pad_h < rows;  // the last rows may lie under no window
    for (int64_t w = 0; w < shape.conv_width.input; w += kLane) {
      const int64_t count = std::min(kLane, shape.conv_width.input - w);
      const int64_t there = held ? std::clamp<int64_t>(patch.columns - pad_w - w, 0, count) : 0;
      gather_transposed(from + (h + pad_h) * patch.row + (w + pad_w) * patch.channels,
                        patch.channels, there, 1, patch.channels, block);
      // Now one register holds a channel's columns.
      for (int64_t c = 0; c < patch.channels; ++c) {
        T* to = dx + c * dxs.channel + h * dxs.row + w * dxs.column;
        if (std::is_same_v<T, Acc> && count == kLane && dxs.column == 1) {
          store(to, block[c]);
        } else {
          for (int64_t e = 0; e < count; ++e) to[e * dxs.column] = static_cast<T>(block[c][e]);
        }
      }
    }
  }
}

// dx (N, C, H, W), all of it written.
template <typename T>
void direct_input_grad(const DirectShape& shape, const BackwardInputs<T>& in, T* dx,
                       const Strides4& dxs) {
  using Acc = acc_t<T>;
  const int64_t blocks = channel_blocks<Acc>(shape), outputs = shape.outputs();
  const PatchLayout<Acc> largest(shape, 0);
  Scratch<Acc> packed(shape.groups * shape.filters * blocks * largest.patch());
  std::vector<int64_t> starts = pack_filters(shape, in, packed);
  const bool finite = all_finite(packed.data(), starts.back());
  starts.pop_back();
  const std::vector<int32_t> valid = valid_positions(shape);
  const int64_t rows = PatchLayout<Acc>::rows(shape, shape.height.output);
  // The pool's padding: windows may begin above and left of the convolution's output.
  const int64_t above = shape.height.padding * shape.conv_height.stride;

  const int64_t tasks = shape.images * shape.groups * blocks;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    Scratch<Acc> plane(rows * largest.row);
    std::vector<int32_t> windows(outputs);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task % blocks, group = task / blocks % shape.groups;
      const int64_t image = task / blocks / shape.groups;
      const PatchLayout<Acc> patch(shape, block);
      for (int64_t o = 0; o < outputs; ++o) {
        windows[o] = patch.window(shape, o / shape.width.output, o % shape.width.output, 0) -
                     static_cast<int32_t>(above * patch.row);
      }
      std::fill_n(plane.data(), rows * patch.row, Acc(0));
      PatchAdder<Acc> adder(shape, patch, packed.data() + starts[group * blocks + block],
                            plane.data());
      const int64_t first = group * shape.filters;
      if (valid.empty()) {
        add_each(shape, in, image, first, patch, windows, adder);
      } else {
        add_sorted(shape, in, image, first, patch, windows, valid, adder);
      }
      T* to = dx + image * dxs.image + (group * shape.channels + patch.first_channel) * dxs.channel;
      store_patches(shape, patch, rows, plane.data(), to, dxs);
    }
  });
  if (!finite) repair_input_grad(shape, in, dx, dxs);
}

}  // namespace memopt::cpu
