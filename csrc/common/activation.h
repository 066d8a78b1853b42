// The activations that conv_relu_pool applies between the convolution and the pool, and the states
// of a pooled element: which position of its window won, and which branch of the activation it
// took.
#pragma once

#include <cstdint>

namespace memopt {

enum class ActivationKind { kIdentity, kRelu, kLeakyRelu, kHardtanh };

struct Activation {
  ActivationKind kind = ActivationKind::kRelu;
  double alpha = 0;  // leaky_relu: the negative slope; hardtanh: the smallest value
  double beta = 0;   // hardtanh: the largest value

  // Branches with a derivative other than 0 that backward must tell apart. A code is
  // branch * positions + position, branch 1 being leaky_relu's negative side, or all ones where the
  // derivative is 0.
  int64_t branches() const { return kind == ActivationKind::kLeakyRelu ? 2 : 1; }
  double derivative(int64_t branch) const { return branch == 0 ? 1.0 : alpha; }
};

}  // namespace memopt
