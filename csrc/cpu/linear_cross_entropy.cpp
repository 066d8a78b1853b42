// Cross-entropy of z = x W^T + b without the (N, V) matrix z: chunks of rows are made, turned into
// their losses and, in place, into their gradients, and multiplied out while they exist.
//
//   loss  = (1 - s) w[t] (-log p[t]) + s / V sum_c w[c] (-log p[c])             p = softmax(z)
//   dz[c] = ((1 - s) w[t] + s / V sum w) p[c] - (1 - s) w[t] [c = t] - s / V w[c]
//
// for target class t, class weights w and label smoothing s.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "linear_gradients.h"
#include "softmax_rows.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;

struct Arguments {
  const char* op;
  const Tensor &input, &weight, &target;
  const std::optional<Tensor>&bias, &class_weight;
  int64_t ignore_index;
  double smoothing;
  int64_t chunk_rows;

  int64_t rows() const { return input.size(0); }
  int64_t classes() const { return weight.size(0); }
  ScalarType dtype() const { return input.scalar_type(); }
  ScalarType accumulator() const {
    return dtype() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }
};

void check(const Arguments& a) {
  check_linear(a.op, a.input, a.weight, a.bias, a.chunk_rows);
  MEMOPT_CHECK(a.classes() > 0, a.op, ": the linear weight has no rows, needs one for each class");
  MEMOPT_CHECK(a.target.scalar_type() == ScalarType::Long && a.target.dim() == 1 &&
                   a.target.size(0) == a.rows() && a.target.is_cpu(),
               a.op, ": target has ", a.target.numel(), " elements of dtype ",
               toString(a.target.scalar_type()), " in ", a.target.dim(), " dimensions, needs ",
               a.rows(), " of dtype Long in one, on the CPU");
  MEMOPT_CHECK(a.smoothing >= 0 && a.smoothing <= 1, a.op, ": label_smoothing is ", a.smoothing,
               ", needs to be between 0 and 1");
  if (!a.class_weight) return;
  MEMOPT_CHECK(a.class_weight->dim() == 1 && a.class_weight->size(0) == a.classes(), a.op,
               ": weight has ", a.class_weight->numel(), " elements in ", a.class_weight->dim(),
               " dimensions, needs one for each of ", a.classes(), " classes");
  MEMOPT_CHECK(a.class_weight->is_cpu(), a.op, ": weight must be on the CPU, as input is");
  dispatch_floating(a.class_weight->scalar_type(), a.op, "weight", [](auto) {});
}

// The arguments of a row's loss, as accumulators A.
template <typename A>
class RowLoss {
 public:
  explicit RowLoss(const Arguments& a)
      : target_(torch::stable::contiguous(a.target)),
        targets_(target_.const_data_ptr<int64_t>()),
        classes_(a.classes()),
        ignore_index_(a.ignore_index),
        own_(static_cast<A>(1 - a.smoothing)),
        each_(static_cast<A>(a.smoothing / static_cast<double>(a.classes()))),
        weights_(a.classes(), A(1)) {
    for (int64_t r = 0; r < a.rows(); ++r) {
      MEMOPT_CHECK(ignored(r) || (targets_[r] >= 0 && targets_[r] < classes_), a.op, ": target ",
                   targets_[r], " is out of bounds, needs to be in [0, ", classes_,
                   ") or ignore_index ", ignore_index_);
    }
    if (a.class_weight) {
      const Tensor w =
          torch::stable::contiguous(torch::stable::to(*a.class_weight, a.accumulator()));
      std::copy_n(w.template const_data_ptr<A>(), classes_, weights_.begin());
    }
    for (const A w : weights_) weight_sum_ += w;
    for (int64_t r = 0; r < a.rows(); ++r) {
      if (ignored(r)) continue;
      ++counted_;
      divisor_ += weights_[targets_[r]];
    }
  }

  bool ignored(int64_t r) const { return targets_[r] == ignore_index_; }
  // Rows that count, and the sum of their targets' weights: what 'mean' divides by.
  int64_t counted() const { return counted_; }
  double divisor() const { return divisor_; }

  // The loss of row r with logits z, which become factor times its gradient where one is wanted.
  template <bool gradient>
  A operator()(int64_t r, A* z, A factor) const {
    const int64_t t = targets_[r];
    const A* w = weights_.data();
    const A max = row_max(z, classes_);
    const A z_target = z[t] - max;
    const double z_mean =
        each_ > 0 ? sum_row<A>(classes_, [=](int64_t c) { return w[c] * (z[c] - max); }) : 0;
    const double sum = gradient ? exp_in_place(z, classes_, max) : sum_exp(z, classes_, max);
    const A log_sum = static_cast<A>(std::log(sum));
    const A own = own_ * w[t];
    A loss = own * (log_sum - z_target);
    if (each_ > 0) loss += each_ * static_cast<A>(weight_sum_ * log_sum - z_mean);
    if constexpr (gradient) {
      const A scale = factor * static_cast<A>((own + each_ * weight_sum_) / sum);
      if (each_ > 0) {
        const A smooth = factor * each_;
        for (int64_t c = 0; c < classes_; ++c) z[c] = z[c] * scale - smooth * w[c];
      } else {
        for (int64_t c = 0; c < classes_; ++c) z[c] *= scale;
      }
      z[t] -= factor * own;
    }
    return loss;
  }

 private:
  Tensor target_;
  const int64_t* targets_;
  int64_t classes_, ignore_index_;
  A own_, each_;
  std::vector<A> weights_;
  double weight_sum_ = 0, divisor_ = 0;
  int64_t counted_ = 0;
};

// Turns logits of rows [first, first + count) into losses and, where wanted, into the gradient of
// the rows' losses times `factors` (null: 1). An ignored row has loss and gradient 0.
template <typename T, bool gradient>
void pass_over_rows(const RowLoss<acc_t<T>>& row_loss, T* logits, int64_t first, int64_t count,
                    int64_t columns, const acc_t<T>* factors, acc_t<T>* losses) {
  torch::stable::parallel_for(0, count, row_grain(columns), [&](int64_t begin, int64_t end) {
    using A = acc_t<T>;
    std::vector<A> scratch;
    for (int64_t k = begin; k < end; ++k) {
      T* z = logits + k * columns;
      const int64_t r = first + k;
      A loss = 0;
      if (!row_loss.ignored(r)) {
        A* row = load_row(z, columns, scratch);
        loss = row_loss.template operator()<gradient>(r, row, factors ? factors[r] : A(1));
        if constexpr (gradient) store_row(row, columns, z);
      } else if constexpr (gradient) {
        std::fill_n(z, columns, T(0));
      }
      if (losses) losses[r] = loss;
    }
  });
}

// Passes over all rows in chunks. `logits` holds the chunks, one after the other; or all rows.
template <typename T>
void pass_in_chunks(const Arguments& a, const RowLoss<acc_t<T>>& row_loss, const Tensor& logits,
                    bool gradient, const acc_t<T>* factors, acc_t<T>* losses,
                    LinearGradients* gradients) {
  const Tensor weight = as_operand(a.weight);
  const int64_t N = a.rows(), V = a.classes(), chunk = logits.size(0);
  for (int64_t begin = 0; begin < N; begin += chunk) {
    const int64_t n = std::min(chunk, N - begin);
    const Tensor z = rows_of(logits, 0, n);
    linear_out(z, rows_of(a.input, begin, n), weight, a.bias);
    T* data = z.mutable_data_ptr<T>();
    if (gradient) {
      pass_over_rows<T, true>(row_loss, data, begin, n, V, factors, losses);
    } else {
      pass_over_rows<T, false>(row_loss, data, begin, n, V, factors, losses);
    }
    if (gradients) gradients->add(begin, z);
  }
}

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The loss; the factor by which its backward pass multiplies the gradients kept here, which are
// those of the SUM of the losses (1 / N of it would underflow in float16); and these: dz, or dX, dW
// and db. dW and db of float16 stay in float32, whose range a sum needs. (overwrite_kept is for
// autograd: the caller drops all but the loss, so backward may scale these in place.)
Results linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                             const std::optional<Tensor>& linear_bias,
                             const std::optional<Tensor>& weight, std::string reduction,
                             int64_t ignore_index, double label_smoothing, bool keep_logits_grad,
                             bool want_input, bool want_weight, bool want_bias,
                             bool /*overwrite_kept*/, int64_t chunk_rows) {
  const Arguments a{
      "linear_cross_entropy", input,           linear_weight, target, linear_bias, weight,
      ignore_index,           label_smoothing, chunk_rows};
  check(a);
  const bool rows = reduction == "none", any = want_input || want_weight || want_bias;
  MEMOPT_CHECK(rows || reduction == "mean" || reduction == "sum", a.op, ": reduction is '",
               reduction, "', needs 'none', 'mean' or 'sum'");
  MEMOPT_CHECK(!(rows && (any || keep_logits_grad)) && !(any && keep_logits_grad), a.op,
               ": either the gradient of the logits can be kept or those of the linear layer, and "
               "with reduction 'none' neither");
  const int64_t N = a.rows(), V = a.classes();
  const ScalarType accumulator = a.accumulator();
  Tensor losses = torch::stable::empty({N}, accumulator);
  Tensor loss = torch::stable::empty({}, accumulator),
         scale = torch::stable::empty({}, accumulator);
  Tensor logits =
      torch::stable::empty({keep_logits_grad ? N : std::min(N, chunk_rows), V}, a.dtype());
  LinearGradients gradients(input, linear_weight, {want_input, want_weight, want_bias});
  dispatch_floating(a.dtype(), a.op, "input", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const RowLoss<A> row_loss(a);
    A* row_losses = losses.mutable_data_ptr<A>();
    pass_in_chunks<T>(a, row_loss, logits, any || keep_logits_grad, nullptr, row_losses,
                      any ? &gradients : nullptr);
    double sum = 0;
    for (int64_t r = 0; r < N; ++r) sum += row_losses[r];
    const bool mean = reduction == "mean";
    *loss.mutable_data_ptr<A>() = static_cast<A>(mean ? sum / row_loss.divisor() : sum);
    // Where every row is ignored the mean is NaN, and its gradient 0.
    const double factor = !mean ? 1 : row_loss.counted() == 0 ? 0 : 1 / row_loss.divisor();
    *scale.mutable_data_ptr<A>() = static_cast<A>(factor);
  });
  const Tensor dz = keep_logits_grad ? logits : torch::stable::empty({0, 0}, a.dtype());
  const auto [dx, dw, db] = gradients.finish(/*rounded=*/a.dtype() != ScalarType::Half);
  return {rows ? losses : loss, scale, dz, dx, dw, db};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& input, const Tensor& linear_weight, const Tensor& target,
    const std::optional<Tensor>& linear_bias, const std::optional<Tensor>& weight,
    int64_t ignore_index, double label_smoothing, bool want_input, bool want_weight, bool want_bias,
    int64_t chunk_rows) {
  const Arguments a{"linear_cross_entropy_backward",
                    input,
                    linear_weight,
                    target,
                    linear_bias,
                    weight,
                    ignore_index,
                    label_smoothing,
                    chunk_rows};
  check(a);
  MEMOPT_CHECK(grad.dim() == 1 && grad.size(0) == a.rows() &&
                   grad.scalar_type() == a.accumulator() && grad.is_cpu(),
               a.op, ": grad has ", grad.numel(), " elements of dtype ",
               toString(grad.scalar_type()), " in ", grad.dim(), " dimensions, needs ", a.rows(),
               " of dtype ", toString(a.accumulator()), " in one, on the CPU");
  const Tensor factors = torch::stable::contiguous(grad);
  Tensor logits = torch::stable::empty({std::min(a.rows(), chunk_rows), a.classes()}, a.dtype());
  LinearGradients gradients(input, linear_weight, {want_input, want_weight, want_bias});
  dispatch_floating(a.dtype(), a.op, "input", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    pass_in_chunks<T>(a, RowLoss<A>(a), logits, true, factors.const_data_ptr<A>(), nullptr,
                      &gradients);
  });
  return gradients.finish();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
}

}  // namespace memopt::cpu
