// The innermost loop of the direct convolution: a block of accumulators for P neighbouring pixels
// of one output row and J units of filters, held in registers while it walks over channels and
// taps.
//
//   out[p][j] (+)= sum over channels c and taps t of x[c * plane + offset[t] + p] * w[c][t][j]
//
// The lanes of a register are either filters (a unit is kLanes of them; weights are loaded, pixels
// broadcast) or images (a unit is one filter; pixels are loaded, weights broadcast).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "registers.h"

namespace memopt::cpu {

enum class LanesAre { kFilters, kImages };

// Where the taps of one output row lie in the scratch copy of the input, in elements.
struct Taps {
  int64_t channels = 0;              // of this pass
  int64_t plane = 0;                 // from a channel to the next
  int64_t count = 0;                 // per channel
  const int64_t* offsets = nullptr;  // [count]
};

// Units of filters in a block, at most, and the pixels that fit beside so many.
constexpr int kMaxUnits = 6;
template <LanesAre kLanesAre>
constexpr int max_pixels(int units) {
  // Besides the accumulators, registers hold the loaded operand of a tap and one broadcast value.
  constexpr bool kImages = kLanesAre == LanesAre::kImages;
  int pixels = 1;
  while (pixels < 14 && (pixels + 1) * units + (kImages ? pixels + 1 : units) + 1 <= kRegisters) {
    ++pixels;
  }
  return pixels;
}

template <typename Acc, LanesAre kLanesAre, int kUnits, int kPixels>
void convolve_tile(const Acc* x, const Acc* w, const Taps& taps, const Acc* start, Acc* out) {
  constexpr int kWidth = kLanes<Acc>;
  using V = Register<Acc>;
  V sums[kPixels][kUnits] = {};
  for (int64_t c = 0; c < taps.channels; ++c, x += taps.plane) {
    for (int64_t t = 0; t < taps.count; ++t) {
      const Acc* from = x + taps.offsets[t];
      if constexpr (kLanesAre == LanesAre::kFilters) {
        V weights[kUnits];
#pragma GCC unroll 16
        for (int j = 0; j < kUnits; ++j) weights[j] = load<V>(w + j * kWidth);
#pragma GCC unroll 16
        for (int p = 0; p < kPixels; ++p) {
          const V pixel = broadcast(from[p]);
#pragma GCC unroll 16
          for (int j = 0; j < kUnits; ++j) {
            sums[p][j] = multiply_add(pixel, weights[j], sums[p][j]);
          }
        }
        w += kUnits * kWidth;
      } else {
        V pixels[kPixels];
#pragma GCC unroll 16
        for (int p = 0; p < kPixels; ++p) pixels[p] = load<V>(from + p * kWidth);
#pragma GCC unroll 16
        for (int j = 0; j < kUnits; ++j) {
          const V weight = broadcast(w[j]);
#pragma GCC unroll 16
          for (int p = 0; p < kPixels; ++p) {
            sums[p][j] = multiply_add(pixels[p], weight, sums[p][j]);
          }
        }
        w += kUnits;
      }
    }
  }
  // The first pass over channels starts from the bias, the others from what is there.
#pragma GCC unroll 16
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 16
    for (int j = 0; j < kUnits; ++j) {
      Acc* to = out + (p * kUnits + j) * kWidth;
      const V before = load<V>(start ? start + j * kWidth : to);
      store(to, before + sums[p][j]);
    }
  }
}

template <typename Acc>
using ConvolveTile = void (*)(const Acc* x, const Acc* w, const Taps& taps, const Acc* start,
                              Acc* out);

template <typename Acc, LanesAre kLanesAre, int kUnits, int... kPixels>
ConvolveTile<Acc> choose_pixels(int pixels, std::integer_sequence<int, kPixels...>) {
  static constexpr ConvolveTile<Acc> kTable[] = {
      convolve_tile<Acc, kLanesAre, kUnits, kPixels + 1>...};
  return kTable[pixels - 1];
}

template <typename Acc, LanesAre kLanesAre, int... kUnits>
ConvolveTile<Acc> choose_units(int units, int pixels, std::integer_sequence<int, kUnits...>) {
  ConvolveTile<Acc> found = nullptr;
  ((units == kUnits + 1
        ? void(found = choose_pixels<Acc, kLanesAre, kUnits + 1>(
                   pixels, std::make_integer_sequence<int, max_pixels<kLanesAre>(kUnits + 1)>()))
        : void()),
   ...);
  return found;
}

// The kernel for 1 <= units <= kMaxUnits (4 for filters in lanes) and 1 <= pixels <= max_pixels.
template <typename Acc, LanesAre kLanesAre>
ConvolveTile<Acc> convolve_tile_for(int units, int pixels) {
  constexpr int kUnits = kLanesAre == LanesAre::kImages ? kMaxUnits : 4;
  return choose_units<Acc, kLanesAre>(units, pixels, std::make_integer_sequence<int, kUnits>());
}

}  // namespace memopt::cpu
