// A head in registers as e2m1 codes, with a power of two for each block of its dims (MXFP4).
#pragma once

#include "head_blocks.cuh"

// The head's codes from `out` on, and each block's scale at scales[block]. B, spelled out in the kernel, has kBlock and kLeast,
// the least magnitude that counts. All lanes of the head call it.
template <typename B, typename H>
__device__ __forceinline__ void store_packed_blocks(uint8_t* out, float* scales, Head<H>& x, uint32_t lane) {
  using W = HeadLayout<H>;
  float scale[2 * W::kChunks];
  block_amax<B::kBlock>(scale, x, lane);
#pragma unroll
  for (uint32_t v = 0; v < 2 * W::kChunks; ++v) {
    const uint32_t e = W::element(v / 2 * W::kLanes + lane, v % 2);
    scale[v] = pow2_scale<e2m1x2>(max_nan(scale[v], B::kLeast));
    if (e % B::kBlock == 0) scales[e / B::kBlock] = scale[v];
    float(&at)[W::kWidth] = x.x[v / 2][v % 2];
    divide(at, scale[v]);
    write((e2m1x2*)(out + e / 2), at);
  }
}
