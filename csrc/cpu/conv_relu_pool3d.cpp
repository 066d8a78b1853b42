// conv_relu_pool3d: y = max_pool(act(conv(x, w) + b)) in three dimensions, and one code per pooled
// element. By the stock convolution in chunks.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "conv_pool_chunks.h"

namespace memopt::cpu {
namespace {

std::tuple<Tensor, Tensor> conv_relu_pool3d(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias, Ints stride,
                                            Ints padding, Ints dilation, int64_t groups,
                                            Ints pool_kernel_size, Ints pool_stride,
                                            Ints pool_padding, Ints pool_dilation, bool ceil_mode,
                                            std::string activation, double alpha, double beta,
                                            bool save_codes) {
  const ConvPoolProblem problem =
      make_problem("conv_relu_pool3d", 3, input, weight, bias,
                   {stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding,
                    pool_dilation, ceil_mode, activation, alpha, beta});
  auto results = empty_results(problem, 3, input.scalar_type(), save_codes);
  Tensor &output = std::get<0>(results), &codes = std::get<1>(results);
  uint8_t* bytes = save_codes ? codes.mutable_data_ptr<uint8_t>() : nullptr;
  dispatch_floating(input.scalar_type(), "conv_relu_pool3d", "input", [&](auto zero) {
    using T = decltype(zero);
    dispatch_activation<T>(problem.pool.activation, [&](const auto& act) {
      forward_chunks<T>(problem, act, input, weight, bias, output, bytes);
    });
  });
  return results;
}

std::tuple<Tensor, Tensor, Tensor> conv_relu_pool3d_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& codes, Ints stride,
    Ints padding, Ints dilation, int64_t groups, Ints pool_kernel_size, Ints pool_stride,
    Ints pool_padding, Ints pool_dilation, bool ceil_mode, std::string activation, double alpha,
    double beta, bool input_grad, bool weight_grad, bool bias_grad) {
  const char* op = "conv_relu_pool3d_backward";
  const ConvPoolProblem problem =
      make_problem(op, 3, input, weight, std::nullopt,
                   {stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding,
                    pool_dilation, ceil_mode, activation, alpha, beta});
  check_saved(op, 3, problem, grad, input, codes);
  ConvPoolGradients grads(problem, input, weight, input_grad, weight_grad, bias_grad);
  const Tensor packed = torch::stable::contiguous(codes);
  dispatch_floating(input.scalar_type(), op, "input", [&](auto zero) {
    using T = decltype(zero);
    backward_chunks<T>(problem, grad, input, weight, packed.const_data_ptr<uint8_t>(), grads);
  });
  return {grads.dx, grads.dw, grads.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("conv_relu_pool3d", TORCH_BOX(&conv_relu_pool3d));
  m.impl("conv_relu_pool3d_backward", TORCH_BOX(&conv_relu_pool3d_backward));
}

}  // namespace memopt::cpu
