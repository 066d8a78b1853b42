// conv_relu_pool2d: y = max_pool(relu(conv(x, w) + b)) and one code per pooled element.
//
// Images go through the stock convolution in chunks that stay in cache; each chunk is pooled to
// values and codes while hot, so the convolution's output never exists in full. Backward rebuilds
// its gradient from the codes, chunk by chunk, and hands it to the stock convolution's backward.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "aten_convolution.h"
#include "direct_forward.h"
#include "direct_input_grad.h"
#include "direct_weight_grad.h"
#include "max_pool_codes.h"

namespace memopt::cpu {
namespace {

using torch::headeronly::MemoryFormat;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// Bytes of convolution output worked on at once: what the second-level cache of two threads holds.
constexpr int64_t kChunkBytes = int64_t{1} << 20;

struct Problem {
  ConvolutionParameters convolution;
  PoolShape pool;            // its input is the convolution's output
  WindowAxis height, width;  // of the convolution, over the input
  bool channels_last = false;
  int64_t images_per_chunk = 1;
};

void check_pair(const char* name, const Ints& values, int64_t least) {
  MEMOPT_CHECK(values.size() == 2, "conv_relu_pool2d: ", name, " has ", values.size(),
               " numbers, needs 2");
  for (const int64_t v : values) {
    MEMOPT_CHECK(v >= least && v < (int64_t{1} << 31), "conv_relu_pool2d: ", name, " is ",
                 values[0], ", ", values[1], ", needs integers of at least ", least,
                 " and below 2^31");
  }
}

// Whether a 4-D tensor's strides say channels_last: PyTorch's own rule, so that the result has
// eager's memory format.
bool suggests_channels_last(const Tensor& t) {
  int64_t least = 0;
  if (t.stride(1) == 0) return false;
  for (const int64_t d : {1, 3, 2, 0}) {
    const int64_t size = t.size(d), stride = t.stride(d);
    if (size == 0 || stride < least || (d == 0 && least == t.stride(1))) return false;
    least = size > 1 ? stride * size : stride;
  }
  return true;
}

Problem make_problem(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                     const Ints& stride, const Ints& padding, const Ints& dilation, int64_t groups,
                     const Ints& pool_kernel_size, const Ints& pool_stride,
                     const Ints& pool_padding, const Ints& pool_dilation, bool ceil_mode,
                     const std::string& activation) {
  const char* op = "conv_relu_pool2d: ";
  MEMOPT_CHECK(input.dim() == 4, op, "input has ", input.dim(), " dimensions, needs (N, C, H, W)");
  MEMOPT_CHECK(weight.dim() == 4, op, "weight has ", weight.dim(),
               " dimensions, needs (K, C, R, S)");
  MEMOPT_CHECK(weight.is_cpu(), op, "weight must be on the CPU, as input is");
  MEMOPT_CHECK(weight.scalar_type() == input.scalar_type(), op, "input has dtype ",
               toString(input.scalar_type()), " and weight ", toString(weight.scalar_type()),
               ", needs the same dtype");
  const int64_t channels = input.size(1), filters = weight.size(0);
  MEMOPT_CHECK(groups > 0 && filters > 0 && filters % groups == 0, op, "groups is ", groups,
               ", needs a positive divisor of weight's ", filters, " filters");
  // Compared by division: groups comes from outside and a product could overflow.
  MEMOPT_CHECK(channels % groups == 0 && weight.size(1) == channels / groups && channels > 0, op,
               "input has ", channels, " channels, but weight expects ", groups, " groups of ",
               weight.size(1));
  if (bias.has_value()) {
    MEMOPT_CHECK(bias->is_cpu(), op, "bias must be on the CPU, as input is");
    MEMOPT_CHECK(bias->dim() == 1 && bias->size(0) == filters, op, "bias has ", bias->numel(),
                 " elements in ", bias->dim(), " dimensions, needs shape (", filters, ",)");
    MEMOPT_CHECK(bias->scalar_type() == input.scalar_type(), op, "input has dtype ",
                 toString(input.scalar_type()), " and bias ", toString(bias->scalar_type()),
                 ", needs the same dtype");
  }
  check_pair("stride", stride, 1);
  check_pair("padding", padding, 0);
  check_pair("dilation", dilation, 1);
  check_pair("pool_kernel_size", pool_kernel_size, 1);
  check_pair("pool_stride", pool_stride, 1);
  check_pair("pool_padding", pool_padding, 0);
  check_pair("pool_dilation", pool_dilation, 1);
  MEMOPT_CHECK(activation == "relu", op, "activation is '", activation, "', needs 'relu'");

  Problem problem;
  problem.convolution = {stride, padding, dilation, groups};
  problem.pool.images = input.size(0);
  problem.pool.channels = filters;
  for (const int d : {0, 1}) {
    MEMOPT_CHECK(weight.size(2 + d) > 0, op, "weight has an empty kernel");
    WindowAxis axis{input.size(2 + d), weight.size(2 + d), stride[d], padding[d], dilation[d]};
    axis.set_output(false);
    MEMOPT_CHECK(axis.input > 0 && axis.output > 0, op, "the kernel reaches over ", axis.reach(),
                 " of a padded input of ", axis.input + 2 * axis.padding,
                 "; the convolution's output would be empty");
    WindowAxis pool{axis.output, pool_kernel_size[d], pool_stride[d], pool_padding[d],
                    pool_dilation[d]};
    MEMOPT_CHECK(pool.padding <= pool.kernel / 2, op, "pool_padding is ", pool.padding,
                 ", needs at most half of pool_kernel_size, which is ", pool.kernel);
    pool.set_output(ceil_mode);
    (d == 0 ? problem.height : problem.width) = axis;
    MEMOPT_CHECK(pool.output > 0, op, "the pool's window reaches over ", pool.reach(),
                 " of the convolution's output of ", axis.output, "; its output would be empty");
    (d == 0 ? problem.pool.height : problem.pool.width) = pool;
  }
  MEMOPT_CHECK(problem.pool.positions() < (int64_t{1} << 32) - 1, op,
               "pool_kernel_size has more than 2^32 - 2 positions");
  problem.channels_last =
      input.size(0) > 0 && (suggests_channels_last(input) || suggests_channels_last(weight));
  int64_t image_bytes = static_cast<int64_t>(input.element_size());
  bool overflow = __builtin_mul_overflow(image_bytes, filters, &image_bytes);
  overflow |= __builtin_mul_overflow(image_bytes, problem.pool.height.input, &image_bytes);
  overflow |= __builtin_mul_overflow(image_bytes, problem.pool.width.input, &image_bytes);
  // Far below 2^63, so that the bits of an image's codes can be counted too.
  MEMOPT_CHECK(!overflow && image_bytes < (int64_t{1} << 56), op, "the convolution's output of ",
               filters, " x ", problem.pool.height.input, " x ", problem.pool.width.input,
               " an image would exceed 2^56 bytes");
  problem.images_per_chunk = std::max<int64_t>(1, kChunkBytes / image_bytes);
  return problem;
}

Tensor empty_4d(const Problem& problem, int64_t n, int64_t c, int64_t h, int64_t w,
                ScalarType dtype) {
  return torch::stable::empty(
      {n, c, h, w}, dtype, std::nullopt, std::nullopt, std::nullopt,
      problem.channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
}

Strides4 strides_of(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

DirectShape direct_shape(const Problem& problem, const Tensor& input) {
  const int64_t groups = problem.convolution.groups;
  return {
      problem.pool.images, groups,        input.size(1) / groups, problem.pool.channels / groups,
      problem.height,      problem.width, problem.pool.height,    problem.pool.width,
      strides_of(input)};
}

// Calls body(first image, images) for every chunk of the batch.
template <typename Body>
void for_each_chunk(const Problem& problem, const Body& body) {
  for (int64_t n = 0; n < problem.pool.images; n += problem.images_per_chunk) {
    body(n, std::min(problem.images_per_chunk, problem.pool.images - n));
  }
}

std::tuple<Tensor, Tensor> conv_relu_pool2d(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias, Ints stride,
                                            Ints padding, Ints dilation, int64_t groups,
                                            Ints pool_kernel_size, Ints pool_stride,
                                            Ints pool_padding, Ints pool_dilation, bool ceil_mode,
                                            std::string activation, bool save_codes) {
  const Problem problem =
      make_problem(input, weight, bias, stride, padding, dilation, groups, pool_kernel_size,
                   pool_stride, pool_padding, pool_dilation, ceil_mode, activation);
  const PoolShape& pool = problem.pool;
  const int64_t image_codes = save_codes ? pool.code_bytes() : 0;
  Tensor output = empty_4d(problem, pool.images, pool.channels, pool.height.output,
                           pool.width.output, input.scalar_type());
  Tensor codes = torch::stable::empty({pool.images, pool.channels, image_codes}, ScalarType::Byte);
  Tensor images = input;
  dispatch_floating(input.scalar_type(), "conv_relu_pool2d", "input", [&](auto zero) {
    using T = decltype(zero);
    T* y = output.mutable_data_ptr<T>();
    uint8_t* bytes = save_codes ? codes.mutable_data_ptr<uint8_t>() : nullptr;
    if (direct_forward<T, ReluAfterMax>(
            direct_shape(problem, input), input.const_data_ptr<T>(), weight.const_data_ptr<T>(),
            strides_of(weight), bias ? bias->const_data_ptr<T>() : nullptr,
            bias ? bias->stride(0) : 0, {y, strides_of(output), bytes})) {
      return;
    }
    for_each_chunk(problem, [&](int64_t first, int64_t count) {
      const Tensor convolved = convolution(torch::stable::narrow(images, 0, first, count), weight,
                                           bias, problem.convolution);
      PoolShape chunk = pool;
      chunk.images = count;
      max_pool_relu<T>(chunk, convolved.const_data_ptr<T>(), strides_of(convolved),
                       y + first * output.stride(0), strides_of(output),
                       bytes ? bytes + first * pool.channels * image_codes : nullptr);
    });
  });
  return {output, codes};
}

// total += part, in the accumulator's dtype. Both contiguous.
template <typename T>
void accumulate(const Tensor& part, acc_t<T>* total) {
  const Tensor dense = torch::stable::contiguous(part);
  const T* values = dense.const_data_ptr<T>();
  torch::stable::parallel_for(0, dense.numel(), 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) total[i] += static_cast<acc_t<T>>(values[i]);
  });
}

template <typename T>
constexpr ScalarType acc_dtype() {
  return std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
}

// Gradients that are not asked for come back as empty tensors of shape (0,).
std::tuple<Tensor, Tensor, Tensor> conv_relu_pool2d_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& codes, Ints stride,
    Ints padding, Ints dilation, int64_t groups, Ints pool_kernel_size, Ints pool_stride,
    Ints pool_padding, Ints pool_dilation, bool ceil_mode, std::string activation, bool input_grad,
    bool weight_grad, bool bias_grad) {
  const Problem problem =
      make_problem(input, weight, std::nullopt, stride, padding, dilation, groups, pool_kernel_size,
                   pool_stride, pool_padding, pool_dilation, ceil_mode, activation);
  const PoolShape& pool = problem.pool;
  const char* op = "conv_relu_pool2d_backward: ";
  const ScalarType dtype = input.scalar_type();
  MEMOPT_CHECK(input.is_cpu() && codes.is_cpu(), op,
               "input and codes must be on the CPU, as grad is");
  MEMOPT_CHECK(grad.scalar_type() == dtype, op, "grad has dtype ", toString(grad.scalar_type()),
               ", needs input's ", toString(dtype));
  MEMOPT_CHECK(grad.dim() == 4 && grad.size(0) == pool.images && grad.size(1) == pool.channels &&
                   grad.size(2) == pool.height.output && grad.size(3) == pool.width.output,
               op, "grad has the wrong shape, needs (", pool.images, ", ", pool.channels, ", ",
               pool.height.output, ", ", pool.width.output, ")");
  MEMOPT_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 3 &&
                   codes.size(0) == pool.images && codes.size(1) == pool.channels &&
                   codes.size(2) == pool.code_bytes(),
               op, "codes has the wrong shape or dtype, needs uint8 of shape (", pool.images, ", ",
               pool.channels, ", ", pool.code_bytes(),
               "); the forward pass makes them with save_codes=True");

  const auto absent = [&] { return torch::stable::empty({0}, dtype); };
  Tensor dx = input_grad ? empty_4d(problem, input.size(0), input.size(1), input.size(2),
                                    input.size(3), dtype)
                         : absent();
  Tensor dw = weight_grad ? torch::stable::empty_like(weight) : absent();
  Tensor db = bias_grad ? torch::stable::empty({pool.channels}, dtype) : absent();
  Tensor images = input;
  const Tensor packed = torch::stable::contiguous(codes);
  const uint8_t* bytes = packed.const_data_ptr<uint8_t>();

  dispatch_floating(dtype, "conv_relu_pool2d_backward", "input", [&](auto zero) {
    using T = decltype(zero);
    const T* dy = grad.const_data_ptr<T>();
    const DirectShape shape = direct_shape(problem, input);
    if (suits_direct_backward<acc_t<T>>(shape)) {
      const BackwardInputs<T> in{dy,
                                 strides_of(grad),
                                 bytes,
                                 input.const_data_ptr<T>(),
                                 weight.const_data_ptr<T>(),
                                 strides_of(weight)};
      bool done = true;
      if (weight_grad || bias_grad) {
        done = direct_weight_grad<T>(shape, in, weight_grad ? dw.mutable_data_ptr<T>() : nullptr,
                                     weight_grad ? strides_of(dw) : Strides4{},
                                     bias_grad ? db.mutable_data_ptr<T>() : nullptr);
      }
      if (input_grad && done) {
        done = direct_input_grad<T>(shape, in, dx.mutable_data_ptr<T>(), strides_of(dx));
      }
      if (done) return;
    }
    Tensor dw_sum = torch::stable::empty(weight.sizes(), acc_dtype<T>());
    std::vector<acc_t<T>> db_sum(pool.channels, 0);
    acc_t<T>* dw_total = dw_sum.template mutable_data_ptr<acc_t<T>>();
    std::fill_n(dw_total, dw_sum.numel(), acc_t<T>(0));
    Tensor buffer = empty_4d(problem, std::min(problem.images_per_chunk, pool.images),
                             pool.channels, pool.height.input, pool.width.input, dtype);
    for_each_chunk(problem, [&](int64_t first, int64_t count) {
      PoolShape chunk = pool;
      chunk.images = count;
      const T* dy_chunk = dy + first * grad.stride(0);
      const uint8_t* codes_chunk = bytes + first * pool.channels * pool.code_bytes();
      if (bias_grad) add_live<T>(chunk, dy_chunk, strides_of(grad), codes_chunk, db_sum.data());
      if (!input_grad && !weight_grad) return;
      scatter_from_codes<T>(chunk, dy_chunk, strides_of(grad), codes_chunk,
                            buffer.mutable_data_ptr<T>(), strides_of(buffer));
      const auto [dx_part, dw_part] =
          convolution_backward(torch::stable::narrow(buffer, 0, 0, count),
                               torch::stable::narrow(images, 0, first, count), weight,
                               problem.convolution, input_grad, weight_grad);
      if (weight_grad) accumulate<T>(dw_part, dw_total);
      if (input_grad) {
        Tensor target = torch::stable::narrow(dx, 0, first, count);
        torch::stable::copy_(target, dx_part);
      }
    });
    if (weight_grad) torch::stable::copy_(dw, dw_sum);
    if (bias_grad) {
      T* values = db.mutable_data_ptr<T>();
      for (int64_t c = 0; c < pool.channels; ++c) values[c] = static_cast<T>(db_sum[c]);
    }
  });
  return {dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("conv_relu_pool2d", TORCH_BOX(&conv_relu_pool2d));
  m.impl("conv_relu_pool2d_backward", TORCH_BOX(&conv_relu_pool2d_backward));
}

}  // namespace memopt::cpu
