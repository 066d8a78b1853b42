// From a tensor's runtime dtype to the C++ type, and the type each accumulates in.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "check.h"

namespace memopt {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;
using torch::headeronly::ScalarType;

// float16, bfloat16 and float32 accumulate in float32; float64 in float64.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulate<T>::type;

// Calls body(T{}) for the C++ type T of a floating dtype, and raises for any other.
template <typename Body>
void dispatch_floating(ScalarType dtype, const char* op, const char* argument, const Body& body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    case ScalarType::Half:
      return body(Half{});
    default:
      fail(op, ": ", argument, " has dtype ", toString(dtype),
           ", needs float32, float64, bfloat16 or float16");
  }
}

}  // namespace memopt
