// tile_scales.cuh: the scales of 16 tokens, a page of 8 after the other, into shared memory and onto codes.
#include "runs.cuh"
#include "../../../templates/device/attention/common/tile_scales.cuh"

struct Cache {
  static constexpr uint32_t page_tokens = kTokens;
  uint8_t* scales;
  uint32_t page_bytes;

  __device__ PageRef nth_page(uint32_t n) const { return {nullptr, scales + n * page_bytes, nullptr, 0, Fault::none, true}; }
};
constexpr uint32_t kTile = 16, kMostLines = 8, kHead = 1, kHidden = 5;  // tokens 5 to 7 are no live ones

// Pages, shifted by `kOff` scales: where they are not aligned to copies of kRun scales these are loaded, which leaves the same in the stage.
// The last of kOwn + 1 neighbouring heads is looked at; of several, copies that must be out of any pool wait for what they load.
template <typename S, ScaleUse kUse, uint32_t kRun, uint32_t kOff = 0, uint32_t kOwn = 0>
__device__ __forceinline__ void held(uint8_t* stage, uint8_t* expanded, void* scales, const uint32_t* codes, uint32_t* out) {
  constexpr uint32_t kFirst = kHead - kOwn, kThreads = 32 / 2;  // of a page
  using Scales = TileScales<S, ScaleTile<kUse, kTile, kRun, kTokens, kThreads, kOwn + 1>>;
  using None = TileScales<S, ScaleTile<ScaleUse::none, kTile, 1, kTokens, kThreads>>;
  using Staged = StageScales<Scales, None>;
  const Cache cache = {(uint8_t*)((typename S::Scale*)scales + kOff), (uint32_t)(kTokens * S::kScaleRow * sizeof(typename S::Scale))};
  const uint32_t lane = threadIdx.x, page = lane / kThreads, to = (uint32_t)__cvta_generic_to_shared(stage);
  for (uint32_t i = lane; i < Scales::kStageBytes / 4; i += 32) ((uint32_t*)stage)[i] = 0xeeeeeeeeu;
  for (uint32_t i = lane; i < Scales::kExpandedBytes / 4; i += 32) ((uint32_t*)expanded)[i] = 0xeeeeeeeeu;
  __syncwarp();
  auto loaded = typename Staged::Loaded(cache, to);
  const Staged staged = {to, &loaded}, next = {(uint32_t)__cvta_generic_to_shared(expanded), &loaded};
  const PageRef ref = cache.nth_page(page);
  const uint32_t thread = lane % kThreads, first = page * kTokens, end = page == 0 ? kHidden : kTokens;
  if (kOwn > 0 && (page == 0 || !Scales::aligned(cache))) Scales::copy_any(to, cache, ref, thread, first, 0, kFirst, 0, end);
  else if (!Scales::aligned(cache)) Scales::store_and_load(loaded.keys, to, cache, ref, thread, first, 0, kFirst, 0, end);
  else if (page == 0) Scales::copy_some(to, cache, ref, thread, first, 0, kFirst, 0, end);
  else staged.copy_run(cache, ref, thread, first, 0, kFirst);
  if constexpr (kOwn == 0) next.fetch(cache, ref, thread, first, 0, kFirst, 0, 0);  // what was loaded reaches its stage
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  if constexpr (Scales::kGrouped) {
    if (lane < kTile) StageScales<Scales, None>::expand(expanded, stage, kOwn, lane, lane % kTokens, kFirst);
    __syncwarp();
  }
  if constexpr (kUse == ScaleUse::token) {
    const auto own = LaneScales<Scales>(stage, cache, 0, kOwn, kFirst);
    if (lane % 4 == 0) out[lane / 4] = __float_as_uint(own.scale(0, 0));
    if (lane % 4 == 1) out[lane / 4 + 8] = __float_as_uint(own.scale(0, 1));
    if (lane >= kTile) out[lane] = __float_as_uint(kOff > 0 ? to_f32(Scales::read(stage, kOwn, lane % kTile, lane % kTokens, kFirst)) : TokenScales<Scales, Cache>{stage, cache, 0, kOwn, kFirst}(lane % kTile));
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
template <typename S, uint32_t kRun, uint32_t kOwn = 0>
__device__ __forceinline__ void zeros(uint8_t* stage, void* scales, uint32_t* out) {
  using Scales = TileScales<S, ScaleTile<ScaleUse::token, kTile, kRun, kTokens, 32, kOwn + 1>>;
  constexpr uint32_t kFirst = kHead - kOwn;
  const Cache cache = {(uint8_t*)scales, (uint32_t)(kTokens * S::kScaleRow * sizeof(typename S::Scale))};
  const uint32_t lane = threadIdx.x;
  for (uint32_t page = 0; page < 2; ++page)
    Scales::copy_some((uint32_t)__cvta_generic_to_shared(stage), cache, cache.nth_page(page), lane, page * kTokens, 0, kFirst, 0, page == 0 ? kHidden : kTokens);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  const auto own = LaneScales<Scales>(stage, cache, 0, kOwn, kFirst);
  if (lane % 4 != 0 || ((const typename S::Scale*)(stage + Scales::lane_place(lane / 4, kOwn)))->bits != from_f32<typename S::Scale>(own.scale(0, 0)).bits) return;
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
    case 14: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::key_groups, 0>(stage, expanded, halves, codes, to);
    case 15: return held<Run<e4m3, float, kHow, false, 1, 40>, ScaleUse::token, 1, 0, 1>(stage, expanded, f32s, codes, to);
    case 16: return held<Run<int8_t, f16, kHow, false, 1, 40>, ScaleUse::token, 2, 0, 1>(stage, expanded, halves, codes, to);
    case 17: return held<Run<u4x2, f16, kHow, true, 1, 10>, ScaleUse::key_groups, 8, 0, 1>(stage, expanded, halves, codes, to);
    case 18: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::value_groups, 4, 0, 1>(stage, expanded, eighths, codes, to);
    case 20: return zeros<Run<u4x2, f16, kHow, true, 1, 20>, 4>(stage, halves, to);
    case 21: return zeros<Run<uint8_t, f16, kHow, true, 1, 20>, 2, 1>(stage, halves, to);
    case 19: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::value_groups, 4, 2, 1>(stage, expanded, eighths, codes, to);
  }
}

extern "C" __global__ void tile_scales_halves(const uint32_t* in, uint32_t* products, uint32_t* sums, uint32_t* special) {
  const uint32_t i = threadIdx.x, a = in[i], b = in[i ^ 1], c = in[i ^ 2];
  products[i] = multiply_halves(a, b);
  sums[i] = multiply_add_halves(a, b, c);
  const bool same = multiply_by_half<0>(a, b) == multiply_halves(a, permute(b, 0, 0x1010)) && multiply_by_half<1>(a, b) == multiply_halves(a, permute(b, 0, 0x3232));
  special[i] = has_special<f16>(a) + 2 * has_special<bf16>(a) + 4 * !same;
}

// A thread a token and head: four e4m3 scales out of a stage as f16.
extern "C" __global__ void tile_scales_bytes(uint8_t* scales, Vec<uint32_t, 2>* out) {
  using S = Run<e2m1x2, e4m3, Recipe::amax, false, 1, 10>;
  using Scales = TileScales<S, ScaleTile<ScaleUse::key_groups, kTile, 4, kTokens, 32, 2>>;
  __shared__ alignas(16) uint8_t stage[Scales::kStageBytes];
  const Cache cache = {scales, kTokens * S::kScaleRow};
  const uint32_t lane = threadIdx.x;
  for (uint32_t page = 0; page < 2; ++page) Scales::copy_some(matrix_address(stage), cache, cache.nth_page(page), lane, page * kTokens, 0, 0, 0, kTokens);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  uint32_t four[2];
  GroupBytes<Scales>::halves(four, GroupBytes<Scales>::of(stage, lane / kTile, lane % kTile).e[0]);
  out[lane] = {four[0], four[1]};
}
