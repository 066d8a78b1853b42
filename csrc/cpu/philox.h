// Philox4x32-10 on whole vectors of counters: common/philox.h, many blocks at once.
//
// A lane of 64 bits holds one 32-bit word, so that one instruction multiplies a vector of words
// into full products; what lies above a lane's low 32 bits is ignored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../common/philox.h"
#include "simd.h"

namespace memopt::cpu {

using Lanes = Vector<uint64_t, kFloatLanes / 2>;

inline Lanes multiply_low_words(Lanes a, uint32_t b) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (Lanes)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xFFFFFFFFu) * b;
#endif
}

constexpr int kLanes = kFloatLanes / 2;
constexpr int kPhiloxChains = 4;  // independent vectors: enough to hide the multiplier's latency
constexpr int kPhiloxBlocks = kLanes * kPhiloxChains;
constexpr int kPhiloxElements = 4 * kPhiloxBlocks;

// The uniform numbers of kPhiloxElements elements from 4 * block on.
inline void uniform_blocks(uint64_t seed, uint64_t block, float* out) {
  Lanes a[kPhiloxChains], b[kPhiloxChains], c[kPhiloxChains], d[kPhiloxChains];
  for (int chain = 0; chain < kPhiloxChains; ++chain) {
    Lanes counter;
    for (int lane = 0; lane < kLanes; ++lane) counter[lane] = block + chain * kLanes + lane;
    a[chain] = counter;
    b[chain] = counter >> 32;
    c[chain] = d[chain] = Lanes{};
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kPhiloxChains; ++chain) {
      const Lanes p = multiply_low_words(a[chain], kPhiloxMultiplier0);
      const Lanes q = multiply_low_words(c[chain], kPhiloxMultiplier1);
      a[chain] = (q >> 32) ^ b[chain] ^ static_cast<uint64_t>(key0);
      c[chain] = (p >> 32) ^ d[chain] ^ static_cast<uint64_t>(key1);
      b[chain] = q;
      d[chain] = p;
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  uint64_t pairs[2 * kPhiloxBlocks];  // of words: a and b, c and d of every block
  for (int chain = 0; chain < kPhiloxChains; ++chain) {
    const Lanes ab = (a[chain] & 0xFFFFFFFFu) | (b[chain] << 32);
    const Lanes cd = (c[chain] & 0xFFFFFFFFu) | (d[chain] << 32);
    for (int lane = 0; lane < kLanes; ++lane) {
      pairs[2 * (chain * kLanes + lane)] = ab[lane];
      pairs[2 * (chain * kLanes + lane) + 1] = cd[lane];
    }
  }
  for (int i = 0; i < 2 * kPhiloxBlocks; ++i) {
    out[2 * i] = uniform(static_cast<uint32_t>(pairs[i]));
    out[2 * i + 1] = uniform(static_cast<uint32_t>(pairs[i] >> 32));
  }
}

// The uniform numbers of elements [first, first + count); first is a multiple of 4, and `out` has
// room for count rounded up to a multiple of kPhiloxElements.
inline void uniforms(uint64_t seed, int64_t first, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kPhiloxElements) {
    uniform_blocks(seed, static_cast<uint64_t>(first + i) / 4, out + i);
  }
}

}  // namespace memopt::cpu
