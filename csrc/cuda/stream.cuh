// The device and the stream that PyTorch is on, and errors of a launch.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "../common/check.h"

namespace memopt::cuda {

// Makes a tensor's device current for its lifetime and knows PyTorch's current stream there.
class DeviceScope {
 public:
  explicit DeviceScope(const torch::stable::Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  MEMOPT_CHECK(error == cudaSuccess, op, ": CUDA error: ", cudaGetErrorString(error));
}

}  // namespace memopt::cuda
