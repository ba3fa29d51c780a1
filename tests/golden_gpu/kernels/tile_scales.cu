// tile_scales.cuh: the scales of 16 tokens, a page of 8 after the other, into shared memory and onto codes.
#include "runs.cuh"
#include "../../../templates/device/attention/tile_scales.cuh"

struct Cache {};
constexpr uint32_t kTile = 16, kMostLines = 8, kHead = 1;

template <typename S, ScaleUse kUse>
__device__ __forceinline__ void held(uint8_t* tile, void* scales, const uint32_t* codes, uint32_t* out) {
  using Scales = TileScales<S, kTile, kUse>;
  const uint32_t lane = threadIdx.x, page = lane / kTokens % 2;
  for (uint32_t i = lane; i < Scales::kBytes / 4; i += 32) ((uint32_t*)tile)[i] = 0xeeeeeeeeu;
  __syncwarp();
  if (lane < kTile) {
    const PageRef ref = {nullptr, (typename S::Scale*)scales + page * kTokens * S::kScaleRow, nullptr, 0, Fault::none, true};
    typename Scales::Loaded loaded;
    Scales::load(loaded, Cache{}, ref, lane % kTokens, kHead);
    Scales::store(tile, loaded, lane);
  }
  __syncwarp();
  if constexpr (kUse == ScaleUse::token) {
    out[lane] = __float_as_uint(Scales::of_token(tile, lane % kTile));
  } else if (kUse == ScaleUse::key_groups ? lane < kTile : lane < kTile && lane % 2 == 0) {
#pragma unroll
    for (uint32_t group = 0; group < Scales::kGroups; ++group) {
      const auto pair = Scales::pair(tile, group, lane);
      uint32_t* to = out + (group * kTile + lane) * 3;
      to[0] = pair.scale;
      to[1] = pair.zero;
      to[2] = Scales::apply(codes[group * kTile + lane], pair);
    }
  }
}

// Each of these: a block.
extern "C" __global__ void tile_scales_held(uint8_t* f32s, uint8_t* halves, uint8_t* eighths, const uint32_t* codes, uint32_t* out) {
  __shared__ alignas(16) uint8_t tile[kTile * kMostLines * 4];
  uint32_t* to = out + blockIdx.x * kTile * kMostLines * 3;
  constexpr Recipe kHow = Recipe::amax;
  switch (blockIdx.x) {
    case 0: return held<Run<e4m3, float, kHow, false, 1, 40>, ScaleUse::token>(tile, f32s, codes, to);
    case 1: return held<Run<int8_t, f16, kHow, false, 2, 40>, ScaleUse::token>(tile, halves, codes, to);
    case 2: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::key_groups>(tile, halves, codes, to);
    case 3: return held<Run<int8_t, f16, kHow, false, 1, 10>, ScaleUse::value_groups>(tile, halves, codes, to);
    case 4: return held<Run<u4x2, f16, kHow, true, 1, 10>, ScaleUse::key_groups>(tile, halves, codes, to);
    case 5: return held<Run<u4x2, f16, kHow, true, 1, 10>, ScaleUse::value_groups>(tile, halves, codes, to);
    case 6: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::key_groups>(tile, eighths, codes, to);
    case 7: return held<Run<e2m1x2, e4m3, kHow, false, 1, 20>, ScaleUse::value_groups>(tile, eighths, codes, to);
    case 8: return held<Run<uint8_t, f16, kHow, true, 2, 40>, ScaleUse::key_groups>(tile, halves, codes, to);
    case 9: return held<Run<int8_t, f16, kHow, false, 1, 16>, ScaleUse::key_groups>(tile, halves, codes, to);
    case 10: return held<Run<u4x2, f16, kHow, true, 1, 16>, ScaleUse::value_groups>(tile, halves, codes, to);
  }
}

extern "C" __global__ void tile_scales_halves(const uint32_t* in, uint32_t* products, uint32_t* sums, uint32_t* special) {
  const uint32_t i = threadIdx.x, a = in[i], b = in[i ^ 1], c = in[i ^ 2];
  products[i] = multiply_halves(a, b);
  sums[i] = multiply_add_halves(a, b, c);
  special[i] = has_special<f16>(a) + 2 * has_special<bf16>(a);
}
