// RoPE on a head's first pairs: H::kRotaryPairs of the kRotaryDim / 2 pairs rotate, the others stay.
#pragma once

#include "heads.cuh"

// The place of pair i's angle among the kRotaryPairs angles of its row: lanes that read together read neighbours.
template <typename H>
__device__ constexpr uint32_t first_angle(uint32_t i) {
  return i % HeadLayout<H>::kTogether * (H::kRotaryPairs / HeadLayout<H>::kTogether) + i / HeadLayout<H>::kTogether;
}

// Neox pairs: element i rotates with element kRotaryDim / 2 + i. `angles` are (cos, sin) of the rotated pairs, at first_angle(i).
template <typename H>
__device__ __forceinline__ void rotate_first(Head<H>& x, const float2* angles, uint32_t lane) {
  using W = HeadLayout<H>;
  constexpr uint32_t kVectorPairs = H::kRotaryPairs / W::kWidth;
  static_assert(W::kNeox && H::kRotaryPairs % W::kWidth == 0);
#pragma unroll
  for (uint32_t c = 0; c < W::kChunks; ++c) {
    const uint32_t p = c * W::kLanes + lane;
    if (p >= kVectorPairs) continue;
#pragma unroll
    for (uint32_t j = 0; j < W::kWidth; ++j) Head<H>::rotate_pair(x.x[c][0][j], x.x[c][1][j], angles[j * kVectorPairs + p]);
  }
}
