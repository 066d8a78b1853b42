// Walking a tensor of any strides in row-major order.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace memopt::cpu {

// Offsets of a strided tensor's elements, in row-major order of its shape.
//
//   StridedCursor cursor(t, begin);   // at logical element `begin`
//   for (...) { use(data[cursor.offset()]); cursor.advance(); }
class StridedCursor {
 public:
  StridedCursor(const torch::stable::Tensor& tensor, int64_t begin)
      : sizes_(tensor.sizes().begin(), tensor.sizes().end()),
        strides_(tensor.strides().begin(), tensor.strides().end()),
        index_(sizes_.size(), 0) {
    for (int64_t d = static_cast<int64_t>(sizes_.size()) - 1; d >= 0 && begin > 0; --d) {
      index_[d] = begin % sizes_[d];
      begin /= sizes_[d];
      offset_ += index_[d] * strides_[d];
    }
  }

  int64_t offset() const { return offset_; }

  void advance() { carry(static_cast<int64_t>(sizes_.size()) - 1, 1); }

  // Elements from here to the end of the innermost dimension, and the step from one to the next.
  int64_t run() const { return sizes_.empty() ? 1 : sizes_.back() - index_.back(); }
  int64_t step() const { return strides_.empty() ? 1 : strides_.back(); }

  // Past `count` elements, at most run().
  void skip(int64_t count) { carry(static_cast<int64_t>(sizes_.size()) - 1, count); }

 private:
  void carry(int64_t d, int64_t count) {
    for (; d >= 0; --d, count = 1) {
      offset_ += count * strides_[d];
      if ((index_[d] += count) < sizes_[d]) return;
      offset_ -= sizes_[d] * strides_[d];
      index_[d] = 0;
    }
  }

  std::vector<int64_t> sizes_, strides_, index_;
  int64_t offset_ = 0;
};

}  // namespace memopt::cpu
