// The stock convolution and its gradient, called through PyTorch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace memopt::cpu {

struct ConvolutionParameters {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups = 1;
};

// input (N, C, H, W), weight (K, C / groups, R, S), bias (K) -> (N, K, OH, OW)
inline torch::stable::Tensor convolution(const torch::stable::Tensor& input,
                                         const torch::stable::Tensor& weight,
                                         const std::optional<torch::stable::Tensor>& bias,
                                         const ConvolutionParameters& p) {
  using torch::stable::detail::from;
  const std::vector<int64_t> output_padding(p.stride.size(), 0);
  std::array<StableIValue, 9> stack{from(input),    from(weight),         from(bias),
                                    from(p.stride), from(p.padding),      from(p.dilation),
                                    from(false),    from(output_padding), from(p.groups)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::convolution", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
}

// The gradients asked for by `input_grad` and `weight_grad`; the others are undefined tensors.
inline std::tuple<torch::stable::Tensor, torch::stable::Tensor> convolution_backward(
    const torch::stable::Tensor& grad, const torch::stable::Tensor& input,
    const torch::stable::Tensor& weight, const ConvolutionParameters& p, bool input_grad,
    bool weight_grad) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const std::vector<int64_t> output_padding(p.stride.size(), 0);
  const std::array<bool, 3> mask{input_grad, weight_grad, false};
  std::array<StableIValue, 11> stack{
      from(grad),
      from(input),
      from(weight),
      from(std::nullopt),
      from(p.stride),
      from(p.padding),
      from(p.dilation),
      from(false),
      from(output_padding),
      from(p.groups),
      from(torch::headeronly::HeaderOnlyArrayRef<bool>(mask.data(), mask.size()))};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::convolution_backward", "", stack.data(), TORCH_ABI_VERSION));
  auto input_result = to<torch::stable::Tensor>(stack[0]);
  auto weight_result = to<torch::stable::Tensor>(stack[1]);
  to<torch::stable::Tensor>(stack[2]);
  return {input_result, weight_result};
}

}  // namespace memopt::cpu
