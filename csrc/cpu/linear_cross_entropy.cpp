// Cross-entropy of z = x W^T + b without the (N, V) matrix z (linear_loss.h says how).
//
//   a = scale cap tanh(z / cap)        p = softmax(a)        q = the target's weights of the
//   classes loss  = token weight (sum_c q[c] (-log p[c]) + z_loss logsumexp(a)^2) da[c] = p[c]
//   sum(q) - q[c]        and the like for the other terms
//
// With class weights w and label smoothing s, a target class t has the weights
// q[c] = (1 - s) w[t] [c = t] + s / V w[c], and target probabilities Q have
// q[c] = ((1 - s) Q[c] + s / V) w[c].
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "cross_entropy.h"
#include "cross_entropy_rows.h"
#include "linear_loss.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;
using Arguments = CrossEntropyArguments;

// (count,) of the dtype, zeros; or without elements where unwanted.
Tensor zeros_if(bool wanted, std::vector<int64_t> sizes, ScalarType dtype) {
  if (!wanted) sizes = {0};
  Tensor t = torch::stable::empty(sizes, dtype);
  torch::stable::zero_(t);
  return t;
}

template <typename A>
A* data_if(bool wanted, const Tensor& t) {
  return wanted ? t.mutable_data_ptr<A>() : nullptr;
}

using Forward =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The loss, and for each row logsumexp, entropy and the largest class; the gradient
// of the result in a row's loss; what backward needs of each row; and the gradients formed here. In
// float16 they are those of the SUM of the losses (1 / N of it would underflow), and those that sum
// over rows stay in float32, for such a sum may overflow. (overwrite_kept is for autograd: the
// caller drops all but the results, so backward may scale the gradients in place.)
Forward linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                             const std::optional<Tensor>& linear_bias,
                             const std::optional<Tensor>& weight,
                             const std::optional<Tensor>& token_weight,
                             const std::optional<Tensor>& logit_scale, std::string reduction,
                             int64_t ignore_index, double label_smoothing, double softcap,
                             double z_loss, bool with_entropy, bool with_argmax, bool want_input,
                             bool want_weight, bool want_bias, bool want_scale,
                             bool /*overwrite_kept*/, bool by_classes, int64_t chunk_rows) {
  const Arguments a{"linear_cross_entropy",
                    input,
                    linear_weight,
                    target,
                    linear_bias,
                    weight,
                    token_weight,
                    logit_scale,
                    ignore_index,
                    label_smoothing,
                    softcap,
                    z_loss,
                    chunk_rows};
  a.check();
  const bool by_row = reduction == "none", mean = reduction == "mean";
  MEMOPT_CHECK(by_row || mean || reduction == "sum", a.op, ": reduction is '", reduction,
               "', needs 'none', 'mean' or 'sum'");
  MEMOPT_CHECK(!by_row || !(want_input || want_weight || want_bias || want_scale), a.op,
               ": gradients are formed in the forward pass of a sum or a mean, and with reduction "
               "'none' they cannot be");
  MEMOPT_CHECK(!want_scale || logit_scale, a.op, ": there is no logit_scale to want a gradient of");
  const int64_t N = a.rows();
  const ScalarType wide = a.accumulator();
  Tensor losses = zeros_if(true, {N}, wide), lse = zeros_if(true, {N}, wide);
  Tensor entropy = zeros_if(with_entropy, {N}, wide);
  Tensor largest = zeros_if(with_argmax, {N}, ScalarType::Long);
  Tensor statistics = zeros_if(true, {N, kStatistics}, wide);
  Tensor grad_scale = zeros_if(want_scale, {N}, wide);
  Tensor loss = torch::stable::empty({}, wide), factor = torch::stable::empty({}, wide);
  std::tuple<Tensor, Tensor, Tensor> gradients{loss, loss, loss};
  dispatch_floating(a.dtype(), a.op, "input", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const CrossEntropyRows<T> rows(a);
    // Where every row is ignored the mean is NaN, and its gradient 0.
    const double scale = !mean ? 1 : rows.ids().empty() ? 0 : 1 / rows.divisor();
    const double unit = a.dtype() == ScalarType::Half ? 1 : scale;
    *factor.mutable_data_ptr<A>() = static_cast<A>(scale);
    if (with_argmax) std::fill_n(largest.mutable_data_ptr<int64_t>(), N, int64_t{-1});
    CrossEntropy<T> row_loss(
        a, rows,
        {losses.mutable_data_ptr<A>(), lse.mutable_data_ptr<A>(), data_if<A>(with_entropy, entropy),
         data_if<int64_t>(with_argmax, largest), statistics.mutable_data_ptr<A>(),
         data_if<A>(want_scale, grad_scale)},
        {nullptr, nullptr, nullptr, unit});
    gradients = run_in_parts<T>(input, linear_weight, linear_bias, rows.ids(),
                                {{want_input, want_weight, want_bias},
                                 by_classes,
                                 /*rounded=*/a.dtype() != ScalarType::Half,
                                 want_scale,
                                 chunk_rows},
                                row_loss, [](auto& passes, auto& loss_of_part) {
                                  passes.sums_and_gradients(loss_of_part);
                                });
    const A* each = losses.const_data_ptr<A>();
    double sum = 0;
    for (int64_t r = 0; r < N; ++r) sum += each[r];
    *loss.mutable_data_ptr<A>() = static_cast<A>(mean ? sum / rows.divisor() : sum);
  });
  const auto& [dx, dw, db] = gradients;
  return {
      by_row ? losses : loss, lse, entropy, largest, factor, statistics, dx, dw, db, grad_scale};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const std::optional<Tensor>& linear_bias, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& token_weight, const std::optional<Tensor>& logit_scale,
    const Tensor& statistics, const std::optional<Tensor>& grad_loss,
    const std::optional<Tensor>& grad_lse, const std::optional<Tensor>& grad_entropy,
    int64_t ignore_index, double label_smoothing, double softcap, double z_loss, bool want_input,
    bool want_weight, bool want_bias, bool want_scale, bool by_classes, int64_t chunk_rows) {
  const Arguments a{"linear_cross_entropy_backward",
                    input,
                    linear_weight,
                    target,
                    linear_bias,
                    weight,
                    token_weight,
                    logit_scale,
                    ignore_index,
                    label_smoothing,
                    softcap,
                    z_loss,
                    chunk_rows};
  a.check();
  a.check_tensor("statistics", statistics, {a.rows(), kStatistics});
  a.check_dtype("statistics", statistics, a.accumulator());
  MEMOPT_CHECK(!want_scale || logit_scale, a.op, ": there is no logit_scale to want a gradient of");
  Tensor grad_scale = zeros_if(want_scale, {a.rows()}, a.accumulator());
  std::tuple<Tensor, Tensor, Tensor> gradients{grad_scale, grad_scale, grad_scale};
  dispatch_floating(a.dtype(), a.op, "input", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    std::vector<Tensor> held{torch::stable::contiguous(statistics)};
    const auto by_row = [&](const char* name, const std::optional<Tensor>& grad) -> const A* {
      if (!grad) return nullptr;
      a.check_tensor(name, *grad, {a.rows()});
      a.check_dtype(name, *grad, a.accumulator());
      held.push_back(torch::stable::contiguous(*grad));
      return held.back().template const_data_ptr<A>();
    };
    const std::vector<A> zeros(grad_loss ? 0 : a.rows(), A(0));
    const A* of_loss = by_row("grad_loss", grad_loss);
    const CrossEntropyRows<T> rows(a);
    CrossEntropy<T> row_loss(
        a, rows,
        {nullptr, nullptr, nullptr, nullptr, held[0].template mutable_data_ptr<A>(),
         data_if<A>(want_scale, grad_scale)},
        {of_loss ? of_loss : zeros.data(), by_row("grad_lse", grad_lse),
         by_row("grad_entropy", grad_entropy)});
    gradients = run_in_parts<T>(
        input, linear_weight, linear_bias, rows.ids(),
        {{want_input, want_weight, want_bias}, by_classes, true, want_scale, chunk_rows}, row_loss,
        [](auto& passes, auto& loss_of_part) { passes.gradients(loss_of_part); });
  });
  const auto& [dx, dw, db] = gradients;
  return {dx, dw, db, grad_scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
}

}  // namespace memopt::cpu
