// head_norms.cuh, first_pairs.cuh and position_scale.cuh: heads of 40 dims on 8 lanes, of which 5 have a pair of vectors.
#include "runs.cuh"
#include "../../../templates/device/rows/head_norms.cuh"
#include "../../../templates/device/rows/first_pairs.cuh"
#include "../../../templates/device/rows/position_scale.cuh"

struct Part {
  static constexpr uint32_t kDim = 40, kWidth = 4, kLanes = 8, kRotaryBegin = 0, kRotaryDim = 40;
  static constexpr uint32_t kTurningPairs = 8;
  static constexpr bool kNeox = true;
};
struct First {
  static constexpr uint32_t kCount = 24;
  static constexpr float kEps = 0.0625f;
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

// The first pairs turned, then all times a half.
extern "C" __global__ void head_first_pairs(const float* rows, const float2* angles, float* turned, float* scaled) {
  __shared__ float2 placed[Part::kTurningPairs];
  if (threadIdx.x < Part::kTurningPairs) placed[first_angle<Part>(threadIdx.x)] = angles[threadIdx.x];
  __syncthreads();
  const uint32_t lane = threadIdx.x % Part::kLanes, at = threadIdx.x / Part::kLanes * Part::kDim;
  Head<Part> x;
  x.load(rows + at, lane);
  rotate_first(x, placed, lane);
  put(x, lane, turned + at);
  scale_head(x, 0.5f, lane);
  put(x, lane, scaled + at);
}

extern "C" __global__ void head_position_factors(const uint32_t* positions, float* factors) {
  factors[threadIdx.x] = position_factor<Factor>(positions[threadIdx.x]);
}
