// The passes of a loss over the logits of a linear layer, which exist a block of classes at a time:
//
//   sums        each row's softmax, over all blocks
//   gradients   each block of logits becomes its gradient and is multiplied out into dX, dW and db
//
// A loss is a class with
//   begin(chunk)      before the sums of some rows
//   add(block)        a block's part of the sums; it may change the logits in place, as `cap` does
//   finish(chunk)     when all blocks have been seen
//   prepare(chunk)    before the gradients: what the row sums say of each row
//   cap(block)        what `add` makes of fresh logits
//   gradient(block)   such logits become their gradient
//   conclude(chunk, begin, end)   after the gradients of these blocks
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../common/dispatch.h"
#include "linear_chunk.h"
#include "linear_gradients.h"
#include "softmax_columns.h"

namespace memopt::cpu {

template <typename T>
class LinearLoss {
 public:
  using A = acc_t<T>;
  using Tensor = torch::stable::Tensor;

  // How gradients are formed: `by_classes` holds dW for some classes at a time rather than all of
  // it as accumulators, and makes the logits twice; `rounded`: dW and db in T, not in A;
  // `others`: the loss wants gradients of its own.
  struct Settings {
    Wanted wanted;
    bool by_classes, rounded, others;
    int64_t chunk_rows;
  };

  // ids: the rows that count; others have gradient 0. dx: where others have made room for it.
  LinearLoss(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
             std::vector<int64_t> ids, Settings settings, const Tensor* dx = nullptr)
      : ids_(std::move(ids)),
        set_(settings),
        capacity_(std::max<int64_t>(1, std::min<int64_t>(settings.chunk_rows, ids_.size()))),
        chunk_(x, weight, bias, capacity_) {
    const auto [input, w, b] = set_.wanted;
    const int64_t V = weight.size(0), H = weight.size(1);
    const ScalarType narrow = x.scalar_type(), wide = accumulator_of(narrow);
    result_dtype_ = set_.rounded ? narrow : wide;
    dx_ = dx ? *dx : torch::stable::empty({input ? x.size(0) : 0, input ? H : 0}, narrow);
    if (!dx && input && ids_.size() < static_cast<size_t>(x.size(0))) torch::stable::zero_(dx_);
    if (b) db_.assign(V, 0.0);
    // Sums of dW go straight into the result where that has their dtype.
    in_place_ = result_dtype_ == wide;
    dw_ = torch::stable::empty({w ? V : 0, w ? H : 0},
                               in_place_ || set_.by_classes ? result_dtype_ : wide);
    if (w && ids_.empty()) torch::stable::zero_(dw_);
    if (w && set_.by_classes && !in_place_) dw_sums_ = Buffer<A>(classes_at_once() * H);
  }

  // Sums only: logits are kept nowhere.
  template <typename Loss>
  void sums(Loss& loss) {
    for_each_chunk([&](int64_t) { sum_chunk(loss, nullptr); });
  }

  // Sums and, where any are wanted, gradients; the logits of a chunk are kept in between.
  template <typename Loss>
  void sums_and_gradients(Loss& loss) {
    const bool any = set_.wanted.input || set_.wanted.weight || set_.wanted.bias || set_.others;
    if (!any || set_.by_classes) {
      sums(loss);
      if (any) gradients(loss);
      return;
    }
    const Buffer<A> logits(chunk_.classes() * padded<A>(capacity_));
    for_each_chunk([&](int64_t first) {
      sum_chunk(loss, logits.data());
      loss.prepare(chunk_);
      gradient_of_classes(loss, 0, chunk_.classes(), first, logits.data());
    });
  }

  // Gradients from sums that are known already: the logits are made again, block by block.
  template <typename Loss>
  void gradients(Loss& loss) {
    if (ids_.empty()) return;
    const int64_t V = chunk_.classes(), step = set_.by_classes ? classes_at_once() : V;
    for (int64_t v = 0; v < V; v += step) {
      const int64_t end = std::min(V, v + step);
      for_each_chunk([&](int64_t first) {
        loss.prepare(chunk_);
        gradient_of_classes(loss, v, end, first, nullptr);
      });
      if (dw_sums_) round_to(dw_, v * chunk_.features(), *dw_sums_, (end - v) * chunk_.features());
    }
  }

  // (dX, dW, db), with no elements where one was not wanted.
  std::tuple<Tensor, Tensor, Tensor> finish() {
    Tensor db = torch::stable::empty({static_cast<int64_t>(db_.size())}, result_dtype_);
    dispatch_floating(result_dtype_, "linear", "bias", [&](auto zero) {
      using R = decltype(zero);
      R* out = db.mutable_data_ptr<R>();
      for (size_t v = 0; v < db_.size(); ++v) out[v] = static_cast<R>(db_[v]);
    });
    return {dx_, torch::stable::to(dw_, result_dtype_), db};
  }

 private:
  // So many classes that their part of dW, as accumulators, takes some MiB.
  int64_t classes_at_once() const {
    constexpr int64_t kBytes = 4 << 20;
    const int64_t blocks = kBytes / sizeof(A) / (chunk_.features() + 1) / chunk_.block();
    return chunk_.block() * std::max<int64_t>(1, blocks);
  }

  template <typename Body>
  void for_each_chunk(const Body& body) {
    const int64_t count = static_cast<int64_t>(ids_.size());
    for (int64_t first = 0; first < count; first += capacity_) {
      chunk_.take(ids_.data() + first, std::min(capacity_, count - first), set_.wanted.weight);
      body(first);
    }
  }

  template <typename Body>
  void for_each_block(int64_t begin, int64_t end, A* logits, const Body& body) {
    torch::stable::parallel_for(begin, end, 1, [&](int64_t b, int64_t e) {
      std::vector<A> scratch(logits ? 0 : chunk_.block() * chunk_.stride());
      for (; b < e; ++b) {
        const int64_t first = b * chunk_.block();
        const int64_t count = std::min(chunk_.block(), chunk_.classes() - first);
        A* z = logits ? logits + (b - begin) * chunk_.block() * chunk_.stride() : scratch.data();
        body(Block<A>{z, b, first, count, chunk_.stride()});
      }
    });
  }

  // `kept`: where the logits of all classes are to be left, or null.
  template <typename Loss>
  void sum_chunk(Loss& loss, A* kept) {
    loss.begin(chunk_);
    for_each_block(0, chunk_.blocks(), kept, [&](Block<A> block) {
      chunk_.logits(block.first, block.first + block.count, block.z);
      loss.add(block);
    });
    loss.finish(chunk_);
  }

  // Adds the chunk that begins at row `first` of those that count. `logits`: of all classes, as
  // the sums left them; null: they are made again.
  template <typename Loss>
  void gradient_of_classes(Loss& loss, int64_t begin, int64_t end, int64_t first, A* logits) {
    const int64_t H = chunk_.features(), step = chunk_.block(), ld = chunk_.stride();
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t at_once = threads == 1 ? 1 : 4 * threads;  // blocks between two meetings
    A* dx = set_.wanted.input ? dx_of_chunk(first) : nullptr;
    A* dw = !set_.wanted.weight ? nullptr
            : dw_sums_          ? dw_sums_->data() - begin * H
                                : dw_.mutable_data_ptr<A>();
    std::vector<A> fresh(logits ? 0 : at_once * step * ld);
    std::vector<A> panels(dx ? at_once * chunk_.packed_size() : 0);
    const int64_t first_block = begin / step, last_block = (end + step - 1) / step;
    for (int64_t b = first_block; b < last_block; b += at_once) {
      const int64_t stop = std::min(last_block, b + at_once);
      A* dz = logits ? logits + b * step * ld : fresh.data();
      for_each_block(b, stop, dz, [&](Block<A> block) {
        const int64_t v = block.first, v_end = v + block.count;
        if (!logits) {
          chunk_.logits(v, v_end, block.z);
          loss.cap(block);
        }
        loss.gradient(block);
        if (dw) chunk_.weight_gradient(v, v_end, block.z, dw + v * H, first > 0);
        if (!db_.empty()) chunk_.bias_gradient(v, v_end, block.z, db_.data() + v);
        if (dx)
          chunk_.pack_weight(v, v_end, panels.data() + (block.index - b) * chunk_.packed_size());
      });
      if (!dx) continue;
      chunk_.input_gradient(b * step, std::min(end, stop * step), dz, panels.data(), dx, b > 0);
    }
    loss.conclude(chunk_, first_block, last_block);
    if (dx && last_block == chunk_.blocks() && !chunk_.consecutive()) store_rows(dx);
  }

  // Where dX of a chunk adds up: in the result itself, or beside it.
  A* dx_of_chunk(int64_t first) {
    const int64_t H = chunk_.features();
    if constexpr (std::is_same_v<T, A>) {
      if (chunk_.consecutive()) return dx_.template mutable_data_ptr<A>() + chunk_.ids()[0] * H;
    }
    if (!dx_sums_) dx_sums_.emplace((set_.by_classes ? ids_.size() : capacity_) * H);
    return dx_sums_->data() + (set_.by_classes ? first * H : 0);
  }

  void store_rows(const A* dx) {
    const int64_t H = chunk_.features();
    T* out = dx_.template mutable_data_ptr<T>();
    torch::stable::parallel_for(0, chunk_.count(), 16, [&](int64_t j, int64_t end) {
      for (; j < end; ++j) store_values(dx + j * H, H, out + chunk_.ids()[j] * H);
    });
  }

  static void store_values(const A* from, int64_t count, T* out) {
    if constexpr (std::is_same_v<T, double>) {
      std::copy_n(from, count, out);
    } else {
      store_floats(from, count, out);
    }
  }

  void round_to(const Tensor& result, int64_t at, const Buffer<A>& sums, int64_t count) {
    store_values(sums.data(), count, result.mutable_data_ptr<T>() + at);
  }

  std::vector<int64_t> ids_;
  Settings set_;
  int64_t capacity_;
  LinearChunk<T> chunk_;
  ScalarType result_dtype_;
  bool in_place_;
  Tensor dx_, dw_;
  std::optional<Buffer<A>> dx_sums_, dw_sums_;
  std::vector<double> db_;
};

// In how many parts rows are worked on side by side: where there are so few classes that blocks of
// them leave threads idle, and sums of dW for each part take little beside the gradients. It does
// not depend on the number of threads, for the result must not.
inline int64_t parts_of(int64_t rows, int64_t classes, int64_t features) {
  constexpr int64_t kParts = 8, kMostElements = 1 << 21;
  const bool small = kParts * classes * features <= kMostElements;
  return small && rows >= 8 * kParts * classes && rows >= 64 * kParts ? kParts : 1;
}

// (dX, dW, db) by run(passes, loss), a call of LinearLoss.
template <typename T, typename Loss, typename Run>
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> run_in_parts(
    const torch::stable::Tensor& x, const torch::stable::Tensor& weight,
    const std::optional<torch::stable::Tensor>& bias, const std::vector<int64_t>& ids,
    typename LinearLoss<T>::Settings settings, const Loss& loss, const Run& run) {
  using torch::stable::Tensor;
  using A = acc_t<T>;
  const int64_t rows = static_cast<int64_t>(ids.size()), V = weight.size(0), H = weight.size(1);
  const int64_t parts = parts_of(rows, V, H);
  if (parts == 1) {
    LinearLoss<T> passes(x, weight, bias, ids, settings);
    Loss own = loss;
    run(passes, own);
    return passes.finish();
  }
  const ScalarType result = settings.rounded ? x.scalar_type() : accumulator_of(x.scalar_type());
  const bool want_dx = settings.wanted.input;
  Tensor dx = torch::stable::empty({want_dx ? x.size(0) : 0, want_dx ? H : 0}, x.scalar_type());
  if (want_dx && rows < x.size(0)) torch::stable::zero_(dx);
  settings.rounded = settings.by_classes = false;
  std::vector<std::tuple<Tensor, Tensor, Tensor>> found(parts, {dx, dx, dx});
  torch::stable::parallel_for(0, parts, 1, [&](int64_t p, int64_t end) {
    for (; p < end; ++p) {
      const auto first = ids.begin() + p * rows / parts,
                 last = ids.begin() + (p + 1) * rows / parts;
      LinearLoss<T> passes(x, weight, bias, {first, last}, settings, &dx);
      Loss own = loss;
      run(passes, own);
      found[p] = passes.finish();
    }
  });
  const auto total = [&](auto member) {
    Tensor sum = std::get<member>(found[0]);
    const int64_t count = sum.numel();
    A* to = sum.template mutable_data_ptr<A>();
    for (int64_t p = 1; p < parts; ++p) {
      const A* more = std::get<member>(found[p]).template const_data_ptr<A>();
      for (int64_t k = 0; k < count; ++k) to[k] += more[k];
    }
    return torch::stable::to(sum, result);
  };
  return {dx, total(std::integral_constant<int, 1>{}), total(std::integral_constant<int, 2>{})};
}

}  // namespace memopt::cpu
