// dW and db from codes: every live window adds dy times its patch of x.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "direct_nonfinite.h"
#include "direct_sums.h"
#include "direct_windows.h"

namespace memopt::cpu {

constexpr int64_t kPatchBytes = 36 << 10;   // of x: what stays in the first-level cache
constexpr int64_t kPartialBytes = 4 << 20;  // of partial sums of dW, over all slices of the batch
constexpr int64_t kMaxSlices = 16;
constexpr int64_t kFilterBlock = 32;

// Padded rows of x from `top` on for one channel block: to (rows, columns, channels).
template <typename T>
void fill_patches(const DirectShape& shape, const PatchLayout<acc_t<T>>& patch, const T* x,
                  int64_t top, int64_t rows, acc_t<T>* to) {
  using Acc = acc_t<T>;
  constexpr int64_t kLane = kLanes<Acc>;
  const int64_t pad = shape.conv_width.padding;
  const int64_t width = std::min(shape.conv_width.input, patch.columns - pad);
  Register<Acc> block[kLane];
  std::fill_n(to, rows * patch.row, Acc(0));
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t h = top + i;
    if (h < 0 || h >= shape.conv_height.input) continue;
    const T* from = x + h * shape.x.row;
    Acc* line = to + i * patch.row + pad * patch.channels;
    if (patch.channels == 1 || shape.x.channel == 1) {
      for (int64_t w = 0; w < width; ++w) {
        for (int64_t c = 0; c < patch.channels; ++c) {
          line[w * patch.channels + c] = static_cast<Acc>(from[w * shape.x.column + c]);
        }
      }
      continue;
    }
    for (int64_t w = 0; w < width; w += kLane) {
      const int64_t count = std::min(kLane, width - w);
      gather_transposed(from + w * shape.x.column, shape.x.channel, patch.channels, shape.x.column,
                        count, block);
      if (patch.channels == kLane) {
        for (int64_t e = 0; e < count; ++e) store(line + (w + e) * kLane, block[e]);
        continue;
      }
      for (int64_t e = 0; e < count; ++e) {
        for (int64_t c = 0; c < patch.channels; ++c) {
          line[(w + e) * patch.channels + c] = block[e][c];
        }
      }
    }
  }
}

// Whether `channels` planes of an image hold finite values only.
template <typename T>
bool finite_planes(const DirectShape& shape, const T* x, int64_t channels) {
  const int64_t height = shape.conv_height.input, width = shape.conv_width.input;
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    const bool dense = shape.x.column == 1 && shape.x.row == width;
    if (dense && (channels == 1 || shape.x.channel == height * width)) {
      return all_finite(x, channels * height * width);
    }
  }
  acc_t<T> sum = 0;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t h = 0; h < height; ++h) {
      const T* row = x + c * shape.x.channel + h * shape.x.row;
      for (int64_t w = 0; w < width; ++w) {
        sum += static_cast<acc_t<T>>(row[w * shape.x.column]) * acc_t<T>(0);
      }
    }
  }
  return sum == acc_t<T>(0);
}

// Which part of the sum a task works on: a slice of the batch, a channel block and a filter block
// of a group. The slices depend on the problem only, so that the sum's order does not depend on
// threads.
template <typename Acc>
struct WeightGradPlan {
  int64_t slices, channel_blocks, filter_blocks, patch;  // patch: elements of a filter's largest

  explicit WeightGradPlan(const DirectShape& shape)
      : channel_blocks(memopt::cpu::channel_blocks<Acc>(shape)),
        filter_blocks((shape.filters + kFilterBlock - 1) / kFilterBlock),
        patch(PatchLayout<Acc>(shape, 0).patch()) {
    const int64_t bytes = size_of_slice(shape) * static_cast<int64_t>(sizeof(Acc));
    slices = std::clamp<int64_t>(kPartialBytes / bytes, 1, std::min(kMaxSlices, shape.images));
  }
  int64_t size_of_slice(const DirectShape& shape) const {
    return shape.groups * shape.filters * channel_blocks * patch;
  }
};

// One task's sums: partial (filters of the block, channel_blocks, patch) of this slice and group.
// Returns whether the planes of x that it is the first to read hold finite values only.
template <typename T>
bool sum_weight_grad(const DirectShape& shape, const WeightGradPlan<acc_t<T>>& plan,
                     const BackwardInputs<T>& in, const std::vector<int32_t>& valid, int64_t slice,
                     int64_t group, int64_t channel_block, int64_t filter_block, acc_t<T>* partial,
                     acc_t<T>* bias_partial) {
  using Acc = acc_t<T>;
  constexpr int64_t kLane = kLanes<Acc>;
  const PatchLayout<Acc> patch(shape, channel_block);
  const PatchKernels<Acc, AddPatches> sum(patch);
  const std::vector<int32_t> positions = patch.positions(shape);
  const int64_t width = shape.width.output, outputs = shape.outputs();
  const int64_t first = filter_block * kFilterBlock;
  const int bits = code_bits(shape.states());
  const Branch<Acc> second(shape);
  const int64_t filters = std::min(kFilterBlock, shape.filters - first);
  int64_t band = shape.height.output;
  while (band > 1 &&
         PatchLayout<Acc>::rows(shape, band) * patch.row * static_cast<int64_t>(sizeof(Acc)) >
             kPatchBytes) {
    band = (band + 1) / 2;
  }
  std::vector<int32_t> windows(band * width);
  for (int64_t o = 0; o < band * width; ++o) {
    windows[o] = patch.window(shape, o / width, o % width, 0);
  }
  Scratch<Acc> x(PatchLayout<Acc>::rows(shape, band) * patch.row);
  Scratch<uint8_t> codes(filters * outputs);
  Scratch<Acc> dy(filters * outputs), grads(band * width);
  Scratch<int32_t> offsets(band * width);
  for (int64_t k = 0; k < filters; ++k) {
    if (partial) std::fill_n(partial + k * plan.channel_blocks * plan.patch, plan.patch, Acc(0));
    if (bias_partial) bias_partial[k] = Acc(0);
  }
  bool finite = true;
  const int64_t last_image = (slice + 1) * shape.images / plan.slices;
  for (int64_t image = slice * shape.images / plan.slices; image < last_image; ++image) {
    const Acc* passed = unpack_planes(shape, in, image, group * shape.filters + first, filters,
                                      codes.data(), dy.data());
    const uint8_t* packed =
        in.codes + (image * shape.groups * shape.filters + group * shape.filters + first) *
                       plane_bytes(outputs, bits);
    const T* source = in.x + image * shape.x.image +
                      (group * shape.channels + patch.first_channel) * shape.x.channel;
    if (partial && filter_block == 0) {
      finite = finite_planes(shape, source, patch.channels) && finite;
    }
    for (int64_t oh = 0; oh < shape.height.output; oh += band) {
      const int64_t rows = std::min(band, shape.height.output - oh);
      if (partial) {
        // From the first row of the pool's padding on; those rows are never read.
        const int64_t top =
            (oh * shape.height.stride - shape.height.padding) * shape.conv_height.stride -
            shape.conv_height.padding;
        fill_patches(shape, patch, source, top, PatchLayout<Acc>::rows(shape, rows), x.data());
      }
      for (int64_t k = 0; k < filters; ++k) {
        const int64_t from = k * outputs + oh * width;
        const int64_t live =
            bits == 4 ? live_windows(codes.data() + from, passed + from, windows.data(),
                                     valid.data() + oh * width, positions.data(), second,
                                     rows * width, offsets.data(), grads.data())
                      : live_windows(shape, packed + k * plane_bytes(outputs, bits), oh * width,
                                     passed + from, windows.data(), positions, rows * width,
                                     offsets.data(), grads.data());
        if (bias_partial) bias_partial[k] += sum_of(grads.data(), live);
        if (partial == nullptr) continue;
        Acc* sums = partial + k * plan.channel_blocks * plan.patch;
        for (std::size_t i = 0; i < sum.parts.size(); ++i) {
          const Segment& part = sum.parts[i];
          sum.kernels[i](
              x.data() + part.first_row * patch.tap_row + part.first_register * patch.step,
              patch.tap_row, patch.step, offsets.data(), grads.data(), live,
              sums + (part.first_row * patch.registers + part.first_register) * kLane,
              patch.registers * kLane);
        }
      }
    }
  }
  return finite;
}

// dw (K, C, R, S) with the weight's strides, db (K); either may be null.
template <typename T>
void direct_weight_grad(const DirectShape& shape, const BackwardInputs<T>& in, T* dw,
                        const Strides4& dws, T* db) {
  using Acc = acc_t<T>;
  const WeightGradPlan<Acc> plan(shape);
  const std::vector<int32_t> valid = valid_positions(shape);
  const int64_t filters = shape.groups * shape.filters;
  const int64_t stride = plan.channel_blocks * plan.patch;  // of a filter
  Scratch<Acc> sums(dw ? plan.slices * plan.size_of_slice(shape) : 0);
  Scratch<Acc> bias_sums(db ? plan.slices * filters : 0);
  const int64_t channel_blocks = dw ? plan.channel_blocks : 1;
  const int64_t tasks = plan.slices * shape.groups * plan.filter_blocks * channel_blocks;
  std::atomic<bool> finite = true;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t channel_block = task % channel_blocks;
      const int64_t filter_block = task / channel_blocks % plan.filter_blocks;
      const int64_t group = task / channel_blocks / plan.filter_blocks % shape.groups;
      const int64_t slice = task / channel_blocks / plan.filter_blocks / shape.groups;
      const int64_t k = slice * filters + group * shape.filters + filter_block * kFilterBlock;
      if (!sum_weight_grad(shape, plan, in, valid, slice, group, channel_block, filter_block,
                           dw ? sums.data() + k * stride + channel_block * plan.patch : nullptr,
                           db && channel_block == 0 ? bias_sums.data() + k : nullptr)) {
        finite = false;
      }
    }
  });
  // The slices' sums in their order, and into the weight's layout.
  torch::stable::parallel_for(0, filters, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (db) {
        Acc sum = 0;
        for (int64_t s = 0; s < plan.slices; ++s) sum += bias_sums.data()[s * filters + k];
        db[k] = static_cast<T>(sum);
      }
      for (int64_t block = 0; dw && block < plan.channel_blocks; ++block) {
        const PatchLayout<Acc> patch(shape, block);
        const int64_t row = patch.registers * kLanes<Acc>;
        for (int64_t r = 0; r < patch.kernel_rows; ++r) {
          for (int64_t i = 0; i < shape.conv_width.kernel * patch.channels; ++i) {
            const int64_t tap = i / patch.channels, c = i % patch.channels;
            const Acc* part = sums.data() + k * stride + block * plan.patch + r * row;
            Acc sum = 0;
            for (int64_t s = 0; s < plan.slices; ++s) {
              sum += part[s * filters * stride + patch.place(tap, c)];
            }
            dw[k * dws.image + (patch.first_channel + c) * dws.channel + r * dws.row +
               tap * dws.column] = static_cast<T>(sum);
          }
        }
      }
    }
  });
  if (dw && !finite) repair_weight_grad(shape, in, dw, dws);
}

}  // namespace memopt::cpu
