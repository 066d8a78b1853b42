// The cross-entropy of a row of logits and its gradient, for the passes of LinearLoss.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cross_entropy_rows.h"
#include "linear_chunk.h"
#include "named_classes.h"
#include "softmax_columns.h"

namespace memopt::cpu {

// What backward needs to know of each row: the columns of `statistics`.
enum Statistic { kMax, kSum, kMean, kMass, kStatistics };

// The loss of rows and its gradient, for the passes of LinearLoss.
template <typename T>
class CrossEntropy {
 public:
  using A = acc_t<T>;
  using Chunk = LinearChunk<T>;

  // By row; null where unwanted.
  struct Results {
    A *losses, *lse, *entropy;
    int64_t* largest;
    A *statistics, *grad_scale;
  };
  // Gradients in the results, by row; null: that of the loss is `unit`, of others 0.
  struct Upstream {
    const A *loss = nullptr, *lse = nullptr, *entropy = nullptr;
    double unit = 1;
  };

  CrossEntropy(const CrossEntropyArguments& a, const CrossEntropyRows<T>& rows, Results results,
               Upstream upstream)
      : a_(a), rows_(rows), to_(results), upstream_(upstream) {}

  void begin(const Chunk& chunk) {
    look_up(chunk);
    const bool smooth = rows_.each() > 0 && !rows_.soft();
    sums_.emplace(chunk.blocks(), chunk.stride(),
                  typename ColumnSums<A>::Wanted{to_.entropy != nullptr, to_.largest != nullptr,
                                                 rows_.soft(), smooth ? rows_.weights() : nullptr});
  }

  void cap(const Block<A>& block) const {
    if (a_.softcap > 0) cap_logits(block, static_cast<A>(a_.softcap));
  }

  void add(Block<A> block) {
    cap(block);
    std::vector<A> soft;
    complete(block, soft);
    targets_.each_in(block, [&](const NamedClass& t, A& z) { target_logits_[t.lane] = z; });
    sums_->add(block);
  }

  void finish(const Chunk& chunk) {
    const auto found = sums_->combine(chunk.count(), rows_.block_sums(chunk.block()));
    for (int64_t j = 0; j < chunk.count(); ++j) {
      const int64_t r = ids_[j];
      const Found<A>& f = found[j];
      const double log_sum = std::log(f.sum), lse = f.max + log_sum, mean = f.moment / f.sum;
      A* statistics = to_.statistics + r * kStatistics;
      statistics[kMax] = f.max;
      statistics[kSum] = static_cast<A>(f.sum);
      statistics[kMean] = static_cast<A>(mean);  // of the logits, relative to the largest
      statistics[kMass] = static_cast<A>(f.mass);
      double loss = 0;
      if (rows_.soft()) {
        loss = f.mass * log_sum - f.weighted;
      } else {
        const A target = rows_.scale(r) * target_logits_[j];
        loss = rows_.own(r) * (log_sum - static_cast<double>(target - f.max));
        if (rows_.each() > 0) loss += rows_.each() * (f.mass * log_sum - f.weighted);
      }
      if (a_.z_loss != 0) loss += a_.z_loss * lse * lse;
      if (to_.losses) to_.losses[r] = static_cast<A>(rows_.token_weight(r) * loss);
      if (to_.lse) to_.lse[r] = static_cast<A>(lse);
      if (to_.entropy) to_.entropy[r] = static_cast<A>(log_sum - mean);
      if (to_.largest) to_.largest[r] = f.largest;
    }
  }

  void prepare(const Chunk& chunk) {
    look_up(chunk);
    const int64_t ld = chunk.stride();
    const bool smooth = rows_.each() > 0 && !rows_.soft();
    terms_ = {};
    terms_.max.assign(ld, A(0));
    terms_.scale.assign(ld, A(0));
    if (upstream_.entropy) terms_.moment.assign(ld, A(0));
    if (smooth) terms_.smooth.assign(ld, A(0));
    if (rows_.soft()) terms_.soft.assign(ld, A(0));
    terms_.class_weight = rows_.weights();
    target_factor_.assign(ld, A(0));
    for (int64_t j = 0; j < chunk.count(); ++j) {
      const int64_t r = ids_[j];
      const A* statistics = to_.statistics + r * kStatistics;
      const double factor =
          (upstream_.loss ? upstream_.loss[r] : upstream_.unit) * rows_.token_weight(r);
      const double sum = statistics[kSum], lse = statistics[kMax] + std::log(sum);
      double mass = rows_.soft() ? statistics[kMass] : rows_.own(r);
      if (smooth) mass += rows_.each() * rows_.weight_sum();
      double of_p = factor * mass;
      if (a_.z_loss != 0) of_p += factor * 2 * a_.z_loss * lse;
      if (upstream_.lse) of_p += upstream_.lse[r];
      if (upstream_.entropy) {
        of_p += upstream_.entropy[r] * static_cast<double>(statistics[kMean]);
        terms_.moment[j] = static_cast<A>(-upstream_.entropy[r] / sum);
      }
      terms_.max[j] = statistics[kMax];
      terms_.scale[j] = static_cast<A>(of_p / sum);
      if (smooth) terms_.smooth[j] = static_cast<A>(factor * rows_.each());
      if (rows_.soft()) {
        terms_.soft[j] = static_cast<A>(factor);
      } else {
        target_factor_[j] = static_cast<A>(factor * rows_.own(r));
      }
    }
  }

  void gradient(Block<A> block) {
    std::vector<A> soft, scale_sums(to_.grad_scale ? block.stride : 0), named;
    complete(block, soft);
    LogitChain<A> chain{static_cast<A>(a_.softcap), to_.grad_scale ? scale_sums.data() : nullptr};
    targets_.each_in(block, [&](const NamedClass&, A& z) { named.push_back(z); });
    gradient_in_place(block, terms_, chain);
    size_t k = 0;
    targets_.each_in(block, [&](const NamedClass& t, A& dz) {
      const A value = named[k++], factor = target_factor_[t.lane];
      dz -= chain.raw_gradient(factor, value, rows_.scale(ids_[t.lane]));
      if (to_.grad_scale) scale_sums[t.lane] -= factor * value;
    });
    if (to_.grad_scale) {
      std::copy(scale_sums.begin(), scale_sums.end(),
                scale_sums_.begin() + block.index * block.stride);
    }
  }

  // After the gradients of blocks [begin, end).
  void conclude(const Chunk& chunk, int64_t begin, int64_t end) {
    if (!to_.grad_scale) return;
    for (int64_t j = 0; j < chunk.count(); ++j) {
      double sum = to_.grad_scale[ids_[j]];
      for (int64_t b = begin; b < end; ++b) sum += scale_sums_[b * chunk.stride() + j];
      to_.grad_scale[ids_[j]] = static_cast<A>(sum);
    }
  }

 private:
  void look_up(const Chunk& chunk) {
    if (ids_ == chunk.ids()) return;
    ids_ = chunk.ids();
    const int64_t n = chunk.count(), ld = chunk.stride();
    target_logits_.assign(n, A(0));
    if (to_.grad_scale) scale_sums_.resize(chunk.blocks() * ld);
    if (rows_.scaled()) {
      lane_scale_.assign(ld, A(1));
      for (int64_t j = 0; j < n; ++j) lane_scale_[j] = rows_.scale(ids_[j]);
    }
    if (rows_.soft()) return;
    std::vector<NamedClass> targets(n);
    for (int64_t j = 0; j < n; ++j) targets[j] = {rows_.target(ids_[j]), j, 0};
    targets_.assign(std::move(targets), /*in_order=*/chunk.blocks() == 1);
  }

  // What lies beside the block's logits.
  void complete(Block<A>& block, std::vector<A>& soft) const {
    if (rows_.scaled()) block.scale = lane_scale_.data();
    if (!rows_.soft()) return;
    rows_.load_soft(block, ids_, soft);
    block.soft = soft.data();
  }

  const CrossEntropyArguments& a_;
  const CrossEntropyRows<T>& rows_;
  Results to_;
  Upstream upstream_;
  std::vector<int64_t> ids_;
  NamedClasses targets_;
  std::vector<A> target_logits_, target_factor_, lane_scale_, scale_sums_;
  std::optional<ColumnSums<A>> sums_;
  GradientTerms<A> terms_;
};

}  // namespace memopt::cpu
