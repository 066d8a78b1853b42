// The one way kernels are launched: nvcc's triple chevrons behind a function call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace memopt::cuda {

constexpr int kThreads = 256;
// Grid-stride loops cover any size; this many blocks fill every card there is.
constexpr int64_t kMaxBlocks = 65535;

inline unsigned blocks_for(int64_t work) {
  const int64_t blocks = (work + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, unsigned block, size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
}

}  // namespace memopt::cuda
