// Gradients of a linear layer z = x W^T + b, given dz a chunk of rows at a time:
//   dX = dz W      dW = dz^T x      db = sum of dz's rows
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "aten.h"

namespace memopt::cpu {

struct Wanted {
  bool input, weight, bias;
};

// Adds the rows of a contiguous (count, columns) matrix to sums, each column in the order of rows.
template <typename T>
void add_rows(const T* rows, int64_t count, int64_t columns, double* sums) {
  constexpr int64_t kWidth = 512, kBlock = 64;  // a block's partial sums stay in the L1 cache
  torch::stable::parallel_for(0, columns, kWidth, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += kWidth) {
      const int64_t width = std::min(kWidth, end - c);
      for (int64_t first = 0; first < count; first += kBlock) {
        acc_t<T> partial[kWidth] = {};
        for (int64_t r = first; r < std::min(count, first + kBlock); ++r) {
          const T* row = rows + r * columns + c;
          for (int64_t k = 0; k < width; ++k) partial[k] += static_cast<acc_t<T>>(row[k]);
        }
        for (int64_t k = 0; k < width; ++k) sums[c + k] += partial[k];
      }
    }
  });
}

// dW and db add up in float32 for bfloat16 and float16 and are rounded once, at the end.
class LinearGradients {
 public:
  using Tensor = torch::stable::Tensor;

  LinearGradients(const Tensor& x, const Tensor& weight, Wanted wanted)
      : x_(x),
        weight_(as_operand(weight)),
        wanted_(wanted),
        dtype_(x.scalar_type()),
        accumulator_(dtype_ == ScalarType::Double ? ScalarType::Double : ScalarType::Float) {
    const int64_t V = weight.size(0), H = weight.size(1);
    dx_ = torch::stable::empty({wanted.input ? x.size(0) : 0, wanted.input ? H : 0}, dtype_);
    dw_ = torch::stable::empty({wanted.weight ? V : 0, wanted.weight ? H : 0}, accumulator_);
    if (wanted.weight && x.size(0) == 0) torch::stable::zero_(dw_);
    if (wanted.bias) db_.assign(V, 0.0);
  }

  // dz: (n, V), contiguous, of x's dtype: the gradient for rows [begin, begin + n) of z.
  void add(int64_t begin, const Tensor& dz) {
    const int64_t n = dz.size(0);
    if (wanted_.input) mm_out(rows_of(dx_, begin, n), dz, weight_);
    if (wanted_.bias) {
      dispatch_floating(dtype_, "linear", "input", [&](auto zero) {
        using T = decltype(zero);
        add_rows(dz.const_data_ptr<T>(), n, dz.size(1), db_.data());
      });
    }
    if (wanted_.weight) {
      const Tensor dz_t = torch::stable::transpose(accumulating(dz), 0, 1);
      const Tensor x = accumulating(rows_of(x_, begin, n));
      if (begin == 0) {
        mm_out(dw_, dz_t, x);
      } else {
        addmm_out(dw_, dw_, dz_t, x);
      }
    }
  }

  // (dX, dW, db), with no elements where one was not wanted. dW and db in x's dtype, or unrounded.
  std::tuple<Tensor, Tensor, Tensor> finish(bool rounded = true) {
    Tensor db = torch::stable::empty({static_cast<int64_t>(db_.size())}, accumulator_);
    dispatch_floating(accumulator_, "linear", "bias", [&](auto zero) {
      using A = decltype(zero);
      std::copy(db_.begin(), db_.end(), db.mutable_data_ptr<A>());
    });
    if (!rounded || accumulator_ == dtype_) return {dx_, dw_, db};
    return {dx_, torch::stable::to(dw_, dtype_), torch::stable::to(db, dtype_)};
  }

 private:
  Tensor accumulating(const Tensor& t) const {
    return dtype_ == accumulator_ ? t : torch::stable::to(t, accumulator_);
  }

  Tensor x_, weight_, dx_, dw_;
  Wanted wanted_;
  ScalarType dtype_, accumulator_;
  std::vector<double> db_;
};

// What every op over a linear layer checks: x (N, H), weight (V, H), bias (V), one dtype, on the
// CPU.
inline void check_linear(const char* op, const torch::stable::Tensor& x,
                         const torch::stable::Tensor& weight,
                         const std::optional<torch::stable::Tensor>& bias, int64_t chunk_rows) {
  dispatch_floating(x.scalar_type(), op, "input", [](auto) {});
  MEMOPT_CHECK(x.dim() == 2, op, ": input has ", x.dim(), " dimensions, needs 2: (N, H)");
  MEMOPT_CHECK(weight.dim() == 2 && weight.size(1) == x.size(1), op, ": the linear weight has ",
               weight.dim(), " dimensions, the last of size ",
               weight.dim() > 0 ? weight.size(weight.dim() - 1) : 0, ", needs 2: (V, ", x.size(1),
               ")");
  MEMOPT_CHECK(weight.scalar_type() == x.scalar_type(), op, ": the linear weight has dtype ",
               toString(weight.scalar_type()), ", needs ", toString(x.scalar_type()),
               ", the dtype of input");
  MEMOPT_CHECK(weight.is_cpu(), op, ": the linear weight must be on the CPU, as input is");
  MEMOPT_CHECK(chunk_rows > 0, op, ": chunk_rows is ", chunk_rows, ", needs to be at least 1");
  if (!bias) return;
  MEMOPT_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": the bias has ",
               bias->numel(), " elements in ", bias->dim(), " dimensions, needs (", weight.size(0),
               ",)");
  MEMOPT_CHECK(bias->scalar_type() == x.scalar_type(), op, ": the bias has dtype ",
               toString(bias->scalar_type()), ", needs ", toString(x.scalar_type()),
               ", the dtype of input");
  MEMOPT_CHECK(bias->is_cpu(), op, ": the bias must be on the CPU, as input is");
}

// out = x W^T + b
inline void linear_out(const torch::stable::Tensor& out, const torch::stable::Tensor& x,
                       const torch::stable::Tensor& weight,
                       const std::optional<torch::stable::Tensor>& bias) {
  const torch::stable::Tensor weight_t = torch::stable::transpose(weight, 0, 1);
  if (bias) {
    addmm_out(out, *bias, x, weight_t);
  } else {
    mm_out(out, x, weight_t);
  }
}

}  // namespace memopt::cpu
