// Between a dtype and float32, a run of elements at a time, so that the loops vectorise.
#pragma once

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../common/dispatch.h"

namespace memopt::cpu {

template <typename T>
void load_floats(const T* source, int64_t step, int64_t count, float* out) {
  if (step == 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(source[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(source[i * step]);
  }
}

template <typename T>
void store_floats(const float* source, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(source[i]);
}

#if defined(__F16C__)
// The compiler leaves c10::Half's conversions scalar.
template <>
inline void load_floats(const Half* source, int64_t step, int64_t count, float* out) {
  int64_t i = 0;
  for (; step == 1 && i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  for (; i < count; ++i) out[i] = static_cast<float>(source[i * step]);
}

template <>
inline void store_floats(const float* source, int64_t count, Half* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  for (; i < count; ++i) out[i] = static_cast<Half>(source[i]);
}
#endif

}  // namespace memopt::cpu
