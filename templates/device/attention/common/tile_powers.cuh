// e8m0 scales of groups of dims (MX formats): they multiply codes as bf16, or, where a warp has few columns, sums of products
// with K and weights of V. A stage has them as TileScales copies them (kDirect); once a tile they are expanded to shared memory
// of the team.
#pragma once

#include "bf16_codes.cuh"
#include "mma_tile.cuh"
#include "tile_scales.cuh"

// The scales of token `token` of head `own` of a tile out of its stage, as bf16: groups 2i and 2i + 1 in powers[i].
template <typename Scales>
__device__ __forceinline__ void read_powers(uint32_t (&powers)[(Scales::kGroups + 1) / 2], const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
  constexpr uint32_t kGroups = Scales::kGroups;
#pragma unroll
  for (uint32_t group = 0; group < kGroups; group += 2) {
    if constexpr (Scales::kRun % 4 == 0 && kGroups % 4 == 0) {
      const uint32_t word = *(const uint32_t*)(stage + token * Scales::kCopies * Scales::kCopyBytes + own * kGroups + group / 4 * 4);
      powers[group / 2] = bf16_powers(permute(word, 0, group % 4 == 0 ? 0x4140 : 0x4342));
    } else {
      const auto read = [&](uint32_t n) { return (uint32_t)Scales::read(stage, own * kGroups + n, token, offset, head).bits; };
      powers[group / 2] = bf16_powers(read(group) | read(min(group + 1, kGroups - 1)) << 16);
    }
  }
}
// The scale of group `group`, in the lower half.
template <uint32_t N>
__device__ __forceinline__ uint32_t power_of(const uint32_t (&powers)[N], uint32_t group) { return powers[group / 2] >> group % 2 * 16; }

// Scales for codes, as KeyGroupScales and ValueGroupScales take them.
template <typename Scales>
struct ElementPowers {
  static constexpr uint32_t kGroups = Scales::kGroups, kTokens = Scales::kTokens, kEntry = Scales::kEntry, kBytes = kTokens * kGroups * kEntry;

  // The scales of token `token` of head `own` of the tile, out of its stage.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
    uint32_t powers[(kGroups + 1) / 2];
    read_powers<Scales>(powers, stage, own, token, offset, head);
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      const uint32_t line = group * kTokens + token;
      if constexpr (kEntry == 4) ((uint32_t*)to)[line] = permute(powers[group / 2], 0, group % 2 == 0 ? 0x1010 : 0x3232);
      else ((uint16_t*)to)[line] = (uint16_t)power_of(powers, group);
    }
  }
  // A fragment's register: the token's, or those of `token` and the next.
  __device__ static __forceinline__ uint32_t pair(const uint8_t* expanded, uint32_t group, uint32_t token) {
    return *(const uint32_t*)(expanded + (group * kTokens + token) * kEntry);
  }
  __device__ static __forceinline__ uint32_t apply(uint32_t codes, uint32_t pair) { return multiply_bf16(codes, pair); }
};

// Scales for sums of products of each group of K, as f32, a token's scales side by side.
template <typename Scales>
struct SumPowers {
  static constexpr uint32_t kGroups = Scales::kGroups, kTokens = Scales::kTokens, kBytes = kTokens * kGroups * 4;

  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
    uint32_t powers[(kGroups + 1) / 2];
    read_powers<Scales>(powers, stage, own, token, offset, head);
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) ((float*)to)[token * kGroups + group] = __uint_as_float(power_of(powers, group) << 16);
  }
};
// The scales of a lane's tokens, lane / 4 + 8i (LaneScales).
template <typename Powers>
struct LanePowers {
  static constexpr uint32_t kGroups = Powers::kGroups, kOfLane = Powers::kTokens / 8, kAtOnce = kGroups % 4 == 0 ? 4 : kGroups % 2 == 0 ? 2 : 1;
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

// The unit of V's sums if weights carry V's scales as bf16: the largest scale of the warp's tokens so far. So no weight passes
// bf16's range, and only weights with scales 2^100 below it lose bits.
struct PowerUnit {
  uint32_t bits = 0x0080, inverse = 0x7e807e80u;  // as bf16, at least 2^-126; of both halves

  __device__ __forceinline__ float value() const { return __uint_as_float(bits << 16); }
  // Raises the unit to `higher`; returns the factor of sums.
  __device__ __forceinline__ float raise(uint32_t higher) {
    const float before = value();
    bits = higher;
    inverse = max(0x7f00u - higher, 0x0040u) * 0x10001u;
    return before * __uint_as_float(inverse << 16);
  }
};

// Scales for weights of V, as fractions of a unit, two tokens side by side for each group.
template <typename Scales, typename E>
struct WeightPowers {
  static constexpr uint32_t kGroups = Scales::kGroups, kTokens = Scales::kTokens, kBytes = kTokens * kGroups * 2, kPairs = (kGroups + 1) / 2;
  // Fragments of codes 2^126 below their numbers have weights 2^118 above theirs, beside which 2^kSlack has room; sums are still
  // to be multiplied by the rest.
  static constexpr bool kBelow = kBelowBf16<E> != 1.0f;
  static constexpr float kFactor = kBelow ? 256.0f : 1.0f;

  // The scales of the tile's tokens: each lane has one token, `token`, and some lanes `store` its scales. If a scale passes the
  // unit, the unit rises, and the warp's sums are rescaled.
  template <typename Tile>
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head, bool store,
                                                WarpSums<Tile>& sums, PowerUnit& unit) {
    uint32_t powers[kPairs], above = 0;
    read_powers<Scales>(powers, stage, own, token, offset, head);
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) above |= multiply_bf16(powers[i], unit.inverse) + 0x407f407fu;  // <= 1: below 0x8000
    if (__any_sync(~0u, above & 0x80008000u)) raise_above(powers, sums, unit);
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      powers[i] = multiply_bf16(powers[i], unit.inverse);
      if constexpr (kBelow) powers[i] = multiply_bf16(powers[i], 0x7a807a80u);
    }
    if (!store) return;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group)
      ((uint16_t*)to)[(token / 2 * kGroups + group) * 2 + token % 2] = (uint16_t)power_of(powers, group);
  }

 private:
  // Raises the unit to the largest of all lanes' scales that is not NaN.
  template <typename Tile>
  __device__ static __forceinline__ void raise_above(const uint32_t (&powers)[kPairs], WarpSums<Tile>& sums, PowerUnit& unit) {
    uint32_t high = unit.bits;
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      const uint32_t power = power_of(powers, group) & 0xffff;
      high = power < 0x7f80 ? max(high, power) : high;
    }
    high = __reduce_max_sync(~0u, high);
    if (high == unit.bits) return;
    const float shrink = unit.raise(high);
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) sums.rescale_out(n, e, shrink);
  }
};

// Weights of tokens 16m to 16m + 15 (exponentiate of mma_tile.cuh), times the scales of each group of dims.
template <typename Powers, typename Tile, typename Factor>
__device__ __forceinline__ void exponentiate(uint32_t (&weights)[Tile::kValueGroups][Tile::kN][2], WarpSums<Tile>& sums, const Scores<Tile>& s, uint32_t m, const Factor& factor,
                                             const uint8_t* expanded) {
  constexpr uint32_t kGroups = Powers::kGroups, kAtOnce = kGroups % 4 == 0 ? 4 : kGroups % 2 == 0 ? 2 : 1;
  uint32_t plain[1][Tile::kN][2];
  exponentiate(plain, sums, s, m, factor);
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      const auto* const at = (const Vec<uint32_t, kAtOnce>*)(expanded + ((8 * m + 4 * half + threadIdx.x % 4) * kGroups + group / kAtOnce * kAtOnce) * 4);
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) weights[group][n][half] = multiply_bf16(plain[0][n][half], at->e[group % kAtOnce]);
    }
}
