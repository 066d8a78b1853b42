// Geometry of convolution and pooling windows, and the codes that say which position of a window
// won.
#pragma once

#include <cstdint>

namespace memopt {

// One dimension of a sliding window: which inputs belong to which output.
//   input = output * stride - padding + position * dilation,   position in [0, kernel)
struct WindowAxis {
  int64_t input = 0, kernel = 1, stride = 1, padding = 0, dilation = 1;
  int64_t output = 0;

  int64_t reach() const { return dilation * (kernel - 1) + 1; }

  // floor((input + 2 padding - reach) / stride) + 1. With ceil_mode the division rounds up, and a
  // last window that would start in the padding on the right is dropped.
  void set_output(bool ceil_mode) {
    const int64_t room = input + 2 * padding - reach() + (ceil_mode ? stride - 1 : 0);
    output = room < 0 ? 0 : room / stride + 1;
    if (ceil_mode && (output - 1) * stride >= input + padding) --output;
  }

  // The outputs [first, last) for which this position of the window lies inside the input.
  int64_t first_output(int64_t position) const {
    const int64_t need = padding - position * dilation;
    return need <= 0 ? 0 : (need + stride - 1) / stride;
  }
  int64_t last_output(int64_t position) const {
    const int64_t most = input - 1 + padding - position * dilation;
    if (most < 0) return 0;
    const int64_t last = most / stride + 1;
    return last < output ? last : output;
  }
};

// Bits of a code for a window of so many positions; the largest code says that ReLU cut the window.
constexpr int code_bits(int64_t positions) {
  return positions <= 15 ? 4 : positions <= 255 ? 8 : positions <= 65535 ? 16 : 32;
}
constexpr uint32_t dead_code(int bits) {
  return bits == 32 ? 0xFFFFFFFFu : (uint32_t{1} << bits) - 1;
}
// Every (image, channel) plane of codes starts at a byte.
constexpr int64_t plane_bytes(int64_t outputs, int bits) { return (outputs * bits + 7) / 8; }

// Little-endian, and for 4 bits the first code in the low half of the byte.
template <typename Code>
void store_codes(const Code* codes, int64_t count, int bits, uint8_t* bytes) {
  if (bits == 4) {
    for (int64_t i = 0; i + 1 < count; i += 2) {
      bytes[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
    }
    if (count % 2) bytes[count / 2] = static_cast<uint8_t>(codes[count - 1]);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int b = 0; b < bits / 8; ++b) *bytes++ = static_cast<uint8_t>(codes[i] >> (8 * b));
  }
}

inline uint32_t load_code(const uint8_t* bytes, int64_t index, int bits) {
  if (bits == 4) return (bytes[index / 2] >> (4 * (index % 2))) & 15;
  uint32_t code = 0;
  for (int b = 0; b < bits / 8; ++b) {
    code |= static_cast<uint32_t>(bytes[index * (bits / 8) + b]) << (8 * b);
  }
  return code;
}

}  // namespace memopt
