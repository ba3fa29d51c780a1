// RMS norms over all heads of a row: the sum of its squares, which a warp works out.
#pragma once

#include "heads.cuh"

// A warp's sum of squares of a row whose norm is over all heads: kCount neighbours, N elements an access. All lanes get it.
template <uint32_t kCount, uint32_t N, typename T>
__device__ __forceinline__ float row_squares(const T* row) {
  float sum = 0.0f;
  for (uint32_t e = threadIdx.x % 32 * N; e < kCount; e += 32 * N) {
    float x[N];
    read(x, row + e);
#pragma unroll
    for (uint32_t j = 0; j < N; ++j) sum = fmaf(x[j], x[j], sum);
  }
  return reduce_sum<32>(sum, 0xffffffffu);
}

// The sum of squares of row + bias.
template <uint32_t kCount, uint32_t N, typename T>
__device__ __forceinline__ float row_squares(const T* row, const T* bias) {
  float sum = 0.0f;
  for (uint32_t e = threadIdx.x % 32 * N; e < kCount; e += 32 * N) {
    float x[N], added[N];
    read(x, row + e);
    read(added, bias + e);
#pragma unroll
    for (uint32_t j = 0; j < N; ++j) {
      const float y = x[j] + added[j];
      sum = fmaf(y, y, sum);
    }
  }
  return reduce_sum<32>(sum, 0xffffffffu);
}

// The sum of squares of a stored row: segment S of kCount / S::kSize heads; 0 if its page has null pointers.
template <typename S, uint32_t kCount, uint32_t N, typename Cache, typename Slot>
__device__ __forceinline__ float stored_row_squares(const Cache& cache, const Slot& at) {
  float sum = 0.0f;
  for (uint32_t e = threadIdx.x % 32 * N; e < kCount; e += 32 * N) {
    if (!at.page.found()) continue;
    float x[N];
    take<S>(x, cache, at.page, at.token, e / S::kSize, e % S::kSize);
#pragma unroll
    for (uint32_t j = 0; j < N; ++j) sum = fmaf(x[j], x[j], sum);
  }
  return reduce_sum<32>(sum, 0xffffffffu);
}
