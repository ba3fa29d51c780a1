// row_lanes.cuh: attention of a block's warps over one tile of tokens in pages of 8, all that lies in shared memory and what each warp has of it.
#include "tiles.cuh"
#include "../../../templates/device/attention/extend/row_lanes.cuh"

template <typename KeyRunOf, typename ValueRunOf, uint32_t kT, uint32_t kNOf, uint32_t kWarps, uint32_t kPartsOf, uint32_t kPartDimsOf, uint32_t kWidth>
struct LanesOf {
  using K = KeyRunOf;
  using V = ValueRunOf;
  static constexpr uint32_t kTokens = kT, kTeamWarps = kWarps, kN = kNOf, kParts = kPartsOf, kPartDims = kPartDimsOf;
  static constexpr uint32_t kKeyPitch = 44, kValuePitch = kParts * kPartDims + 4, kKeyWidth = kWidth, kValueWidth = 4;
  static constexpr float kSlack = 8.0f;
};
using LanesParts = LanesOf<PlainK<bf16>, PlainV<bf16>, 16, 2, 4, 2, 32, 8>;
using LanesWhole = LanesOf<KeyRun<e4m3, float, Recipe::amax, kDims>, ValueRun<e4m3, float, Recipe::amax, kDims>, 32, 4, 2, 1, 48, 4>;
template <>
struct RowShape<LanesParts> : LaneShape<LanesParts> {};
template <>
struct RowShape<LanesWhole> : LaneShape<LanesWhole> {};

// Of the second kv head. Columns of q from the first warp's on, which of them live, and which tokens each sees, [col][token]. Then each
// thread's token; Q, K and V as they lie in shared memory; products, of each part, [part][col][token]; weights; maxima, sums and sums of V.
template <typename Tile>
__device__ __forceinline__ void attend(const Cache<typename Tile::K, typename Tile::V>& cache, const bf16* q, const uint32_t* lives, const uint32_t* sees,
                                       uint32_t* tokens, float* query, float* keys, float* values, float* scores, float* weights, float* max,
                                       float* sum, float* out) {
  using Shape = LaneShape<Tile>;
  constexpr uint32_t kT = Tile::kTokens, kCols = Shape::kCols;
  __shared__ alignas(16) typename Shape::Query shared_query;
  __shared__ alignas(16) typename Shape::Rows rows;
  __shared__ alignas(16) typename Shape::Weights shared_weights;
  const uint32_t thread = threadIdx.x, warp = thread / 32, part = warp % Tile::kParts, first = warp / Tile::kParts * 8 * Tile::kN;
  const uint32_t token = token_of_thread<Tile>(), g = thread % 32 / 4;
  const PageRef page = cache.page(cache.page_ids(cache.page_list(0), token / kTokens));
  tokens[thread] = token;

  for (uint32_t col = warp; col < kCols; col += Tile::kTeamWarps) store_query_column<Tile>(shared_query, col, q + col * kDims, lives[col] != 0);
  store_key_row<Tile>(rows, cache, page, token % kTokens, kHead, 1.0f);
  __syncthreads();
  for (uint32_t i = thread; i < kCols * Shape::kKeyDims; i += Shape::kThreads) query[i] = shared_query[i / Shape::kKeyDims][i % Shape::kKeyDims];
  for (uint32_t i = thread; i < kT * Shape::kKeyDims; i += Shape::kThreads) {
    keys[i] = ((const float*)rows)[i / Shape::kKeyDims * Tile::kKeyPitch + i % Shape::kKeyDims];
  }
  RowSums<Tile> sums;
  RowScores<Tile> s;
  multiply_qk(s, shared_query, first, rows);
  for_each_score(s, [&](uint32_t n, uint32_t m, uint32_t h, float& x) {
    const uint32_t col = first + 16 * m + g + 8 * h;
    scores[(part * kCols + col) * kT + n] = x;
    if (!sees[col * kT + n]) x = -infinity();
  });
  float high[Shape::kM][2];
  if (__any_sync(~0u, tile_max(high, s, sums, 0.5f))) raise_max(sums, high);
  store_weights(shared_weights, first, sums, s, 0.5f);
  __syncthreads();
  store_row<Tile, typename Tile::V, Shape::kValueDims, Tile::kValuePitch, Tile::kValueWidth>(rows, cache, no_page(Fault::none), 0, kHead, 1.0f);
  __syncthreads();
  for (uint32_t i = thread; i < kT * Shape::kValueDims; i += Shape::kThreads) {  // zeros of no page
    values[kT * Shape::kValueDims + i] = ((const float*)rows)[i / Shape::kValueDims * Tile::kValuePitch + i % Shape::kValueDims];
  }
  __syncthreads();
  store_value_row<Tile>(rows, cache, page, token % kTokens, kHead, 1.0f);
  __syncthreads();
  for (uint32_t i = thread; i < kCols * kT; i += Shape::kThreads) weights[i] = shared_weights[i / kT][i % kT];
  for (uint32_t i = thread; i < kT * Shape::kValueDims; i += Shape::kThreads) {
    values[i] = ((const float*)rows)[i / Shape::kValueDims * Tile::kValuePitch + i % Shape::kValueDims];
  }
  multiply_pv(sums, shared_weights, first, rows);
#pragma unroll
  for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t col = first + 16 * m + g + 8 * h;
      float all = sums.row_sum[m][h];
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if (Shape::has_heads()) max[col] = sums.row_max[m][h], sum[col] = all;
#pragma unroll
      for (uint32_t d = 0; d < Shape::kDimTiles; ++d)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) out[col * Shape::kValueDims + Shape::dim(d, e)] = sums.out[m][d][2 * h + e];
    }
}

// [thread]: the first dim, and whether it stores heads.
template <typename Tile>
__device__ __forceinline__ void places(uint32_t* to) {
  to[2 * threadIdx.x] = LaneShape<Tile>::first_dim();
  to[2 * threadIdx.x + 1] = LaneShape<Tile>::has_heads();
}

#define ATTEND(name, Tile)                                                                                                                       \
  extern "C" __global__ void name(uint8_t* keys_in, uint8_t* values_in, Tile::K::Scale* scales, const uint32_t* table, const bf16* q,            \
                                  const uint32_t* lives, const uint32_t* sees, uint32_t* lanes, uint32_t* tokens, float* query, float* keys,     \
                                  float* values, float* scores, float* weights, float* max, float* sum, float* out) {                            \
    places<Tile>(lanes);                                                                                                                         \
    attend<Tile>({keys_in, values_in, scales, table}, q, lives, sees, tokens, query, keys, values, scores, weights, max, sum, out);              \
  }
ATTEND(lanes_parts, LanesParts)
ATTEND(lanes_whole, LanesWhole)
