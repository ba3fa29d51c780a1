// The Hadamard transform of a head in registers.
#pragma once

#include "head_norms.cuh"

__device__ __forceinline__ void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// x H / sqrt(kDim), where H[i][j] is -1 to the number of bits that i and j have in common. Every bit of the dim is a bit of the
// element in its vector, of the lane, or of the vector's number (HeadLayout), and has a step that adds and subtracts the two
// elements which differ in it; those of two lanes meet by a shuffle. All lanes of the head call it.
template <typename H>
__device__ __forceinline__ void hadamard(Head<H>& x, uint32_t lane) {
  using W = HeadLayout<H>;
  constexpr uint32_t kVectors = 2 * W::kChunks, kWidth = W::kWidth;
  static_assert(W::kBits && W::kDim == kVectors * W::kLanes * kWidth, "every lane has as many elements as every other one");
#pragma unroll
  for (uint32_t step = 1; step < kWidth; step *= 2)
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v)
#pragma unroll
      for (uint32_t j = 0; j < kWidth; ++j)
        if ((j & step) == 0) add_and_subtract(x.x[v / 2][v % 2][j], x.x[v / 2][v % 2][j + step]);
#pragma unroll
  for (uint32_t step = 1; step < W::kLanes; step *= 2) {
    const bool second = (W::element(lane, 0) & (W::element(step, 0) ^ W::element(0, 0))) != 0;  // this lane's bit of the dim
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v)
#pragma unroll
      for (uint32_t j = 0; j < kWidth; ++j) {
        const float mine = x.x[v / 2][v % 2][j], other = __shfl_xor_sync(head_mask<H>(lane), mine, step);
        x.x[v / 2][v % 2][j] = second ? other - mine : mine + other;
      }
  }
#pragma unroll
  for (uint32_t step = 1; step < kVectors; step *= 2)
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      if ((v & step) != 0) continue;
      const bool swapped = W::element(v / 2 * W::kLanes, v % 2) > W::element((v + step) / 2 * W::kLanes, v % 2 + step % 2);
      const uint32_t first = swapped ? v + step : v, last = swapped ? v : v + step;
#pragma unroll
      for (uint32_t j = 0; j < kWidth; ++j) add_and_subtract(x.x[first / 2][first % 2][j], x.x[last / 2][last % 2][j]);
    }
  x.vectors(lane, [&](float (&at)[kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < kWidth; ++j) at[j] *= H::kHadamard;
  });
}
