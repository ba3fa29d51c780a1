// The scales of a tile's tokens: read a tile ahead of their use, a token a lane, and kept in shared memory as products want them.
//
// A scale a token stays f32: it multiplies rows of S, and the weights of V. Scales of groups of dims, and zero points, are
// applied to fragments, as f16: a = code * scale - zero * scale. Scales that the caller gives for all tokens are none of these.
#pragma once

#include "fragments.cuh"
#include "split_kv.cuh"

enum class ScaleUse : uint32_t { none, token, key_groups, value_groups };

template <typename S, uint32_t kTokens, ScaleUse kUse>
struct TileScales {
  static constexpr uint32_t kTileTokens = kTokens;
  static constexpr bool kGrouped = kUse == ScaleUse::key_groups || kUse == ScaleUse::value_groups;
  static constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims, kEach = 1 + S::kZero;
  // Keys: every scale twice, for the two elements of a register; values: those of two tokens side by side.
  static constexpr uint32_t kEntry = kUse == ScaleUse::value_groups ? 2 : 4;
  static constexpr uint32_t kBytes = kUse == ScaleUse::none ? 0 : (kTokens * kGroups * kEach * kEntry + 15) / 16 * 16;

  // Those of a token, scales and zero points in turn.
  struct Loaded {
    typename S::Scale e[kUse == ScaleUse::none ? 1 : kGroups * kEach];
  };

  template <typename Cache, typename Page>
  __device__ static __forceinline__ void load(Loaded& out, const Cache& cache, const Page& page, uint32_t offset, uint32_t head) {
    constexpr uint32_t kAccess = within_block(kGroups * kEach, S::kScaleVector);  // the greatest common divisor
    using Access = Vec<typename S::Scale, kAccess>;
#pragma unroll
    for (uint32_t i = 0; i < kGroups * kEach; i += kAccess) {
      const Access some = *(const Access*)(scale_at<S>(cache, page, offset, head, i / kEach * S::kBlockDims) + i % kEach);
#pragma unroll
      for (uint32_t n = 0; n < kAccess; ++n) out.e[i + n] = some.e[n];
    }
  }

  __device__ static __forceinline__ void store(uint8_t* to, const Loaded& loaded, uint32_t token) {
    if constexpr (kUse == ScaleUse::token) {
      ((float*)to)[token] = to_f32(loaded.e[0]);
    } else {
#pragma unroll
      for (uint32_t group = 0; group < kGroups; ++group) {
        const float scale = to_f32(loaded.e[group * kEach]);
        put(to, group, token, scale);
        if constexpr (S::kZero) put(to, kGroups + group, token, -scale * to_f32(loaded.e[group * kEach + 1]));
      }
    }
  }

  // Of token `token`.
  __device__ static __forceinline__ float of_token(const uint8_t* from, uint32_t token) { return ((const float*)from)[token]; }

  // A fragment's register: the token's, or those of `token` and the next.
  struct Pair {
    uint32_t scale, zero;
  };
  __device__ static __forceinline__ Pair pair(const uint8_t* from, uint32_t group, uint32_t token) {
    const auto at = [&](uint32_t line) { return *(const uint32_t*)(from + (line * kTokens + token) * kEntry); };
    return {at(group), S::kZero ? at(kGroups + group) : 0};
  }
  __device__ static __forceinline__ uint32_t apply(uint32_t codes, const Pair& pair) {
    return S::kZero ? multiply_add_halves(codes, pair.scale, pair.zero) : multiply_halves(codes, pair.scale);
  }

 private:
  __device__ static __forceinline__ void put(uint8_t* to, uint32_t line, uint32_t token, float x) {
    const uint16_t bits = from_f32<f16>(x).bits;
    if constexpr (kUse == ScaleUse::key_groups) {
      ((uint32_t*)to)[line * kTokens + token] = bits | (uint32_t)bits << 16;
    } else {
      ((uint16_t*)to)[line * kTokens + token] = bits;
    }
  }
};

// The scales of K and V of a stage, K's first: a token of a tile by a thread of the team's first kTokens, in registers until a
// barrier later they are stored.
template <typename KeyScales, typename ValueScales>
struct StageScales {
  static constexpr uint32_t kBytes = KeyScales::kBytes + ValueScales::kBytes;
  typename KeyScales::Loaded k;
  typename ValueScales::Loaded v;

  // Of the tile's token number `thread`, where it is one of the chunk's and `page` is found; else zeros.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void load(const Cache& cache, const Page& page, const KvChunk& chunk, uint32_t tile, uint32_t head, uint32_t thread) {
    const uint32_t token = tile * KeyScales::kTileTokens + thread;
    if (thread >= KeyScales::kTileTokens || token < chunk.begin || token >= chunk.end || !page.valid) return;
    if constexpr (KeyScales::kBytes > 0) KeyScales::load(k, cache, page, token % cache.page_tokens, head);
    if constexpr (ValueScales::kBytes > 0) ValueScales::load(v, cache, page, token % cache.page_tokens, head);
  }
  __device__ __forceinline__ void store(uint8_t* to, uint32_t thread) const {
    if (thread >= KeyScales::kTileTokens) return;
    if constexpr (KeyScales::kBytes > 0) KeyScales::store(to, k, thread);
    if constexpr (ValueScales::kBytes > 0) ValueScales::store(to + KeyScales::kBytes, v, thread);
  }
};
