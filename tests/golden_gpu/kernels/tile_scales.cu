// tile_scales.cuh: the scales of 16 tokens, a page of 8 after the other, into shared memory and onto codes.
#include "runs.cuh"
#include "../../../templates/device/attention/tile_scales.cuh"

struct Cache {
  static constexpr uint32_t page_tokens = kTokens;
};
constexpr uint32_t kTile = 16, kMostLines = 8, kHead = 1, kHidden = 5;  // token 5 is no live one

// A page, shifted by `kOff` scales: where it is not aligned to copies of kRun scales they are loaded, which leaves the same in the stage.
template <typename S, ScaleUse kUse, uint32_t kRun, uint32_t kOff = 0>
__device__ __forceinline__ void held(uint8_t* stage, uint8_t* expanded, void* scales, const uint32_t* codes, uint32_t* out) {
  using Scales = TileScales<S, ScaleTile<kUse, kTile, kRun>>;
  using None = TileScales<S, ScaleTile<ScaleUse::none, kTile, 1>>;
  const StageScales<Scales, None> staged = {(uint32_t)__cvta_generic_to_shared(stage)};
  const uint32_t lane = threadIdx.x, page = lane / kTokens % 2;
  for (uint32_t i = lane; i < Scales::kStageBytes / 4; i += 32) ((uint32_t*)stage)[i] = 0xeeeeeeeeu;
  for (uint32_t i = lane; i < Scales::kExpandedBytes / 4; i += 32) ((uint32_t*)expanded)[i] = 0xeeeeeeeeu;
  __syncwarp();
  const PageRef ref = {nullptr, (typename S::Scale*)scales + page * kTokens * S::kScaleRow + kOff, nullptr, 0, Fault::none, true};
  if (lane < kTile) {
    const bool live = lane != kHidden;
    if (live && staged.aligned(Cache{}, ref)) staged.copy_async(Cache{}, ref, lane, lane % kTokens, kHead);
    else staged.copy_any(Cache{}, ref, lane, lane % kTokens, kHead, live);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  if constexpr (Scales::kGrouped) {
    if (lane < kTile) StageScales<Scales, None>::expand(expanded, stage, lane, lane % kTokens, kHead);
    __syncwarp();
  }
  if constexpr (kUse == ScaleUse::token) {
    const auto own = LaneScales<Scales>(stage, Cache{}, 0, kHead);
    if (lane % 4 == 0) out[lane / 4] = __float_as_uint(own.scale(0, 0));
    if (lane % 4 == 1) out[lane / 4 + 8] = __float_as_uint(own.scale(0, 1));
    if (lane >= kTile) out[lane] = __float_as_uint(to_f32(Scales::read(stage, 0, lane % kTile, lane % kTokens, kHead)));
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

// Scales, and zero points behind those of all groups, that multiply sums: [scale or zero point, group][token].
template <typename S, uint32_t kRun>
__device__ __forceinline__ void zeros(uint8_t* stage, void* scales, uint32_t* out) {
  using Scales = TileScales<S, ScaleTile<ScaleUse::token, kTile, kRun>>;
  const uint32_t lane = threadIdx.x, page = lane / kTokens % 2;
  const PageRef ref = {nullptr, (typename S::Scale*)scales + page * kTokens * S::kScaleRow, nullptr, 0, Fault::none, true};
  if (lane < kTile) Scales::copy_async((uint32_t)__cvta_generic_to_shared(stage), Cache{}, ref, lane, lane % kTokens, kHead, lane != kHidden);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  const auto own = LaneScales<Scales>(stage, Cache{}, 0, kHead);
  if (lane % 4 != 0 || Scales::slot(lane / 4 + 8) != 2 * (lane / 4) + 1) return;
#pragma unroll
  for (uint32_t group = 0; group < Scales::kGroups; ++group)
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      out[group * kTile + lane / 4 + 8 * i] = __float_as_uint(own.scale(group, i));
      out[(Scales::kGroups + group) * kTile + lane / 4 + 8 * i] = __float_as_uint(own.zero(group, i));
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
    case 15: return zeros<Run<u4x2, f16, kHow, true, 1, 20>, 4>(stage, halves, to);
    case 16: return zeros<Run<uint8_t, f16, kHow, true, 1, 20>, 2>(stage, halves, to);
    case 14: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::key_groups, 0>(stage, expanded, halves, codes, to);
  }
}

extern "C" __global__ void tile_scales_halves(const uint32_t* in, uint32_t* products, uint32_t* sums, uint32_t* special) {
  const uint32_t i = threadIdx.x, a = in[i], b = in[i ^ 1], c = in[i ^ 2];
  products[i] = multiply_halves(a, b);
  sums[i] = multiply_add_halves(a, b, c);
  special[i] = has_special<f16>(a) + 2 * has_special<bf16>(a);
}
