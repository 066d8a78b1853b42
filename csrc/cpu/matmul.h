// Products with a left operand that is read where it lies and a right operand packed in panels:
//
//   c (M, J) = or += a (M, K) b (K, J)
//
// One operand of a linear layer over a large vocabulary is far larger than the caches, and there
// are few rows to use it for. Packing it, as a general matrix product does, then costs as much as
// a quarter of the arithmetic; here it streams through once, with what comes next asked for ahead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "registers.h"

namespace memopt::cpu {

// A tile of c that fits the registers, beside kTileRegisters of b and one of a.
constexpr int kTileRows = kRegisters == 32 ? 8 : 6, kTileRegisters = kRegisters == 32 ? 3 : 2;

// Columns of a full panel of b.
template <typename A>
constexpr int64_t kPanel = kTileRegisters * kLanes<A>;

template <typename A>
int64_t padded(int64_t columns) {
  return (columns + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// The left operand: element (i, k) is at[i * row + k * step].
template <typename A>
struct Left {
  const A* at;
  int64_t row, step;
};

// The right operand: element (k, j) is at[k * row + j] where its rows are read in place, all lanes
// of a register that has any of its columns among them; or, with row 0, packed in panels: each has
// all K rows of its width (a multiple of the lanes), one panel after another.
template <typename A>
struct Right {
  const A* at;
  int64_t row = 0;
};

// Memory that is needed soon, asked for a line at a time while a product runs.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* from, int64_t bytes)
      : next_(static_cast<const char*>(from)), end_(next_ + std::max<int64_t>(0, bytes)) {}

  // Spreads the lines that are left over so many steps.
  void spread(int64_t steps) {
    const int64_t lines = (end_ - next_ + kLine - 1) / kLine;
    every_ = lines > 0 ? std::max<int64_t>(1, steps / lines) : 0;
    countdown_ = every_;
  }

  // Called once for every four values of k: lines asked for in bursts would stall the product.
  void step() {
    if (every_ == 0 || --countdown_ > 0) return;
    countdown_ = every_;
    __builtin_prefetch(next_, 0, 2);
    next_ += kLine;
    if (next_ >= end_) every_ = 0;
  }

 private:
  static constexpr int64_t kLine = 64;
  const char *next_ = nullptr, *end_ = nullptr;
  int64_t every_ = 0, countdown_ = 0;
};

template <int R, int N, typename A>
inline __attribute__((always_inline)) void put_tile(const Register<A> (&sums)[R][N], A* c,
                                                    int64_t ldc, bool add) {
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i, c += ldc) {
#pragma GCC unroll 3
    for (int j = 0; j < N; ++j) {
      A* to = c + j * kLanes<A>;
      store(to, add ? load<Register<A>>(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// A (R x N registers) tile of c; of its last register only `columns` lanes in all belong to c.
template <int R, int N, typename A>
void multiply_tile(int64_t K, const Left<A>& left, const Right<A>& right, A* c, int64_t ldc,
                   int64_t columns, bool add, Ahead& ahead) {
  constexpr int kLane = kLanes<A>;
  const A *a = left.at, *b = right.at;
  const int64_t a_row = left.row, a_step = left.step, b_row = right.row;
  Register<A> sums[R][N] = {};
  if (add) {
    const A* row = c;
    for (int i = 0; i < R; ++i, row += ldc) {
      for (int j = 0; j < N; ++j) __builtin_prefetch(row + j * kLane, 1);
    }
  }
  for (int64_t k = 0; k < K; ++k) {
    if (k % 4 == 0) ahead.step();
    Register<A> of_b[N];
#pragma GCC unroll 3
    for (int j = 0; j < N; ++j) of_b[j] = load<Register<A>>(b + j * kLane);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const Register<A> of_a = broadcast<A>(a[i * a_row]);
#pragma GCC unroll 3
      for (int j = 0; j < N; ++j) sums[i][j] = multiply_add(of_a, of_b[j], sums[i][j]);
    }
    a += a_step;
    b += b_row;
  }
  if (columns == N * kLane) return put_tile<R, N, A>(sums, c, ldc, add);
  A whole[R * N * kLane];
  put_tile<R, N, A>(sums, whole, N * kLane, false);
  for (int i = 0; i < R; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const A sum = whole[i * N * kLane + j];
      c[i * ldc + j] = add ? c[i * ldc + j] + sum : sum;
    }
  }
}

// All rows of c against one panel of b that is N registers wide.
template <int N, typename A>
void multiply_panel(int64_t M, int64_t K, const Left<A>& a, const Right<A>& b, A* c, int64_t ldc,
                    int64_t columns, bool add, Ahead& ahead) {
  int64_t i = 0;
  const auto rows = [&](auto count) {
    constexpr int R = decltype(count)::value;
    for (; i + R <= M; i += R) {
      multiply_tile<R, N>(K, Left<A>{a.at + i * a.row, a.row, a.step}, b, c + i * ldc, ldc, columns,
                          add, ahead);
    }
  };
  rows(std::integral_constant<int, kTileRows>{});
  rows(std::integral_constant<int, 4>{});
  rows(std::integral_constant<int, 2>{});
  rows(std::integral_constant<int, 1>{});
}

// c = or += a b, where b has `columns` columns. Sums run over kDepth values of k, then add up in c:
// their error grows with the root of kDepth rather than with that of K, and the part of a panel
// that is in use stays in the nearest cache.
template <typename A>
void multiply(int64_t M, int64_t columns, int64_t K, Left<A> a, Right<A> b, A* c, int64_t ldc,
              bool add, Ahead ahead = {}) {
  constexpr int64_t kDepth = 128;
  ahead.spread((M + kTileRows - 1) / kTileRows * ((columns + kPanel<A> - 1) / kPanel<A>)*K / 4);
  for (int64_t j = 0; j < columns; j += kPanel<A>) {
    const int64_t width = std::min(kPanel<A>, columns - j), stride = padded<A>(width);
    int64_t k = 0;
    do {  // once for K = 0 too, where c is 0
      const int64_t depth = std::min(kDepth, K - k);
      const Left<A> left{a.at + k * a.step, a.row, a.step};
      const Right<A> panel = b.row ? Right<A>{b.at + j + k * b.row, b.row}
                                   : Right<A>{b.at + j * K + k * stride, stride};
      const bool adds = add || k > 0;
      switch (stride / kLanes<A>) {
        case 1:
          multiply_panel<1>(M, depth, left, panel, c + j, ldc, width, adds, ahead);
          break;
        case 2:
          multiply_panel<2>(M, depth, left, panel, c + j, ldc, width, adds, ahead);
          break;
        default:
          multiply_panel<kTileRegisters>(M, depth, left, panel, c + j, ldc, width, adds, ahead);
      }
      k += kDepth;
    } while (k < K);
  }
}

}  // namespace memopt::cpu
