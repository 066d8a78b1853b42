// The windows of an output, sorted across filters by who won.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "direct_windows.h"

namespace memopt::cpu {

// Codes, one a byte, and gradients of kLanes filters of an image, filters innermost: each (outputs,
// pitch). Filters beyond the last are dead.
template <typename T>
void unpack_across(const DirectShape& shape, const BackwardInputs<T>& in, int64_t image,
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
  Register<Acc> block[kLane];
  for (int64_t h = 0; h < outputs / width; ++h) {
    for (int64_t w = 0; w < width; w += kLane) {
      const int64_t there = std::min(kLane, width - w);
      gather_transposed(from + h * in.dys.row + w * in.dys.column, in.dys.channel, count,
                        in.dys.column, there, block);
      for (int64_t e = 0; e < there; ++e) store(dy + (h * width + w + e) * pitch, block[e]);
    }
  }
}

// For each code of one window, the filters that have it.
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
            int64_t states, int32_t valid, const Branch<Acc>& second) {
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
        const __m512 grad = scale_branch(_mm512_loadu_ps(dy + k), code, second);
        for (int64_t p = 0; p < states; ++p) {
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
      grads[end] = bucket < second.code ? dy[k] : dy[k] * second.derivative;
    }
  }
};

}  // namespace memopt::cpu
