// Philox4x32-10, the counter-based generator of Salmon et al. (SC'11), as in Random123: every
// element's random number is a function of the seed and the element's index alone. Torch-free.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace memopt {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

MEMOPT_HOST_DEVICE PhiloxWords philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p = static_cast<uint64_t>(kPhiloxMultiplier0) * a;
    const uint64_t q = static_cast<uint64_t>(kPhiloxMultiplier1) * c;
    a = static_cast<uint32_t>(q >> 32) ^ b ^ key0;
    c = static_cast<uint32_t>(p >> 32) ^ d ^ key1;
    b = static_cast<uint32_t>(q);
    d = static_cast<uint32_t>(p);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{a, b, c, d}};
}

// The four words of elements 4 * block to 4 * block + 3.
MEMOPT_HOST_DEVICE PhiloxWords philox_block(uint64_t seed, uint64_t block) {
  return philox({{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0}},
                static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// A word as a uniform number in [0, 1): its upper 24 bits, so exact in float32.
MEMOPT_HOST_DEVICE float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

}  // namespace memopt
