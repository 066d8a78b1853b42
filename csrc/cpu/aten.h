// Stock ops that the CPU kernels are built around, called through torch's stable C interface.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace memopt::cpu {

// out = a b                                                  a: (M, K)  b: (K, N)  out: (M, N)
inline void mm_out(const torch::stable::Tensor& out, const torch::stable::Tensor& a,
                   const torch::stable::Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out = beta c + a b, where c is broadcast to out's shape and may be out itself
inline void addmm_out(const torch::stable::Tensor& out, const torch::stable::Tensor& c,
                      const torch::stable::Tensor& a, const torch::stable::Tensor& b,
                      double beta = 1) {
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(out.get(), c.get(), a.get(), b.get(), beta, /*alpha=*/1));
}

// Rows [begin, begin + count) of a matrix, as a view.
inline torch::stable::Tensor rows_of(torch::stable::Tensor matrix, int64_t begin, int64_t count) {
  return torch::stable::narrow(matrix, 0, begin, count);
}

// A matrix that the stock matrix product reads in place: itself where rows or columns are dense in
// memory, else a contiguous copy (which the product would make again on every call).
inline torch::stable::Tensor as_operand(const torch::stable::Tensor& matrix) {
  const bool dense_rows = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  const bool dense_columns = matrix.stride(0) == 1 && matrix.stride(1) >= matrix.size(0);
  return dense_rows || dense_columns ? matrix : torch::stable::contiguous(matrix);
}

}  // namespace memopt::cpu
