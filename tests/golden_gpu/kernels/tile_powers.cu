// tile_powers.cuh: e8m0 scales of 16 tokens, a page of 8 after the other, onto codes, sums of K and weights of V; bf16_codes.cuh, of which they are made.
#include "tiles.cuh"
#include "../../../templates/device/attention/common/tile_powers.cuh"

constexpr uint32_t kTile = 16, kMostLines = 4;
struct Scales16 {
  static constexpr uint32_t page_tokens = kTokens;
  uint8_t* scales;
  uint32_t page_bytes;

  __device__ PageRef nth_page(uint32_t n) const { return {nullptr, scales + n * page_bytes, nullptr, 0, Fault::none, true}; }
};

// Brings the scales of both pages into a stage.
template <typename Scales>
__device__ __forceinline__ void bring(uint8_t* stage, uint8_t* scales, uint32_t row) {
  const Scales16 cache = {scales, kTokens * row};
  for (uint32_t page = 0; page < 2; ++page) Scales::copy_any(matrix_address(stage), cache, cache.nth_page(page), threadIdx.x, page * kTokens, 0, kHead, 0, kTokens);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
}

// Of each group and token: what a register of codes is multiplied by, and becomes; for sums the scale of each token.
template <ScaleUse kUse, uint32_t kRun, uint32_t kD, bool kSums = false>
__device__ __forceinline__ void held(uint8_t* stage, uint8_t* expanded, uint8_t* scales, const uint32_t* codes, uint32_t* out) {
  using S = Run<e4m3, e8m0, Recipe::pow2, false, 1, kD>;
  using Scales = TileScales<S, ScaleTile<kUse, kTile, kRun, kTokens, 32, 1, true>>;
  const uint32_t lane = threadIdx.x;
  bring<Scales>(stage, scales, S::kScaleRow);
  if constexpr (kSums) {
    using Powers = SumPowers<Scales>;
    static_assert(Powers::kBytes <= kTile * kMostLines * 4);
    if (lane < kTile) Powers::expand(expanded, stage, 0, lane, lane % kTokens, kHead);
    __syncwarp();
    const auto own = LanePowers<Powers>(expanded);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
      for (uint32_t group = 0; group < Scales::kGroups; ++group)
        if (lane % 4 == 0) out[(group * kTile + lane / 4 + 8 * i) * 2] = __float_as_uint(own.scale(group, i));
    return;
  }
  using Powers = ElementPowers<Scales>;
  static_assert(Powers::kBytes <= kTile * kMostLines * 4);
  uint32_t powers[(Scales::kGroups + 1) / 2];
  read_powers<Scales>(powers, stage, 0, lane % kTile, lane % kTokens, kHead);
  if (lane < kTile) Powers::expand(expanded, stage, 0, lane, lane % kTokens, kHead);
  __syncwarp();
  if (kUse == ScaleUse::key_groups ? lane < kTile : lane < kTile && lane % 2 == 0) {
#pragma unroll
    for (uint32_t group = 0; group < Scales::kGroups; ++group) {
      const uint32_t pair = Powers::pair(expanded, group, lane);
      out[(group * kTile + lane) * 2] = kUse == ScaleUse::key_groups ? permute(power_of(powers, group), 0, 0x1010) : pair;
      out[(group * kTile + lane) * 2 + 1] = Powers::apply(codes[group * kTile + lane], pair);
    }
  }
}
// Each of these: a block.
extern "C" __global__ void tile_powers_held(uint8_t* scales, const uint32_t* codes, uint32_t* out) {
  __shared__ alignas(16) uint8_t stage[kTile * kMostLines * 4], expanded[kTile * kMostLines * 4];
  uint32_t* to = out + blockIdx.x * kTile * kMostLines * 2;
  switch (blockIdx.x) {
    case 0: return held<ScaleUse::key_groups, 4, 10>(stage, expanded, scales, codes, to);
    case 1: return held<ScaleUse::value_groups, 4, 10>(stage, expanded, scales, codes, to);
    case 2: return held<ScaleUse::value_groups, 2, 20>(stage, expanded, scales, codes, to);
    case 3: return held<ScaleUse::key_groups, 1, 16>(stage, expanded, scales, codes, to);
    case 4: return held<ScaleUse::key_groups, 4, 10, true>(stage, expanded, scales, codes, to);
    case 5: return held<ScaleUse::key_groups, 0, 16, true>(stage, expanded, scales, codes, to);
  }
}

// ---- Weights that carry scales of V, over tiles whose scales rise

template <typename E>
struct Weighed {
  using K = Run<e4m3, e8m0, Recipe::pow2, false, 1, 16>;
  using V = Run<E, e8m0, Recipe::pow2, false, 1, 32>;
  using KeyCode = e4m3;
  using ValueCode = InBf16<E, true>;
  static constexpr uint32_t kKeyGroups = 1, kValueGroups = 2, kTokens = kTile, kTeamWarps = 1, kHeads = 1, kN = 1;
  static constexpr uint32_t kKeyBytes = kDims, kKeyPitch = 48, kValueBytes = kDims / kPerElement<E>, kValuePitch = 48;
  static constexpr float kSlack = 8.0f;
};
// For each of the tiles, whose scales may raise the unit: the weights of scores, [group, half, lane], a sum that began at 1, the unit, and its
// inverse as bf16.
template <typename E>
__device__ __forceinline__ void weigh_tiles(uint8_t* scales, const float* scores, uint32_t tiles, uint32_t* out, float* kept, float* units, uint32_t* inverses) {
  using Tile = Weighed<E>;
  using Scales = TileScales<typename Tile::V, ScaleTile<ScaleUse::value_groups, kTile, 2, kTokens, 32, 1, true>>;
  using Powers = WeightPowers<Scales, E>;
  __shared__ alignas(16) uint8_t stage[Scales::kStageBytes], expanded[Powers::kBytes];
  const uint32_t lane = threadIdx.x, g = lane / 4, j = lane % 4;
  WarpSums<Tile> sums;
  PowerUnit unit;
  sums.out[0][0][0] = 1.0f;
  sums.row_max[0][0] = sums.row_max[0][1] = 0.0f;
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    bring<Scales>(stage, scales + tile * 2 * kTokens * Tile::V::kScaleRow, Tile::V::kScaleRow);
    Powers::expand(expanded, stage, 0, lane % kTile, lane % kTokens, kHead, lane < kTile, sums, unit);
    __syncwarp();
    Scores<Tile> s;
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s.e[0][0][r] = scores[(g + r / 2 * 8) * 8 + 2 * j + r % 2];
    uint32_t weights[2][1][2];
    exponentiate<Powers>(weights, sums, s, 0, 1.0f, expanded);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) out[(tile * 4 + i) * 32 + lane] = weights[i / 2][0][i % 2];
    if (lane == 0) kept[tile] = sums.out[0][0][0], units[tile] = unit.value(), inverses[tile] = unit.inverse;
    __syncwarp();
  }
}
// Of e2m1, then of e4m3.
extern "C" __global__ void tile_powers_weights(uint8_t* scales, const float* scores, uint32_t* out, float* kept, float* units, uint32_t* inverses, uint32_t tiles) {
  weigh_tiles<e2m1x2>(scales, scores, tiles, out, kept, units, inverses);
  weigh_tiles<e4m3>(scales, scores, tiles, out + tiles * 4 * 32, kept + tiles, units + tiles, inverses + tiles);
}

// A thread a word of codes, two bytes of scales and a pair of factors: pairs in every form, scales as bf16, and times the factors; a unit
// raised to the first scale times its inverse, and by how much sums shrink.
extern "C" __global__ void tile_powers_words(const uint32_t* codes, const uint32_t* bytes, const uint32_t* factors, uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, word = codes[i];
  uint32_t together[4], apart[4], below[4], eights[2];
  widen<true>(InBf16<e2m1x2>{}, together, word);
  widen<false>(InBf16<e2m1x2>{}, apart, word);
  widen<false>(InBf16<e2m1x2, true>{}, below, word);
  widen<false>(InBf16<e4m3>{}, eights, word);
  const uint32_t powers = bf16_powers(bytes[i]);
  PowerUnit unit;
  const float shrink = unit.raise((powers & 0x7f80) < 0x7f80 ? max(powers & 0xffff, 0x0080u) : 0x0080u);
  const uint32_t values[] = {together[0], together[1], together[2], together[3], apart[0],    apart[1], apart[2], apart[3], below[0],
                             below[1],    below[2],    below[3],    eights[0],  eights[1],  powers,   multiply_bf16(factors[i], powers), multiply_bf16(unit.inverse, unit.bits * 0x10001u), __float_as_uint(shrink)};
#pragma unroll
  for (uint32_t k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}
