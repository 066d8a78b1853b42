// Classes that rows name, such as targets, found again in each block of transposed logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "softmax_columns.h"

namespace memopt::cpu {

// A class that a row names: which class, the row's lane among the chunk's, and the name's place
// among the row's.
struct NamedClass {
  int64_t index, lane, place;
};

// The classes that a chunk's rows name, in order, so that a block finds its own.
class NamedClasses {
 public:
  // `in_order`: no block is asked for but one of all classes, or they are in order.
  void assign(std::vector<NamedClass> classes, bool in_order) {
    classes_ = std::move(classes);
    if (in_order) return;
    std::sort(classes_.begin(), classes_.end(), [](const NamedClass& a, const NamedClass& b) {
      return std::tie(a.index, a.lane, a.place) < std::tie(b.index, b.lane, b.place);
    });
  }

  // Calls body(class, its element of block.z).
  template <typename A, typename Body>
  void each_in(const Block<A>& block, const Body& body) const {
    auto it = classes_.begin();
    if (block.first > 0) {
      it = std::lower_bound(it, classes_.end(), block.first,
                            [](const NamedClass& n, int64_t first) { return n.index < first; });
    }
    for (; it != classes_.end() && it->index < block.first + block.count; ++it) {
      body(*it, block.z[(it->index - block.first) * block.stride + it->lane]);
    }
  }

 private:
  std::vector<NamedClass> classes_;
};

}  // namespace memopt::cpu
