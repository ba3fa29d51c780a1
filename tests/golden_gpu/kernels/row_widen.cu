// row_widen.cuh: rows of codes as f16, or as bf16 under e8m0 scales, columns of Q as these lie, and scales of tokens on scores and weights.
#include "runs.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"

struct PageIds {};
struct PageList {};

#include "../../../templates/device/attention/extend/extend_tiles.cuh"
#include "../../../templates/device/attention/extend/row_widen.cuh"

// Rows of 128 dims of two heads, a scale for kD dims of each.
template <typename E, typename S, bool kWithZero, uint32_t kD>
struct Wide {
  using Element = E;
  using Scale = S;
  using ScalePointer = S*;
  static constexpr Recipe kRecipe = Recipe::amax;
  static constexpr bool kZero = kWithZero;
  static constexpr uint32_t kSize = 128, kBlockDims = kD, kScaleVector = kSize / kD * (1 + kZero);
  template <typename C>
  __device__ static S* scales(const C&, const PageRef& page) {
    return (S*)page.scales;
  }
  __device__ static constexpr uint32_t scale_offset(uint32_t token, uint32_t head, uint32_t dim) {
    return (token * kHeads + head) * kScaleVector + dim / kD * (1 + kZero);
  }
};
struct NoCache {};

// The rows of a tile by four warps, under scales of head 1; of every seventh row scales are not live, and stay zeros.
template <typename S, ScaleUse kUse, uint32_t kTileTokens>
__device__ __forceinline__ void widen_tile(const uint8_t* codes, uint8_t* scales, uint8_t* out, float* token_scales) {
  using Rows = CodeRows<S, kUse, kTileTokens>;
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * Rows::kRows + lane % Rows::kRows, part = lane / Rows::kRows;
  const PageRef page = {nullptr, scales, nullptr, 0, Fault::none, true};
  typename Rows::Scales own = {};
  Rows::load(own, NoCache{}, page, row, 1, part, row % 7 != 3);
  Rows::store_widened_row(out, codes, row, part, own);
  if (Rows::kToken && part == 0) token_scales[row] = to_f32(own[0]);
}
extern "C" __global__ void __launch_bounds__(128) row_widen_rows(const uint8_t* codes, uint8_t* scales, uint8_t* out, float* token_scales) {
  const uint32_t n = blockIdx.x;
  const uint8_t* from = codes + n * 128 * 128;
  uint8_t *own = scales + n * 4096, *to = out + n * 2 * 128 * 128;
  switch (n) {
    case 0: return widen_tile<Wide<int8_t, f16, false, 32>, ScaleUse::key_groups, 64>(from, own, to, token_scales);
    case 1: return widen_tile<Wide<u4x2, f16, true, 32>, ScaleUse::value_groups, 128>(from, own, to, token_scales);
    case 2: return widen_tile<Wide<e4m3, float, false, 128>, ScaleUse::token, 64>(from, own, to, token_scales);
    case 3: return widen_tile<Wide<e2m1x2, e4m3, false, 16>, ScaleUse::key_groups, 128>(from, own, to, token_scales);
    case 4: return widen_tile<Wide<e2m1x2, e8m0, false, 32>, ScaleUse::value_groups, 128>(from, own, to, token_scales);
    case 5: return widen_tile<Wide<e4m3, e8m0, false, 16>, ScaleUse::key_groups, 64>(from, own, to, token_scales);
  }
}

struct Tile {
  struct K {
    using Element = f16;
    static constexpr Recipe kRecipe = Recipe::none;
    static constexpr bool kZero = false;
  };
  using V = K;
  using KeyCode = f16;
  using ValueCode = f16;
  static constexpr uint32_t kKeyGroups = 1, kValueGroups = 1;
  using Operand = f16;
  static constexpr uint32_t kTokens = 32, kTeamWarps = 4, kN = 2, kKeyDims = 128, kValueDims = 64;
  static constexpr uint32_t kKeyBytes = 2 * kKeyDims, kKeyPitch = kKeyBytes, kValueBytes = 2 * kValueDims, kValuePitch = kValueBytes;
  static constexpr float kSlack = 8.0f;
};

// Columns `cols` of a block by a warp, of which the fourth is not live; dims lie in order, or as codes of 4 bits are widened. Then of each
// eight lanes the places of dims, and the dims of places, of either order.
extern "C" __global__ void row_widen_query(const bf16* q, const uint32_t* cols, uint8_t* plain, uint8_t* apart, uint32_t* places) {
  const uint32_t lane = threadIdx.x;
#pragma unroll 1
  for (uint32_t n = 0; n < 8; ++n) {
    QueryColumn<Tile> x;
    load_pairs(x, q + n * Tile::kKeyDims, n != 3);
    store_pairs<false>(plain, x, cols[n]);
    store_pairs<true>(apart, x, cols[n]);
  }
  const uint32_t i = lane % 8;
  places[lane] = lane < 8 ? place_of_dim<true>(i) : lane < 16 ? dim_at<true>(i) : lane < 24 ? place_of_dim<false>(i) : dim_at<false>(i);
}

// Scores of 64 columns and 32 tokens, of which a column sees those before its limit and a chunk has those before `ends`: weights by scales of
// K and V. Maxima and sums, [column], before and after; what is multiplied by `shrink`; which warps' maxima rose; which weights are -0.
extern "C" __global__ void __launch_bounds__(128) row_widen_weights(const float* scores, const float* k_scales, const float* v_scales, const uint32_t* limits, const uint32_t* ends,
                                                                    float* max, float* sum, float* weights, float* shrink, uint32_t* rises, uint32_t* hidden) {
  constexpr uint32_t kTile = Tile::kTokens;
  __shared__ ScaleRange range;
  const uint32_t block = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = block * 64 + warp * 16 + lane / 4;
  const float *of_keys = k_scales + block * kTile, *of_values = v_scales + block * kTile;
  const uint32_t row = warp * 8 + lane % 8;
  range.store(warp, of_values[row], row < ends[block]);
  __syncthreads();
  RowScores<Tile> s;
  RowSums<Tile> sums;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) sums.row_max[0][h] = max[first + 8 * h], sums.row_sum[0][h] = lane % 4 == 0 ? sum[first + 8 * h] : 0.0f;
  __syncthreads();
  for_each_score(s, [&](uint32_t token, uint32_t, uint32_t h, float& x) { x = scores[(first + 8 * h) * kTile + token]; });
  scale_tokens(s, of_keys);
  for_each_score(s, [&](uint32_t token, uint32_t, uint32_t h, float& x) {
    if (token >= limits[first + 8 * h]) x = -infinity();
  });
  float by[2];
  const bool rose = raise_max(by, sums, s, of_values, range, 0.25f);
  exponentiate<true>(s, sums, of_values, 0.25f);
  add_lanes(sums);
  for_each_score(s, [&](uint32_t token, uint32_t, uint32_t h, float& x) {
    weights[(first + 8 * h) * kTile + token] = x;
    hidden[(first + 8 * h) * kTile + token] = __float_as_uint(x) == 0x80000000u;
  });
  if (lane == 0) rises[block * 4 + warp] = rose;
  if (lane % 4 != 0) return;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) max[first + 8 * h] = sums.row_max[0][h], sum[first + 8 * h] = sums.row_sum[0][h], shrink[first + 8 * h] = by[h];
}
