// Vectors of N lanes by the compiler's own extension (GCC, Clang): one source for every CPU level.
// a < b gives lanes of all ones or zeros, and mask ? a : b chooses lane by lane.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../common/dispatch.h"

namespace memopt::cpu {

template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N>
using Vector = typename VectorOf<T, N>::type;

// Lanes of float32 in the widest register of the level this file is compiled for.
#if defined(__AVX512F__)
constexpr int kFloatLanes = 16;
#elif defined(__AVX2__)
constexpr int kFloatLanes = 8;
#else
constexpr int kFloatLanes = 4;
#endif

// The unsigned integer as wide as T: what a comparison of T is lane-compatible with.
template <typename T>
using unsigned_t = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename V, typename T>
V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V, typename T>
void store(T* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

// Lanes from[0], from[step], ... in the accumulator's type.
template <int N, int64_t kStep, typename T>
Vector<acc_t<T>, N> load_strided(const T* from, int64_t step) {
  using Acc = acc_t<T>;
  if constexpr (kStep == 1 && std::is_same_v<T, Acc>) {
    return load<Vector<Acc, N>>(from);
  } else if constexpr (kStep == 1 && std::is_same_v<T, BFloat16>) {
    const auto wide = __builtin_convertvector(load<Vector<uint16_t, N>>(from), Vector<uint32_t, N>);
    return reinterpret_cast<Vector<float, N>>(wide << 16);
  } else {
    Vector<Acc, N> v;
    for (int i = 0; i < N; ++i) v[i] = static_cast<Acc>(from[i * (kStep > 0 ? kStep : step)]);
    return v;
  }
}

// One bit for each of eight lanes that are all ones or all zeros, the first in the lowest bit.
inline uint8_t bits_of(Vector<int32_t, 8> lanes) {
#if defined(__AVX2__)
  return static_cast<uint8_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(lanes)));
#else
  uint8_t bits = 0;
  for (int k = 0; k < 8; ++k) bits |= static_cast<uint8_t>((lanes[k] & 1) << k);
  return bits;
#endif
}

// The inverse of bits_of.
inline Vector<int32_t, 8> lanes_of(uint8_t bits) {
  const Vector<int32_t, 8> each = {1, 2, 4, 8, 16, 32, 64, 128};
  return ((Vector<int32_t, 8>{} + bits) & each) == each;
}

// to[k] = lanes[k] ? from[k] : 0 for eight elements, bit for bit: a NaN keeps its payload.
template <typename T>
void copy_masked(const T* from, Vector<int32_t, 8> lanes, T* to) {
  using Bits = std::conditional_t<sizeof(T) == 2, int16_t,
                                  std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>;
  const auto mask = __builtin_convertvector(lanes, Vector<Bits, 8>);
  store(to, load<Vector<Bits, 8>>(from) & mask);
}

}  // namespace memopt::cpu
