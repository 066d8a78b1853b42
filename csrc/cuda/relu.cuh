// ReLU that keeps one bit per element, torch-free. One thread makes one byte of the mask, so no
// two threads write the same byte and no atomics are needed.
//   y = max(x, 0)      mask = !(x <= 0)      dx = mask ? dy : 0
#pragma once

#include <cstdint>

namespace memopt::cuda {

template <typename T>
__global__ void relu_kernel(const T* x, T* y, uint8_t* mask, int64_t numel) {
  const int64_t bytes = (numel + 7) / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t byte = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; byte < bytes;
       byte += step) {
    uint8_t bits = 0;
    for (int k = 0; k < 8 && byte * 8 + k < numel; ++k) {
      const T value = x[byte * 8 + k];
      const bool keep = !(value <= T(0));
      y[byte * 8 + k] = keep ? value : T(0);
      bits |= static_cast<uint8_t>(keep) << k;
    }
    mask[byte] = bits;
  }
}

template <typename T>
__global__ void relu_backward_kernel(const T* grad, const uint8_t* mask, T* out, int64_t numel) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < numel;
       i += step) {
    out[i] = (mask[i / 8] >> (i % 8)) & 1 ? grad[i] : T(0);
  }
}

}  // namespace memopt::cuda
