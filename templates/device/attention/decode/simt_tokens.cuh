// Attention on CUDA cores: some lanes of a warp share a token, each with some of its dims of K and V in f32.
//
// `Lanes` names the division: kLanes lanes a token, so 32 / kLanes tokens a warp at once; kWidth elements of a lane at a time, in
// kKeyChunks steps of K and kValueChunks of V, chunk c from dim (c * kLanes + lane) * kWidth on; kCols columns, the segments K
// and V.
#pragma once

#include "../common/columns.cuh"

// The lane's part of q of every column.
template <typename Lanes>
struct LaneQuery {
  float e[Lanes::kCols][Lanes::kKeyChunks][Lanes::kWidth];

  // Column `col` at `row`, kAccess elements at a time; zeros if it is not `live`.
  template <uint32_t kAccess, typename T>
  __device__ __forceinline__ void load(uint32_t col, const T* row, bool live) {
    const uint32_t lane = threadIdx.x % Lanes::kLanes;
#pragma unroll
    for (uint32_t c = 0; c < Lanes::kKeyChunks; ++c) {
      const uint32_t dim = (c * Lanes::kLanes + lane) * Lanes::kWidth;
      Vec<T, Lanes::kWidth> value;
      fill(value, T{});
      if (live && dim < Lanes::K::kSize) ::load<kAccess>(value, row + dim);
#pragma unroll
      for (uint32_t i = 0; i < Lanes::kWidth; ++i) e[col][c][i] = to_f32(value.e[i]);
    }
  }
  // Column `col` times a factor of its scores.
  __device__ __forceinline__ void multiply(uint32_t col, float factor) {
#pragma unroll
    for (uint32_t c = 0; c < Lanes::kKeyChunks; ++c)
#pragma unroll
      for (uint32_t i = 0; i < Lanes::kWidth; ++i) e[col][c][i] *= factor;
  }
};

// A softmax over the tokens of a group of kLanes lanes: of each column the maximum and the sum, and the lane's part of V's sums.
template <typename Lanes>
struct LaneSums {
  float row_max[Lanes::kCols], row_sum[Lanes::kCols];
  float out[Lanes::kCols][Lanes::kValueChunks][Lanes::kWidth];

  __device__ __forceinline__ LaneSums() {
#pragma unroll
    for (uint32_t col = 0; col < Lanes::kCols; ++col) {
      row_max[col] = -infinity();
      row_sum[col] = 0.0f;
#pragma unroll
      for (uint32_t c = 0; c < Lanes::kValueChunks; ++c)
#pragma unroll
        for (uint32_t i = 0; i < Lanes::kWidth; ++i) out[col][c][i] = 0.0f;
    }
  }
};

// The lanes that share this lane's token, as a mask.
template <typename Lanes>
__device__ __forceinline__ uint32_t lanes_of() {
  return ~0u >> (32 - Lanes::kLanes) << (threadIdx.x % 32 / Lanes::kLanes * Lanes::kLanes);
}

// Products of the token at `page`, `offset` with every column, over the lanes that share it; all lanes of the warp take part,
// `live` ones read.
template <typename Lanes, typename Cache>
__device__ __forceinline__ void multiply_qk(float (&score)[Lanes::kCols], const LaneQuery<Lanes>& query, const Cache& cache, const PageRef& page,
                                            uint32_t offset, uint32_t head, bool live, float global) {
  using K = typename Lanes::K;
  const uint32_t lane = threadIdx.x % Lanes::kLanes;
  uint32_t squares = 0;
  float norm = 0.0f;  // asked for first, needed last
  if constexpr (kRowCorrected<K>) norm = live ? to_f32(*scale_at<K>(cache, page, offset, head, 0)) : 0.0f;
#pragma unroll
  for (uint32_t c = 0; c < Lanes::kKeyChunks; ++c) {
    const uint32_t dim = (c * Lanes::kLanes + lane) * Lanes::kWidth;
    if (live && dim < K::kSize) {
      Vec<float, Lanes::kWidth> key;
      if constexpr (kRowCorrected<K>) {
        load_direction<K>(key, squares, page, offset, head, dim);
      } else {
        load_elements<K>(key, cache, page, offset, head, dim, global);
      }
#pragma unroll
      for (uint32_t col = 0; col < Lanes::kCols; ++col)
#pragma unroll
        for (uint32_t i = 0; i < Lanes::kWidth; ++i) score[col] += query.e[col][c][i] * key.e[i];
    }
  }
#pragma unroll
  for (uint32_t col = 0; col < Lanes::kCols; ++col)
#pragma unroll
    for (uint32_t step = Lanes::kLanes / 2; step > 0; step /= 2) score[col] += __shfl_xor_sync(~0u, score[col], step);
  if constexpr (kRowCorrected<K>) {  // so far scores of directions
    norm = corrected_norm<typename K::Element::Book>(norm, reduce_sum<Lanes::kLanes>(squares, ~0u));
#pragma unroll
    for (uint32_t col = 0; col < Lanes::kCols; ++col) score[col] = __fmaf_rn(score[col], norm, norm - norm);  // NaN if infinite
  }
}

// A column's score becomes its weight 2^(score - row_max); sums of earlier tokens are rescaled.
template <typename Lanes>
__device__ __forceinline__ void exponentiate(LaneSums<Lanes>& sums, float& score, uint32_t col) {
  const float row_max = fmaxf(sums.row_max[col], score);
  const float old = rescale(sums.row_max[col], row_max);
  score = rescale(score, row_max);
  sums.row_max[col] = row_max;
  sums.row_sum[col] = sums.row_sum[col] * old + score;
#pragma unroll
  for (uint32_t c = 0; c < Lanes::kValueChunks; ++c)
#pragma unroll
    for (uint32_t i = 0; i < Lanes::kWidth; ++i) sums.out[col][c][i] *= old;
}

// Adds the token's V times the weights; a weight of 0 is not multiplied, because a hidden token may hold anything.
template <typename Lanes, typename Cache>
__device__ __forceinline__ void multiply_pv(LaneSums<Lanes>& sums, const float (&weight)[Lanes::kCols], const Cache& cache, const PageRef& page,
                                            uint32_t offset, uint32_t head, float global) {
  using V = typename Lanes::V;
  const uint32_t lane = threadIdx.x % Lanes::kLanes;
  const float factor = row_factor<V, Lanes::kLanes, Lanes::kWidth>(cache, page, offset, head, true, lane, lanes_of<Lanes>(), global);
#pragma unroll
  for (uint32_t c = 0; c < Lanes::kValueChunks; ++c) {
    const uint32_t dim = (c * Lanes::kLanes + lane) * Lanes::kWidth;
    if (dim < V::kSize) {
      Vec<float, Lanes::kWidth> value;
      load_of_row<V>(value, cache, page, offset, head, dim, factor);
#pragma unroll
      for (uint32_t col = 0; col < Lanes::kCols; ++col) {
        if (weight[col] == 0.0f) continue;
#pragma unroll
        for (uint32_t i = 0; i < Lanes::kWidth; ++i) sums.out[col][c][i] += weight[col] * value.e[i];
      }
    }
  }
}

// The sums of a warp's groups of lanes together, in each of them.
template <typename Lanes>
__device__ __forceinline__ void merge_lanes(LaneSums<Lanes>& sums) {
#pragma unroll
  for (uint32_t step = Lanes::kLanes; step < 32; step *= 2)
#pragma unroll
    for (uint32_t col = 0; col < Lanes::kCols; ++col) {
      const float other = __shfl_xor_sync(~0u, sums.row_max[col], step);
      const float row_max = fmaxf(sums.row_max[col], other);
      const float mine = rescale(sums.row_max[col], row_max), theirs = rescale(other, row_max);
      sums.row_max[col] = row_max;
      sums.row_sum[col] = sums.row_sum[col] * mine + __shfl_xor_sync(~0u, sums.row_sum[col], step) * theirs;
#pragma unroll
      for (uint32_t c = 0; c < Lanes::kValueChunks; ++c)
#pragma unroll
        for (uint32_t i = 0; i < Lanes::kWidth; ++i)
          sums.out[col][c][i] = sums.out[col][c][i] * mine + __shfl_xor_sync(~0u, sums.out[col][c][i], step) * theirs;
    }
}

// A warp's sums to team `team` of `merged` in shared memory, by the lanes of its first group.
template <typename Lanes, typename Merged>
__device__ __forceinline__ void store_team_sums(Merged& merged, uint32_t team, const LaneSums<Lanes>& sums) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane >= Lanes::kLanes) return;
#pragma unroll
  for (uint32_t col = 0; col < Lanes::kCols; ++col) {
    if (lane == 0) merged.max[team][col] = sums.row_max[col];
    if (lane == 0) merged.sum[team][col] = sums.row_sum[col];
#pragma unroll
    for (uint32_t c = 0; c < Lanes::kValueChunks; ++c) {
      const uint32_t dim = (c * Lanes::kLanes + lane) * Lanes::kWidth;
      if (dim < Lanes::V::kSize)
#pragma unroll
        for (uint32_t i = 0; i < Lanes::kWidth; ++i) merged.out[team][col][dim + i] = sums.out[col][c][i];
    }
  }
}
