// What the direct convolution kernels ask of a vector register beyond simd.h: fused multiply-add,
// broadcast, a running maximum that remembers who won, and the transposition of a square.
#pragma once

#include <cstdint>
#include <utility>

#include "simd.h"

namespace memopt::cpu {

// Lanes of an accumulator, float32 or float64, in the widest register of this level.
template <typename Acc>
constexpr int kLanes =
    kFloatLanes * static_cast<int>(sizeof(float)) / static_cast<int>(sizeof(Acc));

template <typename Acc>
using Register = Vector<Acc, kLanes<Acc>>;
template <typename Acc>
using CodeRegister = Vector<unsigned_t<Acc>, kLanes<Acc>>;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// a * b + c, rounded once where the level has the instruction. Asked for by name: the library is
// compiled without contraction, which the quantiser's bits must not depend on.
inline Register<float> multiply_add(Register<float> a, Register<float> b, Register<float> c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Register<float>>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Register<float>>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < kLanes<float>; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline Register<double> multiply_add(Register<double> a, Register<double> b, Register<double> c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Register<double>>(_mm512_fmadd_pd(
      reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b), reinterpret_cast<__m512d>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Register<double>>(_mm256_fmadd_pd(
      reinterpret_cast<__m256d>(a), reinterpret_cast<__m256d>(b), reinterpret_cast<__m256d>(c)));
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < kLanes<double>; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

template <typename T, std::size_t... kIndex>
Vector<T, sizeof...(kIndex)> broadcast_to(T value, std::index_sequence<kIndex...>) {
  return Vector<T, sizeof...(kIndex)>{((void)kIndex, value)...};
}

template <typename Acc>
Register<Acc> broadcast(Acc value) {
  return broadcast_to(value, std::make_index_sequence<kLanes<Acc>>());
}

// The sum of `count` values, always in the same order.
template <typename Acc>
Acc sum_of(const Acc* values, int64_t count) {
  constexpr int kWidth = kLanes<Acc>;
  Register<Acc> sums = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sums += load<Register<Acc>>(values + i);
  Acc sum = 0;
  for (; i < count; ++i) sum += values[i];
  for (int k = 0; k < kWidth; ++k) sum += sums[k];
  return sum;
}

// Whether none of `count` values is infinite or NaN.
template <typename Acc>
bool all_finite(const Acc* values, int64_t count) {
  constexpr int kWidth = kLanes<Acc>;
  Register<Acc> sum = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    sum = sum + load<Register<Acc>>(values + i) * Register<Acc>{};  // 0, or NaN for good
  }
  Acc rest = 0;
  for (; i < count; ++i) rest += values[i] * Acc(0);
  for (int k = 0; k < kWidth; ++k) rest += sum[k];
  return rest == Acc(0);
}

// Takes `value` with the code `here` into the maximum of a window. The first of equal values wins,
// and a NaN wins over everything before it, as in eager.
template <typename Acc>
void take(Register<Acc> value, CodeRegister<Acc> here, Register<Acc>& best,
          CodeRegister<Acc>& code) {
#if defined(__AVX512F__)
  // The compiler would move the masks through vector registers.
  if constexpr (std::is_same_v<Acc, float>) {
    const __m512 v = reinterpret_cast<__m512>(value), most = reinterpret_cast<__m512>(best);
    const __mmask16 wins =
        _mm512_cmp_ps_mask(v, most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    best = reinterpret_cast<Register<Acc>>(_mm512_mask_mov_ps(most, wins, v));
    code = reinterpret_cast<CodeRegister<Acc>>(_mm512_mask_mov_epi32(
        reinterpret_cast<__m512i>(code), wins, reinterpret_cast<__m512i>(here)));
    return;
  }
#endif
  const auto wins = (value > best) | (value != value);
  best = wins ? value : best;
  code = wins ? here : code;
}

// The first `count` lanes from memory, 0 in the others; nothing beyond them is read.
template <typename Acc>
Register<Acc> load_first(const Acc* from, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Acc, float>) {
    const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
    return reinterpret_cast<Register<Acc>>(_mm512_maskz_loadu_ps(lanes, from));
  }
#endif
  Register<Acc> v = {};
  for (int64_t i = 0; i < count; ++i) v[i] = from[i];
  return v;
}

// The first `count` lanes to memory.
template <typename Acc>
void store_first(Acc* to, Register<Acc> v, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Acc, float>) {
    const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
    _mm512_mask_storeu_ps(to, lanes, reinterpret_cast<__m512>(v));
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) to[i] = v[i];
}

// Lane i of the result is lane i / 2 of the low (or high) half of a for even i, of b for odd i.
template <bool kHigh, typename T, int... kIndex>
Vector<T, sizeof...(kIndex)> interleave(Vector<T, sizeof...(kIndex)> a,
                                        Vector<T, sizeof...(kIndex)> b,
                                        std::integer_sequence<int, kIndex...>) {
  constexpr int kCount = sizeof...(kIndex), kFrom = kHigh ? kCount / 2 : 0;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFrom + kIndex / 2 + kIndex % 2 * kCount)...);
#else
  using Lane = std::conditional_t<sizeof(T) == 1, int8_t,
                                  std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>;
  return __builtin_shuffle(a, b,
                           Vector<Lane, kCount>{(kFrom + kIndex / 2 + kIndex % 2 * kCount)...});
#endif
}

// rows[i][j] becomes rows[j][i]. Each pass interleaves the first half of the rows with the second,
// which rotates the bits of an element's place (row, lane) by one; log2(lanes) passes swap the two.
template <typename T, int kCount>
void transpose(Vector<T, kCount>* rows) {
  constexpr auto kSequence = std::make_integer_sequence<int, kCount>();
#pragma GCC unroll 4
  for (int pass = 1; pass < kCount; pass *= 2) {
    Vector<T, kCount> next[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount / 2; ++i) {
      next[2 * i] = interleave<false, T>(rows[i], rows[i + kCount / 2], kSequence);
      next[2 * i + 1] = interleave<true, T>(rows[i], rows[i + kCount / 2], kSequence);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) rows[i] = next[i];
  }
}

}  // namespace memopt::cpu
