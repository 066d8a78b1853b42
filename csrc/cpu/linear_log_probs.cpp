// Log-probabilities of K classes of each row of z = x W^T + b, without the (N, V) matrix z:
//
//   y[k] = z[t[k]] - logsumexp(z)        dz = sum_k dy[k] onehot(t[k]) - softmax(z) sum_k dy[k]
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "linear_loss.h"
#include "named_classes.h"

namespace memopt::cpu {
namespace {

using torch::stable::Tensor;

struct Arguments {
  const char* op;
  const Tensor &input, &weight, &index;
  const std::optional<Tensor>& bias;
  int64_t ignore_index, chunk_rows;

  // The rows that have a class that counts.
  std::vector<int64_t> check() const {
    check_linear(op, input, weight, bias, chunk_rows);
    const int64_t N = input.size(0), V = weight.size(0);
    MEMOPT_CHECK(index.dim() == 2 && index.size(0) == N && index.is_cpu() &&
                     index.scalar_type() == ScalarType::Long,
                 op, ": index has ", index.numel(), " elements of dtype ",
                 toString(index.scalar_type()), " in ", index.dim(), " dimensions, needs (", N,
                 ", K) of dtype Long, on the CPU");
    const Tensor dense = torch::stable::contiguous(index);
    const int64_t K = index.size(1), *ids = dense.const_data_ptr<int64_t>();
    std::vector<int64_t> rows;
    for (int64_t r = 0; r < N; ++r) {
      bool counts = false;
      for (int64_t k = 0; k < K; ++k) {
        const int64_t id = ids[r * K + k];
        if (id == ignore_index) continue;
        MEMOPT_CHECK(id >= 0 && id < V, op, ": index ", id,
                     " is out of bounds, needs to be in [0, ", V, ") or ignore_index ",
                     ignore_index);
        counts = true;
      }
      if (counts) rows.push_back(r);
    }
    return rows;
  }
};

// For the passes of LinearLoss.
template <typename T>
class LogProbs {
 public:
  using A = acc_t<T>;
  using Chunk = LinearChunk<T>;

  // (N, K), (N, 2): the largest logit and the sum of exp(z - largest), and (N, K).
  struct Tensors {
    A *log_probs, *statistics;
    const A* grad;
  };

  LogProbs(const Tensor& index, int64_t ignore_index, Tensors tensors)
      : index_(torch::stable::contiguous(index)),
        ids_(index_.const_data_ptr<int64_t>()),
        K_(index.size(1)),
        ignore_index_(ignore_index),
        at_(tensors) {}

  void begin(const Chunk& chunk) {
    look_up(chunk);
    sums_.emplace(chunk.blocks(), chunk.stride(), typename ColumnSums<A>::Wanted{});
  }

  void cap(const Block<A>&) const {}

  void add(const Block<A>& block) {
    named_.each_in(
        block, [&](const NamedClass& n, A& z) { at_.log_probs[rows_[n.lane] * K_ + n.place] = z; });
    sums_->add(block);
  }

  void finish(const Chunk& chunk) {
    const auto found = sums_->combine(chunk.count(), {});
    for (int64_t j = 0; j < chunk.count(); ++j) {
      const int64_t r = rows_[j];
      at_.statistics[2 * r] = found[j].max;
      at_.statistics[2 * r + 1] = static_cast<A>(found[j].sum);
      const double log_sum = std::log(found[j].sum);
      for (int64_t k = r * K_; k < (r + 1) * K_; ++k) {
        if (ids_[k] == ignore_index_) continue;
        const double below = at_.log_probs[k] - found[j].max;
        at_.log_probs[k] = static_cast<A>(below - log_sum);
      }
    }
  }

  void prepare(const Chunk& chunk) {
    look_up(chunk);
    terms_ = {};
    terms_.max.assign(chunk.stride(), A(0));
    terms_.scale.assign(chunk.stride(), A(0));
    for (int64_t j = 0; j < chunk.count(); ++j) {
      const int64_t r = rows_[j];
      double sum = 0;
      for (int64_t k = r * K_; k < (r + 1) * K_; ++k) {
        if (ids_[k] != ignore_index_) sum += at_.grad[k];
      }
      terms_.max[j] = at_.statistics[2 * r];
      terms_.scale[j] = static_cast<A>(-sum / at_.statistics[2 * r + 1]);
    }
  }

  void gradient(const Block<A>& block) const {
    gradient_in_place(block, terms_, LogitChain<A>{});
    named_.each_in(
        block, [&](const NamedClass& n, A& dz) { dz += at_.grad[rows_[n.lane] * K_ + n.place]; });
  }

  void conclude(const Chunk&, int64_t, int64_t) const {}

 private:
  void look_up(const Chunk& chunk) {
    if (rows_ == chunk.ids()) return;
    rows_ = chunk.ids();
    std::vector<NamedClass> named;
    for (int64_t j = 0; j < chunk.count(); ++j) {
      for (int64_t k = 0; k < K_; ++k) {
        const int64_t id = ids_[rows_[j] * K_ + k];
        if (id != ignore_index_) named.push_back({id, j, k});
      }
    }
    named_.assign(std::move(named), chunk.blocks() == 1);
  }

  Tensor index_;
  const int64_t* ids_;
  int64_t K_, ignore_index_;
  Tensors at_;
  std::vector<int64_t> rows_;
  NamedClasses named_;
  std::optional<ColumnSums<A>> sums_;
  GradientTerms<A> terms_;
};

std::tuple<Tensor, Tensor> linear_log_probs(const Tensor& input, const Tensor& weight,
                                            const Tensor& index, const std::optional<Tensor>& bias,
                                            int64_t ignore_index, int64_t chunk_rows) {
  const Arguments a{"linear_log_probs", input, weight, index, bias, ignore_index, chunk_rows};
  const std::vector<int64_t> rows = a.check();
  const ScalarType wide = accumulator_of(input.scalar_type());
  Tensor log_probs = torch::stable::empty({input.size(0), index.size(1)}, wide);
  Tensor statistics = torch::stable::empty({input.size(0), 2}, wide);
  torch::stable::zero_(log_probs);
  torch::stable::zero_(statistics);
  dispatch_floating(input.scalar_type(), a.op, "input", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const LogProbs<T> loss(
        index, ignore_index,
        {log_probs.mutable_data_ptr<A>(), statistics.mutable_data_ptr<A>(), nullptr});
    run_in_parts<T>(input, weight, bias, rows, {{}, false, true, false, chunk_rows}, loss,
                    [](auto& passes, auto& part) { passes.sums(part); });
  });
  return {log_probs, statistics};
}

std::tuple<Tensor, Tensor, Tensor> linear_log_probs_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& index,
    const std::optional<Tensor>& bias, const Tensor& statistics, int64_t ignore_index,
    bool want_input, bool want_weight, bool want_bias, int64_t chunk_rows) {
  const Arguments a{
      "linear_log_probs_backward", input, weight, index, bias, ignore_index, chunk_rows};
  const std::vector<int64_t> rows = a.check();
  const ScalarType wide = accumulator_of(input.scalar_type());
  for (const auto& [name, t, columns] : {std::tuple{"grad", &grad, index.size(1)},
                                         std::tuple{"statistics", &statistics, int64_t{2}}}) {
    MEMOPT_CHECK(t->dim() == 2 && t->size(0) == input.size(0) && t->size(1) == columns &&
                     t->scalar_type() == wide && t->is_cpu(),
                 a.op, ": ", name, " has ", t->numel(), " elements of dtype ",
                 toString(t->scalar_type()), " in ", t->dim(), " dimensions, needs (",
                 input.size(0), ", ", columns, ") of dtype ", toString(wide), ", on the CPU");
  }
  const Tensor dy = torch::stable::contiguous(grad);
  const Tensor sums = torch::stable::contiguous(statistics);
  std::tuple<Tensor, Tensor, Tensor> gradients{dy, dy, dy};
  dispatch_floating(input.scalar_type(), a.op, "input", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const LogProbs<T> loss(index, ignore_index,
                           {nullptr, sums.mutable_data_ptr<A>(), dy.const_data_ptr<A>()});
    gradients =
        run_in_parts<T>(input, weight, bias, rows,
                        {{want_input, want_weight, want_bias}, false, true, false, chunk_rows},
                        loss, [](auto& passes, auto& part) { passes.gradients(part); });
  });
  return gradients;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) {
  m.impl("linear_log_probs", TORCH_BOX(&linear_log_probs));
  m.impl("linear_log_probs_backward", TORCH_BOX(&linear_log_probs_backward));
}

}  // namespace memopt::cpu
