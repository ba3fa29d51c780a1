// The scales of a tile's tokens: copied into its stage with the rows, a token a thread, and read there as products want them.
//
// token: scales of few groups of dims multiply sums of products, the rows of S, and the weights of V, as f32; so do zero points, which are
// those of integer codes. key_groups, value_groups: those of many groups are applied to fragments, as f16: a = code * scale - zero * scale.
// They are expanded once a tile, from its stage to shared memory of the team. Scales that the caller gives for all tokens are none of these.
#pragma once

#include "../memory/cp_async.cuh"
#include "fragments.cuh"
#include "split_kv.cuh"

enum class ScaleUse : uint32_t { none, token, key_groups, value_groups };

// How the scales of kTokens tokens are used, and how many neighbouring ones of a token, zero points included, are one copy. A copy
// has 4, 8 or 16 bytes; where kRun scales have fewer, it is the aligned word that holds them. kRun = 0: no word surely holds a scale
// and nothing past its page.
template <ScaleUse kUseOf, uint32_t kTokensOf, uint32_t kRunOf>
struct ScaleTile {
  static constexpr ScaleUse kUse = kUseOf;
  static constexpr uint32_t kTokens = kTokensOf, kRun = kRunOf;
};

template <typename S, typename How>
struct TileScales {
  using Scale = typename S::Scale;
  using Bits = typename Word<sizeof(Scale)>::type;
  static constexpr ScaleUse kUse = How::kUse;
  static constexpr uint32_t kTokens = How::kTokens;
  static constexpr bool kGrouped = kUse == ScaleUse::key_groups || kUse == ScaleUse::value_groups;
  static constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims, kEach = 1 + S::kZero;
  static constexpr uint32_t kRun = How::kRun == 0 ? 1 : How::kRun, kCopies = kUse == ScaleUse::none ? 0 : kGroups * kEach / kRun;
  static constexpr uint32_t kCopyBytes = kRun * sizeof(Scale) < 4 ? 4 : kRun * sizeof(Scale);
  static constexpr bool kInWord = How::kRun > 0 && kRun * sizeof(Scale) < 4;  // a copy is a word with other scales in it
  // Whether a lane reads those of its tokens together.
  static constexpr bool kTogether = kUse == ScaleUse::token && How::kRun > 0 && kRun * sizeof(Scale) == kCopyBytes;
  // In a stage: copy i of token t at (i * kTokens + slot(t)) * kCopyBytes.
  static constexpr uint32_t kStageBytes = kCopies * kTokens * kCopyBytes;
  // Expanded, keys: every scale twice, for the two elements of a register; values: those of two tokens side by side.
  static constexpr uint32_t kEntry = kUse == ScaleUse::value_groups ? 2 : 4;
  static constexpr uint32_t kExpandedBytes = kGrouped ? kTokens * kGroups * kEach * kEntry : 0;
  static_assert(kCopyBytes <= 16 && kGroups * kEach % kRun == 0);

  // Tokens that a lane has of scores, 8 apart, are neighbours there.
  __device__ static __forceinline__ uint32_t slot(uint32_t token) {
    return kTogether ? token % 8 * (kTokens / 8) + token / 8 : token;
  }

  // Scale or zero point n of token `token`, out of its stage; `offset` is the token's in its page, which counts from a word.
  __device__ static __forceinline__ Scale read(const uint8_t* stage, uint32_t n, uint32_t token, uint32_t offset, uint32_t head) {
    return *(const Scale*)(stage + place(n, token, offset, head));
  }

  // Whether the page begins where copies can.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ bool aligned(const Cache& cache, const Page& page) {
    if constexpr (kCopies == 0 || (How::kRun > 0 && S::kScaleVector * sizeof(Scale) % kCopyBytes == 0)) return true;
    else return How::kRun > 0 && (uint64_t)S::scales(cache, page) % kCopyBytes == 0;
  }
  // Starts the copies of token `token` of the tile out of such a page; where it is not `live`, zeros.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_async(uint32_t stage, const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live) {
#pragma unroll
    for (uint32_t i = 0; i < kCopies; ++i) {
      uint64_t from = (uint64_t)(scale_at<S>(cache, page, offset, head, i * kRun / kEach * S::kBlockDims) + i * kRun % kEach);
      if constexpr (kInWord) from &= ~(uint64_t)3;
      cp_async<kCopyBytes>(stage + (i * kTokens + slot(token)) * kCopyBytes, (const void*)from, live);
    }
  }
  // The same out of any page: one by one, and waited for here, where it does not begin so.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_any(uint32_t stage, const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live) {
    if (aligned(cache, page)) return copy_async(stage, cache, page, token, offset, head, live);
    if constexpr (sizeof(Scale) < 4) {
#pragma unroll 1
      for (uint32_t n = 0; n < kCopies * kRun; ++n) {
        const Scale* from = scale_at<S>(cache, page, offset, head, n / kEach * S::kBlockDims) + n % kEach;
        store_shared(stage + place(n, token, offset, head), live ? *(const Bits*)from : Bits(0));
      }
    }
  }

  // The scales of token `token`, out of its stage.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t token, uint32_t offset, uint32_t head) {
    constexpr uint32_t kValues = kGroups * kEach;
    alignas(16) Scale loaded[(kValues + 3) / 4 * 4] = {};
#pragma unroll
    for (uint32_t n = 0; n < kValues; ++n) {
      if constexpr (kInWord) loaded[n] = read(stage, n, token, offset, head);
      else if (n % kRun == 0) *(Vec<Scale, kRun>*)&loaded[n] = *(const Vec<Scale, kRun>*)(stage + place(n, token, offset, head));
    }
    uint32_t pairs[(kValues + 3) / 4 * 2];
#pragma unroll
    for (uint32_t n = 0; n < kValues; n += 4) halves(*(uint32_t(*)[2])&pairs[n / 2], &loaded[n]);
    const auto twice = [&](uint32_t n) { return permute(pairs[n / 2], 0, n % 2 == 0 ? 0x1010 : 0x3232); };
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      put(to, group, token, twice(group * kEach));
      if constexpr (S::kZero) put(to, kGroups + group, token, multiply_halves(twice(group * kEach) ^ 0x80008000u, twice(group * kEach + 1)));
    }
  }

  // A fragment's register: the token's, or those of `token` and the next.
  struct Pair {
    uint32_t scale, zero;
  };
  __device__ static __forceinline__ Pair pair(const uint8_t* expanded, uint32_t group, uint32_t token) {
    const auto at = [&](uint32_t line) { return *(const uint32_t*)(expanded + (line * kTokens + token) * kEntry); };
    return {at(group), S::kZero ? at(kGroups + group) : 0};
  }
  __device__ static __forceinline__ uint32_t apply(uint32_t codes, const Pair& pair) {
    return S::kZero ? multiply_add_halves(codes, pair.scale, pair.zero) : multiply_halves(codes, pair.scale);
  }

 private:
  // Where scale or zero point n of token `token` lies in a stage.
  __device__ static __forceinline__ uint32_t place(uint32_t n, uint32_t token, uint32_t offset, uint32_t head) {
    const uint32_t copy = (n / kRun * kTokens + slot(token)) * kCopyBytes, in_copy = n % kRun * sizeof(Scale);
    if constexpr (!kInWord) return copy + in_copy;
    return copy + (uint32_t)(S::scale_offset(offset, head, n / kEach * S::kBlockDims) + n % kEach) * (uint32_t)sizeof(Scale) % 4;
  }
  __device__ static __forceinline__ void store_shared(uint32_t to, uint32_t bits) {
    if constexpr (sizeof(Scale) == 1) asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
    else asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((uint16_t)bits) : "memory");
  }
  // Four as f16.
  __device__ static __forceinline__ void halves(uint32_t (&out)[2], const Scale* in) {
    if constexpr (sizeof(Scale) == 1 && kFragmentFactor<Scale> == 1.0f) {
      widen<true>(Scale{}, out, in[0].bits | in[1].bits << 8 | in[2].bits << 16 | (uint32_t)in[3].bits << 24);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) out[i] = half_of(in[2 * i]) | half_of(in[2 * i + 1]) << 16;
    }
  }
  template <typename T>
  __device__ static __forceinline__ uint32_t half_of(T x) { return from_f32<f16>(to_f32(x)).bits; }
  __device__ static __forceinline__ uint32_t half_of(f16 x) { return x.bits; }
  __device__ static __forceinline__ void put(uint8_t* to, uint32_t line, uint32_t token, uint32_t both) {
    if constexpr (kUse == ScaleUse::key_groups) {
      ((uint32_t*)to)[line * kTokens + token] = both;
    } else {
      ((uint16_t*)to)[line * kTokens + token] = (uint16_t)both;
    }
  }
};

// The scales and zero points of a lane's tokens of a tile, lane / 4 + 8i, of each group; `first` is the tile's first token in its request.
template <typename Scales>
struct LaneScales {
  static constexpr uint32_t kEach = Scales::kEach, kOfToken = Scales::kGroups * kEach, kOfLane = Scales::kTokens / 8;
  float e[kOfToken][kOfLane];

  template <typename Cache>
  __device__ __forceinline__ LaneScales(const uint8_t* stage, const Cache& cache, uint32_t first, uint32_t head) {
    const uint32_t g = threadIdx.x % 32 / 4;
    if constexpr (!Scales::kTogether) {
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i)
#pragma unroll
        for (uint32_t n = 0; n < kOfToken; ++n) e[n][i] = to_f32(Scales::read(stage, n, g + 8 * i, (first + g + 8 * i) % cache.page_tokens, head));
    } else {
      using Scale = typename Scales::Scale;
      constexpr uint32_t kRun = Scales::kRun, kAll = kRun * kOfLane, kAtOnce = kAll * sizeof(Scale) > 16 ? 16 / sizeof(Scale) : kAll;
#pragma unroll
      for (uint32_t copy = 0; copy < Scales::kCopies; ++copy)
#pragma unroll
        for (uint32_t from = 0; from < kAll; from += kAtOnce) {
          const auto some = *(const Vec<Scale, kAtOnce>*)(stage + (copy * Scales::kTokens + Scales::slot(g)) * Scales::kCopyBytes + from * sizeof(Scale));
#pragma unroll
          for (uint32_t n = 0; n < kAtOnce; ++n) e[copy * kRun + (from + n) % kRun][(from + n) / kRun] = to_f32(some.e[n]);
        }
    }
  }
  __device__ __forceinline__ float scale(uint32_t group, uint32_t i) const { return e[group * kEach][i]; }
  __device__ __forceinline__ float zero(uint32_t group, uint32_t i) const { return e[group * kEach + kEach - 1][i]; }
};

// The scales of K and V of a tile, K's first, in its stage and where they are expanded to.
template <typename KeyScales, typename ValueScales>
struct StageScales {
  static constexpr uint32_t kStageBytes = KeyScales::kStageBytes + ValueScales::kStageBytes;
  static constexpr uint32_t kExpandedBytes = KeyScales::kExpandedBytes + ValueScales::kExpandedBytes;
  uint32_t stage;

  // Whether the page begins where copies can.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ bool aligned(const Cache& cache, const Page& page) {
    return KeyScales::aligned(cache, page) && ValueScales::aligned(cache, page);
  }
  // Starts the copies of token `token` of a tile, `offset` tokens into such a page; where it is not `live`, zeros.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void copy_async(const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live = true) const {
    if constexpr (KeyScales::kCopies > 0) KeyScales::copy_async(stage, cache, page, token, offset, head, live);
    if constexpr (ValueScales::kCopies > 0) ValueScales::copy_async(stage + KeyScales::kStageBytes, cache, page, token, offset, head, live);
  }
  // The same out of any page.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void copy_any(const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live) const {
    if constexpr (KeyScales::kCopies > 0) KeyScales::copy_any(stage, cache, page, token, offset, head, live);
    if constexpr (ValueScales::kCopies > 0) ValueScales::copy_any(stage + KeyScales::kStageBytes, cache, page, token, offset, head, live);
  }

  // Expands the scales of token `token` of a tile, which this thread has copied.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t token, uint32_t offset, uint32_t head) {
    if constexpr (KeyScales::kGrouped) KeyScales::expand(to, stage, token, offset, head);
    if constexpr (ValueScales::kGrouped) ValueScales::expand(to + KeyScales::kExpandedBytes, stage + KeyScales::kStageBytes, token, offset, head);
  }
};
