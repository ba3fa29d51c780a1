// head_norms.cuh, first_pairs.cuh and position_scale.cuh: heads of 40 dims on 8 lanes, of which 5 have a pair of vectors;
// hadamard.cuh and head_blocks.cuh: heads of 64 dims on 4 lanes, RoPE's 16 the last.
#include "runs.cuh"
#include "../../../templates/device/rows/head_norms.cuh"
#include "../../../templates/device/rows/first_pairs.cuh"
#include "../../../templates/device/rows/position_scale.cuh"
#include "../../../templates/device/rows/hadamard.cuh"
#include "../../../templates/device/rows/packed_blocks.cuh"
#include "../../../templates/device/rows/pad_heads.cuh"
#include "../../../templates/device/rows/write_rows.cuh"

struct Part {
  static constexpr uint32_t kDim = 40, kWidth = 4, kLanes = 8, kRotaryBegin = 0, kRotaryDim = 40;
  static constexpr uint32_t kRotaryPairs = 8;
  static constexpr bool kNeox = true;
};
struct First {
  static constexpr uint32_t kCount = 24;
  static constexpr float kEps = 0.0625f;
};
struct Whole {
  static constexpr uint32_t kDim = 64, kWidth = 4, kLanes = 4, kRotaryBegin = 48, kRotaryDim = 16;
  static constexpr bool kNeox = false, kBits = true;
  static constexpr float kHadamard = 0.125f;
};
struct Powers {
  static constexpr uint32_t kBlock = 32;
  static constexpr bool kPower = true;
  static constexpr float kLeast = 0.25f;
};
struct Quotients {
  static constexpr uint32_t kBlock = 16;
  static constexpr bool kPower = false;
  static constexpr float kLeast = 0.25f;
};
struct Pad {
  static constexpr uint32_t kBegin = 8, kCount = 16, kWidth = 4;
};
struct Factor {
  static constexpr uint32_t kPeriod = 100, kOffset = 1;
  static constexpr float kScale = 0.25f;
};

__device__ __forceinline__ void put(Head<Part>& head, uint32_t lane, float* out) {
  head.vectors(lane, [&](float (&x)[Part::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < Part::kWidth; ++j) out[e + j] = x[j];
  });
}

// A head each of 8 lanes: its norms, one after another from the same numbers, and which lanes share it.
extern "C" __global__ void head_norms(const float* rows, const float* weight, const float* bias, uint32_t* masks, float* plain, float* by,
                                      float* standard, float* layer, float* biased) {
  const uint32_t lane = threadIdx.x % Part::kLanes, at = threadIdx.x / Part::kLanes * Part::kDim;
  masks[threadIdx.x] = head_mask<Part>(lane);
  Head<Part> x;
  x.load(rows + at, lane);
  rms_norm<First>(x, lane);
  put(x, lane, plain + at);
  x.load(rows + at, lane);
  rms_norm_by<First>(x, 0.25f, lane);
  put(x, lane, by + at);
  x.load(rows + at, lane);
  standardize<First>(x, lane);
  put(x, lane, standard + at);
  x.load(rows + at, lane);
  layer_norm<First>(x, weight, lane);
  put(x, lane, layer + at);
  x.load(rows + at, lane);
  layer_norm<First>(x, weight, bias, lane);
  put(x, lane, biased + at);
}

// The first pairs rotated, then all times a half.
extern "C" __global__ void head_first_pairs(const float* rows, const float2* angles, float* rotated, float* scaled) {
  __shared__ float2 placed[Part::kRotaryPairs];
  if (threadIdx.x < Part::kRotaryPairs) placed[first_angle<Part>(threadIdx.x)] = angles[threadIdx.x];
  __syncthreads();
  const uint32_t lane = threadIdx.x % Part::kLanes, at = threadIdx.x / Part::kLanes * Part::kDim;
  Head<Part> x;
  x.load(rows + at, lane);
  rotate_first(x, placed, lane);
  put(x, lane, rotated + at);
  scale_head(x, 0.5f, lane);
  put(x, lane, scaled + at);
}

extern "C" __global__ void head_position_factors(const uint32_t* positions, float* factors) {
  factors[threadIdx.x] = position_factor<Factor>(positions[threadIdx.x]);
}

// 8 heads of 4 lanes; and the sums and differences of neighbours.
extern "C" __global__ void head_hadamard(const float* rows, float* transformed, float* pairs) {
  const uint32_t lane = threadIdx.x % Whole::kLanes, at = threadIdx.x / Whole::kLanes * Whole::kDim;
  Head<Whole> x;
  x.load(rows + at, lane);
  hadamard(x, lane);
  x.vectors(lane, [&](float (&mine)[Whole::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < Whole::kWidth; ++j) transformed[at + e + j] = mine[j];
  });
  float a = rows[2 * threadIdx.x], b = rows[2 * threadIdx.x + 1];
  add_and_subtract(a, b);
  pairs[2 * threadIdx.x] = a;
  pairs[2 * threadIdx.x + 1] = b;
}

// 8 heads of 4 lanes: the largest magnitude of each vector's block, codes and scales of blocks of 32 and of 16, their exponents; every other head NaN.
extern "C" __global__ void head_blocks(const float* rows, float* amax, float* scale, uint8_t* powers, float* power_scales, uint8_t* quotients,
                                       float* quotient_scales, uint32_t* words, float* nans) {
  constexpr uint32_t kVectors = 2 * HeadLayout<Whole>::kChunks;
  const uint32_t lane = threadIdx.x % Whole::kLanes, head = threadIdx.x / Whole::kLanes, at = head * Whole::kDim;
  Head<Whole> x;
  x.load(rows + at, lane);
  float most[kVectors];
  block_amax<32>(most, x, lane);
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const uint32_t e = HeadLayout<Whole>::element(v / 2 * Whole::kLanes + lane, v % 2) / Whole::kWidth;
    amax[head * Whole::kDim / Whole::kWidth + e] = most[v];
    scale[head * Whole::kDim / Whole::kWidth + e] = block_scale<Powers>(most[v]);
  }
  store_blocks<Powers, 8>((e4m3*)powers + at, power_scales + head, x, lane);
  x.load(rows + at, lane);
  store_blocks<Quotients, 8>((e4m3*)quotients + at, quotient_scales + head, x, lane);
  __syncwarp();
  if (lane == 0) words[head] = e8m0_word(power_scales[head], power_scales[head + 8], infinity(), 1.0f);
  x.load(rows + at, lane);
  if (head % 2 == 0) make_nan(x, lane);
  x.vectors(lane, [&](float (&mine)[Whole::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < Whole::kWidth; ++j) nans[at + e + j] = mine[j];
  });
}

// Codes as e2m1.
extern "C" __global__ void head_packed_blocks(const float* rows, uint8_t* codes, float* scales) {
  const uint32_t lane = threadIdx.x % Whole::kLanes, head = threadIdx.x / Whole::kLanes;
  Head<Whole> x;
  x.load(rows + head * Whole::kDim, lane);
  store_packed_blocks<Powers>(codes + head * Whole::kDim / 2, scales + 2 * head, x, lane);
}

// Rows of 24 elements, the last 16 of them zeros where a row is not padding.
extern "C" __global__ void head_pads(const uint32_t* states, float* out) {
  __shared__ NewRow row_states[6];
  if (threadIdx.x < 6) row_states[threadIdx.x] = {0, 0, 0, (RowState)states[threadIdx.x]};
  __syncthreads();
  const Rows<float> to = {out, 24, 0};
  store_pad_heads<Pad, 32>(to, row_states, 6);
}
