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
#include "strided.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;

// Mask bytes per task: a task's 8 Ki elements fill the L1 cache.
constexpr int64_t kGrain = 1024;

// Calls body(byte, first element, elements) for every byte of a mask over numel elements.
template <typename Body>
void for_each_byte(int64_t numel, const Body& body) {
  torch::stable::parallel_for(0, bytes_for_bits(numel), kGrain, [&](int64_t begin, int64_t end) {
    body(begin, end, begin * 8, std::min(end * 8, numel));
  });
}

template <typename T>
uint8_t relu_block(const T* x, T* y, int count) {
  uint8_t bits = 0;
  for (int k = 0; k < count; ++k) {
    const bool keep = !(x[k] <= T(0));
    y[k] = keep ? x[k] : T(0);
    bits |= static_cast<uint8_t>(keep) << k;
  }
  return bits;
}

template <typename T>
void mask_block(const T* grad, uint8_t bits, T* out, int count) {
  for (int k = 0; k < count; ++k) out[k] = (bits >> k) & 1 ? grad[k] : T(0);
}

// Runs body(in, out, byte index, count) on blocks of eight elements, in row-major order, whatever
// the strides of source and target: strided ones pass through a block of eight on the stack.
template <typename T, typename Body>
void for_each_block(const Tensor& source, const Tensor& target, const Body& body) {
  const T* in = source.const_data_ptr<T>();
  T* out = target.mutable_data_ptr<T>();
  const bool dense = source.is_contiguous() && target.is_contiguous();
  for_each_byte(source.numel(), [&](int64_t byte, int64_t byte_end, int64_t first, int64_t last) {
    if (dense) {
      for (; byte < byte_end; ++byte) {
        const int64_t i = byte * 8;
        body(in + i, out + i, byte, static_cast<int>(std::min<int64_t>(8, last - i)));
      }
      return;
    }
    StridedCursor from(source, first), to(target, first);
    for (; byte < byte_end; ++byte) {
      std::array<T, 8> in_block, out_block;
      const int count = static_cast<int>(std::min<int64_t>(8, last - byte * 8));
      for (int k = 0; k < count; ++k, from.advance()) in_block[k] = in[from.offset()];
      body(in_block.data(), out_block.data(), byte, count);
      for (int k = 0; k < count; ++k, to.advance()) out[to.offset()] = out_block[k];
    }
  });
}

std::tuple<Tensor, Tensor> relu(const Tensor& input) {
  Tensor output = torch::stable::empty_like(input);
  Tensor mask = torch::stable::empty({bytes_for_bits(input.numel())}, ScalarType::Byte);
  uint8_t* bytes = mask.mutable_data_ptr<uint8_t>();
  dispatch_floating(input.scalar_type(), "relu", "input", [&](auto zero) {
    using T = decltype(zero);
    for_each_block<T>(input, output, [&](const T* x, T* y, int64_t byte, int count) {
      bytes[byte] = relu_block(x, y, count);
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
    for_each_block<T>(grad, output, [&](const T* in, T* out, int64_t byte, int count) {
      mask_block(in, bytes[byte], out, count);
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
