// The scales of a tile's tokens: copied into its stage with the rows, a token a thread, and read there as products want them.
//
// A scale a token multiplies rows of S, and the weights of V, as f32. Scales of groups of dims, and zero points, are applied to
// fragments, as f16: a = code * scale - zero * scale. They are expanded once a tile, from its stage to shared memory of the team. Scales that the
// caller gives for all tokens are none of these.
//
// Where a pool's scales lie so that no copy can begin at them, a fetch loads them to registers, and the next fetch stores them to the stage:
// no trip waits for its own loads. Which way a pool takes follows from its base and page stride, and is the same for all its pages.
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
  static constexpr ScaleUse kUse = How::kUse;
  static constexpr uint32_t kTokens = How::kTokens;
  static constexpr bool kGrouped = kUse == ScaleUse::key_groups || kUse == ScaleUse::value_groups;
  static constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims, kEach = 1 + S::kZero;
  static constexpr uint32_t kRun = How::kRun == 0 ? 1 : How::kRun, kCopies = kUse == ScaleUse::none ? 0 : kGroups * kEach / kRun;
  static constexpr uint32_t kCopyBytes = kRun * sizeof(Scale) < 4 ? 4 : kRun * sizeof(Scale);
  static constexpr bool kInWord = How::kRun > 0 && kRun * sizeof(Scale) < 4;  // a copy is a word with other scales in it
  // In a stage: copy i of token t at (i * kTokens + t) * kCopyBytes.
  static constexpr uint32_t kStageBytes = kCopies * kTokens * kCopyBytes;
  // Expanded, keys: every scale twice, for the two elements of a register; values: those of two tokens side by side.
  static constexpr uint32_t kEntry = kUse == ScaleUse::value_groups ? 2 : 4;
  static constexpr uint32_t kExpandedBytes = kGrouped ? kTokens * kGroups * kEach * kEntry : 0;
  static_assert(kCopyBytes <= 16 && kGroups * kEach % kRun == 0);

  // Scale or zero point n of token `token`, out of its stage; `offset` is the token's in its page, which counts from a word.
  __device__ static __forceinline__ Scale read(const uint8_t* stage, uint32_t n, uint32_t token, uint32_t offset, uint32_t head) {
    return *(const Scale*)(stage + place(n, token, offset, head));
  }

  // Whether copies can begin at the scales of every page: surely, or by the pool's base and page stride.
  static constexpr bool kAligned = kCopies == 0 || (How::kRun > 0 && S::kScaleVector * sizeof(Scale) % kCopyBytes == 0);
  template <typename Cache>
  __device__ static __forceinline__ bool aligned(const Cache& cache) {
    if constexpr (kAligned || How::kRun == 0) {
      return kAligned;
    } else {
      const auto second = cache.nth_page(1);
      return ((uint64_t)S::scales(cache, cache.nth_page(0)) | (second.valid ? (uint64_t)S::scales(cache, second) : 0)) % kCopyBytes == 0;
    }
  }
  // Starts the copies of token `token` of the tile out of such a pool; where it is not `live`, zeros.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_async(uint32_t stage, const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live) {
    if constexpr (kCopies > 0) {  // else S may have no scales
#pragma unroll
      for (uint32_t i = 0; i < kCopies; ++i) {
        uint64_t from = (uint64_t)(scale_at<S>(cache, page, offset, head, i * kRun / kEach * S::kBlockDims) + i * kRun % kEach);
        if constexpr (kInWord) from &= ~(uint64_t)3;
        cp_async<kCopyBytes>(stage + (i * kTokens + token) * kCopyBytes, (const void*)from, live);
      }
    }
  }
  // A token's scales and zero points between the fetch that loads them and the next, and where they go in a stage.
  struct Loaded {
    uint32_t e[kAligned ? 1 : kCopies * kRun], stage, offset;
  };
  // Out of a pool at which no copy can begin: what was loaded goes to its stage, and the scales of token `token` are loaded.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void load(Loaded& loaded, uint32_t stage, const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live) {
    if constexpr (kAligned) {
      copy_async(stage, cache, page, token, offset, head, live);
    } else {
#pragma unroll
      for (uint32_t n = 0; n < kCopies * kRun; ++n) {
        store_shared(loaded.stage + place(n, token, loaded.offset, head), loaded.e[n]);
        load_bits(loaded.e[n], scale_at<S>(cache, page, offset, head, n / kEach * S::kBlockDims) + n % kEach, live);
      }
      loaded.stage = stage;
      loaded.offset = offset;
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
    const uint32_t copy = (n / kRun * kTokens + token) * kCopyBytes, in_copy = n % kRun * sizeof(Scale);
    if constexpr (!kInWord) return copy + in_copy;
    return copy + (uint32_t)(S::scale_offset(offset, head, n / kEach * S::kBlockDims) + n % kEach) * (uint32_t)sizeof(Scale) % 4;
  }
  // asm: into 32 bits at once. What the compiler loads to 16 it waits for, to move it to its half of a register.
  __device__ static __forceinline__ void load_bits(uint32_t& bits, const Scale* from, bool live) {
    if constexpr (sizeof(Scale) == 1) asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.u8 %0, [%1]; }" : "+r"(bits) : "l"(from), "r"((uint32_t)live));
    else asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.u16 %0, [%1]; }" : "+r"(bits) : "l"(from), "r"((uint32_t)live));
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

// The scale of each token of a tile, whose first token is `first` of the request, in its stage.
template <typename Scales, typename Cache>
struct TokenScales {
  const uint8_t* stage;
  const Cache& cache;
  uint32_t first, head;
  __device__ __forceinline__ float operator()(uint32_t token) const {
    return to_f32(Scales::read(stage, 0, token, (first + token) % cache.page_tokens, head));
  }
};

// The scales of K and V of a tile, K's first, in its stage and where they are expanded to.
template <typename KeyScales, typename ValueScales>
struct StageScales {
  static constexpr uint32_t kStageBytes = KeyScales::kStageBytes + ValueScales::kStageBytes;
  static constexpr uint32_t kExpandedBytes = KeyScales::kExpandedBytes + ValueScales::kExpandedBytes;

  // Whether copies bring the pool's scales, and what is loaded where they do not; at first zeros for a stage that is fetched anew.
  struct Loaded {
    bool aligned;
    typename KeyScales::Loaded keys;
    typename ValueScales::Loaded values;

    template <typename Cache>
    __device__ __forceinline__ Loaded(const Cache& cache, uint32_t stage)
        : aligned(KeyScales::aligned(cache) && ValueScales::aligned(cache)), keys{{}, stage, 0}, values{{}, stage + KeyScales::kStageBytes, 0} {}
  };
  uint32_t stage;
  Loaded& loaded;

  // Starts the copies of token `token` of a tile, `offset` tokens into its page; where it is not `live`, zeros.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void copy_async(const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live = true) const {
    KeyScales::copy_async(stage, cache, page, token, offset, head, live);
    ValueScales::copy_async(stage + KeyScales::kStageBytes, cache, page, token, offset, head, live);
  }
  // The same out of any pool.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void fetch(const Cache& cache, const Page& page, uint32_t token, uint32_t offset, uint32_t head, bool live) const {
    if (loaded.aligned) return copy_async(cache, page, token, offset, head, live);
    KeyScales::load(loaded.keys, stage, cache, page, token, offset, head, live);
    ValueScales::load(loaded.values, stage + KeyScales::kStageBytes, cache, page, token, offset, head, live);
  }

  // Expands the scales of token `token` of a tile.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t token, uint32_t offset, uint32_t head) {
    if constexpr (KeyScales::kGrouped) KeyScales::expand(to, stage, token, offset, head);
    if constexpr (ValueScales::kGrouped) ValueScales::expand(to + KeyScales::kExpandedBytes, stage + KeyScales::kStageBytes, token, offset, head);
  }
};
