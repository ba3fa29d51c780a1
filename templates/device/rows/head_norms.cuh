// Norms of a head in registers besides RMS norm with weights: RMS norm without weights, and LayerNorm.
//
// N, spelled out in the kernel, has kEps; for RMS norm also kCount, the elements over which the mean runs.
#pragma once

#include "heads.cuh"

// The lanes that share a head with this one.
template <typename H>
__device__ __forceinline__ uint32_t head_mask(uint32_t lane) {
  return 0xffffffffu >> (32 - H::kLanes) << (threadIdx.x % 32 - lane);
}

// The head's first N::kCount elements times `factor`; all of them where the mean was over more than the head.
template <typename N, typename H>
__device__ __forceinline__ void rms_norm_by(Head<H>& x, float factor, uint32_t lane) {
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j)
      if (N::kCount >= H::kDim || e + j < N::kCount) at[j] *= factor;
  });
}

// RMS norm without weights of the head's first N::kCount elements.
template <typename N, typename H>
__device__ __forceinline__ void rms_norm(Head<H>& x, uint32_t lane) {
  const float squares = reduce_sum<H::kLanes>(x.template squares<N::kCount>(lane), head_mask<H>(lane));
  rms_norm_by<N>(x, rms_factor(squares, (float)N::kCount, N::kEps), lane);
}

// (x - mean) / sqrt(variance + kEps) of the head. The variance is summed of what is left without the mean, as a difference of two
// sums would lose digits.
template <typename N, typename H>
__device__ __forceinline__ void standardize(Head<H>& x, uint32_t lane) {
  float sum = 0.0f, squares = 0.0f;
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) sum += at[j];
  });
  const float mean = reduce_sum<H::kLanes>(sum, head_mask<H>(lane)) / (float)H::kDim;
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) {
      at[j] -= mean;
      squares = fmaf(at[j], at[j], squares);
    }
  });
  const float factor = rms_factor(reduce_sum<H::kLanes>(squares, head_mask<H>(lane)), (float)H::kDim, N::kEps);
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] *= factor;
  });
}

// LayerNorm of the head, times weight[kDim].
template <typename N, typename H, typename Weight>
__device__ __forceinline__ void layer_norm(Head<H>& x, const Weight* weight, uint32_t lane) {
  standardize<N>(x, lane);
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
    float w[H::kWidth];
    read(w, weight + e);
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] *= w[j];
  });
}

// LayerNorm plus bias[kDim].
template <typename N, typename H, typename Weight>
__device__ __forceinline__ void layer_norm(Head<H>& x, const Weight* weight, const Weight* bias, uint32_t lane) {
  standardize<N>(x, lane);
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
    float w[H::kWidth], b[H::kWidth];
    read(w, weight + e);
    read(b, bias + e);
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] = fmaf(at[j], w[j], b[j]);
  });
}
