// conv_relu_avg_pool: y = avg_pool(act(conv(x, w) + b)) and one bit per element of the convolution.
//
// Images go through the stock convolution in chunks that stay in cache; each chunk is averaged and
// masked while hot, so the convolution's output never exists in full. Backward spreads dy over the
// windows, chunk by chunk, applies the mask and hands the result to the stock convolution's
// backward.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "average_pool.h"
#include "conv_dense_chunks.h"

namespace memopt::cpu {
namespace {

struct Problem {
  ConvPoolProblem convolution;
  AveragePool pool;
  int dims;
};

Problem make_average_problem(const char* op, const Tensor& input, const Tensor& weight,
                             const std::optional<Tensor>& bias, const ConvPoolArguments& arguments,
                             bool count_include_pad, std::optional<int64_t> divisor_override) {
  const int dims = arguments.stride.size() == 3 ? 3 : 2;
  ConvPoolArguments a = arguments;
  a.pool_dilation.assign(dims, 1);
  Problem problem{make_problem(op, dims, input, weight, bias, a), {}, dims};
  MEMOPT_CHECK(!divisor_override || *divisor_override != 0, op,
               ": divisor_override is 0, needs another integer");
  const PoolShape& shape = problem.convolution.pool;
  for (const WindowAxis& axis : {shape.depth, shape.height, shape.width}) {
    // As the stock avg_pool3d.
    MEMOPT_CHECK(dims == 2 || axis.input >= axis.kernel, op, ": pool_kernel_size has ", axis.kernel,
                 ", needs at most the convolution's output of ", axis.input);
  }
  problem.pool = {problem.convolution.pool, count_include_pad, divisor_override};
  return problem;
}

// The chunk's images [first, first + count) of the pool.
AveragePool chunk_of(const AveragePool& pool, int64_t count) {
  AveragePool chunk = pool;
  chunk.shape.images = count;
  return chunk;
}

std::tuple<Tensor, Tensor> conv_relu_avg_pool(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Ints stride,
    Ints padding, Ints dilation, int64_t groups, Ints pool_kernel_size, Ints pool_stride,
    Ints pool_padding, bool ceil_mode, bool count_include_pad,
    std::optional<int64_t> divisor_override, std::string activation, double alpha, double beta,
    bool save_mask) {
  const char* op = "conv_relu_avg_pool";
  const Problem problem = make_average_problem(op, input, weight, bias,
                                               {stride,
                                                padding,
                                                dilation,
                                                groups,
                                                pool_kernel_size,
                                                pool_stride,
                                                pool_padding,
                                                {},
                                                ceil_mode,
                                                activation,
                                                alpha,
                                                beta},
                                               count_include_pad, divisor_override);
  const AveragePool& pool = problem.pool;
  const PoolShape& shape = pool.shape;
  const int64_t mask_bytes = save_mask ? pool.mask_bytes() : 0;
  ConvPoolProblem format = problem.convolution;
  format.channels_last &= problem.dims == 2;  // the stock avg_pool3d's result is contiguous
  Tensor output =
      empty_like_images(format, pool_sizes(shape, shape.images, problem.dims, &WindowAxis::output),
                        input.scalar_type());
  Tensor mask = torch::stable::empty({shape.images, shape.channels, mask_bytes}, ScalarType::Byte);
  Tensor images = input;
  const Tensor filters = channels_last_weight(weight);
  dispatch_floating(input.scalar_type(), op, "input", [&](auto zero) {
    using T = decltype(zero);
    T* y = output.mutable_data_ptr<T>();
    uint8_t* bits = mask_bytes ? mask.mutable_data_ptr<uint8_t>() : nullptr;
    dispatch_activation<T>(shape.activation, [&](const auto& act) {
      for_each_chunk(problem.convolution, [&](int64_t first, int64_t count) {
        const Tensor convolved =
            to_channels_last(convolution(torch::stable::narrow(images, 0, first, count), filters,
                                         bias, problem.convolution.convolution));
        const T* x = convolved.const_data_ptr<T>();
        const AveragePool chunk = chunk_of(pool, count);
        average_pool<T>(chunk, act, x, y + first * output.stride(0), strides5(output));
        if (bits) activation_mask<T>(chunk, act, x, bits + first * shape.channels * mask_bytes);
      });
    });
  });
  return {output, mask};
}

std::tuple<Tensor, Tensor, Tensor> conv_relu_avg_pool_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& mask, Ints stride,
    Ints padding, Ints dilation, int64_t groups, Ints pool_kernel_size, Ints pool_stride,
    Ints pool_padding, bool ceil_mode, bool count_include_pad,
    std::optional<int64_t> divisor_override, std::string activation, double alpha, double beta,
    bool input_grad, bool weight_grad, bool bias_grad) {
  const char* op = "conv_relu_avg_pool_backward";
  const Problem problem = make_average_problem(op, input, weight, std::nullopt,
                                               {stride,
                                                padding,
                                                dilation,
                                                groups,
                                                pool_kernel_size,
                                                pool_stride,
                                                pool_padding,
                                                {},
                                                ceil_mode,
                                                activation,
                                                alpha,
                                                beta},
                                               count_include_pad, divisor_override);
  const AveragePool& pool = problem.pool;
  const PoolShape& shape = pool.shape;
  const ScalarType dtype = input.scalar_type();
  check_grad(op, problem.dims, problem.convolution, grad, input);
  MEMOPT_CHECK(mask.is_cpu() && mask.scalar_type() == ScalarType::Byte && mask.dim() == 3 &&
                   mask.size(0) == shape.images && mask.size(1) == shape.channels &&
                   mask.size(2) == pool.mask_bytes(),
               op, ": mask has the wrong shape, dtype or device, needs uint8 of shape (",
               shape.images, ", ", shape.channels, ", ", pool.mask_bytes(),
               ") on the CPU; the forward pass makes it with save_mask=True");
  ConvPoolGradients grads(problem.convolution, input, weight, input_grad, weight_grad, bias_grad);
  const Tensor packed = torch::stable::contiguous(mask);
  dispatch_floating(dtype, op, "input", [&](auto zero) {
    using T = decltype(zero);
    const T* dy = grad.const_data_ptr<T>();
    const uint8_t* bits = packed.const_data_ptr<uint8_t>();
    std::vector<double> sums, db_sum(shape.channels, 0);
    const auto make = [&](int64_t first, int64_t count, T* dc) {
      sums.resize(count * shape.channels);
      average_pool_gradient<T>(chunk_of(pool, count), dy + first * grad.stride(0), strides5(grad),
                               bits + first * shape.channels * pool.mask_bytes(), dc, sums.data());
      for (int64_t k = 0; k < count * shape.channels; ++k) db_sum[k % shape.channels] += sums[k];
    };
    backward_dense_chunks<T>(problem.convolution, input, weight, grads, make);
    if (bias_grad) {
      T* db = grads.db.mutable_data_ptr<T>();
      for (int64_t c = 0; c < shape.channels; ++c) {
        db[c] = static_cast<T>(static_cast<acc_t<T>>(db_sum[c]));
      }
    }
  });
  return {grads.dx, grads.dw, grads.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("conv_relu_avg_pool", TORCH_BOX(&conv_relu_avg_pool));
  m.impl("conv_relu_avg_pool_backward", TORCH_BOX(&conv_relu_avg_pool_backward));
}

}  // namespace memopt::cpu
