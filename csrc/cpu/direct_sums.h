// The two inner loops of the gradients: a segment of a patch in registers, summed over windows.
#pragma once

#include <cstdint>
#include <vector>

#include "direct_patch.h"

namespace memopt::cpu {

// sums (rows, registers) += sum over windows of grads * patches of x.
template <typename Acc, bool kDilated>
struct AddPatches {
  template <int kRows, int kRun>
  static void run(const Acc* x, int64_t tap_row, int64_t step, const int32_t* offsets,
                  const Acc* grads, int64_t count, Acc* sums, int64_t sums_row) {
    constexpr int kLane = kLanes<Acc>;
    using V = Register<Acc>;
    V total[kRows][kRun] = {};
    if constexpr (!kDilated) step = kLane;
    for (int64_t i = 0; i < count; ++i) {
      const Acc* from = x + offsets[i];
      const V grad = broadcast(grads[i]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kRun; ++v) {
          total[r][v] = multiply_add(grad, load<V>(from + r * tap_row + v * step), total[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kRun; ++v) {
        Acc* to = sums + r * sums_row + v * kLane;
        store(to, load<V>(to) + total[r][v]);
      }
    }
  }
};

// patch (rows, registers) += sum over entries of grad * filter. What lies beyond a run in its
// last register is left alone: `keep` has all bits set for the lanes of the run.
template <typename Acc, bool kDilated>
struct AddFilters {
  template <int kRows, int kRun>
  static void run(const Acc* filters, int64_t filters_row, const int32_t* offsets, const Acc* grads,
                  int64_t count, const CodeRegister<Acc>& keep, Acc* patch, int64_t tap_row,
                  int64_t step) {
    constexpr int kLane = kLanes<Acc>;
    using V = Register<Acc>;
    V total[kRows][kRun] = {};
    if constexpr (!kDilated) step = kLane;
    for (int64_t i = 0; i < count; ++i) {
      const Acc* from = filters + offsets[i];
      const V grad = broadcast(grads[i]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kRun; ++v) {
          total[r][v] =
              multiply_add(grad, load<V>(from + r * filters_row + v * kLane), total[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kRun; ++v) {
        Acc* to = patch + r * tap_row + v * step;
        V sum = total[r][v];
        if (kDilated || v == kRun - 1) {
          sum = reinterpret_cast<V>(reinterpret_cast<CodeRegister<Acc>>(sum) & keep);
        }
        store(to, load<V>(to) + sum);
      }
    }
  }
};

// The segments of a patch, and for each the instance of a kernel that sums it.
template <typename Acc, template <typename, bool> class Kernel>
struct PatchKernels {
  std::vector<Segment> parts;
  std::vector<decltype(segment_kernel<Kernel<Acc, false>>(Segment{}))> kernels;

  explicit PatchKernels(const PatchLayout<Acc>& patch) : parts(segments(patch)) {
    for (const Segment& part : parts) {
      kernels.push_back(patch.dilated ? segment_kernel<Kernel<Acc, true>>(part)
                                      : segment_kernel<Kernel<Acc, false>>(part));
    }
  }
};

}  // namespace memopt::cpu
