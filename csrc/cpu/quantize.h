// Quantised storage on the CPU, for every op that keeps a tensor so: docs/storage_format.md.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace memopt::cpu {

// Raises unless the format exists; `op` begins the message.
void check_format(const char* op, int64_t bits, int64_t group_size);

// Packs `input`, any strides, in row-major order. Without a seed codes round to nearest.
// Returns (packed, scale, minimum).
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> quantize_tensor(
    const char* op, const torch::stable::Tensor& input, int64_t bits, int64_t group_size,
    const std::optional<torch::stable::Tensor>& seed);

// A packed tensor of `numel` elements, checked: what decode_range reads.
class QuantizedView {
 public:
  QuantizedView(const char* op, const torch::stable::Tensor& packed,
                const torch::stable::Tensor& scale, const torch::stable::Tensor& minimum,
                int64_t numel, int64_t bits, int64_t group_size);

  // Elements [begin, end) into `out`, for T float32, float64, bfloat16 or float16. `begin` is a
  // multiple of 8.
  template <typename T>
  void decode_range(int64_t begin, int64_t end, T* out) const;

  int64_t numel() const { return numel_; }

 private:
  torch::stable::Tensor packed_, scale_, minimum_;
  int64_t numel_, bits_, group_size_;
};

}  // namespace memopt::cpu
