// bfloat16 as 16 bits, with the directed roundings that the quantiser needs. Torch-free.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace memopt {

constexpr uint16_t kBFloat16Max = 0x7F7F;
constexpr uint16_t kBFloat16Nan = 0x7FC0;

MEMOPT_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

MEMOPT_HOST_DEVICE float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

MEMOPT_HOST_DEVICE float bfloat16_to_float(uint16_t value) {
  return bits_float(static_cast<uint32_t>(value) << 16);
}

// Away from zero or toward it. Saturates at the largest finite value. Finite arguments only.
MEMOPT_HOST_DEVICE uint16_t bfloat16_directed(float value, bool away) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = away ? bits + 0xFFFF : bits;
  const uint16_t top = static_cast<uint16_t>(rounded >> 16);
  return (top & 0x7FFF) > kBFloat16Max ? static_cast<uint16_t>((top & 0x8000) | kBFloat16Max) : top;
}

MEMOPT_HOST_DEVICE uint16_t bfloat16_down(float value) {
  return bfloat16_directed(value, (float_bits(value) >> 31) != 0);
}

MEMOPT_HOST_DEVICE uint16_t bfloat16_up(float value) {
  return bfloat16_directed(value, (float_bits(value) >> 31) == 0);
}

// To nearest, ties to even. Finite arguments whose rounding is finite only.
MEMOPT_HOST_DEVICE uint16_t bfloat16_nearest(float value) {
  const uint32_t bits = float_bits(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace memopt
