// Heads that the caller's rows have behind a model's, for attention kernels that take 64 or 128: zeros.
#pragma once

#include "new_rows.cuh"

// In each row that is not padding, kCount elements from kBegin on become 0, kWidth an access. P, a struct of the kernel, has
// these.
template <typename P, uint32_t kThreads, typename Out, typename Row>
__device__ __forceinline__ void store_pad_heads(const Out& out, const Row* row_states, uint32_t rows) {
  constexpr uint32_t kVectors = P::kCount / P::kWidth;
  for (uint32_t i = threadIdx.x; i < rows * kVectors; i += kThreads) {
    const float zeros[P::kWidth] = {};
    if (row_states[i / kVectors].state != RowState::padding) write(out[i / kVectors] + P::kBegin + i % kVectors * P::kWidth, zeros);
  }
}
