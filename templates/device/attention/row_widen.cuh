// Codes of K and V for products of warpgroups (sm_90a): the warps that copy rows load their codes to registers, widen them to f16, and store
// them as row_wgmma.cuh's groups of rows. Columns never know: scales of tokens reach them as floats beside the tile, for sums of K and
// weights of V; those of groups of dims, and zero points, are applied to what is widened.
//
// A warp has a quarter of a tile's rows. At a step it has 64 dims of 8 rows (codes of 8 bits) or 16 rows (4 bits), 16 bytes a lane; lanes
// of one store then touch different banks. A step's registers are loaded anew as soon as they have been widened.
#pragma once

#include "row_wgmma.cuh"
#include "tile_scales.cuh"

// Rows of a tile of kTokens tokens, of which kRun surely lie in one page, and how the scales of segment S are used.
template <typename S, ScaleUse kUse, uint32_t kTokens, uint32_t kRun>
struct CodeRows {
  using E = typename S::Element;
  static constexpr uint32_t kInByte = kPerElement<E>, kPieces = 4 / kInByte, kDims = 16 * kInByte;  // codes of a byte; lanes of 64 dims, dims of each
  static constexpr uint32_t kRows = kTokens / 4, kAtOnce = 32 / kPieces, kRounds = kRows / kAtOnce;   // rows of a warp, of a step; steps of the same dims
  static constexpr uint32_t kPanels = S::kSize / 64, kSteps = kRounds * kPanels;
  static constexpr uint32_t kSame = kRun > kAtOnce ? (kRun / kAtOnce < kRounds ? kRun / kAtOnce : kRounds) : 1, kPages = kRounds / kSame;  // rounds of a page
  static constexpr bool kToken = kUse == ScaleUse::token, kGroup = kUse == ScaleUse::key_groups || kUse == ScaleUse::value_groups;
  // Scales of a lane's dims, each with its zero point.
  static constexpr uint32_t kGroups = !kGroup || S::kBlockDims >= kDims ? 1 : kDims / S::kBlockDims, kEach = 1 + S::kZero;
  // Codes of 4 bits are widened four apart: 8 of them come as 0, 4, 1, 5, 2, 6, 3, 7.
  static constexpr bool kApart = kInByte == 2;
  static_assert(S::kSize % 64 == 0 && kRows % kAtOnce == 0 && (!kGroup || 64 % S::kBlockDims == 0 || S::kBlockDims % 64 == 0));

  using Codes = Vec<uint32_t, 4>;  // a lane's of a step
  using Scales = Vec<typename S::Scale, kGroups * kEach>;

  // The lane's row of a round.
  __device__ static __forceinline__ uint32_t row(uint32_t own, uint32_t round) { return own * kRows + round * kAtOnce + threadIdx.x % 32 / kPieces; }

  // Where a lane's codes and scales of the rounds of a page begin, of a head; without a page they are not read.
  struct From {
    const uint8_t* codes;
    const typename S::Scale* scales;
    bool live;

    template <typename Cache, typename Page>
    __device__ __forceinline__ void set(const Cache& cache, const Page& page, uint32_t token, uint32_t head) {
      const uint32_t dim = threadIdx.x % kPieces * kDims;
      live = page.valid;
      codes = fresh((const uint8_t*)element_at<S>(page, token, head, dim));
      if constexpr (kGroup) scales = fresh((const typename S::Scale*)scale_at<S>(cache, page, token, head, dim / S::kBlockDims * S::kBlockDims));
    }
  };

  // Loads step `n`; codes without a page stay what they were.
  __device__ static __forceinline__ void load(Codes& codes, Scales& scales, const From (&from)[kPages], uint32_t n) {
    const From& begin = from[n / kPanels / kSame];
    const uint32_t later = n / kPanels % kSame * kAtOnce, dim = n % kPanels * 64;
    load_live(codes, begin.codes + (S::offset(later, 0, dim) - S::offset(0, 0, 0)) / kInByte, begin.live);
    if constexpr (kGroup) {
      const typename S::Scale* at = begin.scales + (S::scale_offset(later, 0, dim / S::kBlockDims * S::kBlockDims) - S::scale_offset(0, 0, 0));
      constexpr uint32_t kAll = kGroups * kEach, kAccess = kAll < S::kScaleVector ? kAll : S::kScaleVector;
#pragma unroll
      for (uint32_t i = 0; i < kAll; i += kAccess) load_live(*(Vec<typename S::Scale, kAccess>*)&scales.e[i], at + i, begin.live);
    }
  }

  // Widens step `n` to the tile at `to`.
  __device__ static __forceinline__ void widen_step(uint8_t* to, const Codes& codes, const Scales& scales, uint32_t n, uint32_t own) {
    uint32_t scale[kGroups], zero[kGroups];
    if constexpr (kGroup) {
#pragma unroll
      for (uint32_t g = 0; g < kGroups; ++g) {
        scale[g] = twice(scales.e[g * kEach]);
        if constexpr (S::kZero) zero[g] = multiply_halves(scale[g] ^ 0x80008000u, twice(scales.e[g * kEach + 1]));
      }
    }
    Vec<uint32_t, 4> halves[2 * kInByte];  // 8 dims each
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      uint32_t(&x)[2 * kInByte] = *(uint32_t(*)[2 * kInByte])&halves[w * kInByte / 2].e[w * 2 * kInByte % 4];
      widen<!kApart>(E{}, x, codes.e[w]);
      if constexpr (kGroup) {
        const uint32_t g = kGroups == 1 ? 0 : w * 4 * kInByte / S::kBlockDims;
#pragma unroll
        for (uint32_t i = 0; i < 2 * kInByte; ++i) x[i] = S::kZero ? multiply_add_halves(x[i], scale[g], zero[g]) : multiply_halves(x[i], scale[g]);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2 * kInByte; ++i)
      store_live(to + group_offset<S::kSize>(row(own, n / kPanels), n % kPanels * 64 + threadIdx.x % kPieces * kDims + 8 * i), halves[i]);
  }

 private:
  // asm: the compiler would wait for what it loads behind a condition, and load late.
  __device__ static __forceinline__ void load_live(Codes& to, const void* from, bool live) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to.e[0]), "+r"(to.e[1]), "+r"(to.e[2]), "+r"(to.e[3])
                 : "l"(from), "r"((uint32_t)live));
  }
  __device__ static __forceinline__ void store_live(uint8_t* to, const Vec<uint32_t, 4>& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(x.e[0]), "r"(x.e[1]), "r"(x.e[2]), "r"(x.e[3]) : "memory");
  }
  // Scales: of two bytes a register.
  template <uint32_t N>
  __device__ static __forceinline__ void load_live(Vec<typename S::Scale, N>& to, const void* from, bool live) {
    uint32_t bits[(N * sizeof(typename S::Scale) + 3) / 4] = {};
    constexpr uint32_t kBytes = N * sizeof(typename S::Scale);
    if constexpr (kBytes == 16) {
      load_live(*(Codes*)bits, from, live);
    } else if constexpr (kBytes == 8) {
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2]; }" : "+r"(bits[0]), "+r"(bits[1]) : "l"(from), "r"((uint32_t)live));
    } else if constexpr (kBytes == 4) {
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }" : "+r"(bits[0]) : "l"(from), "r"((uint32_t)live));
    } else if constexpr (kBytes == 2) {
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }" : "+r"(bits[0]) : "l"(from), "r"((uint32_t)live));
    } else {
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }" : "+r"(bits[0]) : "l"(from), "r"((uint32_t)live));
    }
    to = *(const Vec<typename S::Scale, N>*)bits;
  }
  // As both halves of a register.
  __device__ static __forceinline__ uint32_t twice(typename S::Scale x) {
    if constexpr (sizeof(x) == 1) {
      uint32_t out[2];
      widen<true>(x, out, x.bits * 0x101u);
      return out[0];
    } else {
      return x.bits * 0x10001u;
    }
  }
};

// Where dim `dim` of 8 widened ones stands, and which one stands there.
template <bool kApart>
__device__ __forceinline__ constexpr uint32_t place_of_dim(uint32_t dim) { return kApart ? dim % 4 * 2 + dim / 4 : dim; }
template <bool kApart>
__device__ __forceinline__ constexpr uint32_t dim_at(uint32_t place) { return kApart ? place / 2 + place % 2 * 4 : place; }

// ---- Q

// Pairs of neighbouring elements of a column, which begins at `row`; zeros where it is not `live`.
template <typename Tile, typename T>
__device__ __forceinline__ void load_pairs(QueryColumn<Tile>& x, const T* row, bool live) {
#pragma unroll
  for (uint32_t n = 0; n < QueryColumn<Tile>::kEach; ++n) {
    Vec<T, 2> pair = {};
    if (live && x.has(n)) pair = *(const Vec<T, 2>*)(row + x.dim(n, 0));
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) x.x[n][e] = to_f32(pair.e[e]);
  }
}

// Column `col` of the block to its place in shared memory, its dims as widened ones of K lie.
template <bool kApart, typename Tile>
__device__ __forceinline__ void store_pairs(uint8_t* query, const QueryColumn<Tile>& x, uint32_t col) {
#pragma unroll
  for (uint32_t n = 0; n < QueryColumn<Tile>::kEach; ++n) {
    if (!x.has(n)) continue;
    const uint32_t dim = x.dim(n, 0);
    uint8_t* to = query + col / 64 * (128 * Tile::kKeyDims) + group_offset<Tile::kKeyDims>(col % 64, dim / 8 * 8);
    Vec<typename Tile::Operand, 2> pair;
    pack_pair(pair.e, x.x[n][0], x.x[n][1]);
    if constexpr (!kApart) {
      *(Vec<typename Tile::Operand, 2>*)(to + dim % 8 * 2) = pair;
    } else {
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) ((typename Tile::Operand*)to)[place_of_dim<true>(dim % 8 + e)] = pair.e[e];
    }
  }
}

// ---- Scales of tokens, which columns apply: those of a tile lie side by side in shared memory

// Products times the scales of their tokens.
template <typename Tile>
__device__ __forceinline__ void scale_tokens(RowScores<Tile>& s, const float* scales) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kTokens / 8; ++n) {
    const Vec<float, 2> pair = *(const Vec<float, 2>*)(scales + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s.e[0][n][r] *= pair.e[r % 2];
  }
}

// The range of a tile's scales of V: bits of the largest and smallest magnitude, of each of four warps' rows.
struct ScaleRange {
  uint32_t high[4], low[4];

  // The rows of warp `own`, a row a lane; those not `live` count for nothing.
  __device__ __forceinline__ void store(uint32_t own, float scale, bool live) {
    const uint32_t bits = __float_as_uint(scale) & 0x7fffffffu, largest = __reduce_max_sync(~0u, live ? bits : 0), smallest = __reduce_min_sync(~0u, live ? bits : kU32Max);
    if (threadIdx.x % 32 == 0) high[own] = largest, low[own] = smallest;
  }
};

// Weights carry their token's scale of V, so row_max rises with the logarithm of both: raise_max of row_wgmma.cuh, where a score counts as
// much as the tile's largest scale may make of it. Where the scales of a tile differ by more than 2^10, or are no numbers, each score
// counts with its own: f16 would hold too little of a weight whose token has a small one.
template <typename Tile, typename Factor>
__device__ __forceinline__ bool raise_max(float (&shrink)[2], RowSums<Tile>& sums, const RowScores<Tile>& s, const float* scales, const ScaleRange& range, const Factor& factor) {
  const Vec<uint32_t, 4> highs = *(const Vec<uint32_t, 4>*)range.high, lows = *(const Vec<uint32_t, 4>*)range.low;
  const uint32_t largest = max(max(highs.e[0], highs.e[1]), max(highs.e[2], highs.e[3])), smallest = min(min(lows.e[0], lows.e[1]), min(lows.e[2], lows.e[3]));
  float high[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    high[h] = fmaxf(s.e[0][0][2 * h], s.e[0][0][2 * h + 1]);
#pragma unroll
    for (uint32_t n = 1; n < Tile::kTokens / 8; ++n) high[h] = fmaxf(high[h], fmaxf(s.e[0][n][2 * h], s.e[0][n][2 * h + 1]));
    high[h] *= factor_of(factor, 0, h);
  }
  if (largest <= 0x72000000u && largest - smallest <= 10u << 23) {  // up to 2^101
    const float log = (float)max((int32_t)(largest >> 23) - 126, -100);
    high[0] += log;
    high[1] += log;
  } else {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      high[h] -= 100.0f;  // or weights without scales would pass f32
#pragma unroll
      for (uint32_t n = 0; n < Tile::kTokens / 8; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          const float scale = fabsf(scales[8 * n + threadIdx.x % 4 * 2 + e]);
          if (scale < infinity()) high[h] = fmaxf(high[h], s.e[0][n][2 * h + e] * factor_of(factor, 0, h) + log2_approx(scale));
        }
      high[h] = row_maximum(high[h]);
    }
  }
  shrink[0] = shrink[1] = 1.0f;
  if (!__any_sync(~0u, high[0] > sums.row_max[0][0] + Tile::kSlack || high[1] > sums.row_max[0][1] + Tile::kSlack)) return false;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    high[h] = row_maximum(high[h]);
    const bool higher = high[h] > sums.row_max[0][h] + Tile::kSlack;
    shrink[h] = higher ? rescale(sums.row_max[0][h], high[h]) : 1.0f;
    sums.row_max[0][h] = higher ? high[h] : sums.row_max[0][h];
    sums.row_sum[0][h] *= shrink[h];
  }
  return true;
}

// exponentiate of row_wgmma.cuh; then weights are multiplied by the scales of V of their tokens. A hidden one stays -0 whatever its scale.
template <bool kMarks, typename Tile, typename Factor>
__device__ __forceinline__ void exponentiate(RowScores<Tile>& s, RowSums<Tile>& sums, const float* scales, const Factor& factor) {
  const float from[2] = {sums.row_max[0][0] == -infinity() ? 0.0f : sums.row_max[0][0], sums.row_max[0][1] == -infinity() ? 0.0f : sums.row_max[0][1]};
#pragma unroll
  for (uint32_t n = 0; n < Tile::kTokens / 8; ++n) {
    const Vec<float, 2> pair = *(const Vec<float, 2>*)(scales + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      float& x = s.e[0][n][r];
      const bool hidden = kMarks && x == -infinity();
      x = exp2_approx(x * factor_of(factor, 0, r / 2) - from[r / 2]);
      sums.row_sum[0][r / 2] += hidden ? 0.0f : x;
      x = hidden ? -0.0f : x * pair.e[r % 2];
    }
  }
}
