// Attention of a tile of tokens on CUDA cores: S = Q K^T, softmax, O += P V in f32, by a warp over 16 columns or 32.
//
// The lanes have the columns and tokens that they have on tensor cores (row_tile.cuh): lane 4g + j columns 16m + g and g + 8, of
// every 8 tokens 2j and 2j + 1; and of every 16 dims of V the four from 4j on. So the softmax and partial results are those of
// tensor cores. Q, a tile's rows of K and then of V, and its weights lie in shared memory as f32, for any type of the cache.
//
// `Tile` names the numbers: segments K and V, kTokens of a tile, kTeamWarps of a block, kParts of them that share columns, each
// with kPartDims dims of V; from row to row in shared memory kKeyPitch and kValuePitch floats, odd multiples of 4, and kKeyWidth
// and kValueWidth elements that a thread loads at once.
#pragma once

#include "row_tile.cuh"

template <typename Tile>
struct LaneShape {
  static constexpr uint32_t kM = Tile::kN / 2, kTokenTiles = Tile::kTokens / 8, kDimTiles = Tile::kPartDims / 8;
  static constexpr uint32_t kCols = 16 * kM * Tile::kTeamWarps / Tile::kParts, kThreads = 32 * Tile::kTeamWarps;
  static constexpr uint32_t kKeyDims = (Tile::K::kSize + 3) / 4 * 4, kValueDims = Tile::kParts * Tile::kPartDims;  // padded
  static constexpr uint32_t kWeightPitch = Tile::kTokens + 4;
  using Query = float[kCols][Tile::kKeyPitch];
  using Rows = float[Tile::kTokens][Tile::kKeyPitch < Tile::kValuePitch ? Tile::kValuePitch : Tile::kKeyPitch];
  using Weights = float[kCols][kWeightPitch];
  static_assert(Tile::kTokens % 8 == 0 && Tile::kPartDims % 16 == 0 && kThreads % Tile::kTokens == 0);

  // The names of RowShape.
  __device__ static __forceinline__ bool has_heads() { return threadIdx.x % 4 == 0 && threadIdx.x / 32 % Tile::kParts == 0; }
  __device__ static __forceinline__ uint32_t first_dim() { return threadIdx.x / 32 % Tile::kParts * Tile::kPartDims + 4 * (threadIdx.x % 4); }
  __device__ static __forceinline__ uint32_t dim(uint32_t d, uint32_t e) { return first_dim() + d / 2 * 16 + d % 2 * 2 + e; }
};

// Column `col` of the block out of `row`, by a warp; zeros if it is not `live`.
template <typename Tile, typename T>
__device__ __forceinline__ void store_query_column(typename LaneShape<Tile>::Query& query, uint32_t col, const T* row, bool live) {
#pragma unroll 4
  for (uint32_t dim = threadIdx.x % 32; dim < LaneShape<Tile>::kKeyDims; dim += 32) query[col][dim] = live && dim < Tile::K::kSize ? to_f32(row[dim]) : 0.0f;
}

// The tile's token of this thread, of which neighbouring threads copy a row.
template <typename Tile>
__device__ __forceinline__ uint32_t token_of_thread() {
  return threadIdx.x / (LaneShape<Tile>::kThreads / Tile::kTokens);
}
// Row `offset` of a page to the thread's token, f32, with zeros behind its kSize dims up to kDims; all zeros where there is no
// page.
template <typename Tile, typename S, uint32_t kDims, uint32_t kPitch, uint32_t kWidth, typename Cache, typename Page>
__device__ __forceinline__ void store_row(typename LaneShape<Tile>::Rows& rows, const Cache& cache, const Page& page, uint32_t offset, uint32_t head, float global) {
  constexpr uint32_t kThreads = LaneShape<Tile>::kThreads / Tile::kTokens, kStore = kWidth < 4 ? kWidth : 4;
  static_assert(!kRowCorrected<S> || (kThreads <= 32 && (kThreads & (kThreads - 1)) == 0), "store_row: the threads of a row are lanes of a warp");
  const uint32_t lane = threadIdx.x % kThreads, mask = kThreads < 32 ? ((1u << kThreads % 32) - 1) << (threadIdx.x % 32 - lane) : ~0u;
  float* to = (float*)rows + token_of_thread<Tile>() * kPitch;
  const float factor = row_factor<S, kThreads, kWidth>(cache, page, offset, head, page.valid, lane, mask, global);
#pragma unroll 4
  for (uint32_t dim = lane * kWidth; dim < kDims; dim += kThreads * kWidth) {
    Vec<float, kWidth> x;
    fill(x, 0.0f);
    if (page.valid && dim < S::kSize) load_of_row<S>(x, cache, page, offset, head, dim, factor);
#pragma unroll
    for (uint32_t i = 0; i < kWidth; i += kStore)
      if (dim + i < kDims) *(Vec<float, kStore>*)(to + dim + i) = *(const Vec<float, kStore>*)&x.e[i];
  }
}
template <typename Tile, typename Cache, typename Page>
__device__ __forceinline__ void store_key_row(typename LaneShape<Tile>::Rows& rows, const Cache& cache, const Page& page, uint32_t offset, uint32_t head, float global) {
  store_row<Tile, typename Tile::K, LaneShape<Tile>::kKeyDims, Tile::kKeyPitch, Tile::kKeyWidth>(rows, cache, page, offset, head, global);
}
template <typename Tile, typename Cache, typename Page>
__device__ __forceinline__ void store_value_row(typename LaneShape<Tile>::Rows& rows, const Cache& cache, const Page& page, uint32_t offset, uint32_t head, float global) {
  store_row<Tile, typename Tile::V, LaneShape<Tile>::kValueDims, Tile::kValuePitch, Tile::kValueWidth>(rows, cache, page, offset, head, global);
}

// Products of the warp's columns, which begin at `first`, with the tile's K.
template <typename Tile>
__device__ __forceinline__ void multiply_qk(RowScores<Tile>& s, const typename LaneShape<Tile>::Query& query, uint32_t first, const typename LaneShape<Tile>::Rows& rows) {
  using Shape = LaneShape<Tile>;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const float* keys = (const float*)rows + 2 * j * Tile::kKeyPitch;
  for_each_score(s, [](uint32_t, uint32_t, uint32_t, float& x) { x = 0.0f; });
#pragma unroll 2
  for (uint32_t dim = 0; dim < Shape::kKeyDims; dim += 4) {
    Vec<float, 4> q[2 * Shape::kM];
#pragma unroll
    for (uint32_t c = 0; c < 2 * Shape::kM; ++c) q[c] = *(const Vec<float, 4>*)&query[first + g + 8 * c][dim];
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTokenTiles; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const auto key = *(const Vec<float, 4>*)(keys + (8 * n + e) * Tile::kKeyPitch + dim);
#pragma unroll
        for (uint32_t c = 0; c < 2 * Shape::kM; ++c) {
          float& to = s.e[c / 2][n][c % 2 * 2 + e];
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i) to = __fmaf_rn(q[c].e[i], key.e[i], to);
        }
      }
  }
}

// The smallest number of f32 that arithmetic does not flush to 0.
constexpr float kLeastWeight = 1.17549435e-38f;

// P = 2^(S - row_max) to shared memory, by one of the warps that share columns, and added to row_sum. Only weights
// of hidden tokens are 0: an infinity or NaN in V of a token that a row sees belongs in its result.
template <typename Tile, typename Factor>
__device__ __forceinline__ void store_weights(typename LaneShape<Tile>::Weights& weights, uint32_t first, RowSums<Tile>& sums, const RowScores<Tile>& s, const Factor& factor) {
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < LaneShape<Tile>::kTokenTiles; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2 * LaneShape<Tile>::kM; ++c) {
      Vec<float, 2> p;
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float x = s.e[c / 2][n][c % 2 * 2 + e], weight = weight_of(sums, x, c / 2, c % 2, factor);
        p.e[e] = x == -infinity() ? 0.0f : weight == 0.0f ? kLeastWeight : weight;
        sums.row_sum[c / 2][c % 2] += p.e[e];
      }
      if (threadIdx.x / 32 % Tile::kParts == 0) *(Vec<float, 2>*)&weights[first + g + 8 * c][8 * n + 2 * j] = p;
    }
}

// Adds V of the tile times the weights. A weight of 0 is not multiplied, because a hidden token may hold anything.
template <typename Tile>
__device__ __forceinline__ void multiply_pv(RowSums<Tile>& sums, const typename LaneShape<Tile>::Weights& weights, uint32_t first, const typename LaneShape<Tile>::Rows& rows) {
  using Shape = LaneShape<Tile>;
  const uint32_t g = threadIdx.x % 32 / 4;
  const float* values = (const float*)rows + Shape::first_dim();
#pragma unroll 1
  for (uint32_t token = 0; token < Tile::kTokens; token += 4) {
    Vec<float, 4> p[2 * Shape::kM];
#pragma unroll
    for (uint32_t c = 0; c < 2 * Shape::kM; ++c) p[c] = *(const Vec<float, 4>*)&weights[first + g + 8 * c][token];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
      for (uint32_t d = 0; d < Shape::kDimTiles; d += 2) {
        const auto v = *(const Vec<float, 4>*)(values + (token + i) * Tile::kValuePitch + 8 * d);
#pragma unroll
        for (uint32_t c = 0; c < 2 * Shape::kM; ++c)
#pragma unroll
          for (uint32_t e = 0; e < 4; ++e) {
            float& to = sums.out[c / 2][d + e / 2][c % 2 * 2 + e % 2];
            if (p[c].e[i] != 0.0f) to = __fmaf_rn(p[c].e[i], v.e[e], to);
          }
      }
  }
}
