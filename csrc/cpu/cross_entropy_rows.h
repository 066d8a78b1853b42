// The arguments of linear_cross_entropy: their checks, and what they say of each row.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "linear_chunk.h"
#include "linear_gradients.h"
#include "named_classes.h"
#include "softmax_columns.h"

namespace memopt::cpu {

struct CrossEntropyArguments {
  using Tensor = torch::stable::Tensor;

  const char* op;
  const Tensor &input, &linear_weight, &target;
  const std::optional<Tensor>&linear_bias, &weight, &token_weight, &logit_scale;
  int64_t ignore_index;
  double label_smoothing, softcap, z_loss;
  int64_t chunk_rows;

  int64_t rows() const { return input.size(0); }
  int64_t classes() const { return linear_weight.size(0); }
  ScalarType dtype() const { return input.scalar_type(); }
  ScalarType accumulator() const { return accumulator_of(dtype()); }
  bool soft() const { return target.scalar_type() != ScalarType::Long; }

  void check() const {
    check_linear(op, input, linear_weight, linear_bias, chunk_rows);
    const int64_t N = rows(), V = classes();
    MEMOPT_CHECK(V > 0, op, ": the linear weight has no rows, needs one for each class");
    check_tensor("target", target, soft() ? std::vector<int64_t>{N, V} : std::vector<int64_t>{N});
    if (soft()) check_dtype("target", target);
    MEMOPT_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op, ": label_smoothing is ",
                 label_smoothing, ", needs to be between 0 and 1");
    MEMOPT_CHECK(softcap >= 0, op, ": softcap is ", softcap,
                 ", needs to be positive, or 0 for none");
    if (weight) {
      check_tensor("weight", *weight, {V});
      dispatch_floating(weight->scalar_type(), op, "weight", [](auto) {});
    }
    if (token_weight) {
      check_tensor("token_weight", *token_weight, {N});
      check_dtype("token_weight", *token_weight, accumulator());
    }
    if (logit_scale) {
      check_tensor("logit_scale", *logit_scale, {N});
      check_dtype("logit_scale", *logit_scale, accumulator());
    }
  }

  void check_tensor(const char* name, const Tensor& t, const std::vector<int64_t>& sizes) const {
    bool fits = t.dim() == static_cast<int64_t>(sizes.size());
    for (size_t d = 0; fits && d < sizes.size(); ++d) fits = t.size(d) == sizes[d];
    MEMOPT_CHECK(fits, op, ": ", name, " has ", t.numel(), " elements in ", t.dim(),
                 " dimensions, needs (", sizes[0], sizes.size() > 1 ? ", " : "",
                 sizes.size() > 1 ? std::to_string(sizes[1]) : "", ")");
    MEMOPT_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU, as input is");
  }

  void check_dtype(const char* name, const Tensor& t, std::optional<ScalarType> needed = {}) const {
    const bool fits = needed ? t.scalar_type() == *needed
                             : t.scalar_type() == dtype() || t.scalar_type() == accumulator();
    MEMOPT_CHECK(fits, op, ": ", name, " has dtype ", toString(t.scalar_type()), ", needs ",
                 toString(needed.value_or(dtype())));
  }
};

// What the arguments say of each row's loss.
template <typename T>
class CrossEntropyRows {
 public:
  using A = acc_t<T>;
  using Tensor = torch::stable::Tensor;

  explicit CrossEntropyRows(const CrossEntropyArguments& a)
      : own_(1 - a.label_smoothing),
        each_(a.label_smoothing / static_cast<double>(a.classes())),
        classes_(a.classes()),
        weights_(a.weight ? values(*a.weight) : std::vector<A>(a.classes(), A(1))),
        token_weight_(a.token_weight ? values(*a.token_weight) : std::vector<A>()),
        scale_(a.logit_scale ? values(*a.logit_scale) : std::vector<A>()) {
    if (a.soft()) {
      soft_ = a.target;
      for (int64_t r = 0; r < a.rows(); ++r) ids_.push_back(r);
      for (const int64_t r : ids_) divisor_ += token_weight(r);
    } else {
      target_ = torch::stable::contiguous(a.target);
      targets_ = target_->template const_data_ptr<int64_t>();
      for (int64_t r = 0; r < a.rows(); ++r) {
        if (targets_[r] == a.ignore_index) continue;
        MEMOPT_CHECK(targets_[r] >= 0 && targets_[r] < classes_, a.op, ": target ", targets_[r],
                     " is out of bounds, needs to be in [0, ", classes_, ") or ignore_index ",
                     a.ignore_index);
        ids_.push_back(r);
        divisor_ += token_weight(r) * weights_[targets_[r]];
      }
    }
    constexpr int64_t kUnit = 8;  // block_rows() is a multiple of it
    for (int64_t v = 0; v < classes_; v += kUnit) {
      double sum = 0;
      for (int64_t c = v; c < std::min(classes_, v + kUnit); ++c) sum += weights_[c];
      unit_sums_.push_back(sum);
      weight_sum_ += sum;
    }
  }

  bool soft() const { return soft_.has_value(); }
  // The rows that count, and the sum of their weights: what 'mean' divides by.
  const std::vector<int64_t>& ids() const { return ids_; }
  double divisor() const { return divisor_; }

  int64_t target(int64_t r) const { return targets_[r]; }
  // The part of a target class's weight that label smoothing leaves it, and what every class gets.
  double own(int64_t r) const { return own_ * weights_[targets_[r]]; }
  double each() const { return each_; }
  double weight_sum() const { return weight_sum_; }
  const A* weights() const { return weights_.data(); }
  double token_weight(int64_t r) const { return token_weight_.empty() ? 1 : token_weight_[r]; }
  bool scaled() const { return !scale_.empty(); }
  A scale(int64_t r) const { return scale_.empty() ? A(1) : scale_[r]; }

  // Sums of class weights of every `rows` classes.
  std::vector<double> block_sums(int64_t rows) const {
    std::vector<double> sums((classes_ + rows - 1) / rows, 0.0);
    for (size_t k = 0; k < unit_sums_.size(); ++k) sums[k * 8 / rows] += unit_sums_[k];
    return sums;
  }

  // The weights q of soft targets for a block of logits, transposed as these are.
  void load_soft(const Block<A>& block, const std::vector<int64_t>& ids,
                 std::vector<A>& out) const {
    out.assign(block.count * block.stride, A(0));
    std::vector<A> row(block.count);
    for (size_t j = 0; j < ids.size(); ++j) {
      if (soft_->scalar_type() == accumulator_of(soft_->scalar_type())) {
        copy_part(Matrix<A>(*soft_), ids[j], block, row.data());
      } else {
        copy_part(Matrix<T>(*soft_), ids[j], block, row.data());
      }
      for (int64_t c = 0; c < block.count; ++c) {
        const A smoothed = static_cast<A>(own_) * row[c] + static_cast<A>(each_);
        out[c * block.stride + j] = smoothed * weights_[block.first + c];
      }
    }
  }

 private:
  static std::vector<A> values(const Tensor& t) {
    const Tensor wide = torch::stable::contiguous(
        torch::stable::to(t, std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float));
    const A* data = wide.template const_data_ptr<A>();
    return {data, data + t.numel()};
  }

  template <typename S>
  static void copy_part(Matrix<S> soft, int64_t r, const Block<A>& block, A* out) {
    soft.data += block.first * soft.column_stride;
    soft.columns = block.count;
    soft.copy_row(r, out);
  }

  double own_, each_;
  int64_t classes_;
  std::vector<A> weights_, token_weight_, scale_;
  std::optional<Tensor> soft_, target_;
  const int64_t* targets_ = nullptr;
  std::vector<int64_t> ids_;
  std::vector<double> unit_sums_;
  double weight_sum_ = 0, divisor_ = 0;
};

}  // namespace memopt::cpu
