// Attention of a tile of tokens on tensor cores, m16n8k16: S^T = K Q^T, softmax, O^T += V^T P^T, by a warp over its columns.
//
// Tokens, then dims, lie on M and columns on N, so that few columns fill the tensor cores. Lane 4g + j has, of every 16 x 8
// result, rows g and g + 8 of columns 2j and 2j + 1: element r of a fragment is row g + r / 2 * 8, column 2j + r % 2.
//
// `Tile` names the numbers of a tile: kTokens of it (a multiple of 16), kN tiles of 8 columns of a warp, kTeamWarps warps that
// share it, the segments K and V, and, for rows of K and V, the bytes (kKeyBytes) and the pitch in shared memory (kKeyPitch). V
// follows K in a stage. kSlack: the distance, base 2, by which a score may pass the running maximum of its column.
//
// Each product has operands of its own (fragments.cuh): bf16 where K, or V, is rows of bf16, else f16. Q and weights follow.
#pragma once

#include "columns.cuh"
#include "fragments.cuh"

// Element type of a segment's fragments: its elements, biased integers (KeyCode and ValueCode of `Tile`), or, for MAX's nvfp4,
// the products from tables. Codes that were widened in shared memory are elements of 16 bits.
template <typename S, typename Code, bool = kSame<Code, e2m1x2> && S::kRecipe == Recipe::nvfp4_max>
struct FragmentsOf {
  using Element = Code;
};
template <typename S, typename Code>
struct FragmentsOf<S, Code, true> {
  using Element = e2m1x2_products;
};

// Numbers derived from a tile: 32-byte blocks of a row, steps of 16 dims of K, tiles of 16 dims of V.
template <typename Tile>
struct TileShape {
  using Keys = KeyFragments<typename FragmentsOf<typename Tile::K, typename Tile::KeyCode>::Element>;
  using Values = ValueFragments<typename FragmentsOf<typename Tile::V, typename Tile::ValueCode>::Element>;
  static constexpr uint32_t kM = Tile::kTokens / 16;
  static constexpr uint32_t kKeyBlocks = (Tile::kKeyBytes + 31) / 32, kValueBlocks = (Tile::kValueBytes + 31) / 32;
  static constexpr uint32_t kKeySteps = kKeyBlocks * Keys::kSteps, kValueTiles = kValueBlocks * Values::kTiles;
  static constexpr uint32_t kPairs = kKeySteps * 8;  // pairs of elements of q: step * 8 + register * 4 + lane % 4
  using Query = uint32_t[kKeySteps][Tile::kN * Tile::kTeamWarps][32][2];  // Q in shared memory: step, 8 columns, lane, register
  static constexpr uint32_t kValuesAt = Tile::kTokens * Tile::kKeyPitch;  // where V begins in a stage
  // The group of dims of a step of K, of a tile of V.
  __device__ static constexpr uint32_t key_group(uint32_t step) {
    return Tile::kKeyGroups == 1 ? 0 : (step / Keys::kSteps * Keys::kDims + step % Keys::kSteps / Keys::kHalfSteps * Keys::kHalfDims) / Tile::K::kBlockDims;
  }
  __device__ static constexpr uint32_t value_group(uint32_t tile) {
    return Tile::kValueGroups == 1 ? 0 : (tile / Values::kTiles * Values::kDims + tile % Values::kTiles / Values::kHalfTiles * Values::kHalfDims) / Tile::V::kBlockDims;
  }
  // Correction of sums for V's biased codes, or zero points: sums of weights, or of weights times zero points.
  static constexpr bool kValueZeros = kBeginsAtZero<typename Tile::ValueCode> && Tile::V::kZero;
  static constexpr bool kValuesMoved = !kValueZeros && kMovedUp<typename Tile::ValueCode> > 0.0f;
};

// A warp's state of its columns: the running maximum and sum of each (base 2), and the sums of V.
template <typename Tile>
struct WarpSums {
  using Shape = TileShape<Tile>;
  float out[Shape::kValueTiles][Tile::kN][4] = {}, row_max[Tile::kN][2], row_sum[Tile::kN][2] = {};
  float ceiling[Tile::kN][2];  // products above which row_max rises
  // Correction for V's biased codes: a fragment with equal rows, or this lane's share.
  static constexpr uint32_t kBack = Shape::kValuesMoved ? 4 : Shape::kValueZeros ? 2 : 0;
  float back[Tile::kValueGroups][Tile::kN][kBack + (kBack == 0)] = {};

  __device__ __forceinline__ WarpSums() {
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        row_max[n][e] = lowest();
        ceiling[n][e] = -infinity();
      }
  }
  // Start of row_max: f32's lowest number. Unlike -inf it has a difference to every score.
  __device__ static __forceinline__ float lowest() { return __uint_as_float(0xff7fffffu); }

  __device__ __forceinline__ void rescale_out(uint32_t n, uint32_t e, float factor) {
#pragma unroll
    for (uint32_t g = 0; g < Tile::kValueGroups; ++g) rescale_group(g, n, e, factor);
  }
  __device__ __forceinline__ void rescale_group(uint32_t g, uint32_t n, uint32_t e, float factor) {
#pragma unroll
    for (uint32_t t = 0; t < Shape::kValueTiles; ++t) {
      if (Shape::value_group(t) != g) continue;
      out[t][n][e] *= factor;
      out[t][n][2 + e] *= factor;
    }
#pragma unroll
    for (uint32_t i = e; i < kBack; i += 2) back[g][n][i] *= factor;
  }
};

// Scores of a tile: 16-token tiles, 8-column tiles, fragment.
template <typename Tile>
struct Scores {
  float e[TileShape<Tile>::kM][Tile::kN][4];
};

// A factor of each of the warp's columns, from the array `factors`: the lane has columns 8n + 2j + e.
template <typename Tile>
struct ColumnFactors {
  float e[Tile::kN][2];

  __device__ __forceinline__ explicit ColumnFactors(const float* factors) {
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) e[n][i] = factors[8 * n + 2 * (threadIdx.x % 4) + i];
  }
};

// The factor from products to scores, or from scores to base 2: one a column, or one for all columns.
template <typename Tile>
__device__ __forceinline__ float factor_of(const ColumnFactors<Tile>& factors, uint32_t n, uint32_t e) {
  return factors.e[n][e];
}
__device__ __forceinline__ float factor_of(float factor, uint32_t, uint32_t) { return factor; }

// ---- Q

// A column of q as a warp holds it: pairs of neighbouring elements, pair n * 32 + lane.
template <typename Tile>
struct QueryColumn {
  using Shape = TileShape<Tile>;
  using Keys = typename Shape::Keys;
  static constexpr uint32_t kEach = (Shape::kPairs + 31) / 32;
  float x[kEach][2];

  // The dim of element e of the lane's pair n; at or past Tile::K::kSize there is none.
  __device__ static __forceinline__ uint32_t dim(uint32_t n, uint32_t e) {
    const uint32_t pair = n * 32 + threadIdx.x % 32, step = pair / 8;
    return step / Keys::kSteps * Keys::kDims + Keys::key_dim(step % Keys::kSteps, pair % 4, pair / 4 % 2, e);
  }
  __device__ static __forceinline__ bool has(uint32_t n) { return n * 32 + threadIdx.x % 32 < Shape::kPairs; }

  // The column at `row`; zeros where it is not `live`.
  template <typename T>
  __device__ __forceinline__ void load(const T* row, bool live) {
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) x[n][e] = has(n) && live && dim(n, e) < Tile::K::kSize ? to_f32(row[dim(n, e)]) : 0.0f;
  }

  // Multiplies by the scales of K's dims of this head. One scale for all dims is returned as a factor of products instead, and
  // rounds no element.
  template <typename Cache>
  __device__ __forceinline__ float multiply_scales(const Cache& cache, uint32_t head) {
    using K = typename Tile::K;
    const auto scale = [&](uint32_t d) { return scale_value<K>(*scale_at<K>(cache, no_page(Fault::none), 0, head, d)); };
    if constexpr (K::kBlockDims >= K::kSize) {
      return scale(0);
    } else {
#pragma unroll
      for (uint32_t n = 0; n < kEach; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          if (dim(n, e) < K::kSize) x[n][e] *= scale(dim(n, e));
      return 1.0f;
    }
  }

  // Divides by 2^n and the sign of qk_scale, and multiplies qk_scale by them: f16 holds the elements, the largest in [1, 2), and
  // the largest product is the largest score. A column of zeros, infinities or NaNs stays as it is. A qk_scale of 0 becomes tiny,
  // because 0 times the -inf of a hidden token would be NaN.
  __device__ __forceinline__ void normalize(float& qk_scale) {
    float high = 0.0f;
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) high = fmaxf(high, fabsf(x[n][e]));
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
    const uint32_t exponent = __float_as_uint(high) >> 23;
    const bool usual = exponent > 0 && exponent < 254;
    const float up = usual ? __uint_as_float(exponent << 23) : 1.0f, down = usual ? __uint_as_float((254 - exponent) << 23) : 1.0f;
    qk_scale *= up;
    const float sign = qk_scale < 0.0f ? -down : down;
    qk_scale = qk_scale == 0.0f ? 1e-37f : fabsf(qk_scale);
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) x[n][e] *= sign;
  }

  // To shared memory as operands of the products: query[step][col / 8][lane][register].
  __device__ __forceinline__ void store(typename Shape::Query& query, uint32_t col) const {
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n) {
      const uint32_t pair = n * 32 + threadIdx.x % 32;
      if (!has(n)) continue;
      const Vec<typename Keys::Operand, 2> both = operands(n);
      query[pair / 8][col / 8][col % 8 * 4 + pair % 4][pair / 4 % 2] = *(const uint32_t*)&both;
    }
  }

  // Negated sums of the stored elements of each group of dims, in units of one step of the code's bias: to sums[group], by lane
  // 0.
  __device__ __forceinline__ void store_sums(float (&sums)[Tile::kKeyGroups]) const {
#pragma unroll
    for (uint32_t g = 0; g < Tile::kKeyGroups; ++g) {
      float sum = 0.0f;
#pragma unroll
      for (uint32_t n = 0; n < kEach; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          if (has(n) && Shape::key_group((n * 32 + threadIdx.x % 32) / 8) == g) sum -= to_f32(operands(n).e[e]) / (Keys::kFactor * even_out<typename Tile::KeyCode>(dim(n, e)));
#pragma unroll
      for (uint32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (threadIdx.x % 32 == 0) sums[g] = sum;
    }
  }

 private:
  __device__ __forceinline__ Vec<typename Keys::Operand, 2> operands(uint32_t n) const {
    using Code = typename Tile::KeyCode;
    Vec<typename Keys::Operand, 2> both;
    pack_pair(both.e, x[n][0] * even_out<Code>(dim(n, 0)), x[n][1] * even_out<Code>(dim(n, 1)));
    return both;
  }
};

struct NoQuerySums {};

// These sums for the warp's columns from `first` on: the lane has columns 8n + 2j + e.
template <typename Tile>
struct QuerySums {
  float e[Tile::kKeyGroups][Tile::kN][2];

  __device__ __forceinline__ QuerySums(const float (*sums)[Tile::kKeyGroups], uint32_t first) {
#pragma unroll
    for (uint32_t g = 0; g < Tile::kKeyGroups; ++g)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) e[g][n][i] = sums[first + 8 * n + 2 * (threadIdx.x % 4) + i][g];
  }
};

// The lane's registers of step `step` for tile `n` of 8 columns.
template <typename Tile>
__device__ __forceinline__ void read_query(uint32_t (&out)[2], const typename TileShape<Tile>::Query& query, uint32_t step, uint32_t n) {
  const Vec<uint32_t, 2> both = *(const Vec<uint32_t, 2>*)query[step][n][threadIdx.x % 32];
  out[0] = both.e[0];
  out[1] = both.e[1];
}

// Q of the warp's columns, which begin at tile `first` of 8 columns: all in registers, or read block by block.
template <typename Tile>
struct HeldQuery {
  using Shape = TileShape<Tile>;
  static constexpr uint32_t kUnroll = Shape::kKeyBlocks;  // of the loop over blocks
  uint32_t e[Shape::kKeySteps][Tile::kN][2];

  __device__ __forceinline__ HeldQuery(const typename Shape::Query& query, uint32_t first) {
#pragma unroll
    for (uint32_t step = 0; step < Shape::kKeySteps; ++step)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) read_query<Tile>(e[step][n], query, step, first + n);
  }
  __device__ __forceinline__ void load(uint32_t) {}
  __device__ __forceinline__ const uint32_t (&at(uint32_t block, uint32_t step, uint32_t n) const)[2] { return e[block * Shape::Keys::kSteps + step][n]; }
};
template <typename Tile>
struct SharedQuery {
  using Shape = TileShape<Tile>;
  static constexpr uint32_t kUnroll = 4;
  const typename Shape::Query& query;
  uint32_t first, e[Shape::Keys::kSteps][Tile::kN][2];

  __device__ __forceinline__ SharedQuery(const typename Shape::Query& query, uint32_t first) : query(query), first(first) {}
  __device__ __forceinline__ void load(uint32_t block) {
#pragma unroll
    for (uint32_t step = 0; step < Shape::Keys::kSteps; ++step)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) read_query<Tile>(e[step][n], query, block * Shape::Keys::kSteps + step, first + n);
  }
  __device__ __forceinline__ const uint32_t (&at(uint32_t, uint32_t step, uint32_t n) const)[2] { return e[step][n]; }
};

// ---- S^T = K Q^T

// Fragments of codes that have no scales of their own.
struct NoGroupScales {
  template <typename Fragment>
  __device__ __forceinline__ void operator()(Fragment&, uint32_t, uint32_t) const {}
};

// Fragments of K times the scales of groups of dims, expanded.
template <typename Tile, typename KeyScales>
struct KeyGroupScales {
  using Keys = typename TileShape<Tile>::Keys;
  const uint8_t* scales;

  // Block `block` of tokens 16m to 16m + 15.
  __device__ __forceinline__ void operator()(uint32_t (&a)[Keys::kSteps][4], uint32_t block, uint32_t m) const {
    const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t row = 0; row < 2; ++row) {
        const uint32_t dim = block * Keys::kDims + half * Keys::kHalfDims + Keys::kInWord * j;
        const auto pair = KeyScales::pair(scales, min(dim / Tile::K::kBlockDims, KeyScales::kGroups - 1), 16 * m + g + 8 * row);
#pragma unroll
        for (uint32_t step = half * Keys::kHalfSteps; step < (half + 1) * Keys::kHalfSteps; ++step) {
          a[step][row] = KeyScales::apply(a[step][row], pair);
          a[step][row + 2] = KeyScales::apply(a[step][row + 2], pair);
        }
      }
  }
};

// Fragments of K times scales of groups of half as many dims as 16 bytes of codes have, out of their stage.
template <typename Tile, typename Bytes>
struct KeyByteScales {
  using Keys = typename TileShape<Tile>::Keys;
  uint32_t e[TileShape<Tile>::kM][2][Bytes::kHalves / 2];  // rows g and g + 8: two halves of blocks each

  __device__ __forceinline__ KeyByteScales(const uint8_t* stage, uint32_t own) {
    const uint32_t g = threadIdx.x % 32 / 4, selector = threadIdx.x % 4 < 2 ? 0x6420 : 0x7531;
#pragma unroll
    for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
      for (uint32_t row = 0; row < 2; ++row) {
        const auto words = Bytes::of(stage, own, 16 * m + g + 8 * row);
#pragma unroll
        for (uint32_t i = 0; i < Bytes::kHalves; i += 4) {
          uint32_t pairs[2];
          Bytes::halves(pairs, permute(words.e[i / 2], i + 2 < Bytes::kHalves ? words.e[i / 2 + 1] : 0, selector));
          e[m][row][i / 2] = pairs[0];
          if (i + 2 < Bytes::kHalves) e[m][row][i / 2 + 1] = pairs[1];
        }
      }
  }
  __device__ __forceinline__ void operator()(uint32_t (&a)[Keys::kSteps][4], uint32_t block, uint32_t m) const {
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r)
#pragma unroll
      for (uint32_t step = 0; step < Keys::kSteps; ++step) {
        const uint32_t both = e[m][r % 2][block];
        a[step][r] = step < Keys::kHalfSteps ? multiply_by_half<0>(a[step][r], both) : multiply_by_half<1>(a[step][r], both);
      }
  }
};

// Products of each group of dims, in the fragments of scores.
template <typename Tile>
using GroupProducts = float[Tile::kKeyGroups][TileShape<Tile>::kM][Tile::kN][4];

// Start of products of biased codes.
template <typename Tile>
__device__ __forceinline__ void move_back(GroupProducts<Tile>& products, const QuerySums<Tile>& query_sums) {
#pragma unroll
  for (uint32_t g = 0; g < Tile::kKeyGroups; ++g)
#pragma unroll
    for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) products[g][m][n][r] = kMovedUp<typename Tile::KeyCode> * query_sums.e[g][n][r % 2];
}

// Block `block` of K of tokens 16m to 16m + 15, which begins at `at` in shared memory.
template <typename Tile, typename GroupScales>
__device__ __forceinline__ void load_keys(uint32_t (&a)[TileShape<Tile>::Keys::kSteps][4], uint32_t at, uint32_t block, uint32_t m, const GroupScales& scale) {
  using Keys = typename TileShape<Tile>::Keys;
  if (block * 32 + 16 < Tile::kKeyBytes) Keys::load(a, at);
  else Keys::load_half(*(uint32_t(*)[Keys::kHalfSteps][4])a, at);
  scale(a, block, m);
}

// Adds the products of the tile's K, which begins at `stage` in shared memory, with the warp's columns of Q.
template <typename Tile, typename Query, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_qk(GroupProducts<Tile>& products, uint32_t stage, Query& query, const GroupScales& scale = {}) {
  using Shape = TileShape<Tile>;
  using Keys = typename Shape::Keys;
  // Products that add to one sum wait for each other. With fewer than 4 sums, and no codes to widen meanwhile, each sum is split
  // in two.
  constexpr uint32_t kChains = Shape::kM * Tile::kN < 4 && kPlain<typename Tile::KeyCode> ? 2 : 1;
  const uint32_t keys = stage + Keys::offset(threadIdx.x % 32, Tile::kKeyPitch);
  float others[Shape::kM][Tile::kN][4] = {};
#pragma unroll (Tile::kKeyGroups > 1 ? Shape::kKeyBlocks : Query::kUnroll)
  for (uint32_t block = 0; block < Shape::kKeyBlocks; ++block) {
#pragma unroll
    for (uint32_t m = 0; m < Shape::kM; ++m) {
      uint32_t a[Keys::kSteps][4] = {};
      load_keys<Tile>(a, keys + m * 16 * Tile::kKeyPitch + block * 32, block, m, scale);
      if (m == 0) query.load(block);
#pragma unroll
      for (uint32_t i = 0; i < Keys::kSteps; ++i) {
        const uint32_t step = block * Keys::kSteps + i;
#pragma unroll
        for (uint32_t n = 0; n < Tile::kN; ++n)
          multiply_add<typename Keys::Operand>(step % kChains == 1 ? others[m][n] : products[Shape::key_group(step)][m][n], a[i], query.at(block, i, n));
      }
    }
  }
  if constexpr (kChains == 2) {
#pragma unroll
    for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) products[0][m][n][r] += others[m][n][r];
  }
}
// Products of one group as scores.
template <typename Tile>
__device__ __forceinline__ void take_products(Scores<Tile>& s, const GroupProducts<Tile>& products) {
#pragma unroll
  for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) s.e[m][n][r] = products[0][m][n][r];
}
template <typename Tile, typename Query, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_qk(Scores<Tile>& s, uint32_t stage, Query& query, const GroupScales& scale = {}) {
  GroupProducts<Tile> products = {};
  multiply_qk<Tile>(products, stage, query, scale);
  take_products(s, products);
}

// The sum of the products of the groups, each less its token's zero point and times its scale of K (LaneScales).
template <typename Tile, typename Sums, typename KeyScales>
__device__ __forceinline__ void scale_scores(Scores<Tile>& s, const GroupProducts<Tile>& products, const Sums& query_sums, const KeyScales& k_scales) {
#pragma unroll
  for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t g = 0; g < Tile::kKeyGroups; ++g) {
        const float scale = k_scales.scale(g, 2 * m + half);
#pragma unroll
        for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
          for (uint32_t e = 0; e < 2; ++e) {
            float x = products[g][m][n][2 * half + e];
            if constexpr (Tile::K::kZero) x = __fmaf_rn(k_scales.zero(g, 2 * m + half) + kMovedUp<typename Tile::KeyCode>, query_sums.e[g][n][e], x);
            float& to = s.e[m][n][2 * half + e];
            to = g == 0 ? x * scale : __fmaf_rn(x, scale, to);
          }
      }
}

// Products times their column's factor.
template <typename Tile>
__device__ __forceinline__ void multiply_columns(Scores<Tile>& s, const ColumnFactors<Tile>& factors) {
#pragma unroll
  for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) s.e[m][n][r] *= factors.e[n][r % 2];
}

// each(token of the tile, column of the warp, score) for every score of the lane.
template <typename Tile, typename Each>
__device__ __forceinline__ void for_each_score(Scores<Tile>& s, const Each& each) {
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) each(16 * m + g + r / 2 * 8, 8 * n + 2 * j + r % 2, s.e[m][n][r]);
}

// ---- Softmax

// The lane's largest product of each column; true if one passes its column's ceiling.
template <typename Tile>
__device__ __forceinline__ bool tile_max(float (&high)[Tile::kN][2], const Scores<Tile>& s, const WarpSums<Tile>& sums) {
  bool rises = false;
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      high[n][e] = s.e[0][n][e];
#pragma unroll
      for (uint32_t r = 1; r < Tile::kTokens / 8; ++r) high[n][e] = fmaxf(high[n][e], s.e[r / 2][n][r % 2 * 2 + e]);
      rises |= high[n][e] > sums.ceiling[n][e];
    }
  return rises;
}

// The largest of the 8 lanes that share a column.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (uint32_t step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// If `high` passes the column's ceiling it becomes row_max, and the ceiling Tile::kSlack (base 2) above it; returns true then.
// `shrink` becomes the factor of the column's sums.
template <typename Tile, typename Factor>
__device__ __forceinline__ bool raise_row_max(float& shrink, WarpSums<Tile>& sums, float high, uint32_t n, uint32_t e, const Factor& factor) {
  high = column_max(high);
  if (!(high > sums.ceiling[n][e])) return false;
  const float row_max = high * factor_of(factor, n, e);
  shrink = exp2_approx(sums.row_max[n][e] - row_max);
  sums.row_max[n][e] = row_max;
  sums.row_sum[n][e] *= shrink;
  sums.ceiling[n][e] = high + Tile::kSlack / factor_of(factor, n, e);
  return true;
}

// Columns that pass their ceiling get a new maximum; their sums are rescaled.
template <typename Tile, typename Factor>
__device__ __forceinline__ void raise_max(WarpSums<Tile>& sums, const float (&high)[Tile::kN][2], const Factor& factor) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      float shrink;
      if (raise_row_max(shrink, sums, high[n][e], n, e, factor)) sums.rescale_out(n, e, shrink);
    }
}

// 2^(score - row_max).
template <typename Tile, typename Factor>
__device__ __forceinline__ float weight_of(const WarpSums<Tile>& sums, float s, uint32_t n, uint32_t e, const Factor& factor) {
  return exp2_approx(s * factor_of(factor, n, e) - sums.row_max[n][e]);
}

// Adds the rounded weights to the correction of V's biased codes.
template <typename Tile>
__device__ __forceinline__ void add_moved(WarpSums<Tile>& sums, const uint32_t (&weights)[Tile::kValueGroups][Tile::kN][2]) {
  if constexpr (TileShape<Tile>::kValuesMoved) {
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};  // 1
#pragma unroll
    for (uint32_t g = 0; g < Tile::kValueGroups; ++g)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) multiply_add<typename TileShape<Tile>::Values::Operand>(sums.back[g][n], ones, weights[g][n]);
  }
}

// Weights of tokens 16m to 16m + 15, added to row_sum in f32 and rounded to operands of V^T P^T.
template <typename Tile, typename Factor>
__device__ __forceinline__ void exponentiate(uint32_t (&weights)[1][Tile::kN][2], WarpSums<Tile>& sums, const Scores<Tile>& s, uint32_t m, const Factor& factor) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float p[2];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        p[e] = weight_of(sums, s.e[m][n][2 * half + e], n, e, factor);
        sums.row_sum[n][e] += p[e];
      }
      Vec<typename TileShape<Tile>::Values::Operand, 2> both;
      pack_pair(both.e, p[0], p[1]);
      weights[0][n][half] = transposed(*(const uint32_t*)&both);
    }
}

// ---- Weights that carry their token's scale of V

// The unit of weights of a group of dims, if weights carry V's scales: they are relative to 2^from in place of row_max. No weight
// is above 2^4 units, so that f16 holds the weights that count. unit: 2^(from - row_max). most: the largest weight allowed, or -1
// if f32 may not hold 2^(score - row_max) without the scale: such weights are computed by logarithms.
template <typename Tile>
struct ValueUnits {
  float from[Tile::kValueGroups][Tile::kN][2], unit[Tile::kValueGroups][Tile::kN][2] = {}, most[Tile::kValueGroups][Tile::kN][2];

  __device__ __forceinline__ ValueUnits() {
#pragma unroll
    for (uint32_t g = 0; g < Tile::kValueGroups; ++g)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          from[g][n][e] = WarpSums<Tile>::lowest();
          most[g][n][e] = 16.0f;
        }
  }
  // Makes weights, and the sums so far, relative to 2^to.
  __device__ __forceinline__ void move(WarpSums<Tile>& sums, uint32_t g, uint32_t n, uint32_t e, float to) {
    sums.rescale_group(g, n, e, exp2_approx(from[g][n][e] - to));
    from[g][n][e] = to;
  }
  // Bound for a new `from` or row_max: at most 2^100 below row_max, which leaves f32 room for sums.
  __device__ __forceinline__ void relate(WarpSums<Tile>& sums, uint32_t g, uint32_t n, uint32_t e) {
    if (from[g][n][e] < sums.row_max[n][e] - 100.0f) move(sums, g, n, e, sums.row_max[n][e] - 100.0f);
    unit[g][n][e] = exp2_approx(from[g][n][e] - sums.row_max[n][e]);
    most[g][n][e] = unit[g][n][e] <= 0x1p64f ? 16.0f : -1.0f;
  }
};

// raise_max for `out` relative to units: the units shrink in its place.
template <typename Tile, typename Factor>
__device__ __forceinline__ void raise_max(WarpSums<Tile>& sums, ValueUnits<Tile>& value, const float (&high)[Tile::kN][2], const Factor& factor) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      float shrink;
      if (!raise_row_max(shrink, sums, high[n][e], n, e, factor)) continue;
#pragma unroll
      for (uint32_t g = 0; g < Tile::kValueGroups; ++g) value.relate(sums, g, n, e);
    }
}

// Weights in units, of each group of dims.
template <typename Tile>
struct ScaledWeights {
  Scores<Tile> of[Tile::kValueGroups];
};

// Weights times their token's scale of V (LaneScales), and the lane's sum of the first group's weights without scales.
// kSkipHidden:
// the weight of a hidden token is 0 whatever its scale. Returns false if a weight is NaN or above its unit's bound.
template <bool kSkipHidden, typename Tile, typename ValueScales, typename Factor>
__device__ __forceinline__ bool weigh(ScaledWeights<Tile>& weights, float (&sum)[Tile::kN][2], const Scores<Tile>& s, const ValueUnits<Tile>& value,
                                      const ValueScales& v_scales, const Factor& factor) {
  bool fit = true;
#pragma unroll
  for (uint32_t g = 0; g < Tile::kValueGroups; ++g)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        float largest = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < Tile::kTokens / 8; ++i) {
          const float p = exp2_approx(__fmaf_rn(s.e[i / 2][n][i % 2 * 2 + e], factor_of(factor, n, e), -value.from[g][n][e]));
          const float w = kSkipHidden && s.e[i / 2][n][i % 2 * 2 + e] == -infinity() ? 0.0f : p * v_scales.scale(g, i);
          if (g == 0) sum[n][e] = i == 0 ? p : sum[n][e] + p;
          weights.of[g].e[i / 2][n][i % 2 * 2 + e] = w;
          largest = i == 0 ? fabsf(w) : fmaxf(largest, fabsf(w));
        }
        fit = fit && largest <= value.most[g][n][e];
      }
  return fit;
}

// Weights by logarithms, for scales of any size: units follow the largest weight that is not NaN; row_sum has no units.
template <bool kSkipHidden, typename Tile, typename ValueScales, typename Factor>
__device__ __forceinline__ void weigh_and_move(ScaledWeights<Tile>& weights, WarpSums<Tile>& sums, const Scores<Tile>& s, ValueUnits<Tile>& value,
                                               const ValueScales& v_scales, const Factor& factor) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      float score[Tile::kTokens / 8];
#pragma unroll
      for (uint32_t i = 0; i < Tile::kTokens / 8; ++i) {
        score[i] = s.e[i / 2][n][i % 2 * 2 + e] * factor_of(factor, n, e);
        sums.row_sum[n][e] += exp2_approx(score[i] - sums.row_max[n][e]);
      }
#pragma unroll
      for (uint32_t g = 0; g < Tile::kValueGroups; ++g) {
        float high = -infinity();
#pragma unroll
        for (uint32_t i = 0; i < Tile::kTokens / 8; ++i) {
          const float x = score[i] + log2_approx(fabsf(v_scales.scale(g, i)));
          if (x < infinity()) high = fmaxf(high, x);
        }
        high = column_max(high);
        if (high > value.from[g][n][e] + 3.0f) value.move(sums, g, n, e, high);
        if (high > -infinity()) value.relate(sums, g, n, e);
#pragma unroll
        for (uint32_t i = 0; i < Tile::kTokens / 8; ++i) {
          const float scale = v_scales.scale(g, i), w = copysignf(exp2_approx(score[i] + log2_approx(fabsf(scale)) - value.from[g][n][e]), scale);
          weights.of[g].e[i / 2][n][i % 2 * 2 + e] = kSkipHidden && s.e[i / 2][n][i % 2 * 2 + e] == -infinity() ? 0.0f : w;
        }
      }
    }
}

// Adds the sums of weigh to row_sum.
template <typename Tile>
__device__ __forceinline__ void add_sums(WarpSums<Tile>& sums, const float (&sum)[Tile::kN][2], const ValueUnits<Tile>& value) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) sums.row_sum[n][e] = __fmaf_rn(sum[n][e], value.unit[0][n][e], sums.row_sum[n][e]);
}

// Weights of tokens 16m to 16m + 15, rounded to operands of V^T P^T. Times zero points (LaneScales) they are added to the
// correction of V's codes.
template <bool kSkipHidden, typename Tile, typename ValueScales>
__device__ __forceinline__ void round_weights(uint32_t (&rounded)[Tile::kValueGroups][Tile::kN][2], WarpSums<Tile>& sums, const ScaledWeights<Tile>& weights, const Scores<Tile>& s, uint32_t m,
                                              const ValueScales& v_scales) {
#pragma unroll
  for (uint32_t g = 0; g < Tile::kValueGroups; ++g)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        Vec<typename TileShape<Tile>::Values::Operand, 2> both;
        pack_pair(both.e, weights.of[g].e[m][n][2 * half], weights.of[g].e[m][n][2 * half + 1]);
        rounded[g][n][half] = transposed(*(const uint32_t*)&both);
        if constexpr (TileShape<Tile>::kValueZeros) {
          const float zero = v_scales.zero(g, 2 * m + half) + kMovedUp<typename Tile::ValueCode>;
#pragma unroll
          for (uint32_t e = 0; e < 2; ++e) {
            const float w = to_f32(both.e[e]);
            if (!kSkipHidden || s.e[m][n][2 * half + e] != -infinity()) sums.back[g][n][e] = __fmaf_rn(w, zero, sums.back[g][n][e]);
          }
        }
      }
}

// ---- O^T += V^T P^T

// Fragments of V times the scales of groups of dims, expanded.
template <typename Tile, typename ValueScales>
struct ValueGroupScales {
  using Values = typename TileShape<Tile>::Values;
  const uint8_t* scales;

  __device__ __forceinline__ void operator()(uint32_t (&a)[Values::kTiles][4], uint32_t block, uint32_t m) const {
    const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t late = 0; late < 2; ++late) {
        const uint32_t dim = block * Values::kDims + half * Values::kHalfDims + Values::kTiles * g;
        const auto pair = ValueScales::pair(scales, min(dim / Tile::V::kBlockDims, ValueScales::kGroups - 1), 16 * m + 2 * j + 8 * late);
#pragma unroll
        for (uint32_t t = half * Values::kHalfTiles; t < (half + 1) * Values::kHalfTiles; ++t) {
          a[t][2 * late] = ValueScales::apply(a[t][2 * late], pair);
          a[t][2 * late + 1] = ValueScales::apply(a[t][2 * late + 1], pair);
        }
      }
  }
};

// The address of the lane's row of such a block in shared memory.
template <typename Tile>
__device__ __forceinline__ uint32_t values_at(uint32_t stage, uint32_t block, uint32_t m) {
  using Values = typename TileShape<Tile>::Values;
  return stage + TileShape<Tile>::kValuesAt + m * 16 * Tile::kValuePitch + Values::offset(threadIdx.x % 32, Tile::kValuePitch) + block * 32;
}
// Fragments of V times such scales.
template <typename Tile, typename Bytes>
struct ValueByteScales {
  using Values = typename TileShape<Tile>::Values;
  uint32_t e[TileShape<Tile>::kM][2][Bytes::kHalves];  // tokens 2j, 2j + 1, and 8 further on: each half of a block

  __device__ __forceinline__ ValueByteScales(const uint8_t* stage, uint32_t own) {
    const uint32_t j = threadIdx.x % 4, selector = threadIdx.x % 32 < 16 ? 0x6240 : 0x7351;
#pragma unroll
    for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
      for (uint32_t late = 0; late < 2; ++late) {
        const auto first = Bytes::of(stage, own, 16 * m + 2 * j + 8 * late), second = Bytes::of(stage, own, 16 * m + 2 * j + 8 * late + 1);
#pragma unroll
        for (uint32_t word = 0; word < Bytes::kWords; ++word)
          Bytes::halves(*(uint32_t(*)[2])&e[m][late][2 * word], permute(first.e[word], second.e[word], selector));
      }
  }
  __device__ __forceinline__ void operator()(uint32_t (&a)[Values::kTiles][4], uint32_t block, uint32_t m) const {
#pragma unroll
    for (uint32_t t = 0; t < Values::kTiles; ++t)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) a[t][r] = multiply_halves(a[t][r], e[m][r / 2][2 * block + t / Values::kHalfTiles]);
  }
};

// Block `block` of V of tokens 16m to 16m + 15, transposed.
template <typename Tile, typename GroupScales>
__device__ __forceinline__ void load_values(uint32_t (&a)[TileShape<Tile>::Values::kTiles][4], uint32_t stage, uint32_t block, uint32_t m, const GroupScales& scale) {
  using Values = typename TileShape<Tile>::Values;
  const uint32_t at = values_at<Tile>(stage, block, m);
  if (block * 32 + 16 < Tile::kValueBytes) Values::load(a, at);
  else Values::load_half(*(uint32_t(*)[Values::kHalfTiles][4])a, at);
  scale(a, block, m);
}

// Adds V of tokens 16m to 16m + 15, out of the tile at `stage`, times their weights.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_pv(WarpSums<Tile>& sums, uint32_t stage, const uint32_t (&weights)[Tile::kValueGroups][Tile::kN][2], uint32_t m,
                                            const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
#pragma unroll
  for (uint32_t block = 0; block < TileShape<Tile>::kValueBlocks; ++block) {
    uint32_t a[Values::kTiles][4] = {};
    load_values<Tile>(a, stage, block, m, scale);
#pragma unroll
    for (uint32_t t = 0; t < Values::kTiles; ++t)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) {
        const uint32_t tile = block * Values::kTiles + t;
        multiply_add<typename Values::Operand>(sums.out[tile][n], a[t], weights[TileShape<Tile>::value_group(tile)][n]);
      }
  }
  add_moved(sums, weights);
}

// True if the lane's part of V of tokens 16m to 16m + 15 has an infinity or NaN.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ bool has_special_values(uint32_t stage, uint32_t m, const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
  if constexpr (kBeginsAtZero<typename Tile::ValueCode>) return false;
  bool special = false;
#pragma unroll
  for (uint32_t block = 0; block < TileShape<Tile>::kValueBlocks; ++block) {
    uint32_t a[Values::kTiles][4] = {};
    load_values<Tile>(a, stage, block, m, scale);
#pragma unroll
    for (uint32_t t = 0; t < Values::kTiles; ++t)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) special |= has_special<typename Values::Operand>(a[t][r]);
  }
  return special;
}

// multiply_pv, column by column, each with the tokens that it sees: V of a token that one column sees and another does not may
// hold infinities or NaN, and 0 times them is NaN. A hidden token has the score -inf.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_pv_by_column(WarpSums<Tile>& sums, uint32_t stage, const uint32_t (&weights)[1][Tile::kN][2], uint32_t m,
                                                      const Scores<Tile>& s, const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n) {
    uint32_t seen[2];  // masks of the pairs of elements of tokens
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      seen[half] = transposed((s.e[m][n][2 * half] == -infinity() ? 0 : 0xffffu) | (s.e[m][n][2 * half + 1] == -infinity() ? 0 : 0xffff0000u));
#pragma unroll 1
    for (uint32_t col = 0; col < 8; ++col) {
      const uint32_t early = __shfl_sync(~0u, seen[0], 4 * col + j), late = __shfl_sync(~0u, seen[1], 4 * col + j);
      const uint32_t weight[2] = {g == col ? weights[0][n][0] : 0, g == col ? weights[0][n][1] : 0};
#pragma unroll
      for (uint32_t block = 0; block < TileShape<Tile>::kValueBlocks; ++block) {
        uint32_t a[Values::kTiles][4] = {};
        load_values<Tile>(a, stage, block, m, scale);
#pragma unroll
        for (uint32_t t = 0; t < Values::kTiles; ++t) {
          const uint32_t own[4] = {a[t][0] & early, a[t][1] & early, a[t][2] & late, a[t][3] & late};
          float (&to)[4] = sums.out[block * Values::kTiles + t][n];
          float added[4] = {to[0], to[1], to[2], to[3]};
          multiply_add<typename Values::Operand>(added, own, weight);
#pragma unroll
          for (uint32_t r = 0; r < 4; ++r) to[r] = 2 * j + r % 2 == col ? added[r] : to[r];
        }
      }
    }
  }
}

// ---- Results

// Multiplies `out` by its units.
template <typename Tile>
__device__ __forceinline__ void apply_units(WarpSums<Tile>& sums, const ValueUnits<Tile>& value) {
#pragma unroll
  for (uint32_t g = 0; g < Tile::kValueGroups; ++g)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) sums.rescale_group(g, n, e, value.unit[g][n][e]);
}

// Corrects `out` for V's biased codes.
template <typename Tile>
__device__ __forceinline__ void move_back(WarpSums<Tile>& sums) {
  using Shape = TileShape<Tile>;
  using Values = typename Shape::Values;
#pragma unroll
  for (uint32_t g = 0; g < Tile::kValueGroups; ++g)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        float back = 0.0f;
        if constexpr (Shape::kValuesMoved) back = kMovedUp<typename Tile::ValueCode> * sums.back[g][n][e];
        if constexpr (Shape::kValueZeros) {
          back = sums.back[g][n][e];
#pragma unroll
          for (uint32_t step = 4; step < 32; step *= 2) back += __shfl_xor_sync(~0u, back, step);
        }
#pragma unroll
        for (uint32_t t = 0; t < Shape::kValueTiles; ++t) {
          if (Shape::value_group(t) != g) continue;
#pragma unroll
          for (uint32_t half = 0; half < 2; ++half) {
            const float factor = Values::kFactor * even_out<typename Tile::ValueCode>(Values::value_dim(t % Values::kTiles, 8 * half));
            sums.out[t][n][2 * half + e] = __fmaf_rn(sums.out[t][n][2 * half + e], factor, -back);
          }
        }
      }
}

// Remaining factors of sums of products with V's codes: one factor, or a scale of each dim of the head.
struct OneFactor {
  float factor;
  __device__ __forceinline__ float operator()(uint32_t) const { return factor; }
};
template <typename V, typename Cache>
struct ChannelScales {
  const Cache& cache;
  uint32_t head;
  __device__ __forceinline__ float operator()(uint32_t dim) const { return scale_value<V>(*scale_at<V>(cache, no_page(Fault::none), 0, head, dim)); }
};

// Stores the warp's columns, from `first` on, to team `team` of `merged` in shared memory: row_max, row_sum over all lanes, and
// `out` times factor(dim).
template <typename Tile, typename Merged, typename Factor = OneFactor>
__device__ __forceinline__ void store_team_sums(Merged& merged, uint32_t team, uint32_t first, WarpSums<Tile>& sums, const Factor& factor = {1.0f}) {
  using Values = typename TileShape<Tile>::Values;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t col = first + 8 * n + 2 * j + e;
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2) sums.row_sum[n][e] += __shfl_xor_sync(~0u, sums.row_sum[n][e], step);
      if (g == 0) merged.max[team][col] = sums.row_sum[n][e] == 0.0f ? -infinity() : sums.row_max[n][e];  // no token was seen
      if (g == 0) merged.sum[team][col] = sums.row_sum[n][e];
#pragma unroll
      for (uint32_t t = 0; t < TileShape<Tile>::kValueTiles; ++t)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t dim = t / Values::kTiles * Values::kDims + Values::value_dim(t % Values::kTiles, g + 8 * half);
          if (dim < Tile::V::kSize) merged.out[team][col][dim] = sums.out[t][n][2 * half + e] * factor(dim);
        }
    }
}
