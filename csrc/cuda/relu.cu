// Binding of the ReLU kernels: checks, allocation, launch, registration.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "../common/bits.h"
#include "../common/check.h"
#include "../common/dispatch.h"
#include "launch.cuh"
#include "relu.cuh"
#include "stream.cuh"

namespace memopt::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// An output with input's strides, filled by write(contiguous output).
template <typename Write>
Tensor like(const Tensor& input, const Write& write) {
  Tensor output = torch::stable::empty_like(input);
  if (output.is_contiguous()) {
    write(output);
    return output;
  }
  Tensor staged =
      torch::stable::empty(input.sizes(), input.scalar_type(), std::nullopt, input.device());
  write(staged);
  torch::stable::copy_(output, staged);
  return output;
}

std::tuple<Tensor, Tensor> relu(const Tensor& input) {
  const DeviceScope scope(input);
  const int64_t numel = input.numel();
  Tensor mask =
      torch::stable::empty({bytes_for_bits(numel)}, ScalarType::Byte, std::nullopt, input.device());
  Tensor x = torch::stable::contiguous(input);
  Tensor output = like(input, [&](Tensor& y) {
    dispatch_floating(input.scalar_type(), "relu", "input", [&](auto zero) {
      using T = decltype(zero);
      if (numel == 0) return;
      launch(relu_kernel<T>, blocks_for(bytes_for_bits(numel)), kThreads, 0, scope.stream(),
             x.const_data_ptr<T>(), y.mutable_data_ptr<T>(), mask.mutable_data_ptr<uint8_t>(),
             numel);
      check_launch("relu");
    });
  });
  return {output, mask};
}

Tensor relu_backward(const Tensor& grad, const Tensor& mask) {
  const int64_t numel = grad.numel();
  const int64_t needed = bytes_for_bits(numel);
  MEMOPT_CHECK(mask.scalar_type() == ScalarType::Byte && mask.dim() == 1 && mask.size(0) == needed,
               "relu_backward: mask has ", mask.numel(), " elements of dtype ",
               toString(mask.scalar_type()), ", needs ", needed,
               " bytes of dtype uint8: one bit for each element of grad");
  MEMOPT_CHECK(
      grad.is_cuda() && mask.is_cuda() && mask.get_device_index() == grad.get_device_index(),
      "relu_backward: grad and mask are on different devices, needs the same");
  const DeviceScope scope(grad);
  Tensor packed = torch::stable::contiguous(mask);
  Tensor g = torch::stable::contiguous(grad);
  return like(grad, [&](Tensor& out) {
    dispatch_floating(grad.scalar_type(), "relu_backward", "grad", [&](auto zero) {
      using T = decltype(zero);
      if (numel == 0) return;
      launch(relu_backward_kernel<T>, blocks_for(numel), kThreads, 0, scope.stream(),
             g.const_data_ptr<T>(), packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr<T>(),
             numel);
      check_launch("relu_backward");
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CUDA, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("relu_backward", TORCH_BOX(&relu_backward));
}

}  // namespace memopt::cuda
