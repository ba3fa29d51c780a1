// Codes of K and V for products of warpgroups (sm_90a): rows are copied to shared memory as the cache has them, and the warps
// that copy them widen them to f16, or to bf16 beside e8m0 scales, in row_wgmma.cuh's groups of rows. Scales of tokens lie as
// floats beside the tile and multiply sums of K and weights of V. Scales of groups of dims, and zero points, are applied to
// widened elements. Codes of MAX's nvfp4 are widened by the table of their group (fp4_tables.cuh).
//
// Each of a tile's rows has one thread, or two with half of the dims each. Neighbouring lanes have neighbouring rows: in both
// swizzled patterns they touch different banks, and a thread has its row's scales in registers.
#pragma once

#include "../common/bf16_codes.cuh"
#include "row_wgmma.cuh"
#include "../common/tile_scales.cuh"

// The element type as which a segment's codes are widened (fragments.cuh). kPowers: beside e8m0 scales of groups of dims.
template <typename S, bool kPowers>
struct WidenedAs {
  using Code = typename FragmentsOf<S, typename S::Element>::Element;
};
template <typename S>
struct WidenedAs<S, true> {
  using Code = InBf16<typename S::Element>;
};

// Rows of a tile of kTokens tokens, and how the scales of segment S are used.
template <typename S, ScaleUse kUse, uint32_t kTokens>
struct CodeRows {
  using E = typename S::Element;
  static constexpr uint32_t kInByte = kPerElement<E>, kBytes = S::kSize / kInByte;                    // of a row
  static constexpr uint32_t kSpan = kBytes % 128 == 0 ? 128 : kBytes % 64 == 0 ? 64 : 32;             // of the copy's swizzle
  static constexpr uint32_t kParts = 128 / kTokens, kDims = S::kSize / kParts, kRows = 32 / kParts;  // threads a row; dims each
  static constexpr bool kToken = kUse == ScaleUse::token, kGroup = kUse == ScaleUse::key_groups || kUse == ScaleUse::value_groups;
  // Scales of a thread's part of a row, each with its zero point.
  static constexpr uint32_t kGroups = !kGroup || S::kBlockDims >= kDims ? 1 : (kDims + S::kBlockDims - 1) / S::kBlockDims, kEach = 1 + S::kZero;
  static constexpr bool kPowers = kGroup && kSame<typename S::Scale, e8m0>;  // the exponents of bf16 have room for them
  using Code = typename WidenedAs<S, kPowers>::Code;
  static constexpr float kFactor = kFragmentFactor<Code>;  // widened elements are divided by it
  static constexpr bool kTables = kSame<Code, e2m1x2_products>, kMultiplied = kGroup && !kTables;
  // Codes of 4 bits that are no neighbours are widened four apart: 8 of them come as 0, 4, 1, 5, 2, 6, 3, 7.
  static constexpr bool kApart = !kNeighbours<Code>;
  static_assert(kBytes % 32 == 0 && 128 % kTokens == 0 && (kParts == 1 || !kGroup || kGroups * S::kBlockDims == kDims || S::kBlockDims >= S::kSize));

  // A row's scales as they are loaded: kAccess of them at once, into registers of their own.
  struct Scales {
    using Scale = typename S::Scale;
    static constexpr uint32_t kAll = kGroups * kEach, kNear = S::kScaleVector * sizeof(Scale) > 16 ? 16 / sizeof(Scale) : S::kScaleVector;
    static constexpr uint32_t kAccess = kAll % kNear == 0 ? kNear : 1, kBytes = kAccess * sizeof(Scale), kWords = (kBytes + 3) / 4;
    uint32_t words[kAll / kAccess][kWords];

    __device__ __forceinline__ Scale operator[](uint32_t i) const {
      const uint32_t byte = i % kAccess * (uint32_t)sizeof(Scale), bits = words[i / kAccess][byte / 4] >> byte % 4 * 8;
      return *(const Scale*)&bits;
    }
  };

  // Loads the scales of token `token` of a page; if it is not `live`, they keep their values.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void load(Scales& scales, const Cache& cache, const Page& page, uint32_t token, uint32_t head, uint32_t part, bool live) {
#pragma unroll
    for (uint32_t i = 0; i < Scales::kAll; i += Scales::kAccess)
      load_live<Scales::kBytes>(scales.words[i / Scales::kAccess], scale_at<S>(cache, page, token, head, part * kDims + i / kEach * S::kBlockDims) + i % kEach, live);
  }

  // The thread's part of row `row` of a tile, from `from` to the tile at `to`.
  __device__ static __forceinline__ void store_widened_row(uint8_t* to, const uint8_t* from, uint32_t row, uint32_t part, const Scales& scales) {
    Widening widening(scales);
    // The row's places, which the compiler would keep for every piece.
    const uint32_t here = fresh_places(row / 8 * (8 * kBytes) + row % 8 * kSpan + (row % 8 * kSpan / 128) * 16);
    const uint32_t there = fresh_places(group_offset<S::kSize>(row, 0));
    constexpr uint32_t kPiece = 16 * kInByte, kAtOnce = 2;
    Vec<uint32_t, 4> pieces[kAtOnce];  // some at once: the compiler thinks that stores may change them
#pragma unroll
    for (uint32_t dim = 0; dim < kDims; dim += kPiece) {
      if (dim % (kAtOnce * kPiece) == 0) {
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint32_t byte = (part * kDims + dim) / kInByte + 16 * i;
          pieces[i] = *(const Vec<uint32_t, 4>*)(from + byte / kSpan * (8 * kSpan) + (here ^ byte % kSpan));
        }
      }
      const Vec<uint32_t, 4>& codes = pieces[dim / kPiece % kAtOnce];
      Vec<uint32_t, 4> halves[2 * kInByte];  // 8 dims each
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w)
        widening.widen_word(*(uint32_t(*)[2 * kInByte])&halves[w * kInByte / 2].e[w * 2 * kInByte % 4], codes.e[w], dim + w * 4 * kInByte);
#pragma unroll
      for (uint32_t i = 0; i < 2 * kInByte; ++i) {
        const uint32_t to_dim = part * kDims + dim + 8 * i;
        *(Vec<uint32_t, 4>*)(to + to_dim / 64 * 1024 + (there ^ to_dim % 64 * 2)) = halves[i];
      }
    }
  }

 private:
  // Scales and negative zero points of a thread's part of a row, each as both halves of a register, or the tables of four groups.
  struct Widening {
    const Scales& scales;
    uint32_t scale[kGroups], zero[kGroups];
    E4m3Table tables[4];

    __device__ __forceinline__ explicit Widening(const Scales& scales) : scales(scales) {
      if constexpr (kMultiplied) {
#pragma unroll
        for (uint32_t g = 0; g < kGroups; ++g) {
          scale[g] = twice(scales[g * kEach]);
          if constexpr (S::kZero) zero[g] = twice(scales[g * kEach + 1]) ^ 0x80008000u;
        }
      }
    }
    // A word of codes, from `dim` of the part on; words come in their order.
    __device__ __forceinline__ void widen_word(uint32_t (&x)[2 * kInByte], uint32_t codes, uint32_t dim) {
      const uint32_t g = kGroups == 1 ? 0 : dim / S::kBlockDims;
      if constexpr (kTables) {
        if (dim % (4 * S::kBlockDims) == 0) Fp4Tables::make_tables(tables, four_of(g));
        uint32_t products[2];
        Fp4Tables::products_of_codes(products, codes, tables[g % 4]);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) widen<true>(e4m3{}, *(uint32_t(*)[2])&x[2 * i], products[i]);
      } else {
        widen<!kApart>(Code{}, x, codes);
      }
      if constexpr (kMultiplied) {
#pragma unroll
        for (uint32_t i = 0; i < 2 * kInByte; ++i) {
          // (code - zero) * scale. In code * scale - zero * scale all dims of a group would be off by the rounding of
          // zero * scale.
          if constexpr (S::kZero) x[i] = add_halves(x[i], zero[g]);
          x[i] = kPowers ? multiply_bf16(x[i], scale[g]) : multiply_halves(x[i], scale[g]);
        }
      }
    }

    // The scales of four groups from `first` on, as far as there are any, a byte each.
    __device__ __forceinline__ uint32_t four_of(uint32_t first) const {
      uint32_t bytes = 0;
#pragma unroll
      for (uint32_t i = 0; i < 4 && first + i < kGroups; ++i) bytes |= (uint32_t)scales[first + i].bits << 8 * i;
      return bytes;
    }
  };

  __device__ static __forceinline__ uint32_t fresh_places(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }
  // As both halves of a register.
  __device__ static __forceinline__ uint32_t twice(typename S::Scale x) {
    if constexpr (kPowers) {
      return bf16_powers(x.bits * 0x10001u);
    } else if constexpr (sizeof(x) == 1) {
      uint32_t out[2];
      widen<true>(x, out, x.bits * 0x101u);
      return out[0];
    } else {
      return x.bits * 0x10001u;
    }
  }
};

// The place of dim `dim` among 8 widened dims, and the dim at a place.
template <bool kApart>
__device__ __forceinline__ constexpr uint32_t place_of_dim(uint32_t dim) { return kApart ? dim % 4 * 2 + dim / 4 : dim; }
template <bool kApart>
__device__ __forceinline__ constexpr uint32_t dim_at(uint32_t place) { return kApart ? place / 2 + place % 2 * 4 : place; }

// ---- Q

// Pairs of neighbouring elements of a column, which begins at `row`; zeros where it is not `live`.
template <typename Tile, typename T>
__device__ __forceinline__ void load_pairs(QueryColumn<Tile>& x, const T* row, bool live) {
  static_assert(kPlain<typename Tile::KeyCode> && kPlain<typename Tile::ValueCode>, "dims lie as those of elements that are widened");
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

  // The rows of warp `own`, a row a lane; rows that are not `live` do not count.
  __device__ __forceinline__ void store(uint32_t own, float scale, bool live) {
    const uint32_t bits = __float_as_uint(scale) & 0x7fffffffu, largest = __reduce_max_sync(~0u, live ? bits : 0), smallest = __reduce_min_sync(~0u, live ? bits : kU32Max);
    if (threadIdx.x % 32 == 0) high[own] = largest, low[own] = smallest;
  }
};

// Weights carry their token's scale of V, so row_max rises with the logarithm of both: raise_max of row_wgmma.cuh, a score
// counts with the tile's largest scale. If the scales of a tile differ by more than 2^10, or are NaN or infinite, each score
// counts with its own scale, because f16 would lose the weights of tokens with small scales.
template <typename Tile, typename Factor>
__device__ __forceinline__ bool raise_max(float (&shrink)[2], RowSums<Tile>& sums, const RowScores<Tile>& s, const float* scales, const ScaleRange& range, const Factor& factor) {
  const uint32_t largest = __reduce_max_sync(~0u, range.high[threadIdx.x % 4]), smallest = __reduce_min_sync(~0u, range.low[threadIdx.x % 4]);
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

// exponentiate of row_wgmma.cuh; then weights are multiplied by the scales of V of their tokens. A hidden one stays -0 whatever
// its scale.
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
