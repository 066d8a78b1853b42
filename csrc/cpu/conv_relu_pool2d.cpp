// conv_relu_pool2d: y = max_pool(act(conv(x, w) + b)) and one code per pooled element.
//
// By the direct kernels (direct_*.h). Gradients whose offsets do not fit 32 bits are computed by
// the stock convolution in chunks (conv_pool_chunks.h).
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "conv_pool_chunks.h"
#include "direct_forward.h"
#include "direct_input_grad.h"
#include "direct_weight_grad.h"

namespace memopt::cpu {
namespace {

Strides4 strides4(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}; }

DirectShape direct_shape(const ConvPoolProblem& problem, const Tensor& input) {
  const int64_t groups = problem.convolution.groups;
  return {problem.pool.images,     groups,
          input.size(1) / groups,  problem.pool.channels / groups,
          problem.height,          problem.width,
          problem.pool.height,     problem.pool.width,
          problem.pool.activation, strides4(input)};
}

std::tuple<Tensor, Tensor> conv_relu_pool2d(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias, Ints stride,
                                            Ints padding, Ints dilation, int64_t groups,
                                            Ints pool_kernel_size, Ints pool_stride,
                                            Ints pool_padding, Ints pool_dilation, bool ceil_mode,
                                            std::string activation, double alpha, double beta,
                                            bool save_codes) {
  const ConvPoolProblem problem =
      make_problem("conv_relu_pool2d", 2, input, weight, bias,
                   {stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding,
                    pool_dilation, ceil_mode, activation, alpha, beta});
  auto results = empty_results(problem, 2, input.scalar_type(), save_codes);
  Tensor &output = std::get<0>(results), &codes = std::get<1>(results);
  uint8_t* bytes = save_codes ? codes.mutable_data_ptr<uint8_t>() : nullptr;
  dispatch_floating(input.scalar_type(), "conv_relu_pool2d", "input", [&](auto zero) {
    using T = decltype(zero);
    dispatch_activation<T>(problem.pool.activation, [&](const auto& act) {
      direct_forward<T>(direct_shape(problem, input), act, input.const_data_ptr<T>(),
                        weight.const_data_ptr<T>(), strides4(weight),
                        bias ? bias->const_data_ptr<T>() : nullptr, bias ? bias->stride(0) : 0,
                        {output.mutable_data_ptr<T>(), strides4(output), bytes});
    });
  });
  return results;
}

template <typename T>
void direct_backward(const DirectShape& shape, const Tensor& grad, const Tensor& input,
                     const Tensor& weight, const uint8_t* codes, ConvPoolGradients& grads) {
  const BackwardInputs<T> in{
      grad.const_data_ptr<T>(),   strides4(grad),  codes, input.const_data_ptr<T>(),
      weight.const_data_ptr<T>(), strides4(weight)};
  if (grads.has_dw || grads.has_db) {
    T* dw = grads.has_dw ? grads.dw.template mutable_data_ptr<T>() : nullptr;
    T* db = grads.has_db ? grads.db.template mutable_data_ptr<T>() : nullptr;
    direct_weight_grad<T>(shape, in, dw, grads.has_dw ? strides4(grads.dw) : Strides4{}, db);
  }
  if (grads.has_dx) {
    direct_input_grad<T>(shape, in, grads.dx.template mutable_data_ptr<T>(), strides4(grads.dx));
  }
}

std::tuple<Tensor, Tensor, Tensor> conv_relu_pool2d_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& codes, Ints stride,
    Ints padding, Ints dilation, int64_t groups, Ints pool_kernel_size, Ints pool_stride,
    Ints pool_padding, Ints pool_dilation, bool ceil_mode, std::string activation, double alpha,
    double beta, bool input_grad, bool weight_grad, bool bias_grad) {
  const char* op = "conv_relu_pool2d_backward";
  const ConvPoolProblem problem =
      make_problem(op, 2, input, weight, std::nullopt,
                   {stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding,
                    pool_dilation, ceil_mode, activation, alpha, beta});
  check_saved(op, 2, problem, grad, input, codes);
  ConvPoolGradients grads(problem, input, weight, input_grad, weight_grad, bias_grad);
  const Tensor packed = torch::stable::contiguous(codes);
  const uint8_t* bytes = packed.const_data_ptr<uint8_t>();
  dispatch_floating(input.scalar_type(), op, "input", [&](auto zero) {
    using T = decltype(zero);
    const DirectShape shape = direct_shape(problem, input);
    if (suits_direct_backward<acc_t<T>>(shape)) {
      direct_backward<T>(shape, grad, input, weight, bytes, grads);
    } else {
      backward_chunks<T>(problem, grad, input, weight, bytes, grads);
    }
  });
  return {grads.dx, grads.dw, grads.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("conv_relu_pool2d", TORCH_BOX(&conv_relu_pool2d));
  m.impl("conv_relu_pool2d_backward", TORCH_BOX(&conv_relu_pool2d_backward));
}

}  // namespace memopt::cpu
