// The pool of the direct kernels: from rows of the convolution's output, still in cache with
// filters or images in the lanes, to values and codes, and from there to the output's own layout.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "direct_shape.h"

namespace memopt::cpu {

// A value as the output's dtype holds it: what the stock convolution hands to the pool, so that
// ties break as there.
template <typename T>
Register<acc_t<T>> round_to(Register<acc_t<T>> v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    using Bits = CodeRegister<float>;
    const Bits bits = reinterpret_cast<Bits>(v);
    const Bits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
    return v != v ? v : reinterpret_cast<Register<float>>(rounded);
  } else if constexpr (std::is_same_v<T, Half>) {
#if defined(__AVX512F__)
    // The forms with a mask: GCC 12 warns of its own header's in the others.
    const __m256i half =
        _mm512_maskz_cvtps_ph(0xFFFF, reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
    return reinterpret_cast<Register<float>>(_mm512_maskz_cvtph_ps(0xFFFF, half));
#elif defined(__F16C__)
    return reinterpret_cast<Register<float>>(
        _mm256_cvtph_ps(_mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT)));
#else
    for (int i = 0; i < kLanes<float>; ++i) v[i] = static_cast<float>(static_cast<Half>(v[i]));
    return v;
#endif
  } else {
    return v;
  }
}

// Codes before they are packed, lanes innermost: a byte each, or a word for codes of more than 8
// bits.
struct CodeRows {
  uint8_t* bytes;
  uint32_t* words;

  CodeRows from(int64_t place) const {
    return {bytes ? bytes + place : nullptr, words ? words + place : nullptr};
  }
};

// One output pixel in `units` registers. kHeight and kWidth are those of a window that lies inside,
// or 0 for any window.
template <typename T, typename Act, int kHeight, int kWidth>
void pool_pixel(const DirectShape& shape, const Act& act, const acc_t<T>* const* rows, int64_t left,
                int64_t units, unsigned_t<acc_t<T>> dead, acc_t<T>* values, CodeRows codes) {
  using Acc = acc_t<T>;
  using V = Register<Acc>;
  using Code = CodeRegister<Acc>;
  constexpr int kLane = kLanes<Acc>;
  const WindowAxis& width = shape.width;
  const auto positions = static_cast<unsigned_t<Acc>>(shape.positions());
  for (int64_t j = 0; j < units; ++j) {
    V best = broadcast(-std::numeric_limits<Acc>::infinity());
    Code code = Code{} + dead;
    bool empty = true;
    const auto see = [&](const Acc* row, int64_t w, int64_t position) {
      const V value = round_to<T>(load<V>(row + (w * units + j) * kLane));
      V activated = act.before(value);
      Code here = Code{} + static_cast<unsigned_t<Acc>>(position);
      if constexpr (Act::kBranches) {
        activated = round_to<T>(activated);
        here += reinterpret_cast<Code>(act.branch(value)) & positions;
      }
      if (empty) {  // a window's first value wins over none, even if it is -inf
        best = activated;
        code = here;
        empty = false;
      } else {
        take<Acc>(activated, here, best, code);
      }
    };
    if constexpr (kHeight > 0) {
#pragma GCC unroll 3
      for (int kh = 0; kh < kHeight; ++kh) {
#pragma GCC unroll 3
        for (int kw = 0; kw < kWidth; ++kw) {
          see(rows[kh], left + kw * width.dilation, kh * kWidth + kw);
        }
      }
    } else {
      for (int64_t kh = 0; kh < shape.height.kernel; ++kh) {
        if (rows[kh] == nullptr) continue;
        for (int64_t kw = 0; kw < width.kernel; ++kw) {
          const int64_t w = left + kw * width.dilation;
          if (w >= 0 && w < width.input) see(rows[kh], w, kh * width.kernel + kw);
        }
      }
    }
    const V value = empty ? best : act.after(best);
    code = act.dead(best) ? Code{} + dead : code;
    store(values + j * kLane, value);
    if (codes.bytes) {
      store(codes.bytes + j * kLane, __builtin_convertvector(code, Vector<uint8_t, kLane>));
    } else {
      store(codes.words + j * kLane, __builtin_convertvector(code, Vector<uint32_t, kLane>));
    }
  }
}

// One row of outputs: values and codes (OW, units * kLanes).
template <typename T, typename Act>
void pool_row(const DirectShape& shape, const Act& act, const std::vector<const acc_t<T>*>& rows,
              int64_t units, unsigned_t<acc_t<T>> dead, acc_t<T>* values, CodeRows codes) {
  const WindowAxis& width = shape.width;
  const int64_t pitch = units * kLanes<acc_t<T>>;
  const bool inside = std::find(rows.begin(), rows.end(), nullptr) == rows.end();
  const auto is = [&](int64_t kernel) {
    return inside && shape.height.kernel == kernel && width.kernel == kernel;
  };
  const auto whole = is(2)   ? pool_pixel<T, Act, 2, 2>
                     : is(3) ? pool_pixel<T, Act, 3, 3>
                             : pool_pixel<T, Act, 0, 0>;
  for (int64_t ow = 0; ow < width.output; ++ow, values += pitch, codes = codes.from(pitch)) {
    const int64_t left = ow * width.stride - width.padding;
    const bool fits = left >= 0 && left + width.reach() <= width.input;
    (fits ? whole : pool_pixel<T, Act, 0, 0>)(shape, act, rows.data(), left, units, dead, values,
                                              codes);
  }
}

// Where a block of pooled planes goes: element (lane, output) at lane * lane_step + output * step.
template <typename T>
struct Planes {
  T* data;
  int64_t lane_step, step, lanes;
};

// (outputs, pitch) with lanes innermost -> planes.
template <typename T>
void store_values(const acc_t<T>* from, int64_t pitch, int64_t outputs, const Planes<T>& to) {
  using Acc = acc_t<T>;
  constexpr int64_t kLane = kLanes<Acc>;
  if (to.step != 1 || to.lanes == 1) {
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t i = 0; i < to.lanes; ++i) {
        to.data[o * to.step + i * to.lane_step] = static_cast<T>(from[o * pitch + i]);
      }
    }
    return;
  }
  Register<Acc> block[kLane];
  for (int64_t o = 0; o < outputs; o += kLane) {
    const int64_t count = std::min(kLane, outputs - o);
    for (int64_t i = 0; i < kLane; ++i) {
      block[i] = i < count ? load<Register<Acc>>(from + (o + i) * pitch) : Register<Acc>{};
    }
    transpose<Acc, kLane>(block);
    for (int64_t i = 0; i < to.lanes; ++i) {
      T* plane = to.data + i * to.lane_step + o;
      if constexpr (std::is_same_v<T, Acc>) {
        if (count == kLane) {
          store(plane, block[i]);
        } else {
          store_first(plane, block[i], count);
        }
      } else {
        for (int64_t e = 0; e < count; ++e) plane[e] = static_cast<T>(block[i][e]);
      }
    }
  }
}

// (outputs, pitch) codes, one a byte with kLanes innermost -> planes of packed codes. `outputs` is
// even but at the end of a plane.
template <int kLane>
void store_packed(const uint8_t* from, int64_t pitch, int64_t outputs, int bits,
                  const Planes<uint8_t>& to) {
  using Bytes = Vector<uint8_t, kLane>;
  const int64_t step = bits == 4 ? 2 : 1;  // codes in a byte
  const int64_t size = (outputs + step - 1) / step;
  for (int64_t b = 0; b < size; b += kLane) {
    const int64_t count = std::min<int64_t>(kLane, size - b);
    Bytes block[kLane];
    for (int64_t i = 0; i < kLane; ++i) {
      block[i] = Bytes{};
      if (i >= count) continue;
      const int64_t o = (b + i) * step;
      block[i] = load<Bytes>(from + o * pitch);
      if (step == 2 && o + 1 < outputs) block[i] |= load<Bytes>(from + (o + 1) * pitch) << 4;
    }
    transpose<uint8_t, kLane>(block);
    for (int64_t i = 0; i < to.lanes; ++i) {
      uint8_t* plane = to.data + i * to.lane_step + b;
      if (count == kLane) {
        store(plane, block[i]);
      } else {
        for (int64_t e = 0; e < count; ++e) plane[e] = block[i][e];
      }
    }
  }
}

// The same for codes of more than 8 bits.
inline void store_words(const uint32_t* from, int64_t pitch, int64_t outputs, int bits,
                        const Planes<uint8_t>& to) {
  std::vector<uint32_t> plane(outputs);
  for (int64_t i = 0; i < to.lanes; ++i) {
    for (int64_t o = 0; o < outputs; ++o) plane[o] = from[o * pitch + i];
    store_codes(plane.data(), outputs, bits, to.data + i * to.lane_step);
  }
}

}  // namespace memopt::cpu
