// fp4_tables.cuh: tables of scales, and what codes select; tables of a tile's scales, 16 tokens, a page of 8 after the other.
#include "runs.cuh"
#include "../../../templates/device/attention/common/tile_scales.cuh"

// Of each scale, four in a word: words whose codes are 0 to 7 and 8 to 15, below it alone, and with the next scale of its word.
extern "C" __global__ void fp4_tables(const uint32_t* scales, Vec<uint32_t, 8>* out) {
  E4m3Table tables[4];
  Fp4Tables::make_tables(tables, scales[threadIdx.x]);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t parts[4][2];
    Fp4Tables::products_of_codes(parts[0], 0x76543210u, tables[i]);
    Fp4Tables::products_of_codes(parts[1], 0xfedcba98u, tables[i]);
    Fp4Tables::products_of_codes(parts[2], 0x76543210u, tables[i], tables[(i + 1) % 4]);
    Fp4Tables::products_of_codes(parts[3], 0xfedcba98u, tables[i], tables[(i + 1) % 4]);
#pragma unroll
    for (uint32_t n = 0; n < 8; ++n) out[threadIdx.x * 4 + i].e[n] = parts[n / 2][n % 2];
  }
}

struct Cache {
  static constexpr uint32_t page_tokens = kTokens;
  e4m3* scales;
  uint32_t page_bytes;

  __device__ PageRef nth_page(uint32_t n) const { return {nullptr, scales + n * page_bytes, nullptr, 0, Fault::none, true}; }
};

// Tables of each group of dims, [group, token], read one by one and by two.
template <uint32_t kRun, uint32_t kDimsOf>
__device__ __forceinline__ void held(e4m3* scales, E4m3Table* out) {
  constexpr uint32_t kTile = 16, kHead = 1;
  using S = Run<e2m1x2, e4m3, Recipe::nvfp4_max, false, 1, kDimsOf>;
  using Scales = TileScales<S, ScaleTile<ScaleUse::key_groups, kTile, kRun, 1, 1>>;
  using None = TileScales<S, ScaleTile<ScaleUse::none, kTile, 1, 1, 1>>;
  __shared__ alignas(16) uint8_t stage[Scales::kStageBytes], expanded[Scales::kExpandedBytes];
  const uint32_t lane = threadIdx.x, token = lane % kTile;
  const Cache cache = {scales, kTokens * S::kScaleRow};
  const StageScales<Scales, None> staged = {(uint32_t)__cvta_generic_to_shared(stage), nullptr};
  if (lane < kTile) staged.fetch(cache, cache.nth_page(lane / kTokens % 2), 0, lane, lane % kTokens, kHead, 0, 1);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  if (lane < kTile) StageScales<Scales, None>::expand(expanded, stage, 0, lane, lane % kTokens, kHead);
  __syncwarp();
#pragma unroll
  for (uint32_t group = 0; group < Scales::kGroups; ++group) {
    const uint32_t dim = (group + 1) * kDimsOf - 1;  // of the last one, past the row
    const auto both = Scales::tables_at<2>(expanded, dim, token / 2 * 2);
    out[group * 32 + lane] = lane < kTile ? Scales::tables_at<1>(expanded, dim, token).e[0] : both.e[token % 2];
  }
}
extern "C" __global__ void fp4_tables_of_tiles(e4m3* scales, E4m3Table* words, E4m3Table* halves) {
  held<1, 16>(scales, words);
  held<0, 24>(scales, halves);
}
