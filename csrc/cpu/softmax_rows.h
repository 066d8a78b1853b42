// The arithmetic of one row of a softmax, on accumulators (float, or double for double).
//
// Every loop runs over blocks of kRowLanes values with an accumulator for each lane, so that
// compilers vectorise it without being allowed to reorder sums: the result is the same at every
// vector width.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "../common/dispatch.h"

namespace memopt::cpu {

constexpr int kRowLanes = 16;

// e^x for x <= 0 or NaN: x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor polynomial of
// degree 7, whose remainder is below 5.2e-9 (0.05 ulp). Below float's normal range it is 0.
inline float exp_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const float rounded = x * 1.44269504f + kRound;
  const float n = rounded - kRound;
  // ln 2 in two parts, of which n times the first is exact.
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t exponent;
  std::memcpy(&exponent, &rounded, sizeof exponent);
  exponent = (exponent + 127u) << 23;  // the bits of 2^n
  float power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

inline double exp_nonpositive(double x) { return std::exp(x); }

// Calls step(lane, i) for every i in [begin, end), kRowLanes of them side by side.
template <typename Step>
void for_each_lane(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + kRowLanes <= end; i += kRowLanes) {
    for (int k = 0; k < kRowLanes; ++k) step(k, i + k);
  }
  for (int k = 0; i + k < end; ++k) step(k, i + k);
}

// Combines the lanes pairwise: 16, 8, 4, 2, 1.
template <typename A, typename Combine>
A fold_lanes(A (&lanes)[kRowLanes], const Combine& combine) {
  for (int half = kRowLanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] = combine(lanes[k], lanes[k + half]);
  }
  return lanes[0];
}

// Sum of value(i) for i < count; in A within stretches of 1024, then in double, so that the error
// does not grow with the row's length.
template <typename A, typename Value>
double sum_row(int64_t count, const Value& value) {
  constexpr int64_t kStretch = 1024;
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    A lanes[kRowLanes] = {};
    for_each_lane(begin, std::min(count, begin + kStretch),
                  [&](int k, int64_t i) { lanes[k] += value(i); });
    total += fold_lanes(lanes, [](A a, A b) { return a + b; });
  }
  return total;
}

// The largest value; NaNs are passed over, for exp(NaN - max) brings them back.
template <typename A>
A row_max(const A* row, int64_t count) {
  const auto larger = [](A a, A b) { return a > b ? a : b; };
  A lanes[kRowLanes];
  std::fill_n(lanes, kRowLanes, -std::numeric_limits<A>::infinity());
  for_each_lane(0, count, [&](int k, int64_t i) { lanes[k] = larger(row[i], lanes[k]); });
  return fold_lanes(lanes, larger);
}

// Sum of exp(row - max).
template <typename A>
double sum_exp(const A* row, int64_t count, A max) {
  return sum_row<A>(count, [=](int64_t i) { return exp_nonpositive(row[i] - max); });
}

// The same, and the row becomes those exponentials.
template <typename A>
double exp_in_place(A* row, int64_t count, A max) {
  return sum_row<A>(count, [=](int64_t i) { return row[i] = exp_nonpositive(row[i] - max); });
}

// A row of T as accumulators: `row` itself where T is its own accumulator, else a copy in scratch.
template <typename T>
acc_t<T>* load_row(T* row, int64_t count, std::vector<acc_t<T>>& scratch) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return row;
  } else {
    scratch.resize(count);
    for (int64_t k = 0; k < count; ++k) scratch[k] = static_cast<acc_t<T>>(row[k]);
    return scratch.data();
  }
}

// The way back; nothing is to be done where load_row gave `row` itself.
template <typename A, typename T>
void store_row(const A* values, int64_t count, T* row) {
  if constexpr (std::is_same_v<A, T>) {
    if (values == row) return;
  }
  for (int64_t k = 0; k < count; ++k) row[k] = static_cast<T>(values[k]);
}

// Rows for one task: some 32 thousand elements.
inline int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns));
}

}  // namespace memopt::cpu
