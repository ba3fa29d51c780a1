// tile_channels.cuh: fragments of 16 tokens whose codes have a scale and a zero point a dim, and of rows that wait, from the third token on.
#include "runs.cuh"
#include "../../../templates/device/base/fault.cuh"

struct Cache {
  static constexpr uint32_t page_tokens = kTokens;
};

#include "../../../templates/device/attention/common/tile_channels.cuh"

struct Tile {
  using K = Run<u4x2, f16, Recipe::amax, true, 1, 1, 16>;
  using V = K;
  static constexpr uint32_t kTokens = 16, kTeamWarps = 1, kN = 1, kKeyBytes = kDims / 2, kKeyPitch = 48, kValueBytes = kKeyBytes, kValuePitch = kKeyPitch;
  using KeyCode = K::Element;
  using ValueCode = V::Element;
  static constexpr uint32_t kKeyGroups = 1, kValueGroups = 1;
};

// The dims of a register's elements, of 4 bits and of 8.
extern "C" __global__ void channel_dims(uint32_t* out) {
  const uint32_t i = threadIdx.x / 2, e = threadIdx.x % 2;
  out[threadIdx.x] = dim_in_word<u4x2>(i, e);
  out[8 + threadIdx.x] = dim_in_word<int8_t>(i, e);
}

// [step, lane, register] of codes, and of rows; the scales as they come into the stage, and zeros in their place.
extern "C" __global__ void channel_fragments(const uint32_t* codes, f16* scales, const f16* rows, uint32_t* scaled, uint32_t* waiting, uint32_t* staged) {
  using Keys = TileShape<Tile>::Keys;
  using Channels = TileChannels<Tile::K, 16, 32>;
  __shared__ alignas(16) uint32_t tile[16 * Tile::kKeyPitch / 4];
  __shared__ alignas(16) uint8_t stage[2][Channels::kStageBytes];
  const uint32_t lane = threadIdx.x, at = matrix_address(tile) + Keys::offset(lane, Tile::kKeyPitch);
  const PageRef page = {nullptr, scales, nullptr, 0, Fault::none, true};
  for (uint32_t i = lane; i < sizeof(tile) / 4; i += 32) tile[i] = codes[i];
  const uint32_t first = (uint32_t)__cvta_generic_to_shared(stage[0]), second = (uint32_t)__cvta_generic_to_shared(stage[1]);
  Channels::Loaded loaded = {{}, first, 0};
  if (Channels::aligned(Cache{})) Channels::copy_run(first, Cache{}, page, lane, 0, 0, 1);
  Channels::copy_any(second, Cache{}, page, lane, 0, 0, 1, 3, 4);
  cp_async_commit();
  cp_async_wait<0>();
  Channels::store_and_load(loaded, second, Cache{}, page, lane, 0, 0, 1, 3, 4);
  cp_async_commit();
  cp_async_wait<0>();
  Channels::copy_some(second, Cache{}, page, lane, 0, 0, 1, 3, 3);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  uint32_t a[Keys::kSteps][4] = {}, b[Keys::kSteps][4] = {};
  load_keys<Tile>(a, at, 0, 0, KeyChannels<Tile>{stage[0]});
  const WaitingRows<Tile> found = {rows, 1, 48, 50, 64};
  load_keys<Tile>(b, at, 0, 0, found);
#pragma unroll
  for (uint32_t s = 0; s < Keys::kSteps; ++s)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      scaled[(s * 32 + lane) * 4 + r] = a[s][r];
      waiting[(s * 32 + lane) * 4 + r] = b[s][r];
    }
  found.load(a, 0, 0);  // the same again
#pragma unroll
  for (uint32_t s = 0; s < Keys::kSteps; ++s)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r)
      if (a[s][r] != b[s][r]) waiting[0] = 0xffffffffu;
  for (uint32_t i = lane; i < 2 * Channels::kStageBytes / 4; i += 32) staged[i] = ((const uint32_t*)stage)[i];
}
