// A linear layer z = x W^T + b for a few rows at a time, its logits transposed: z (V, rows).
//
//   z^T = W x^T      dW += dz^T x      dX = dz W
//
// W and dW are read where they lie, some rows of W (a block) at a time, so that the logits of a
// block become a gradient and are multiplied out while they are in the cache.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "../common/dispatch.h"
#include "convert.h"
#include "matmul.h"
#include "softmax_rows.h"

namespace memopt::cpu {

// A matrix with any strides, and some of its rows as accumulators.
template <typename T>
struct Matrix {
  const T* data;
  int64_t rows, columns, row_stride, column_stride;

  explicit Matrix(const torch::stable::Tensor& t)
      : data(t.template const_data_ptr<T>()),
        rows(t.size(0)),
        columns(t.size(1)),
        row_stride(t.stride(0)),
        column_stride(t.stride(1)) {}

  const T* row(int64_t r) const { return data + r * row_stride; }

  // Row r as accumulators: where it lies, or a copy in `scratch`.
  const acc_t<T>* row_at(int64_t r, std::vector<acc_t<T>>& scratch) const {
    if constexpr (std::is_same_v<T, acc_t<T>>) {
      if (column_stride == 1) return row(r);
    }
    scratch.resize(columns);
    copy_row(r, scratch.data());
    return scratch.data();
  }

  void copy_row(int64_t r, acc_t<T>* out) const {
    if constexpr (std::is_same_v<T, double>) {
      for (int64_t k = 0; k < columns; ++k) out[k] = row(r)[k * column_stride];
    } else {
      load_floats(row(r), column_stride, columns, out);
    }
  }
};

inline ScalarType accumulator_of(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Uninitialised memory from torch's allocator, which counts it.
template <typename A>
class Buffer {
 public:
  explicit Buffer(int64_t elements)
      : tensor_(torch::stable::empty(
            {elements}, std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float)) {}
  A* data() const { return tensor_.template mutable_data_ptr<A>(); }

 private:
  torch::stable::Tensor tensor_;
};

// Rows of W in one block: what a thread turns from logits into their gradient at once.
inline int64_t block_rows(int64_t classes) {
  constexpr int64_t kMost = 96;
  const int64_t blocks = std::max<int64_t>(1, (classes + kMost - 1) / kMost);
  return std::max<int64_t>(8, (classes + 8 * blocks - 1) / (8 * blocks) * 8);
}

template <typename T>
class LinearChunk {
 public:
  using A = acc_t<T>;
  using Tensor = torch::stable::Tensor;

  // For at most `capacity` rows of x at a time.
  LinearChunk(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              int64_t capacity)
      : x_(x), weight_(weight), block_(block_rows(weight.size(0))), capacity_(capacity) {
    if (few()) pack_few();
    if (!bias) return;
    bias_.resize(classes());
    const Tensor wide =
        torch::stable::contiguous(torch::stable::to(*bias, accumulator_of(bias->scalar_type())));
    std::copy_n(wide.template const_data_ptr<A>(), classes(), bias_.begin());
  }

  int64_t classes() const { return weight_.rows; }
  int64_t features() const { return weight_.columns; }
  int64_t count() const { return static_cast<int64_t>(ids_.size()); }
  int64_t block() const { return block_; }
  int64_t blocks() const { return (classes() + block_ - 1) / block_; }
  // Elements from one class to the next in a block of logits.
  int64_t stride() const { return padded<A>(count()); }
  const std::vector<int64_t>& ids() const { return ids_; }

  // Whether the rows are one after another, and T its own accumulator.
  bool consecutive() const {
    return std::is_same_v<T, A> && !ids_.empty() && ids_.back() - ids_.front() == count() - 1;
  }

  // Takes the rows of x with these numbers, which increase.
  void take(const int64_t* ids, int64_t count, bool want_weight) {
    ids_.assign(ids, ids + count);
    const int64_t H = features();
    in_place_ = few() && consecutive() && x_.column_stride == 1;
    if (want_weight && !rows_) rows_.emplace(capacity_ * padded<A>(H));
    if (in_place_) {
      if (want_weight) put_last_columns();
      return;
    }
    if (!transposed_) transposed_.emplace(padded<A>(capacity_) * H);
    constexpr int64_t kGroup = kLanes<A>;  // rows that are transposed together
    torch::stable::parallel_for(0, stride() / kGroup, 1, [&](int64_t group, int64_t end) {
      std::vector<A> scratch[kGroup];
      const std::vector<A> zeros(H, A(0));
      for (; group < end; ++group) {
        const A* rows[kGroup];
        for (int64_t j = 0; j < kGroup; ++j) {
          const int64_t row = group * kGroup + j;
          rows[j] = row < count ? x_.row_at(ids[row], scratch[j]) : zeros.data();
          if (want_weight && row < count) put(rows[j], row, count, rows_->data());
        }
        put_transposed(rows, group * kGroup, stride(), transposed_->data());
      }
    });
  }

  // z (v1 - v0, stride): the logits of some classes.
  void logits(int64_t v0, int64_t v1, A* z) const {
    const int64_t H = features(), n = v1 - v0, ld = stride();
    if (in_place_) return few_logits(z);
    std::vector<A> scratch;
    Left<A> left{nullptr, H, 1};
    if constexpr (std::is_same_v<T, A>) {
      if (weight_.column_stride == 1) left = {weight_.row(v0), weight_.row_stride, 1};
    }
    if (left.at == nullptr) {
      scratch.resize(n * H);
      for (int64_t v = 0; v < n; ++v) weight_.copy_row(v0 + v, scratch.data() + v * H);
      left.at = scratch.data();
    }
    multiply<A>(n, ld, H, left, {transposed_->data()}, z, ld, /*add=*/false, ahead_of(v1));
    if (bias_.empty()) return;
    for (int64_t v = 0; v < n; ++v) {
      for (int64_t j = 0; j < ld; ++j) z[v * ld + j] += bias_[v0 + v];
    }
  }

  // dw (v1 - v0, H) = or += dz^T x
  void weight_gradient(int64_t v0, int64_t v1, const A* dz, A* dw, bool add) const {
    constexpr int64_t kRows = 2 * kTileRows;  // of dW, which stay in the nearest cache
    const int64_t H = features(), ld = stride();
    for (int64_t v = 0; v < v1 - v0; v += kRows) {
      const int64_t n = std::min(kRows, v1 - v0 - v);
      const Ahead ahead =
          add ? Ahead(dw + (v + n) * H, v0 + v + n < classes() ? n * H * kSize : 0) : Ahead();
      const Left<A> left{dz + v * ld, ld, 1};
      int64_t done = 0;
      if constexpr (std::is_same_v<T, A>) {
        if (in_place_) {
          done = H / kLanes<A> * kLanes<A>;
          const Right<A> right{x_.row(ids_[0]), x_.row_stride};
          multiply<A>(n, done, count(), left, right, dw + v * H, H, add, ahead);
        }
      }
      if (done == H) continue;
      multiply<A>(n, H - done, count(), left, {rows_->data()}, dw + v * H + done, H, add, ahead);
    }
  }

  // db (v1 - v0) += the sums of dz's rows
  void bias_gradient(int64_t v0, int64_t v1, const A* dz, double* db) const {
    for (int64_t v = v0; v < v1; ++v, dz += stride()) {
      db[v - v0] += sum_row<A>(count(), [&](int64_t j) { return dz[j]; });
    }
  }

  // Packs rows of W as the right operand of `input_gradient`.
  void pack_weight(int64_t v0, int64_t v1, A* panels) const {
    std::vector<A> row(features());
    for (int64_t v = v0; v < v1; ++v) put(weight_.row_at(v, row), v - v0, v1 - v0, panels);
  }
  int64_t packed_size() const { return block_ * padded<A>(features()); }

  // dx (count, H) = or += dz W for blocks of classes, in their order. dz: (classes, stride).
  void input_gradient(int64_t v0, int64_t v1, const A* dz, const A* panels, A* dx, bool add) const {
    const int64_t H = features(), ld = stride(), n = count();
    const int64_t across = (H + kPanel<A> - 1) / kPanel<A>;
    constexpr int64_t kRows = 4 * kTileRows;
    const int64_t down = (n + kRows - 1) / kRows;
    const auto part = [&](int64_t row, int64_t rows, int64_t panel, int64_t columns,
                          Ahead ahead = {}) {
      for (int64_t v = v0; v < v1; v += block_) {
        const int64_t depth = std::min(block_, v1 - v);
        multiply<A>(rows, columns, depth, Left<A>{dz + (v - v0) * ld + row, 1, ld},
                    {panels + (v - v0) / block_ * packed_size() + panel * depth},
                    dx + row * H + panel, H, add || v > v0, v + block_ >= v1 ? ahead : Ahead());
      }
    };
    if (torch::stable::get_num_threads() == 1) return part(0, n, 0, H, ahead_of(v1));
    torch::stable::parallel_for(0, across * down, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = t % down * kRows, panel = t / down * kPanel<A>;
        part(row, std::min(kRows, n - row), panel, std::min(kPanel<A>, H - panel));
      }
    });
  }

 private:
  static constexpr int64_t kSize = sizeof(A);

  // Row `k` of a right operand with `depth` rows of `features` columns, in panels.
  void put(const A* row, int64_t k, int64_t depth, A* panels) const {
    const int64_t H = features();
    for (int64_t h = 0; h < H; h += kPanel<A>) {
      const int64_t width = std::min(kPanel<A>, H - h), stride = padded<A>(width);
      A* to = panels + h * depth + k * stride;
      int64_t j = 0;
      for (; j + kLanes<A> <= width; j += kLanes<A>) store(to + j, load<Register<A>>(row + h + j));
      for (; j < stride; ++j) to[j] = j < width ? row[h + j] : A(0);
    }
  }

  // Few enough classes that packing x would cost as much as its products.
  bool few() const { return classes() <= 32; }

  // W^T, as the right operand of z = x W^T.
  void pack_few() {
    constexpr int64_t kGroup = kLanes<A>;
    const int64_t width = padded<A>(classes());
    few_weight_.resize(width * features());
    const std::vector<A> zeros(features(), A(0));
    std::vector<A> scratch[kGroup];
    for (int64_t v = 0; v < width; v += kGroup) {
      const A* rows[kGroup];
      for (int64_t k = 0; k < kGroup; ++k) {
        rows[k] = v + k < classes() ? weight_.row_at(v + k, scratch[k]) : zeros.data();
      }
      put_transposed(rows, v, width, few_weight_.data());
    }
  }

  // z of all classes, from rows of x in place.
  void few_logits(A* z) const {
    if constexpr (std::is_same_v<T, A>) {
      const int64_t width = padded<A>(classes()), ld = stride();
      std::vector<A> by_row(count() * width);
      multiply<A>(count(), width, features(), Left<A>{x_.row(ids_[0]), x_.row_stride, 1},
                  {few_weight_.data()}, by_row.data(), width, /*add=*/false);
      for (int64_t v = 0; v < classes(); ++v) {
        const A bias = bias_.empty() ? A(0) : bias_[v];
        for (int64_t j = 0; j < ld; ++j) {
          z[v * ld + j] = j < count() ? by_row[j * width + v] + bias : A(0);
        }
      }
    }
  }

  // The columns of x that do not fill a register, as a right operand.
  void put_last_columns() {
    if constexpr (std::is_same_v<T, A>) {
      const int64_t H = features(), first = H / kLanes<A> * kLanes<A>;
      if (first == H) return;
      for (int64_t k = 0; k < count(); ++k) {
        A* to = rows_->data() + k * kLanes<A>;
        std::fill(std::copy(x_.row(ids_[k]) + first, x_.row(ids_[k]) + H, to), to + kLanes<A>,
                  A(0));
      }
    }
  }

  // Columns [first, first + lanes), of `columns` in all, of a right operand given by its columns.
  void put_transposed(const A* const* rows, int64_t first, int64_t columns, A* panels) const {
    constexpr int64_t kGroup = kLanes<A>;
    const int64_t H = features(), panel = first / kPanel<A> * kPanel<A>;
    const int64_t width = std::min(kPanel<A>, columns - panel);
    A* to = panels + panel * H + (first - panel);
    int64_t h = 0;
    for (; h + kGroup <= H; h += kGroup) {
      Register<A> square[kGroup];
      for (int64_t j = 0; j < kGroup; ++j) square[j] = load<Register<A>>(rows[j] + h);
      transpose<A, kLanes<A>>(square);
      for (int64_t k = 0; k < kGroup; ++k) store(to + (h + k) * width, square[k]);
    }
    for (; h < H; ++h) {
      for (int64_t j = 0; j < kGroup; ++j) to[h * width + j] = rows[j][h];
    }
  }

  // The block of W after class v, where its rows are read in place.
  Ahead ahead_of(int64_t v) const {
    const int64_t last = std::min(v + block_, classes());
    if (weight_.column_stride != 1 || v >= last) return {};
    return {weight_.row(v), (last - v) * weight_.row_stride * static_cast<int64_t>(sizeof(T))};
  }

  Matrix<T> x_, weight_;
  int64_t block_, capacity_;
  bool in_place_ = false;                       // rows of x are read where they lie
  std::optional<Buffer<A>> transposed_, rows_;  // x^T and x, each as a right operand
  std::vector<A> bias_, few_weight_;
  std::vector<int64_t> ids_;
};

}  // namespace memopt::cpu
