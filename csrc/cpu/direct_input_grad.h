// dx from codes: every live window adds dy times its filter to its patch of dx. Windows of the same
// output whose filters share a winner share the patch, so they are summed in registers first.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "direct_windows.h"

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
          for (int64_t i = 0; i < patch.run; ++i) {
            to[i] = static_cast<Acc>(filter[i % patch.channels * in.ws.channel + r * in.ws.row +
                                            i / patch.channels * in.ws.column]);
          }
        }
      }
    }
  }
  starts.push_back(to - packed.data());
  return starts;
}

// patch (rows, registers) += sum over entries of grad * filter. What lies beyond a row's run in its
// last register is left alone: `keep` has all bits set for the lanes of the run.
template <typename Acc>
struct AddFilters {
  template <int kRows, int kRun>
  static void run(const Acc* filters, int64_t filters_row, const int32_t* offsets, const Acc* grads,
                  int64_t count, const CodeRegister<Acc>& keep, Acc* patch, int64_t tap_row) {
    constexpr int kLane = kLanes<Acc>;
    using V = Register<Acc>;
    V total[kRows][kRun] = {};
    for (int64_t i = 0; i < count; ++i) {
      const Acc* from = filters + offsets[i];
      const V grad = broadcast(grads[i]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kRun; ++v) {
          total[r][v] =
              multiply_add(grad, load<V>(from + r * filters_row + v * kLane), total[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kRun; ++v) {
        Acc* to = patch + r * tap_row + v * kLane;
        V sum = total[r][v];
        if (v == kRun - 1) {
          sum = reinterpret_cast<V>(reinterpret_cast<CodeRegister<Acc>>(sum) & keep);
        }
        store(to, load<V>(to) + sum);
      }
    }
  }
};

// Codes, one a byte, and gradients of kLanes filters of an image, filters innermost: each (outputs,
// pitch). Filters beyond the last are dead.
// Returns false where a gradient is not finite.
template <typename T>
bool unpack_across(const DirectShape& shape, const BackwardInputs<T>& in, int64_t image,
                   int64_t first_filter, int64_t count, int64_t pitch, uint8_t* codes,
                   acc_t<T>* dy) {
  using Acc = acc_t<T>;
  constexpr int64_t kLane = kLanes<Acc>;
  const int64_t outputs = shape.outputs(), filters = shape.groups * shape.filters;
  const int64_t plane = plane_bytes(outputs, 4);
  const uint8_t* packed = in.codes + (image * filters + first_filter) * plane;
  Vector<uint8_t, kLane> rows[kLane];
  for (int64_t o = 0; o < outputs; o += kLane) {
    const int64_t there = std::min(kLane, outputs - o);
    for (int64_t k = 0; k < kLane; ++k) {
      rows[k] = k < count ? expand_codes<kLane>(packed + k * plane, o, there)
                          : Vector<uint8_t, kLane>{} + uint8_t{15};
    }
    transpose<uint8_t, kLane>(rows);
    for (int64_t e = 0; e < there; ++e) store(codes + (o + e) * pitch, rows[e]);
  }
  // Rows of gradients that follow each other without a gap are one long row.
  const bool flat = in.dys.row == shape.width.output * in.dys.column;
  const int64_t width = flat ? outputs : shape.width.output;
  const T* from = in.dy + image * in.dys.image + first_filter * in.dys.channel;
  Register<Acc> block[kLane], poison = {};
  for (int64_t h = 0; h < outputs / width; ++h) {
    for (int64_t w = 0; w < width; w += kLane) {
      const int64_t there = std::min(kLane, width - w);
      gather_transposed(from + h * in.dys.row + w * in.dys.column, in.dys.channel, count,
                        in.dys.column, there, block);
      for (int64_t e = 0; e < there; ++e) {
        store(dy + (h * width + w + e) * pitch, block[e]);
        poison = poison + block[e] * Register<Acc>{};
      }
    }
  }
  return all_finite(reinterpret_cast<const Acc*>(&poison), kLane);
}

// For each position of one window, the filters that have their winner there.
template <typename Acc>
struct Buckets {
  int64_t capacity;
  std::vector<int32_t> offsets;  // (16, capacity): of the filter's weights; bucket 15 is the dead
  std::vector<Acc> grads;
  int64_t sizes[16];

  // A register may be stored from the last element on.
  explicit Buckets(int64_t filters)
      : capacity(filters + kLanes<Acc>), offsets(16 * capacity), grads(16 * capacity) {}

  // Sorts `count` filters, a multiple of kLanes.
  void sort(const uint8_t* codes, const Acc* dy, const int32_t* places, int64_t count,
            int64_t positions, int32_t valid) {
    std::fill_n(sizes, 16, 0);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Acc, float>) {
      const __m512i bits = _mm512_set1_epi32(valid), one = _mm512_set1_epi32(1);
      for (int64_t k = 0; k < count; k += 16) {
        const __m512i code = _mm512_maskz_cvtepu8_epi32(
            0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k)));
        const __mmask16 live =
            _mm512_test_epi32_mask(_mm512_maskz_srlv_epi32(0xFFFF, bits, code), one);
        const __m512i place = _mm512_loadu_si512(places + k);
        const __m512 grad = _mm512_loadu_ps(dy + k);
        for (int64_t p = 0; p < positions; ++p) {
          const __mmask16 here =
              _mm512_mask_cmpeq_epi32_mask(live, code, _mm512_set1_epi32(static_cast<int>(p)));
          const int64_t end = p * capacity + sizes[p];
          _mm512_storeu_si512(offsets.data() + end, _mm512_maskz_compress_epi32(here, place));
          _mm512_storeu_ps(grads.data() + end, _mm512_maskz_compress_ps(here, grad));
          sizes[p] += __builtin_popcount(here);
        }
      }
      return;
    }
#endif
    for (int64_t k = 0; k < count; ++k) {
      const int64_t bucket = (valid >> codes[k] & 1) ? codes[k] : 15;
      const int64_t end = bucket * capacity + sizes[bucket]++;
      offsets[end] = places[k];
      grads[end] = dy[k];
    }
  }
};

// Adds the windows of a block of filters to the padded gradient of one channel block of an image.
template <typename Acc>
void scatter_windows(const DirectShape& shape, const PatchLayout<Acc>& patch,
                     const std::vector<int32_t>& windows, const std::vector<int32_t>& valid,
                     const std::vector<int32_t>& places, const Acc* filters, const uint8_t* codes,
                     const Acc* dy, int64_t pitch, Buckets<Acc>& buckets, Acc* dx) {
  constexpr int kLane = kLanes<Acc>;
  const std::vector<Segment> parts = segments(patch);
  std::vector<decltype(segment_kernel<AddFilters<Acc>>(parts[0]))> kernels;
  for (const Segment& part : parts) kernels.push_back(segment_kernel<AddFilters<Acc>>(part));
  const std::vector<int32_t> positions = patch.positions(shape);
  const CodeRegister<Acc> whole = ~CodeRegister<Acc>{};
  CodeRegister<Acc> tail = whole;
  for (int64_t i = patch.run - (patch.registers - 1) * kLane; i < kLane; ++i) tail[i] = 0;
  for (int64_t o = 0; o < shape.outputs(); ++o) {
    buckets.sort(codes + o * pitch, dy + o * pitch, places.data(), pitch, shape.positions(),
                 valid[o]);
    for (int64_t p = 0; p < shape.positions(); ++p) {
      if (buckets.sizes[p] == 0) continue;
      Acc* to = dx + windows[o] + positions[p];
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const Segment& part = parts[i];
        const bool last = part.first_register + part.registers == patch.registers;
        kernels[i](
            filters + (part.first_row * patch.registers + part.first_register) * kLane,
            patch.registers * kLane, buckets.offsets.data() + p * buckets.capacity,
            buckets.grads.data() + p * buckets.capacity, buckets.sizes[p], last ? tail : whole,
            to + part.first_row * patch.tap_row + part.first_register * kLane, patch.tap_row);
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
bool direct_input_grad(const DirectShape& shape, const BackwardInputs<T>& in, T* dx,
                       const Strides4& dxs) {
  using Acc = acc_t<T>;
  const int64_t blocks = channel_blocks<Acc>(shape), outputs = shape.outputs();
  const PatchLayout<Acc> largest(shape, 0);
  Scratch<Acc> packed(shape.groups * shape.filters * blocks * largest.patch());
  std::vector<int64_t> starts = pack_filters(shape, in, packed);
  if (!all_finite(packed.data(), starts.back())) return false;
  starts.pop_back();
  const std::vector<int32_t> valid = valid_positions(shape);
  // A multiple of the lanes whose weights stay in the first-level cache.
  constexpr int64_t kLane = kLanes<Acc>;
  const int64_t fit = kFilterBytes / (largest.patch() * static_cast<int64_t>(sizeof(Acc)));
  const int64_t needed = (shape.filters + kLane - 1) / kLane * kLane;
  const int64_t pitch = std::clamp<int64_t>(fit / kLane * kLane, kLane, needed);
  const int64_t rows = PatchLayout<Acc>::rows(shape, shape.height.output);
  // The pool's padding: windows may begin above and left of the convolution's output.
  const int64_t above = shape.height.padding * shape.conv_height.stride;

  std::atomic<bool> finite = true;
  torch::stable::parallel_for(
      0, shape.images * shape.groups * blocks, 1, [&](int64_t begin, int64_t end) {
        Scratch<Acc> plane(rows * largest.row), dy(pitch * outputs);
        Scratch<uint8_t> codes(pitch * outputs);
        Buckets<Acc> buckets(pitch);
        std::vector<int32_t> windows(outputs), places(pitch);
        for (int64_t task = begin; task < end && finite; ++task) {
          const int64_t block = task % blocks, group = task / blocks % shape.groups;
          const int64_t image = task / blocks / shape.groups;
          const PatchLayout<Acc> patch(shape, block);
          for (int64_t o = 0; o < outputs; ++o) {
            windows[o] = patch.window(shape, o / shape.width.output, o % shape.width.output, 0) -
                         static_cast<int32_t>(above * patch.row);
          }
          for (int64_t k = 0; k < pitch; ++k) places[k] = static_cast<int32_t>(k * patch.patch());
          std::fill_n(plane.data(), rows * patch.row, Acc(0));
          for (int64_t first = 0; first < shape.filters; first += pitch) {
            for (int64_t k = 0; k < pitch; k += kLane) {
              const int64_t count = std::clamp<int64_t>(shape.filters - first - k, 0, kLane);
              if (!unpack_across(shape, in, image, group * shape.filters + first + k, count, pitch,
                                 codes.data() + k, dy.data() + k)) {
                finite = false;
              }
            }
            scatter_windows(shape, patch, windows, valid, places,
                            packed.data() + starts[group * blocks + block] + first * patch.patch(),
                            codes.data(), dy.data(), pitch, buckets, plane.data());
          }
          store_patches(
              shape, patch, rows, plane.data(),
              dx + image * dxs.image + (group * shape.channels + patch.first_channel) * dxs.channel,
              dxs);
        }
      });
  return finite;
}

}  // namespace memopt::cpu
