// Attention of a tile of tokens on tensor cores, m16n8k16: S^T = K Q^T, softmax, O^T += V^T P^T, by a warp over its columns.
//
// Tokens, then dims, lie on M and columns on N, so that few columns fill the tensor cores. Lane 4g + j has, of every 16 x 8
// result, rows g and g + 8 of columns 2j and 2j + 1: element r of a fragment is row g + r / 2 * 8, column 2j + r % 2.
//
// `Tile` names the numbers of a tile: kTokens of it (a multiple of 16), kN tiles of 8 columns of a warp, kTeamWarps warps that share
// it, the segments K and V, and of rows of K and V the bytes (kKeyBytes) and the pitch in shared memory (kKeyPitch). V follows K in a
// stage. kSlack: how far, base 2, a score may pass the running maximum of its column.
//
// Each product has operands of its own (fragments.cuh): bf16 where K, or V, is rows of bf16, else f16. Q and weights follow.
#pragma once

#include "columns.cuh"
#include "fragments.cuh"

// What a segment's fragments are made of: its elements, but of MAX's nvfp4 what tables make of them.
template <typename S, bool = S::kRecipe == Recipe::nvfp4_max>
struct FragmentsOf {
  using Element = typename S::Element;
};
template <typename S>
struct FragmentsOf<S, true> {
  using Element = e2m1x2_products;
};

// What follows from a tile's numbers: 32-byte blocks of a row, steps of 16 dims of K, tiles of 16 dims of V.
template <typename Tile>
struct TileShape {
  using Keys = KeyFragments<typename FragmentsOf<typename Tile::K>::Element>;
  using Values = ValueFragments<typename FragmentsOf<typename Tile::V>::Element>;
  static constexpr uint32_t kM = Tile::kTokens / 16;
  static constexpr uint32_t kKeyBlocks = (Tile::kKeyBytes + 31) / 32, kValueBlocks = (Tile::kValueBytes + 31) / 32;
  static constexpr uint32_t kKeySteps = kKeyBlocks * Keys::kSteps, kValueTiles = kValueBlocks * Values::kTiles;
  static constexpr uint32_t kPairs = kKeySteps * 8;  // of neighbouring elements of a column of q: step * 8 + register * 4 + lane % 4
  using Query = uint32_t[kKeySteps][Tile::kN * Tile::kTeamWarps][32][2];  // Q's operands in shared memory: step, 8 columns, lane, register
  static constexpr uint32_t kValuesAt = Tile::kTokens * Tile::kKeyPitch;  // where V begins in a stage
};

// What a warp keeps of its columns: the running maximum and sum of each (base 2), and the sums of V.
template <typename Tile>
struct WarpSums {
  float out[TileShape<Tile>::kValueTiles][Tile::kN][4] = {}, row_max[Tile::kN][2], row_sum[Tile::kN][2] = {};

  __device__ __forceinline__ WarpSums() {
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) row_max[n][e] = -infinity();
  }
  __device__ __forceinline__ void rescale_out(uint32_t n, uint32_t e, float factor) {
#pragma unroll
    for (uint32_t t = 0; t < TileShape<Tile>::kValueTiles; ++t) {
      out[t][n][e] *= factor;
      out[t][n][2 + e] *= factor;
    }
  }
};

// Scores of a tile: 16-token tiles, 8-column tiles, fragment.
template <typename Tile>
struct Scores {
  float e[TileShape<Tile>::kM][Tile::kN][4];
};

// A factor of each of the warp's columns, out of those from `factors` on: the lane's, of columns 8n + 2j + e.
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

// What makes scores of products, or base 2 of scores: a factor of each column, or one of all.
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

  // The dim of element e of the lane's pair n; from Tile::K::kSize on there is none.
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

  // Times the scales that K's dims of this head have.
  template <typename Cache>
  __device__ __forceinline__ void multiply_channels(const Cache& cache, uint32_t head) {
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e)
        if (dim(n, e) < Tile::K::kSize) x[n][e] *= to_f32(*scale_at<typename Tile::K>(cache, no_page(Fault::none), 0, head, dim(n, e)));
  }

  // Divided by 2^n and the sign of qk_scale, which is multiplied by them: f16 holds the elements, the largest in [1, 2), and the
  // largest product is the largest score. A column of zeros, infinities or NaNs stays as it is. A qk_scale of 0 becomes tiny: 0
  // times the -inf of a hidden token would be NaN.
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
      Vec<typename Keys::Operand, 2> both;
      pack_pair(both.e, x[n][0], x[n][1]);
      query[pair / 8][col / 8][col % 8 * 4 + pair % 4][pair / 4 % 2] = *(const uint32_t*)&both;
    }
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

// Block `block` of K of tokens 16m to 16m + 15, which begins at `at` in shared memory.
template <typename Tile, typename GroupScales>
__device__ __forceinline__ void load_keys(uint32_t (&a)[TileShape<Tile>::Keys::kSteps][4], uint32_t at, uint32_t block, uint32_t m, const GroupScales& scale) {
  using Keys = typename TileShape<Tile>::Keys;
  if (block * 32 + 16 < Tile::kKeyBytes) Keys::load(a, at);
  else Keys::load_half(*(uint32_t(*)[Keys::kHalfSteps][4])a, at);
  scale(a, block, m);
}

// Products of the tile's K, which begins at `stage` in shared memory, with the warp's columns of Q.
template <typename Tile, typename Query, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_qk(Scores<Tile>& s, uint32_t stage, Query& query, const GroupScales& scale = {}) {
  using Shape = TileShape<Tile>;
  using Keys = typename Shape::Keys;
  // Products that add to one sum wait for each other: where there are fewer than 4 sums they are two.
  constexpr uint32_t kChains = Shape::kM * Tile::kN < 4 ? 2 : 1;
  const uint32_t keys = stage + Keys::offset(threadIdx.x % 32, Tile::kKeyPitch);
  float chains[kChains][Shape::kM][Tile::kN][4] = {};
#pragma unroll Query::kUnroll
  for (uint32_t block = 0; block < Shape::kKeyBlocks; ++block) {
#pragma unroll
    for (uint32_t m = 0; m < Shape::kM; ++m) {
      uint32_t a[Keys::kSteps][4] = {};
      load_keys<Tile>(a, keys + m * 16 * Tile::kKeyPitch + block * 32, block, m, scale);
      if (m == 0) query.load(block);
#pragma unroll
      for (uint32_t step = 0; step < Keys::kSteps; ++step)
#pragma unroll
        for (uint32_t n = 0; n < Tile::kN; ++n)
          multiply_add<typename Keys::Operand>(chains[(block * Keys::kSteps + step) % kChains][m][n], a[step], query.at(block, step, n));
    }
  }
#pragma unroll
  for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) s.e[m][n][r] = kChains == 1 ? chains[0][m][n][r] : chains[0][m][n][r] + chains[kChains - 1][m][n][r];
}

// Scores times their token's scale of K, k_scales(token of the tile).
template <typename Tile, typename KeyScales>
__device__ __forceinline__ void scale_scores(Scores<Tile>& s, const KeyScales& k_scales) {
#pragma unroll
  for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float scale = k_scales(16 * m + threadIdx.x % 32 / 4 + 8 * half);
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) {
        s.e[m][n][2 * half] *= scale;
        s.e[m][n][2 * half + 1] *= scale;
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

// The lane's largest score of each column; whether one passes its column's running maximum by more than Tile::kSlack.
template <typename Tile, typename Factor>
__device__ __forceinline__ bool tile_max(float (&high)[Tile::kN][2], const Scores<Tile>& s, const WarpSums<Tile>& sums, const Factor& factor) {
  bool rises = false;
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      high[n][e] = s.e[0][n][e];
#pragma unroll
      for (uint32_t r = 1; r < Tile::kTokens / 8; ++r) high[n][e] = fmaxf(high[n][e], s.e[r / 2][n][r % 2 * 2 + e]);
      high[n][e] *= factor_of(factor, n, e);
      rises |= high[n][e] > sums.row_max[n][e] + Tile::kSlack;
    }
  return rises;
}

// The largest of the 8 lanes that share a column.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (uint32_t step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Columns whose tile maximum passes the running one by more than Tile::kSlack get it; their sums are rescaled.
template <typename Tile>
__device__ __forceinline__ void raise_max(WarpSums<Tile>& sums, float (&high)[Tile::kN][2]) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      high[n][e] = column_max(high[n][e]);
      if (!(high[n][e] > sums.row_max[n][e] + Tile::kSlack)) continue;
      const float shrink = rescale(sums.row_max[n][e], high[n][e]);
      sums.row_max[n][e] = high[n][e];
      sums.row_sum[n][e] *= shrink;
      sums.rescale_out(n, e, shrink);
    }
}

// 2^(score - row_max).
template <typename Tile, typename Factor>
__device__ __forceinline__ float weight_of(const WarpSums<Tile>& sums, float s, uint32_t n, uint32_t e, const Factor& factor) {
  const float from = sums.row_max[n][e] == -infinity() ? 0.0f : sums.row_max[n][e];  // no token was seen yet
  return exp2_approx(s * factor_of(factor, n, e) - from);
}

// Weights of tokens 16m to 16m + 15, added to row_sum in f32 and rounded to operands of V^T P^T.
template <typename Tile, typename Factor>
__device__ __forceinline__ void exponentiate(uint32_t (&weights)[Tile::kN][2], WarpSums<Tile>& sums, const Scores<Tile>& s, uint32_t m, const Factor& factor) {
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
      weights[n][half] = transposed(*(const uint32_t*)&both);
    }
}

// ---- Weights that carry their token's scale of V

// What weights are relative to: a power of two of each column that none passes by 2^4, so that f16 holds what counts; its inverse.
template <typename Tile>
struct ValueUnit {
  float unit[Tile::kN][2] = {}, inverse[Tile::kN][2] = {};
};

// As raise_max: `out` is relative to the unit, which shrinks with row_max in its place. One below f32's range starts anew.
template <typename Tile>
__device__ __forceinline__ void raise_max(WarpSums<Tile>& sums, ValueUnit<Tile>& value, float (&high)[Tile::kN][2]) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      high[n][e] = column_max(high[n][e]);
      if (!(high[n][e] > sums.row_max[n][e] + Tile::kSlack)) continue;
      const float shrink = rescale(sums.row_max[n][e], high[n][e]);
      sums.row_max[n][e] = high[n][e];
      sums.row_sum[n][e] *= shrink;
      value.unit[n][e] *= shrink;
      value.inverse[n][e] = value.unit[n][e] < 1e-37f ? 0.0f : 1.0f / value.unit[n][e];
      if (value.unit[n][e] >= 1e-37f) continue;
      value.unit[n][e] = 0.0f;
      sums.rescale_out(n, e, 0.0f);
    }
}

// Scores become weights times their token's scale of V, v_scales(token of the tile); row_sum gets the weights alone. kSkipHidden: a weight of 0 stays 0 whatever
// the scale. The lane's largest of each column; whether one passes its unit.
template <bool kSkipHidden, typename Tile, typename ValueScales, typename Factor>
__device__ __forceinline__ bool weigh_by_value_scales(float (&largest)[Tile::kN][2], Scores<Tile>& s, WarpSums<Tile>& sums, const ValueUnit<Tile>& value,
                                                      const ValueScales& v_scales, const Factor& factor) {
  bool grows = false;
#pragma unroll
  for (uint32_t m = 0; m < TileShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float scale = v_scales(16 * m + threadIdx.x % 32 / 4 + 8 * half);
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          const float p = weight_of(sums, s.e[m][n][2 * half + e], n, e, factor), w = kSkipHidden && p == 0.0f ? 0.0f : p * scale;
          sums.row_sum[n][e] += p;
          s.e[m][n][2 * half + e] = w;
          if (m == 0 && half == 0) largest[n][e] = 0.0f;
          if (fabsf(w) < infinity()) largest[n][e] = fmaxf(largest[n][e], fabsf(w));
          grows |= largest[n][e] > value.unit[n][e] * 16.0f;
        }
    }
  return grows;
}

// Columns whose largest weight passes the unit get a larger one; their sums are rescaled.
template <typename Tile>
__device__ __forceinline__ void raise_unit(WarpSums<Tile>& sums, ValueUnit<Tile>& value, float (&largest)[Tile::kN][2]) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      largest[n][e] = column_max(largest[n][e]);
      if (largest[n][e] <= value.unit[n][e] * 16.0f) continue;
      const float higher = __uint_as_float(max(__float_as_uint(largest[n][e]) & 0x7f800000u, 0x00800000u)), shrink = value.unit[n][e] / higher;
      value.unit[n][e] = higher;
      value.inverse[n][e] = 1.0f / higher;
      sums.rescale_out(n, e, shrink);
    }
}

// Weights of tokens 16m to 16m + 15 in units, rounded to operands of V^T P^T.
template <typename Tile>
__device__ __forceinline__ void round_weights(uint32_t (&weights)[Tile::kN][2], const Scores<Tile>& s, const ValueUnit<Tile>& value, uint32_t m) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      Vec<typename TileShape<Tile>::Values::Operand, 2> both;
      pack_pair(both.e, s.e[m][n][2 * half] * value.inverse[n][0], s.e[m][n][2 * half + 1] * value.inverse[n][1]);
      weights[n][half] = transposed(*(const uint32_t*)&both);
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

// Where the lane's row of such a block begins in shared memory.
template <typename Tile>
__device__ __forceinline__ uint32_t values_at(uint32_t stage, uint32_t block, uint32_t m) {
  using Values = typename TileShape<Tile>::Values;
  return stage + TileShape<Tile>::kValuesAt + m * 16 * Tile::kValuePitch + Values::offset(threadIdx.x % 32, Tile::kValuePitch) + block * 32;
}
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
__device__ __forceinline__ void multiply_pv(WarpSums<Tile>& sums, uint32_t stage, const uint32_t (&weights)[Tile::kN][2], uint32_t m, const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
#pragma unroll
  for (uint32_t block = 0; block < TileShape<Tile>::kValueBlocks; ++block) {
    uint32_t a[Values::kTiles][4] = {};
    load_values<Tile>(a, stage, block, m, scale);
#pragma unroll
    for (uint32_t t = 0; t < Values::kTiles; ++t)
#pragma unroll
      for (uint32_t n = 0; n < Tile::kN; ++n) multiply_add<typename Values::Operand>(sums.out[block * Values::kTiles + t][n], a[t], weights[n]);
  }
}

// Whether the lane's part of V of tokens 16m to 16m + 15 has an infinity or NaN.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ bool has_special_values(uint32_t stage, uint32_t m, const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
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

// As multiply_pv, column by column, each with the tokens that it sees: a token that one column sees and another does not may hold
// infinities or NaN, which times a weight of 0 are NaN. Hidden tokens are those whose s is `hidden`.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_pv_by_column(WarpSums<Tile>& sums, uint32_t stage, const uint32_t (&weights)[Tile::kN][2], uint32_t m,
                                                      const Scores<Tile>& s, float hidden, const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n) {
    uint32_t seen[2];  // masks of the pairs of elements of tokens
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      seen[half] = transposed((s.e[m][n][2 * half] == hidden ? 0 : 0xffffu) | (s.e[m][n][2 * half + 1] == hidden ? 0 : 0xffff0000u));
#pragma unroll 1
    for (uint32_t col = 0; col < 8; ++col) {
      const uint32_t early = __shfl_sync(~0u, seen[0], 4 * col + j), late = __shfl_sync(~0u, seen[1], 4 * col + j);
      const uint32_t weight[2] = {g == col ? weights[n][0] : 0, g == col ? weights[n][1] : 0};
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

// `out` in place of multiples of the unit.
template <typename Tile>
__device__ __forceinline__ void apply_unit(WarpSums<Tile>& sums, const ValueUnit<Tile>& value) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) sums.rescale_out(n, e, value.unit[n][e]);
}

// What sums of products with V's codes are still to be multiplied by: one factor, or a scale of each dim of the head.
struct OneFactor {
  float factor;
  __device__ __forceinline__ float operator()(uint32_t) const { return factor; }
};
template <typename V, typename Cache>
struct ChannelScales {
  const Cache& cache;
  uint32_t head;
  __device__ __forceinline__ float operator()(uint32_t dim) const { return to_f32(*scale_at<V>(cache, no_page(Fault::none), 0, head, dim)); }
};

// The warp's columns, which begin at `first`, to team `team` of `merged` in shared memory: row_max, row_sum over all lanes, and
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
      if (g == 0) merged.max[team][col] = sums.row_max[n][e];
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
