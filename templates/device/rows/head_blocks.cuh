// A head in registers, quantized by blocks of its dims: e4m3 codes, and a scale a block.
#pragma once

#include "head_norms.cuh"

// The largest magnitude of the block that each vector of this lane lies in. A block has the dims that differ in bits below
// kBlock: of vectors, of the pair of vectors, and of lanes, which shuffles bring together. All lanes of the head call it.
template <uint32_t kBlock, typename H>
__device__ __forceinline__ void block_amax(float (&amax)[2 * HeadLayout<H>::kChunks], Head<H>& x, uint32_t lane) {
  using W = HeadLayout<H>;
  static_assert(W::kBits && kBlock % W::kWidth == 0);
  // Vectors of a block differ in the bits of `same`: the first of them stands for all.
  uint32_t same = 0;
#pragma unroll
  for (uint32_t step = 1; step < 2 * W::kChunks; step *= 2)
    if ((W::element(step / 2 * W::kLanes, step % 2) ^ W::element(0, 0)) < kBlock) same |= step;
#pragma unroll
  for (uint32_t v = 0; v < 2 * W::kChunks; ++v) {
    const float mine = amax_of(x.x[v / 2][v % 2]);
    amax[v & ~same] = (v & same) == 0 ? mine : max_nan(amax[v & ~same], mine);
  }
#pragma unroll
  for (uint32_t step = 1; step < W::kLanes; step *= 2)
#pragma unroll
    for (uint32_t v = 0; v < 2 * W::kChunks; ++v)
      if ((v & same) == 0 && (W::element(step, 0) ^ W::element(0, 0)) < kBlock) amax[v] = max_nan(amax[v], __shfl_xor_sync(head_mask<H>(lane), amax[v], step));
#pragma unroll
  for (uint32_t v = 0; v < 2 * W::kChunks; ++v) amax[v] = amax[v & ~same];
}

// The block's scale: B, spelled out in the kernel, has kPower (a power of two, rounded up) and kLeast, the least magnitude that
// counts.
template <typename B>
__device__ __forceinline__ float block_scale(float amax) {
  const float counted = max_nan(amax, B::kLeast);
  return B::kPower ? pow2_scale<e4m3>(counted) : amax_scale<e4m3, float>(counted);
}

// The head's codes from `out` on, and each block's scale at scales[block * kStride].
template <typename B, uint32_t kStride, typename H>
__device__ __forceinline__ void store_blocks(e4m3* out, float* scales, Head<H>& x, uint32_t lane) {
  using W = HeadLayout<H>;
  float scale[2 * W::kChunks];
  block_amax<B::kBlock>(scale, x, lane);
#pragma unroll
  for (uint32_t v = 0; v < 2 * W::kChunks; ++v) {
    const uint32_t e = W::element(v / 2 * W::kLanes + lane, v % 2);
    scale[v] = block_scale<B>(scale[v]);
    if (e % B::kBlock == 0) scales[e / B::kBlock * kStride] = scale[v];
    float(&at)[W::kWidth] = x.x[v / 2][v % 2];
    if constexpr (B::kPower) {  // the reciprocal is exact, and so is the product as long as it is a normal number
#pragma unroll
      for (uint32_t j = 0; j < W::kWidth; ++j) at[j] = __fmul_rn(at[j], __frcp_rn(scale[v]));
    } else {
      divide(at, scale[v]);
    }
    write(out + e, at);
  }
}

// Four scales as e8m0: exponents + 127, the first the lowest byte. NaN and infinity are 255.
__device__ __forceinline__ uint32_t e8m0_word(float a, float b, float c, float d) {
  const auto exponent = [](float x) { return __float_as_uint(x) >> 23 & 0xffu; };
  return exponent(a) | exponent(b) << 8 | exponent(c) << 16 | exponent(d) << 24;
}

template <typename H>
__device__ __forceinline__ void make_nan(Head<H>& x, uint32_t lane) {
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] = nan_f32();
  });
}
