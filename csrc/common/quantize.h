// The arithmetic of the quantiser, one group and one element at a time: docs/storage_format.md.
// CPU and GPU kernels call the same functions; built without contraction to FMA and with IEEE
// division they give the same bits. Torch-free.
//
// Everything is computed in halves (x / 2, m / 2, s / 2), which no range of float32 overflows.
#pragma once

#include <cstdint>

#include "bfloat16.h"
#include "host_device.h"

namespace memopt {

constexpr float kNearestThreshold = 0.5f;  // takes the place of the uniform number

MEMOPT_HOST_DEVICE constexpr int quantized_levels(int bits) { return (1 << bits) - 1; }

MEMOPT_HOST_DEVICE constexpr int64_t quantized_bytes(int64_t numel, int bits) {
  // Eight elements fill `bits` bytes; written so that numel * bits cannot overflow.
  return numel / 8 * bits + (numel % 8 * bits + 7) / 8;
}

MEMOPT_HOST_DEVICE constexpr int64_t quantized_groups(int64_t numel, int64_t group_size) {
  return numel / group_size + (numel % group_size != 0);
}

// Float32 as integers of the same order: -NaN < -Inf < ... < -0 < +0 < ... < +Inf < +NaN. The
// minimum and maximum of these are exact, independent of the order, and show NaN and Inf too.
MEMOPT_HOST_DEVICE int32_t ordered_key(float value) {
  const int32_t bits = static_cast<int32_t>(float_bits(value));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

MEMOPT_HOST_DEVICE float key_float(int32_t key) {
  return bits_float(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}

constexpr int32_t kKeyOfInfinity = 0x7F800000;
constexpr int32_t kKeyOfMinusInfinity = ~kKeyOfInfinity;

// What the codes of one group are computed from.
struct GroupScale {
  uint16_t scale, minimum;  // bfloat16, as stored
  float half_minimum;
  float half_step;  // the divisor: half the scale, but the exact half range of a constant group
  bool finite;
};

// From the smallest and the largest key of a group.
MEMOPT_HOST_DEVICE GroupScale group_scale(int32_t low_key, int32_t high_key, int levels) {
  if (low_key <= kKeyOfMinusInfinity || high_key >= kKeyOfInfinity) {
    return {kBFloat16Nan, kBFloat16Nan, 0.0f, 1.0f, false};
  }
  const float low = key_float(low_key) + 0.0f, high = key_float(high_key) + 0.0f;  // -0 is +0
  GroupScale group;
  group.finite = true;
  group.minimum = bfloat16_down(low);
  group.half_minimum = 0.5f * bfloat16_to_float(group.minimum);
  float half_range = 0.5f * high - group.half_minimum;
  half_range = half_range > 0.0f ? half_range : 0.0f;
  if (low == high) {
    group.scale = bfloat16_nearest(2.0f * half_range);
    group.half_step = half_range;
  } else {
    group.scale = bfloat16_up(2.0f * (half_range / static_cast<float>(levels)));
    group.half_step = 0.5f * bfloat16_to_float(group.scale);
  }
  group.half_step = group.half_step > 0.0f ? group.half_step : 1.0f;
  return group;
}

// The code of x: the integer below its position between the codes, or the one above where the
// threshold, uniform in [0, 1), is less than the fraction.
MEMOPT_HOST_DEVICE int32_t encode(float x, float half_minimum, float half_step, float levels,
                                  float threshold) {
  float position = (0.5f * x - half_minimum) / half_step;
  position = position > 0.0f ? position : 0.0f;
  position = position < levels ? position : levels;
  const int32_t below = static_cast<int32_t>(position);
  return below + (threshold < position - static_cast<float>(below) ? 1 : 0);
}

// The value of a code. The product is exact (8 x 8 bits), so contraction to FMA changes nothing.
// `limit` is the largest finite value of the output dtype; NaN stays NaN.
MEMOPT_HOST_DEVICE float decode(int32_t code, float half_minimum, float half_scale, float limit) {
  float value = 2.0f * (half_minimum + half_scale * static_cast<float>(code));
  value = value > limit ? limit : value;
  return value < -limit ? -limit : value;
}

}  // namespace memopt
