// The activations on scalars and on vectors. Where the activation only clamps, it is applied to the
// maximum instead of to every value: it is monotone, and whatever it makes equal has derivative 0,
// so that values and codes are those of activation before pool.
//
//   before(v)     applied to each value before the maximum
//   branch(v)     lanes of all ones where the value is on the second branch
//   after(best)   applied to the maximum
//   dead(best)    lanes of all ones where the derivative at the maximum is 0
#pragma once

#include "../common/activation.h"
#include "../common/dispatch.h"
#include "simd.h"

namespace memopt::cpu {

// A value as T holds it, in the accumulator's type.
template <typename T>
acc_t<T> rounded(double value) {
  return static_cast<acc_t<T>>(static_cast<T>(value));
}

template <typename T>
struct Identity {
  static constexpr bool kBranches = false;
  explicit Identity(const Activation&) {}
  template <typename V>
  V before(V v) const {
    return v;
  }
  template <typename V>
  V after(V best) const {
    return best;
  }
  template <typename V>
  auto dead(V best) const {
    return best != best && best == best;
  }
};

template <typename T>
struct Relu {
  static constexpr bool kBranches = false;
  explicit Relu(const Activation&) {}
  template <typename V>
  V before(V v) const {
    return v;
  }
  template <typename V>
  V after(V best) const {
    return best < V{} ? V{} : best;
  }
  template <typename V>
  auto dead(V best) const {
    return best <= V{};
  }
};

template <typename T>
struct Hardtanh {
  static constexpr bool kBranches = false;
  explicit Hardtanh(const Activation& a) : least(rounded<T>(a.alpha)), most(rounded<T>(a.beta)) {}
  template <typename V>
  V before(V v) const {
    return v;
  }
  template <typename V>
  V after(V best) const {
    const V low = V{} + least, high = V{} + most;
    const V clamped = best < low ? low : best;
    return clamped > high ? high : clamped;
  }
  template <typename V>
  auto dead(V best) const {
    return (best <= V{} + least) | (best >= V{} + most);
  }

  acc_t<T> least, most;
};

// Not a clamp: a negative slope of less than 1 makes neighbours equal by rounding, one below 0 is
// not monotone.
template <typename T>
struct LeakyRelu {
  static constexpr bool kBranches = true;
  explicit LeakyRelu(const Activation& a) : slope(static_cast<acc_t<T>>(a.alpha)) {}
  template <typename V>
  V before(V v) const {
    return v > V{} ? v : v * slope;
  }
  template <typename V>
  auto branch(V v) const {
    return ~(v > V{});
  }
  template <typename V>
  V after(V best) const {
    return best;
  }
  template <typename V>
  auto dead(V best) const {
    return best != best && best == best;
  }

  acc_t<T> slope;
};

// Calls body(activation of T).
template <typename T, typename Body>
void dispatch_activation(const Activation& a, const Body& body) {
  switch (a.kind) {
    case ActivationKind::kIdentity:
      return body(Identity<T>(a));
    case ActivationKind::kRelu:
      return body(Relu<T>(a));
    case ActivationKind::kLeakyRelu:
      return body(LeakyRelu<T>(a));
    case ActivationKind::kHardtanh:
      return body(Hardtanh<T>(a));
  }
}

}  // namespace memopt::cpu
