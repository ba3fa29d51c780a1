// tile_scales.cuh: the scales of 16 tokens, a page of 8 after the other, into shared memory and onto codes.
#include "runs.cuh"
#include "../../../templates/device/attention/tile_scales.cuh"

// Pages of scales S.
template <typename S>
struct Cache {
  static constexpr uint32_t page_tokens = kTokens;
  typename S::Scale* scales;
  __device__ PageRef nth_page(uint32_t n) const { return {nullptr, scales + n * kTokens * S::kScaleRow, nullptr, 0, Fault::none, true}; }
};
constexpr uint32_t kTile = 16, kMostLines = 8, kHead = 1, kHidden = 5;  // token 5 is no live one

// Pages, shifted by `kOff` scales: where they are not aligned to copies of kRun scales these are loaded, which the next fetch stores.
template <typename S, ScaleUse kUse, uint32_t kRun, uint32_t kOff = 0>
__device__ __forceinline__ void held(uint8_t* stage, uint8_t* expanded, void* scales, const uint32_t* codes, uint32_t* out) {
  using Scales = TileScales<S, ScaleTile<kUse, kTile, kRun>>;
  using None = TileScales<S, ScaleTile<ScaleUse::none, kTile, 1>>;
  const Cache<S> cache = {(typename S::Scale*)scales + kOff};
  const uint32_t lane = threadIdx.x, at = (uint32_t)__cvta_generic_to_shared(stage);
  typename StageScales<Scales, None>::Loaded loaded(cache, at);
  const StageScales<Scales, None> staged = {at, loaded};
  for (uint32_t i = lane; i < Scales::kStageBytes / 4; i += 32) ((uint32_t*)stage)[i] = 0xeeeeeeeeu;
  for (uint32_t i = lane; i < Scales::kExpandedBytes / 4; i += 32) ((uint32_t*)expanded)[i] = 0xeeeeeeeeu;
  __syncwarp();
  const PageRef page = cache.nth_page(lane / kTokens % 2);
  if (lane < kTile) {
    const bool live = lane != kHidden;
    if (live && loaded.aligned) staged.copy_async(cache, page, lane, lane % kTokens, kHead);
    else staged.fetch(cache, page, lane, lane % kTokens, kHead, live);
    if (!loaded.aligned) staged.fetch(cache, page, lane, lane % kTokens, kHead, false);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  if constexpr (Scales::kGrouped) {
    if (lane < kTile) StageScales<Scales, None>::expand(expanded, stage, lane, lane % kTokens, kHead);
    __syncwarp();
  }
  if constexpr (kUse == ScaleUse::token) {
    const float scale = kOff > 0 ? to_f32(Scales::read(stage, 0, lane % kTile, lane % kTokens, kHead)) : TokenScales<Scales, Cache<S>>{stage, cache, 0, kHead}(lane % kTile);
    out[lane] = __float_as_uint(scale);
  } else if (kUse == ScaleUse::key_groups ? lane < kTile : lane < kTile && lane % 2 == 0) {
#pragma unroll
    for (uint32_t group = 0; group < Scales::kGroups; ++group) {
      const auto pair = Scales::pair(expanded, group, lane);
      uint32_t* to = out + (group * kTile + lane) * 3;
      to[0] = pair.scale;
      to[1] = pair.zero;
      to[2] = Scales::apply(codes[group * kTile + lane], pair);
    }
  }
}

// Each of these: a block.
extern "C" __global__ void tile_scales_held(uint8_t* f32s, uint8_t* halves, uint8_t* eighths, const uint32_t* codes, uint32_t* out) {
  __shared__ alignas(16) uint8_t stage[kTile * kMostLines * 4], expanded[kTile * kMostLines * 4];
  uint32_t* to = out + blockIdx.x * kTile * kMostLines * 3;
  constexpr Recipe kHow = Recipe::amax;
  switch (blockIdx.x) {
    case 0: return held<Run<e4m3, float, kHow, false, 1, 40>, ScaleUse::token, 1>(stage, expanded, f32s, codes, to);
    case 1: return held<Run<int8_t, f16, kHow, false, 2, 40>, ScaleUse::token, 1>(stage, expanded, halves, codes, to);
    case 2: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::key_groups, 4>(stage, expanded, halves, codes, to);
    case 3: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::value_groups, 2>(stage, expanded, halves, codes, to);
    case 4: return held<Run<u4x2, f16, kHow, true, 1, 10>, ScaleUse::key_groups, 8>(stage, expanded, halves, codes, to);
    case 5: return held<Run<u4x2, f16, kHow, true, 1, 10>, ScaleUse::value_groups, 2>(stage, expanded, halves, codes, to);
    case 6: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::key_groups, 1>(stage, expanded, eighths, codes, to);
    case 7: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::value_groups, 1>(stage, expanded, eighths, codes, to);
    case 8: return held<Run<uint8_t, f16, kHow, true, 2, 40>, ScaleUse::key_groups, 2>(stage, expanded, halves, codes, to);
    case 9: return held<Run<int8_t, f16, kHow, false, 1, 16>, ScaleUse::key_groups, 1>(stage, expanded, halves, codes, to);
    case 10: return held<Run<u4x2, f16, kHow, true, 1, 16>, ScaleUse::value_groups, 2>(stage, expanded, halves, codes, to);
    case 11: return held<Run<int8_t, f16, kHow, false, 2, 40>, ScaleUse::token, 1, 1>(stage, expanded, halves, codes, to);
    case 12: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::value_groups, 1, 1>(stage, expanded, eighths, codes, to);
    case 13: return held<Run<u4x2, f16, kHow, true, 1, 10>, ScaleUse::key_groups, 4, 4>(stage, expanded, halves, codes, to);
    case 14: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::key_groups, 0>(stage, expanded, halves, codes, to);
  }
}

extern "C" __global__ void tile_scales_halves(const uint32_t* in, uint32_t* products, uint32_t* sums, uint32_t* special) {
  const uint32_t i = threadIdx.x, a = in[i], b = in[i ^ 1], c = in[i ^ 2];
  products[i] = multiply_halves(a, b);
  sums[i] = multiply_add_halves(a, b, c);
  special[i] = has_special<f16>(a) + 2 * has_special<bf16>(a);
}
