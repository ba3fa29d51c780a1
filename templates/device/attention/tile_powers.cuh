// e8m0 scales of groups of dims (MX formats), which multiply codes as bf16, or sums of products: those of K where few columns have them.
#pragma once

#include "bf16_codes.cuh"
#include "mma_tile.cuh"
#include "tile_scales.cuh"

// As TileScales has others of groups. kSums: they multiply sums, as f32.
template <typename S, typename How, bool kSums = false>
struct TilePowers : TileScales<S, How> {
  using Base = TileScales<S, How>;
  using Base::kGroups, Base::kTokens;
  static_assert(Base::kGrouped && kSame<typename S::Scale, e8m0>);
  // Expanded for sums: a token's side by side.
  static constexpr uint32_t kExpandedBytes = kSums ? kTokens * kGroups * 4 : Base::kExpandedBytes;

  // The scales of token `token` of head `own` of the tile, out of its stage.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
#pragma unroll
    for (uint32_t group = 0; group < kGroups; group += 2) {
      const uint32_t pair = bf16_powers(two_bytes(stage, own, token, offset, head, group));
#pragma unroll
      for (uint32_t i = 0; i < 2 && group + i < kGroups; ++i) {
        const uint32_t line = (group + i) * kTokens + token;
        if constexpr (kSums) ((float*)to)[token * kGroups + group + i] = __uint_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u);
        else if constexpr (Base::kEntry == 4) ((uint32_t*)to)[line] = permute(pair, 0, i == 0 ? 0x1010 : 0x3232);
        else ((uint16_t*)to)[line] = (uint16_t)(pair >> 16 * i);
      }
    }
  }
  __device__ static __forceinline__ uint32_t apply(uint32_t codes, const typename Base::Pair& pair) { return multiply_bf16(codes, pair.scale); }

 private:
  // Those of groups `group` and group + 1, a byte in each half; the compiler reads a word once.
  __device__ static __forceinline__ uint32_t two_bytes(const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head, uint32_t group) {
    if constexpr (Base::kRun % 4 == 0 && kGroups % 4 == 0) {
      const uint32_t word = *(const uint32_t*)(stage + token * Base::kCopies * Base::kCopyBytes + own * kGroups + group / 4 * 4);
      return permute(word, 0, group % 4 == 0 ? 0x4140 : 0x4342);
    }
    const auto read = [&](uint32_t n) { return (uint32_t)Base::read(stage, own * kGroups + n, token, offset, head).bits; };
    return read(group) | read(min(group + 1, kGroups - 1)) << 16;
  }
};

// Scales of sums of a lane's tokens, lane / 4 + 8i, of each group (LaneScales).
template <typename Scales>
struct LanePowers {
  static constexpr uint32_t kGroups = Scales::kGroups, kOfLane = Scales::kTokens / 8, kAtOnce = kGroups % 4 == 0 ? 4 : kGroups % 2 == 0 ? 2 : 1;
  alignas(4 * kAtOnce) float e[kOfLane][kGroups];

  __device__ __forceinline__ explicit LanePowers(const uint8_t* expanded) {
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i)
#pragma unroll
      for (uint32_t group = 0; group < kGroups; group += kAtOnce)
        *(Vec<float, kAtOnce>*)&e[i][group] = *(const Vec<float, kAtOnce>*)(expanded + ((threadIdx.x % 32 / 4 + 8 * i) * kGroups + group) * 4);
  }
  __device__ __forceinline__ float scale(uint32_t group, uint32_t i) const { return e[i][group]; }
};
