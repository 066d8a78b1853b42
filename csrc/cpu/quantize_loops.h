// The vectorised loops of the quantiser, over runs that stay in the L1 cache. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/quantize.h"

namespace memopt::cpu {

// Elements that are converted, coded and packed at once. Not below the largest vector of Philox.
constexpr int64_t kRun = 1024;

struct KeyRange {
  int32_t low = INT32_MAX, high = INT32_MIN;
};

inline void extend(KeyRange& range, const float* x, int64_t count) {
  int32_t low = range.low, high = range.high;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t key = ordered_key(x[i]);
    low = std::min(low, key);
    high = std::max(high, key);
  }
  range = {low, high};
}

// `thresholds` are the uniform numbers, or null for rounding to nearest.
inline void encode_run(const float* x, int64_t count, const GroupScale& group, int levels,
                       const float* thresholds, uint8_t* codes) {
  if (!group.finite) {
    std::fill(codes, codes + count, uint8_t{0});
    return;
  }
  const float top = static_cast<float>(levels);
  const float minimum = group.half_minimum, step = group.half_step;
  if (thresholds == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      codes[i] = static_cast<uint8_t>(encode(x[i], minimum, step, top, kNearestThreshold));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      codes[i] = static_cast<uint8_t>(encode(x[i], minimum, step, top, thresholds[i]));
    }
  }
}

// Packs codes, low bits first; `codes` has room for 7 more, which are set to 0.
inline void pack_codes(uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  std::fill(codes + count, codes + count + 7, uint8_t{0});
  const int64_t bytes = quantized_bytes(count, bits);
  if (bits == 8) {
    std::copy(codes, codes + bytes, out);
  } else if (bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  } else {
    for (int64_t i = 0; i < bytes; ++i) {
      const uint8_t* c = codes + 4 * i;
      out[i] = static_cast<uint8_t>(c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6);
    }
  }
}

// The inverse; `codes` has room for 7 more.
inline void unpack_codes(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
  const int64_t bytes = quantized_bytes(count, bits);
  if (bits == 8) {
    std::copy(packed, packed + bytes, codes);
  } else if (bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      codes[2 * i] = packed[i] & 15;
      codes[2 * i + 1] = packed[i] >> 4;
    }
  } else {
    for (int64_t i = 0; i < bytes; ++i) {
      codes[4 * i] = packed[i] & 3;
      codes[4 * i + 1] = packed[i] >> 2 & 3;
      codes[4 * i + 2] = packed[i] >> 4 & 3;
      codes[4 * i + 3] = packed[i] >> 6;
    }
  }
}

inline void decode_run(const uint8_t* codes, int64_t count, uint16_t scale, uint16_t minimum,
                       float limit, float* out) {
  const float half_minimum = 0.5f * bfloat16_to_float(minimum);
  const float half_scale = 0.5f * bfloat16_to_float(scale);
  for (int64_t i = 0; i < count; ++i) out[i] = decode(codes[i], half_minimum, half_scale, limit);
}

}  // namespace memopt::cpu
