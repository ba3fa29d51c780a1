// The scales of a tile's tokens: copied into its stage with the rows, a token a thread, and read there as products want them.
//
// token: scales of few groups of dims multiply sums of products, the rows of S, and the weights of V, as f32; zero points of
// integer codes do too. key_groups, value_groups: scales of many groups are applied to fragments, as f16: a = (code - zero) *
// scale. They are expanded once a tile, from its stage to shared memory of the team; scales of MAX's nvfp4 become tables there
// (fp4_tables.cuh). Scales that the caller gives for all tokens are not handled here.
//
// If a pool's scales are not aligned for copies, a fetch loads them to registers, and the next fetch stores them to the stage: no
// trip waits for its own loads. The way of a pool follows from its base and page stride, and is the same for all its pages.
#pragma once

#include "../../memory/cp_async.cuh"
#include "fp4_tables.cuh"
#include "../plan/split_kv.cuh"

enum class ScaleUse : uint32_t { none, token, key_groups, value_groups };

// The use of a tile's scales. A tile has kTokens tokens of kHeads neighbouring kv heads. One copy has kRun neighbouring scales of
// a token, zero points included: 4, 8 or 16 bytes, or the aligned word that holds them. kRun = 0: a word with a scale may reach
// past the page. kRows tokens are copied together, by kThreads threads. kDirect: products convert scales of groups themselves,
// and nothing is expanded (GroupBytes).
template <ScaleUse kUseOf, uint32_t kTokensOf, uint32_t kRunOf, uint32_t kRowsOf, uint32_t kThreadsOf, uint32_t kHeadsOf = 1, bool kDirectOf = false>
struct ScaleTile {
  static constexpr bool kDirect = kDirectOf;
  static constexpr ScaleUse kUse = kUseOf;
  static constexpr uint32_t kTokens = kTokensOf, kRun = kRunOf, kRows = kRowsOf, kThreads = kThreadsOf, kHeads = kHeadsOf;
};

template <typename S, typename How>
struct TileScales {
  using Scale = typename S::Scale;
  static constexpr ScaleUse kUse = How::kUse;
  static constexpr uint32_t kTokens = How::kTokens;
  static constexpr bool kGrouped = !How::kDirect && (kUse == ScaleUse::key_groups || kUse == ScaleUse::value_groups);
  static constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims, kEach = 1 + S::kZero, kOfHead = kGroups * kEach;
  static constexpr uint32_t kRun = How::kRun == 0 ? 1 : How::kRun, kCopies = kUse == ScaleUse::none ? 0 : How::kHeads * kOfHead / kRun;
  static constexpr uint32_t kCopyBytes = kRun * sizeof(Scale) < 4 ? 4 : kRun * sizeof(Scale);
  static constexpr bool kInWord = How::kRun > 0 && kRun * sizeof(Scale) < 4;  // a copy is a word with other scales in it
  // Scales of a head that are read at once: a copy for several heads may hold the end of one head and the begin of the next.
  static constexpr uint32_t kLowest = kOfHead & (0 - kOfHead), kVector = kRun < kLowest ? kRun : kLowest;
  // True if a lane reads the scales of its tokens together: each copy belongs to one head.
  static constexpr bool kTogether = kUse == ScaleUse::token && How::kRun > 0 && kRun * sizeof(Scale) == kCopyBytes && kOfHead % kRun == 0;
  // In a stage: copy i of token t at (t * kCopies + i) * kCopyBytes, so that neighbouring lanes, which copy neighbouring bytes,
  // write different banks. kTogether: a head's copies of tokens 8 apart, the tokens of a lane, are neighbours.
  static constexpr uint32_t kStageBytes = kCopies * kTokens * kCopyBytes;
  // Expanded, keys: every scale twice, for the two elements of a register; values: the scales of two tokens side by side.
  static constexpr uint32_t kEntry = kUse == ScaleUse::value_groups ? 2 : 4;
  static constexpr uint32_t kSteps = (How::kRows * kCopies + How::kThreads - 1) / How::kThreads;  // copies of a thread
  // Tables: lines of groups lie 64 bytes apart in banks, because lanes read the lines of two groups at once.
  static constexpr bool kTables = kGrouped && S::kRecipe == Recipe::nvfp4_max;
  static constexpr uint32_t kTableLine = kTokens * sizeof(E4m3Table) + 64;
  static constexpr uint32_t kExpandedBytes = kTables ? kGroups * kTableLine : kGrouped ? kTokens * kGroups * kEach * kEntry : 0;
  static_assert(kCopyBytes <= 16 && How::kHeads * kOfHead % kRun == 0);

  // Scale or zero point n of token `token`, counted from the first one of its tile's heads, from its stage. `offset` is the
  // token's offset in its page, which begins at a word.
  __device__ static __forceinline__ Scale read(const uint8_t* stage, uint32_t n, uint32_t token, uint32_t offset, uint32_t head) {
    return *(const Scale*)(stage + place(n, token, offset, head));
  }

  // True if scales of every page are aligned for copies: at compile time, or by the pool's base and page stride.
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
  // Starts the copies of kRows tokens, from `first` of the tile and `offset` of their page on, by kThreads threads, from a pool
  // of aligned scales. Neighbouring lanes copy neighbouring scales, of all heads of the tile: a sector that they share is read
  // once.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_run(uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head) {
    for_each_copy(thread, [&](uint32_t, uint32_t row, uint32_t i) {
      cp_async<kCopyBytes>(stage + place_of_copy(first + row, i), source(cache, page, offset + row, head, i));
    });
  }
  // copy for tokens [begin, end) of the run, and zeros for the others.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_some(uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head,
                                                   uint32_t begin, uint32_t end) {
    for_each_copy(thread, [&](uint32_t, uint32_t row, uint32_t i) {
      cp_async<kCopyBytes>(stage + place_of_copy(first + row, i), source(cache, page, offset + row, head, i), row >= begin && row < end);
    });
  }
  // copy for any pool. Scales that are not aligned are loaded one by one, and waited for here.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_any(uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head,
                                                  uint32_t begin, uint32_t end) {
    if (aligned(cache)) return copy_some(stage, cache, page, thread, first, offset, head, begin, end);
    if constexpr (!kAligned) {
      Loaded loaded = {{}, stage, offset};
      store_and_load(loaded, stage, cache, page, thread, first, offset, head, begin, end);
      store_and_load(loaded, stage, cache, page, thread, first, offset, head, 0, 0);
    }
  }
  // A thread's scales and zero points between the fetch that loads them and the next fetch, and their places in a stage.
  struct Loaded {
    uint32_t e[kAligned ? 1 : kSteps * kRun], stage, offset;
  };
  // For a pool of scales that are not aligned: stores the loaded scales to their stage, and loads the scales of the next tile.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void store_and_load(Loaded& loaded, uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset,
                                              uint32_t head, uint32_t begin, uint32_t end) {
    if constexpr (kAligned) {
      copy_some(stage, cache, page, thread, first, offset, head, begin, end);
    } else {
      for_each_copy(thread, [&](uint32_t step, uint32_t row, uint32_t i) {
#pragma unroll
        for (uint32_t j = 0; j < kRun; ++j) {
          const uint32_t n = i * kRun + j;
          store_shared(loaded.stage + place(n, first + row, loaded.offset + row, head), loaded.e[step * kRun + j]);
          load_bits(loaded.e[step * kRun + j], scale(cache, page, offset + row, head, n), row >= begin && row < end);
        }
      });
      loaded.stage = stage;
      loaded.offset = offset;
    }
  }

  // kTogether: the place in a stage of head `own`'s scales of tokens `token`, `token` + 8 and so on.
  __device__ static __forceinline__ uint32_t lane_place(uint32_t token, uint32_t own) {
    return (token * How::kHeads + own) * (kTokens / 8) * kOfHead * (uint32_t)sizeof(Scale);
  }

  // The scales of token `token` of head `own` of the tile, out of its stage.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
    if constexpr (kTables) return store_tables(to, stage, own, token, offset, head);
    constexpr uint32_t kValues = kOfHead;
    alignas(16) Scale loaded[(kValues + 3) / 4 * 4] = {};
#pragma unroll
    for (uint32_t n = 0; n < kValues; ++n) {
      if constexpr (kInWord) loaded[n] = read(stage, own * kOfHead + n, token, offset, head);
      else if (n % kVector == 0) *(Vec<Scale, kVector>*)&loaded[n] = *(const Vec<Scale, kVector>*)(stage + place(own * kOfHead + n, token, offset, head));
    }
    uint32_t pairs[(kValues + 3) / 4 * 2];
#pragma unroll
    for (uint32_t n = 0; n < kValues; n += 4) halves(*(uint32_t(*)[2])&pairs[n / 2], &loaded[n]);
    const auto twice = [&](uint32_t n) { return permute(pairs[n / 2], 0, n % 2 == 0 ? 0x1010 : 0x3232); };
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      put(to, group, token, twice(group * kEach));
      if constexpr (S::kZero) put(to, kGroups + group, token, twice(group * kEach + 1) ^ 0x80008000u);
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
  // (code - zero) * scale. In code * scale - zero * scale all dims of a group would be off by the rounding of zero * scale.
  __device__ static __forceinline__ uint32_t apply(uint32_t codes, const Pair& pair) {
    return multiply_halves(S::kZero ? add_halves(codes, pair.zero) : codes, pair.scale);
  }
  // The tables of N neighbouring tokens from `token` on, of the group of `dim`.
  template <uint32_t N>
  __device__ static __forceinline__ Vec<E4m3Table, N> tables_at(const uint8_t* expanded, uint32_t dim, uint32_t token) {
    return *(const Vec<E4m3Table, N>*)(expanded + min(dim / S::kBlockDims, kGroups - 1) * kTableLine + token * sizeof(E4m3Table));
  }

 private:
  __device__ static __forceinline__ void store_tables(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
    static_assert(S::kBlockDims % 8 == 0);  // a register of K has codes of one
    constexpr uint32_t kAtOnce = kVector < 4 ? 1 : kVector / 4;
    uint32_t words[(kGroups + 3) / 4] = {};  // of four scales
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
      if constexpr (kVector * sizeof(Scale) < 4) words[group / 4] |= (uint32_t)read(stage, own * kOfHead + group, token, offset, head).bits << group % 4 * 8;
      else if (group % kVector == 0) *(Vec<uint32_t, kAtOnce>*)&words[group / 4] = *(const Vec<uint32_t, kAtOnce>*)(stage + place(own * kOfHead + group, token, offset, head));
    }
#pragma unroll
    for (uint32_t group = 0; group < kGroups; group += 4) {
      E4m3Table tables[4];
      Fp4Tables::make_tables(tables, words[group / 4]);
#pragma unroll
      for (uint32_t i = 0; i < 4 && group + i < kGroups; ++i) *(E4m3Table*)(to + (group + i) * kTableLine + token * sizeof(E4m3Table)) = tables[i];
    }
  }
  // copy(step, row, i) for this thread's share of the copies of kRows tokens.
  template <typename Copy>
  __device__ static __forceinline__ void for_each_copy(uint32_t thread, const Copy& copy) {
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
      const uint32_t n = step * How::kThreads + thread;
      if (How::kRows * kCopies % How::kThreads == 0 || n < How::kRows * kCopies) copy(step, n / kCopies, n % kCopies);
    }
  }
  // The address of scale or zero point n of a token in its page, and of its copy i.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ const Scale* scale(const Cache& cache, const Page& page, uint32_t offset, uint32_t head, uint32_t n) {
    return scale_at<S>(cache, page, offset, head + n / kOfHead, n % kOfHead / kEach * S::kBlockDims) + n % kEach;
  }
  template <typename Cache, typename Page>
  __device__ static __forceinline__ const void* source(const Cache& cache, const Page& page, uint32_t offset, uint32_t head, uint32_t i) {
    const uint64_t from = (uint64_t)scale(cache, page, offset, head, i * kRun);
    return (const void*)(kInWord ? from & ~(uint64_t)3 : from);
  }
  // The place of copy i of token `token` in a stage.
  __device__ static __forceinline__ uint32_t place_of_copy(uint32_t token, uint32_t i) {
    if constexpr (kTogether) {
      constexpr uint32_t kOfOne = kOfHead / kRun;  // copies of a head
      return lane_place(token % 8, i / kOfOne) + (token / 8 * kOfOne + i % kOfOne) * kCopyBytes;
    }
    return (token * kCopies + i) * kCopyBytes;
  }
  // The place of scale or zero point n of token `token` in a stage.
  __device__ static __forceinline__ uint32_t place(uint32_t n, uint32_t token, uint32_t offset, uint32_t head) {
    if constexpr (!kInWord) return place_of_copy(token, n / kRun) + n % kRun * (uint32_t)sizeof(Scale);
    const uint32_t in_page = S::scale_offset(offset, head + n / kOfHead, n % kOfHead / kEach * S::kBlockDims) + n % kEach;
    return place_of_copy(token, n / kRun) + in_page * (uint32_t)sizeof(Scale) % 4;
  }
  // asm: loads into 32 bits. The compiler waits at once for a 16-bit load, to move it to its half of a register.
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

// The scale of each token of a tile, from its stage, for head `own` of the tile. `first`: the tile's first token in the request;
// `head`: the tile's first head.
template <typename Scales, typename Cache>
struct TokenScales {
  const uint8_t* stage;
  const Cache& cache;
  uint32_t first, own, head;
  __device__ __forceinline__ float operator()(uint32_t token) const {
    return to_f32(Scales::read(stage, own, token, (first + token) % cache.page_tokens, head));
  }
};

// The scales and zero points of a lane's tokens of such a tile, lane / 4 + 8i, of each group of the head.
template <typename Scales>
struct LaneScales {
  static constexpr uint32_t kEach = Scales::kEach, kOfHead = Scales::kOfHead, kOfLane = Scales::kTokens / 8;
  float e[kOfHead][kOfLane];

  template <typename Cache>
  __device__ __forceinline__ LaneScales(const uint8_t* stage, const Cache& cache, uint32_t first, uint32_t own, uint32_t head) {
    const uint32_t g = threadIdx.x % 32 / 4;
    if constexpr (!Scales::kTogether) {
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i)
#pragma unroll
        for (uint32_t n = 0; n < kOfHead; ++n)
          e[n][i] = to_f32(Scales::read(stage, own * kOfHead + n, g + 8 * i, (first + g + 8 * i) % cache.page_tokens, head));
    } else {
      using Scale = typename Scales::Scale;
      constexpr uint32_t kAll = kOfHead * kOfLane, kAtOnce = kAll * sizeof(Scale) > 16 ? 16 / sizeof(Scale) : kAll;
#pragma unroll
      for (uint32_t from = 0; from < kAll; from += kAtOnce) {
        const auto some = *(const Vec<Scale, kAtOnce>*)(stage + Scales::lane_place(g, own) + from * sizeof(Scale));
#pragma unroll
        for (uint32_t n = 0; n < kAtOnce; ++n) e[(from + n) % kOfHead][(from + n) / kOfHead] = to_f32(some.e[n]);
      }
    }
  }
  __device__ __forceinline__ float scale(uint32_t group, uint32_t i) const { return e[group * kEach][i]; }
  __device__ __forceinline__ float zero(uint32_t group, uint32_t i) const { return e[group * kEach + kEach - 1][i]; }
};

// e4m3 scales of groups with half as many dims as 16 bytes of codes (nvfp4): of the kGroups groups of a token in its stage, the
// kHalves groups of a lane, as f16.
template <typename Scales>
struct GroupBytes {
  static constexpr uint32_t kHalves = Scales::kGroups / 2, kWords = Scales::kGroups / 4;
  static_assert(!Scales::kInWord && sizeof(typename Scales::Scale) == 1 && Scales::kEach == 1 && Scales::kGroups % 4 == 0);
  using Words = Vec<uint32_t, kWords>;

  // The bytes of head `own` of token `token`.
  __device__ static __forceinline__ Words of(const uint8_t* stage, uint32_t own, uint32_t token) {
    return *(const Words*)(stage + token * Scales::kCopies * Scales::kCopyBytes + own * Scales::kGroups);
  }
  // Four scales as f16.
  __device__ static __forceinline__ void halves(uint32_t (&out)[2], uint32_t bytes) {
    widen<true>(e4m3{}, out, bytes);
    if constexpr (kFragmentFactor<e4m3> != 1.0f) {
      for (uint32_t i = 0; i < 2; ++i) out[i] = multiply_halves(out[i], 0x5c005c00u);  // 2^8
    }
  }
};

// The scales of K and V of a tile, K's first, in its stage and in the memory of expanded scales.
template <typename KeyScales, typename ValueScales>
struct StageScales {
  static constexpr uint32_t kStageBytes = KeyScales::kStageBytes + ValueScales::kStageBytes;
  static constexpr uint32_t kExpandedBytes = KeyScales::kExpandedBytes + ValueScales::kExpandedBytes;

  // `aligned`: copies bring the pool's scales. Else: the scales that were loaded, at first zeros, and the stage that gets them.
  struct Loaded {
    bool aligned;
    typename KeyScales::Loaded keys;
    typename ValueScales::Loaded values;

    template <typename Cache>
    __device__ __forceinline__ Loaded(const Cache& cache, uint32_t stage)
        : aligned(StageScales::aligned(cache)), keys{{}, stage, 0}, values{{}, stage + KeyScales::kStageBytes, 0} {}
  };
  uint32_t stage;
  Loaded* loaded;  // null: no loads are kept

  // Starts the copies of a run of tokens, from `first` of a tile and `offset` of its page on, by thread `thread` of those that
  // copy it.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void copy_run(const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head) const {
    if constexpr (KeyScales::kCopies > 0) KeyScales::copy_run(stage, cache, page, thread, first, offset, head);
    if constexpr (ValueScales::kCopies > 0) ValueScales::copy_run(stage + KeyScales::kStageBytes, cache, page, thread, first, offset, head);
  }
  // True if copies can bring the pool's scales.
  template <typename Cache>
  __device__ static __forceinline__ bool aligned(const Cache& cache) {
    return KeyScales::aligned(cache) && ValueScales::aligned(cache);
  }
  // For any pool. Aligned scales are copied asynchronously; others are loaded to registers, and the next fetch stores them.
  // Tokens outside [begin, end) of the run get zeros.
  template <typename Cache, typename Page>
  __device__ __forceinline__ void fetch(const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head, uint32_t begin,
                                        uint32_t end) const {
    const uint32_t v_stage = stage + KeyScales::kStageBytes;
    if (loaded == nullptr) {
      if constexpr (KeyScales::kCopies > 0) KeyScales::copy_any(stage, cache, page, thread, first, offset, head, begin, end);
      if constexpr (ValueScales::kCopies > 0) ValueScales::copy_any(v_stage, cache, page, thread, first, offset, head, begin, end);
    } else if (loaded->aligned) {
      if constexpr (KeyScales::kCopies > 0) KeyScales::copy_some(stage, cache, page, thread, first, offset, head, begin, end);
      if constexpr (ValueScales::kCopies > 0) ValueScales::copy_some(v_stage, cache, page, thread, first, offset, head, begin, end);
    } else {
      if constexpr (KeyScales::kCopies > 0) KeyScales::store_and_load(loaded->keys, stage, cache, page, thread, first, offset, head, begin, end);
      if constexpr (ValueScales::kCopies > 0) ValueScales::store_and_load(loaded->values, v_stage, cache, page, thread, first, offset, head, begin, end);
    }
  }

  // Expands the scales of token `token` of head `own` of a tile.
  __device__ static __forceinline__ void expand(uint8_t* to, const uint8_t* stage, uint32_t own, uint32_t token, uint32_t offset, uint32_t head) {
    if constexpr (KeyScales::kGrouped) KeyScales::expand(to, stage, own, token, offset, head);
    if constexpr (ValueScales::kGrouped) ValueScales::expand(to + KeyScales::kExpandedBytes, stage + KeyScales::kStageBytes, own, token, offset, head);
  }
};
