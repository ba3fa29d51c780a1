// A factor of q by its position. P, a struct of the kernel, has kPeriod, kOffset and kScale.
#pragma once

#include "heads.cuh"

// 1 + kScale * ln(1 + floor((position + kOffset) / kPeriod)), within 2^-21 of it relatively; 1 exactly in the first period.
template <typename P>
__device__ __forceinline__ float position_factor(uint32_t position) {
  const uint32_t periods = (position + P::kOffset) / P::kPeriod;
  return fmaf(P::kScale * kLn2, log2_approx((float)(1 + periods)), 1.0f);
}

template <typename H>
__device__ __forceinline__ void scale_head(Head<H>& x, float factor, uint32_t lane) {
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] *= factor;
  });
}
