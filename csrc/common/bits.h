// Packing of booleans, eight to a byte, the first in the lowest bit.
#pragma once

#include <cstdint>

namespace memopt {

// Bytes that hold one bit for each of numel elements.
constexpr int64_t bytes_for_bits(int64_t numel) { return (numel + 7) / 8; }

}  // namespace memopt
