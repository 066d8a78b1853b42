// The windows of one image for a block of filters: which are live, where their winner is, and what
// gradient they pass on.
#pragma once

#include <cstdint>
#include <vector>

#include "direct_patch.h"

namespace memopt::cpu {

template <typename T>
struct BackwardInputs {
  const T* dy;
  Strides4 dys;
  const uint8_t* codes;  // packed planes
  const T* x;            // strides are the shape's
  const T* weight;
  Strides4 ws;
};

// Packed codes of outputs [first, first + count), first even, one a byte; at most kLanes of them,
// and kLanes bytes are written: dead codes beyond the last.
template <int kLane>
Vector<uint8_t, kLane> expand_codes(const uint8_t* packed, int64_t first, int64_t count) {
  using Half = Vector<uint8_t, kLane / 2>;
  Half bytes;
  if (count == kLane) {
    bytes = load<Half>(packed + first / 2);
  } else {
    bytes = ~Half{};
    for (int64_t i = 0; i < (count + 1) / 2; ++i) bytes[i] = packed[first / 2 + i];
    if (count % 2) bytes[count / 2] |= 0xF0;
  }
  const auto wide = __builtin_convertvector(bytes, Vector<uint16_t, kLane / 2>);
  return reinterpret_cast<Vector<uint8_t, kLane>>((wide & 15) | (wide >> 4) << 8);
}

// Codes of 4 bits, one a byte, and gradients of `count` filters of an image, each (count, outputs).
// Returns the gradients, which are the tensor's own where they lie so. Wider codes stay packed.
template <typename T>
const acc_t<T>* unpack_planes(const DirectShape& shape, const BackwardInputs<T>& in, int64_t image,
                              int64_t first_filter, int64_t count, uint8_t* codes, acc_t<T>* dy) {
  constexpr int kLane = kLanes<acc_t<T>>;
  const int64_t outputs = shape.outputs(), filters = shape.groups * shape.filters;
  const int64_t width = shape.width.output;
  for (int64_t k = 0; k < count && code_bits(shape.states()) == 4; ++k) {
    const uint8_t* packed =
        in.codes + (image * filters + first_filter + k) * plane_bytes(outputs, 4);
    for (int64_t o = 0; o < outputs; o += kLane) {
      store(codes + k * outputs + o,
            expand_codes<kLane>(packed, o, std::min<int64_t>(kLane, outputs - o)));
    }
  }
  const T* from = in.dy + image * in.dys.image + first_filter * in.dys.channel;
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    const bool rows = in.dys.column == 1 && in.dys.row == width;
    if (rows && (in.dys.channel == outputs || count == 1)) return from;
  }
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t o = 0; o < outputs; ++o) {
      dy[k * outputs + o] = static_cast<acc_t<T>>(
          from[k * in.dys.channel + o / width * in.dys.row + o % width * in.dys.column]);
    }
  }
  return dy;
}

// For every output one bit for each code whose position lies inside the convolution's output, for
// codes of 4 bits. Codes may come from outside: one whose bit is not set counts as
// dead, as 15 always does.
inline std::vector<int32_t> valid_positions(const DirectShape& shape) {
  std::vector<int32_t> valid(shape.states() <= 15 ? shape.outputs() : 0);
  const WindowAxis &height = shape.height, &width = shape.width;
  for (int64_t o = 0; o < static_cast<int64_t>(valid.size()); ++o) {
    const int64_t top = o / width.output * height.stride - height.padding;
    const int64_t left = o % width.output * width.stride - width.padding;
    for (int64_t code = 0; code < shape.states(); ++code) {
      const int64_t p = code % shape.positions();
      const int64_t h = top + p / width.kernel * height.dilation;
      const int64_t w = left + p % width.kernel * width.dilation;
      const bool inside = h >= 0 && h < height.input && w >= 0 && w < width.input;
      valid[o] |= static_cast<int32_t>(inside) << code;
    }
  }
  return valid;
}

// The second branch of an activation: its codes are those from `code` on.
template <typename Acc>
struct Branch {
  int64_t code = 16;
  Acc derivative = 1;

  explicit Branch(const DirectShape& shape) {
    if (shape.activation.branches() == 1) return;
    code = shape.positions();
    derivative = static_cast<Acc>(shape.activation.derivative(1));
  }
};

#if defined(__AVX512F__)
inline __m512 scale_branch(__m512 grad, __m512i code, const Branch<float>& second) {
  const __mmask16 lanes =
      _mm512_cmpge_epi32_mask(code, _mm512_set1_epi32(static_cast<int>(second.code)));
  return _mm512_mask_mul_ps(grad, lanes, grad, _mm512_set1_ps(second.derivative));
}
#endif

// Appends the live ones of `count` windows: where their patch lies and their gradient. Writes up to
// kLanes elements past what it appends. Returns how many.
template <typename Acc>
int64_t live_windows(const uint8_t* codes, const Acc* dy, const int32_t* windows,
                     const int32_t* valid, const int32_t* positions, const Branch<Acc>& second,
                     int64_t count, int32_t* offsets, Acc* grads) {
  int64_t live = 0, o = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Acc, float>) {
    const __m512i places = _mm512_loadu_si512(positions), one = _mm512_set1_epi32(1);
    for (; o + 16 <= count; o += 16) {
      const __m512i code = _mm512_maskz_cvtepu8_epi32(
          0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + o)));
      const __m512i bits = _mm512_maskz_srlv_epi32(0xFFFF, _mm512_loadu_si512(valid + o), code);
      const __mmask16 lives = _mm512_test_epi32_mask(bits, one);
      const __m512i place = _mm512_add_epi32(_mm512_loadu_si512(windows + o),
                                             _mm512_maskz_permutexvar_epi32(0xFFFF, code, places));
      const __m512 grad = scale_branch(_mm512_loadu_ps(dy + o), code, second);
      // Compressed in a register: storing a compressed register is slow on some processors.
      _mm512_storeu_si512(offsets + live, _mm512_maskz_compress_epi32(lives, place));
      _mm512_storeu_ps(grads + live, _mm512_maskz_compress_ps(lives, grad));
      live += __builtin_popcount(lives);
    }
  }
#endif
  for (; o < count; ++o) {
    offsets[live] = windows[o] + positions[codes[o]];
    grads[live] = codes[o] < second.code ? dy[o] : dy[o] * second.derivative;
    live += valid[o] >> codes[o] & 1;
  }
  return live;
}

// The same for codes of any width, straight from a packed plane, outputs [first, first + count).
template <typename Acc>
int64_t live_windows(const DirectShape& shape, const uint8_t* packed, int64_t first, const Acc* dy,
                     const int32_t* windows, const std::vector<int32_t>& positions, int64_t count,
                     int32_t* offsets, Acc* grads) {
  const WindowAxis &height = shape.height, &width = shape.width;
  const int bits = code_bits(shape.states());
  int64_t live = 0;
  for (int64_t o = 0; o < count; ++o) {
    const int64_t code = load_code(packed, first + o, bits);
    if (code >= shape.states()) continue;
    const int64_t p = code % shape.positions();
    const int64_t h = (first + o) / width.output * height.stride - height.padding +
                      p / width.kernel * height.dilation;
    const int64_t w = (first + o) % width.output * width.stride - width.padding +
                      p % width.kernel * width.dilation;
    if (h < 0 || h >= height.input || w < 0 || w >= width.input) continue;
    offsets[live] = windows[o] + positions[code];
    grads[live++] = code == p ? dy[o] : dy[o] * static_cast<Acc>(shape.activation.derivative(1));
  }
  return live;
}

}  // namespace memopt::cpu
