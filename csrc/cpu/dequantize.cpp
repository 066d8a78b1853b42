// From packed tensors back to floating point: docs/storage_format.md.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "convert.h"
#include "quantize.h"
#include "quantize_loops.h"
#include "strided.h"

namespace memopt::cpu {

using torch::stable::Tensor;

QuantizedView::QuantizedView(const char* op, const Tensor& packed, const Tensor& scale,
                             const Tensor& minimum, int64_t numel, int64_t bits, int64_t group_size)
    : numel_(numel), bits_(bits), group_size_(group_size) {
  check_format(op, bits, group_size);
  const auto check = [&](const Tensor& tensor, const char* name, ScalarType dtype, int64_t needed) {
    MEMOPT_CHECK(tensor.scalar_type() == dtype && tensor.dim() == 1 && tensor.size(0) == needed, op,
                 ": ", name, " has ", tensor.numel(), " elements of dtype ",
                 toString(tensor.scalar_type()), " in ", tensor.dim(), " dimensions, needs ",
                 needed, " of dtype ", toString(dtype), " in one, for ", numel, " elements of ",
                 bits, " bits in groups of ", group_size);
    MEMOPT_CHECK(tensor.is_cpu(), op, ": ", name, " must be on the CPU");
  };
  const int64_t groups = quantized_groups(numel, group_size);
  check(packed, "packed", ScalarType::Byte, quantized_bytes(numel, static_cast<int>(bits)));
  check(scale, "scale", ScalarType::BFloat16, groups);
  check(minimum, "minimum", ScalarType::BFloat16, groups);
  packed_ = torch::stable::contiguous(packed);
  scale_ = torch::stable::contiguous(scale);
  minimum_ = torch::stable::contiguous(minimum);
}

template <typename T>
void QuantizedView::decode_range(int64_t begin, int64_t end, T* out) const {
  const uint8_t* packed = packed_.const_data_ptr<uint8_t>();
  const BFloat16* scale = scale_.const_data_ptr<BFloat16>();
  const BFloat16* minimum = minimum_.const_data_ptr<BFloat16>();
  const int bits = static_cast<int>(bits_);
  const float limit = sizeof(T) < sizeof(float) ? static_cast<float>(std::numeric_limits<T>::max())
                                                : std::numeric_limits<float>::max();
  alignas(64) float buffer[kRun];
  alignas(64) uint8_t codes[kRun + 8];
  for (int64_t at = begin; at < end; at += kRun, out += kRun) {
    const int64_t run_end = std::min(end, at + kRun);
    unpack_codes(packed + quantized_bytes(at, bits), run_end - at, bits, codes);
    float* values = buffer;
    if constexpr (std::is_same_v<T, float>) values = out;
    for (int64_t from = at; from < run_end;) {
      const int64_t group = from / group_size_;
      const int64_t to = std::min(run_end, (group + 1) * group_size_);
      decode_run(codes + (from - at), to - from, scale[group].x, minimum[group].x, limit,
                 values + (from - at));
      from = to;
    }
    if constexpr (!std::is_same_v<T, float>) store_floats(values, run_end - at, out);
  }
}

template void QuantizedView::decode_range(int64_t, int64_t, float*) const;
template void QuantizedView::decode_range(int64_t, int64_t, double*) const;
template void QuantizedView::decode_range(int64_t, int64_t, BFloat16*) const;
template void QuantizedView::decode_range(int64_t, int64_t, Half*) const;

namespace {

constexpr int64_t kGrain = 32 * 1024;  // elements per task

// Elements of a tensor of this shape, after a check that it and its memory can exist.
int64_t checked_numel(const std::vector<int64_t>& size, const std::vector<int64_t>& stride) {
  MEMOPT_CHECK(size.size() == stride.size(), "dequantize: size has ", size.size(),
               " dimensions and stride ", stride.size(), ", needs the same number");
  int64_t numel = 1, span = 1;
  bool overflow = false;
  for (size_t d = 0; d < size.size(); ++d) {
    MEMOPT_CHECK(size[d] >= 0 && stride[d] >= 0, "dequantize: dimension ", d, " has size ", size[d],
                 " and stride ", stride[d], ", needs neither negative");
    MEMOPT_CHECK(stride[d] > 0 || size[d] <= 1, "dequantize: dimension ", d, " has size ", size[d],
                 " and stride 0, needs memory of its own for each element");
    int64_t reach = 0;
    overflow |= __builtin_mul_overflow(numel, size[d], &numel);
    overflow |= __builtin_mul_overflow(std::max<int64_t>(size[d] - 1, 0), stride[d], &reach);
    overflow |= __builtin_add_overflow(span, reach, &span);
  }
  // The largest element has 8 bytes, and so must the byte count fit.
  MEMOPT_CHECK(!overflow && span <= INT64_MAX / 8 && numel <= INT64_MAX / 8,
               "dequantize: a tensor of this size and stride would exceed 2^63 bytes");
  return numel;
}

Tensor empty_strided(const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                     ScalarType dtype) {
  AtenTensorHandle handle;
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()),
                                                         size.data(), stride.data(), shim_dtype,
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor dequantize(const Tensor& packed, const Tensor& scale, const Tensor& minimum,
                  std::vector<int64_t> size, std::vector<int64_t> stride, ScalarType dtype,
                  int64_t bits, int64_t group_size) {
  const int64_t numel = checked_numel(size, stride);
  const QuantizedView view("dequantize", packed, scale, minimum, numel, bits, group_size);
  dispatch_floating(dtype, "dequantize", "the result", [](auto) {});
  Tensor output = empty_strided(size, stride, dtype);
  const bool dense = output.is_contiguous();
  dispatch_floating(dtype, "dequantize", "the result", [&](auto zero) {
    using T = decltype(zero);
    T* out = output.mutable_data_ptr<T>();
    const int64_t runs = (numel + kRun - 1) / kRun;
    torch::stable::parallel_for(0, runs, kGrain / kRun, [&](int64_t first, int64_t last) {
      int64_t at = first * kRun;
      const int64_t end = std::min(last * kRun, numel);
      if (dense) return view.decode_range(at, end, out + at);
      StridedCursor cursor(output, at);
      std::array<T, kRun> buffer;
      for (; at < end; at += kRun) {
        const int64_t count = std::min(kRun, end - at);
        view.decode_range(at, at + count, buffer.data());
        for (int64_t done = 0; done < count;) {
          const int64_t run = std::min(count - done, cursor.run()), step = cursor.step();
          T* target = out + cursor.offset();
          for (int64_t i = 0; i < run; ++i) target[i * step] = buffer[done + i];
          cursor.skip(run);
          done += run;
        }
      }
    });
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) { m.impl("dequantize", TORCH_BOX(&dequantize)); }

}  // namespace memopt::cpu
