// Functions that the CPU and the GPU kernels share: plain C++ here, also device code under nvcc.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MEMOPT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEMOPT_HOST_DEVICE inline
#endif
