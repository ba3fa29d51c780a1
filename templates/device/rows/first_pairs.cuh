// RoPE of the first of a head's pairs: H::kTurningPairs of the kRotaryDim / 2 pairs turn, the others stay.
#pragma once

#include "heads.cuh"

// Where the angle of RoPE pair i waits among the kTurningPairs of its row: lanes that read together read neighbours.
template <typename H>
__device__ constexpr uint32_t first_angle(uint32_t i) {
  return i % HeadLayout<H>::kTogether * (H::kTurningPairs / HeadLayout<H>::kTogether) + i / HeadLayout<H>::kTogether;
}

// Neox pairs: element i turns with element kRotaryDim / 2 + i. `angles` are (cos, sin) of the pairs that turn, each where
// first_angle says.
template <typename H>
__device__ __forceinline__ void rotate_first(Head<H>& x, const float2* angles, uint32_t lane) {
  using W = HeadLayout<H>;
  constexpr uint32_t kTurning = H::kTurningPairs / W::kWidth;  // pairs of vectors
  static_assert(W::kNeox && H::kTurningPairs % W::kWidth == 0);
#pragma unroll
  for (uint32_t c = 0; c < W::kChunks; ++c) {
    const uint32_t p = c * W::kLanes + lane;
    if (p >= kTurning) continue;
#pragma unroll
    for (uint32_t j = 0; j < W::kWidth; ++j) Head<H>::rotate_pair(x.x[c][0][j], x.x[c][1][j], angles[j * kTurning + p]);
  }
}
