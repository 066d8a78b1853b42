// ReLU that keeps one bit per element:
//   y = max(x, 0)      mask = !(x <= 0)      dx = mask ? dy : 0
// A NaN is neither positive nor cut: it passes, and so does its gradient, as in eager.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "../common/bits.h"
#include "../common/check.h"
#include "../common/dispatch.h"
#include "simd.h"
#include "strided.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;

// Mask bytes per task: a task's 8 Ki elements fill the L1 cache.
constexpr int64_t kGrain = 1024;

// Both handle eight elements; where fewer are left their neighbours on the stack are handled too.
template <typename T>
uint8_t relu_block(const T* x, T* y) {
  const auto value = load_strided<8, 1>(x, 1);
  const auto keep = __builtin_convertvector(~(value <= 0), Vector<int32_t, 8>);
  copy_masked(x, keep, y);
  return bits_of(keep);
}

template <typename T>
void mask_block(const T* grad, uint8_t bits, T* out) {
  copy_masked(grad, lanes_of(bits), out);
}

// Runs body(in, out, byte index, elements) on blocks of eight elements, in row-major order,
// whatever the strides of source and target. Strided and incomplete blocks pass through one on the
// stack.
template <typename T, typename Body>
void for_each_block(const Tensor& source, const Tensor& target, const Body& body) {
  const T* in = source.const_data_ptr<T>();
  T* out = target.mutable_data_ptr<T>();
  const bool dense = source.is_contiguous() && target.is_contiguous();
  const int64_t numel = source.numel();
  torch::stable::parallel_for(0, bytes_for_bits(numel), kGrain, [&](int64_t byte, int64_t end) {
    if (dense) {
      for (; byte < std::min(end, numel / 8); ++byte) body(in + byte * 8, out + byte * 8, byte, 8);
    }
    StridedCursor from(source, byte * 8), to(target, byte * 8);
    for (; byte < end; ++byte) {
      std::array<T, 8> in_block{}, out_block;
      const int count = static_cast<int>(std::min<int64_t>(8, numel - byte * 8));
      for (int k = 0; k < count; ++k, from.advance()) in_block[k] = in[from.offset()];
      body(in_block.data(), out_block.data(), byte, count);
      for (int k = 0; k < count; ++k, to.advance()) out[to.offset()] = out_block[k];
    }
  });
}

// A mask's unused last bits are zero.
constexpr uint8_t used_bits(int count) { return static_cast<uint8_t>((1 << count) - 1); }

std::tuple<Tensor, Tensor> relu(const Tensor& input) {
  Tensor output = torch::stable::empty_like(input);
  Tensor mask = torch::stable::empty({bytes_for_bits(input.numel())}, ScalarType::Byte);
  uint8_t* bytes = mask.mutable_data_ptr<uint8_t>();
  dispatch_floating(input.scalar_type(), "relu", "input", [&](auto zero) {
    using T = decltype(zero);
    for_each_block<T>(input, output, [&](const T* x, T* y, int64_t byte, int count) {
      bytes[byte] = relu_block(x, y) & used_bits(count);
    });
  });
  return {output, mask};
}

Tensor relu_backward(const Tensor& grad, const Tensor& mask) {
  const int64_t needed = bytes_for_bits(grad.numel());
  MEMOPT_CHECK(mask.scalar_type() == ScalarType::Byte && mask.dim() == 1 && mask.size(0) == needed,
               "relu_backward: mask has ", mask.numel(), " elements of dtype ",
               toString(mask.scalar_type()), ", needs ", needed,
               " bytes of dtype uint8: one bit for each element of grad");
  MEMOPT_CHECK(mask.is_cpu(), "relu_backward: mask must be on the CPU, as grad is");
  Tensor packed = torch::stable::contiguous(mask);
  const uint8_t* bytes = packed.const_data_ptr<uint8_t>();
  Tensor output = torch::stable::empty_like(grad);
  dispatch_floating(grad.scalar_type(), "relu_backward", "grad", [&](auto zero) {
    using T = decltype(zero);
    for_each_block<T>(grad, output, [&](const T* in, T* out, int64_t byte, int) {
      mask_block(in, bytes[byte], out);
    });
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("relu_backward", TORCH_BOX(&relu_backward));
}

}  // namespace memopt::cpu
