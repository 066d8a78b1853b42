// Softmax down the columns of transposed logits, a block of classes at a time: each lane of a
// register is a row of the loss, so that nothing is summed across lanes.
//
// The sums of a block are taken relative to its own maximum, and combined in the order of blocks:
// the result does not depend on which thread did which block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "matmul.h"
#include "softmax_rows.h"

namespace memopt::cpu {

// exp_nonpositive of softmax_rows.h, lane by lane.
inline Register<float> exp_nonpositive(Register<float> x) {
  using Bits = Vector<uint32_t, kLanes<float>>;
  constexpr float kRound = 12582912.0f;
  const Register<float> rounded = x * 1.44269504f + kRound;
  const Register<float> n = rounded - kRound;
  const Register<float> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Register<float> p = broadcast(1.0f / 5040);
  p = multiply_add(p, r, broadcast(1.0f / 720));
  p = multiply_add(p, r, broadcast(1.0f / 120));
  p = multiply_add(p, r, broadcast(1.0f / 24));
  p = multiply_add(p, r, broadcast(1.0f / 6));
  p = multiply_add(p, r, broadcast(0.5f));
  p = multiply_add(p, r, broadcast(1.0f));
  p = multiply_add(p, r, broadcast(1.0f));
  const Bits power = (reinterpret_cast<Bits>(rounded) + 127u) << 23;
  return x < -87.0f ? Register<float>{} : p * reinterpret_cast<Register<float>>(power);
}

inline Register<double> exp_nonpositive(Register<double> x) {
  for (int k = 0; k < kLanes<double>; ++k) x[k] = std::exp(x[k]);
  return x;
}

// y where exp(y) is not 0, and finite where it is, so that exp(y) y is 0 there.
template <typename V>
V bounded(V y) {
  return y < -88 ? V{} - 88 : y;
}

// Logits before their scale: `count` classes from `first` on, `stride` lanes each; and beside them
// the weights of the targets, where these are not class indices.
template <typename A>
struct Block {
  A* z;
  int64_t index, first, count, stride;
  const A* scale = nullptr;  // a factor for each lane
  const A* soft = nullptr;

  // The logits of class `first + c` in the register at j.
  Register<A> logits(int64_t c, int64_t j) const {
    const Register<A> value = load<Register<A>>(z + c * stride + j);
    return scale ? value * load<Register<A>>(scale + j) : value;
  }

  // Calls body(j) for the registers of a class; the columns of one register are in the cache.
  template <typename Body>
  void each_register(const Body& body) const {
    for (int64_t j = 0; j < stride; j += kLanes<A>) body(j);
  }
};

// What a pass over all classes of a row finds, each relative to the row's largest logit `max`.
template <typename A>
struct Found {
  A max = -std::numeric_limits<A>::infinity();
  double sum = 0;       // of exp(z - max)
  double moment = 0;    // of exp(z - max) (z - max)
  double weighted = 0;  // of w (z - max): w a class's or a soft target's weight
  double mass = 0;      // of a soft target's weights
  int64_t largest = 0;  // the first class whose logit is max

  double log_sum() const { return std::log(sum); }
};

// What passes over all classes add up for each row, by blocks, to be combined at the end.
template <typename A>
class ColumnSums {
 public:
  struct Wanted {
    bool moment, largest, soft;
    const A* class_weight;  // null: no sum of w z
  };

  ColumnSums(int64_t blocks, int64_t stride, Wanted wanted)
      : blocks_(blocks),
        stride_(stride),
        wanted_(wanted),
        max_(blocks * stride),
        sum_(blocks * stride),
        moment_(wanted.moment ? blocks * stride : 0),
        weighted_(wanted.soft || wanted.class_weight ? blocks * stride : 0),
        mass_(wanted.soft ? blocks * stride : 0),
        largest_(wanted.largest ? blocks * stride : 0) {}

  void add(const Block<A>& block) {
    block.each_register([&](int64_t j) {
      const int64_t at = block.index * stride_ + j;
      // NaNs are passed over here, for exp(NaN - max) brings them back.
      Register<A> max = broadcast(-std::numeric_limits<A>::infinity());
      for (int64_t c = 0; c < block.count; ++c) {
        const Register<A> value = block.logits(c, j);
        max = value > max ? value : max;
      }
      store(max_.data() + at, max);
      const Register<A> from = reference(max);
      Register<A> sum = {}, moment = {}, weighted = {}, mass = {};
      for (int64_t first = 0; first < block.count; first += kStretch) {
        Register<A> part[4] = {};  // of a few classes, for the sake of rounding
        for (int64_t c = first; c < std::min(block.count, first + kStretch); ++c) {
          const Register<A> y = block.logits(c, j) - from, e = exp_nonpositive(y);
          part[0] += e;
          if (wanted_.moment) part[1] += e * bounded(y);
          if (wanted_.soft) {
            const Register<A> q = load<Register<A>>(block.soft + c * block.stride + j);
            part[2] += q * y;
            part[3] += q;
          } else if (wanted_.class_weight) {
            part[2] += wanted_.class_weight[block.first + c] * y;
          }
        }
        sum += part[0];
        moment += part[1];
        weighted += part[2];
        mass += part[3];
      }
      store(sum_.data() + at, sum);
      if (wanted_.moment) store(moment_.data() + at, moment);
      if (!weighted_.empty()) store(weighted_.data() + at, weighted);
      if (wanted_.soft) store(mass_.data() + at, mass);
      if (wanted_.largest) find_largest(block, j, at);
    });
  }

  // class_weight_sums: the sum of class weights of each block, where they are wanted.
  std::vector<Found<A>> combine(int64_t count, const std::vector<double>& class_weight_sums) const {
    std::vector<Found<A>> found(count);
    for (int64_t b = 0; b < blocks_; ++b) {
      for (int64_t j = 0; j < count; ++j) {
        const A max = max_[b * stride_ + j];
        if (!(max > found[j].max)) continue;
        found[j].max = max;
        if (wanted_.largest) found[j].largest = largest_[b * stride_ + j];
      }
    }
    for (int64_t b = 0; b < blocks_; ++b) {
      for (int64_t j = 0; j < count; ++j) {
        Found<A>& f = found[j];
        const int64_t at = b * stride_ + j;
        const A shift = std::min(reference(max_[at]) - reference(f.max), A(0));
        const double factor = exp_nonpositive(shift);
        f.sum += factor * sum_[at];
        if (wanted_.moment) f.moment += factor * (moment_[at] + double(bounded(shift)) * sum_[at]);
        if (weighted_.empty()) continue;
        const double mass = wanted_.soft ? mass_[at] : class_weight_sums[b];
        f.weighted += weighted_[at] + double(shift) * mass;
        f.mass += mass;
      }
    }
    for (Found<A>& f : found) {
      // As eager: there is no softmax of logits that are all -inf.
      if (std::isinf(f.max) && f.max < 0) f.sum = std::numeric_limits<double>::quiet_NaN();
    }
    return found;
  }

 private:
  static constexpr int64_t kStretch = 8;

  // What exponents are relative to: 0 where a block has nothing but -inf, which then adds 0.
  template <typename V>
  static V reference(V max) {
    return max == -std::numeric_limits<A>::infinity() ? V{} : max;
  }

  void find_largest(const Block<A>& block, int64_t first, int64_t at) {
    for (int64_t j = 0; j < kLanes<A>; ++j) {
      int64_t c = 0;
      const A factor = block.scale ? block.scale[first + j] : A(1);
      const A* z = block.z + first + j;
      while (c + 1 < block.count && z[c * block.stride] * factor < max_[at + j]) ++c;
      largest_[at + j] = block.first + c;
    }
  }

  int64_t blocks_, stride_;
  Wanted wanted_;
  std::vector<A> max_, sum_, moment_, weighted_, mass_;
  std::vector<int64_t> largest_;
};

// z = cap tanh(z / cap)
inline Register<float> tanh_of(Register<float> x) {
  const Register<float> size = x < 0 ? -x : x, square = x * x;
  const Register<float> e = exp_nonpositive(size * -2.0f), far = (1.0f - e) / (1.0f + e);
  Register<float> near = broadcast(-1382.0f / 155925);
  near = multiply_add(near, square, broadcast(62.0f / 2835));
  near = multiply_add(near, square, broadcast(-17.0f / 315));
  near = multiply_add(near, square, broadcast(2.0f / 15));
  near = multiply_add(near, square, broadcast(-1.0f / 3));
  near = x + x * square * near;
  return size < 0.35f ? near : x < 0 ? -far : far;
}

inline Register<double> tanh_of(Register<double> x) {
  for (int k = 0; k < kLanes<double>; ++k) x[k] = std::tanh(x[k]);
  return x;
}

template <typename A>
void cap_logits(const Block<A>& block, A cap) {
  for (int64_t k = 0; k < block.count * block.stride; k += kLanes<A>) {
    store(block.z + k, cap * tanh_of(load<Register<A>>(block.z + k) / cap));
  }
}

// The gradient of a row's loss in its logits, which lie `y` below the largest, for e = exp(y):
//
//   e (scale + moment y) - smooth w - soft q
//
// with one factor of each kind for every lane, w a class's weight and q a soft target's.
template <typename A>
struct GradientTerms {
  std::vector<A> max, scale;
  std::vector<A> moment, smooth, soft;  // empty: 0
  const A* class_weight = nullptr;

  Register<A> at(const Block<A>& block, int64_t c, int64_t j) const {
    const Register<A> y = block.logits(c, j) - load<Register<A>>(max.data() + j);
    Register<A> factor = load<Register<A>>(scale.data() + j);
    if (!moment.empty()) factor += load<Register<A>>(moment.data() + j) * bounded(y);
    Register<A> gradient = exp_nonpositive(y) * factor;
    if (!smooth.empty()) {
      gradient -= load<Register<A>>(smooth.data() + j) * class_weight[block.first + c];
    }
    if (!soft.empty()) {
      const Register<A> q = load<Register<A>>(block.soft + c * block.stride + j);
      gradient -= load<Register<A>>(soft.data() + j) * q;
    }
    return gradient;
  }
};

// The way from the gradient in the logits back through their scale and cap.
template <typename A>
struct LogitChain {
  A cap = 0;                // 0: none
  A* scale_sums = nullptr;  // a block's sums of gradient times logit over scale; null: unwanted

  // z, for a value of the block before the scale
  template <typename V>
  V raw_gradient(V gradient, V value, V scale) const {
    gradient *= scale;
    if (cap > 0) gradient *= 1 - (value / cap) * (value / cap);
    return gradient;
  }
};

// The block's logits become the gradient in what was logits before scale and cap.
template <typename A>
void gradient_in_place(const Block<A>& block, const GradientTerms<A>& terms,
                       const LogitChain<A>& chain) {
  const bool plain = !block.scale && chain.cap <= 0;
  block.each_register([&](int64_t j) {
    Register<A> scale_sum = {};
    const Register<A> scale = block.scale ? load<Register<A>>(block.scale + j) : broadcast(A(1));
    for (int64_t c = 0; c < block.count; ++c) {
      A* at = block.z + c * block.stride + j;
      Register<A> gradient = terms.at(block, c, j);
      if (!plain) {
        const Register<A> value = load<Register<A>>(at);
        if (chain.scale_sums) scale_sum += gradient * value;
        gradient = chain.raw_gradient(gradient, value, scale);
      }
      store(at, gradient);
    }
    if (chain.scale_sums) store(chain.scale_sums + j, scale_sum);
  });
}

}  // namespace memopt::cpu
