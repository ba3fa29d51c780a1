// Attention of a tile of tokens on tensor cores, m16n8k16: S = Q K^T, softmax, O += P V, by a warp over its columns.
//
// Columns (a query row with one of its heads) lie on M, tokens and then dims on N. Lane 4g + j has, of every 16 x 8 result,
// columns g and g + 8 and tokens, or dims, 2j and 2j + 1: element r of a fragment is column g + r / 2 * 8, token 2j + r % 2. P
// goes from S's fragments to operands without leaving the lane.
//
// `Tile` is the Tile of mma_tile.cuh, with kN = 2 kM tiles of 8 columns of a warp. The fragments {a0, a1, a2, a3} of
// fragments.cuh, 16 tokens x 16 dims of K or 16 dims x 16 tokens of V, are two operands here: {a0, a2} of the first 8 tokens or
// dims, {a1, a3} of the others. Operands of 16-bit elements come in neighbouring registers, so that no register is moved.
#pragma once

#include "../common/mma_tile.cuh"

template <typename Tile>
struct RowShape {
  using Keys = typename TileShape<Tile>::Keys;
  using Values = typename TileShape<Tile>::Values;
  static constexpr uint32_t kKeyBlocks = TileShape<Tile>::kKeyBlocks, kValueBlocks = TileShape<Tile>::kValueBlocks, kKeySteps = TileShape<Tile>::kKeySteps;
  static constexpr uint32_t kM = Tile::kN / 2;                    // tiles of 16 columns of a warp
  static constexpr uint32_t kTokenTiles = Tile::kTokens / 8;      // tiles of 8 tokens
  static constexpr uint32_t kDimTiles = 2 * TileShape<Tile>::kValueTiles;  // tiles of 8 dims of V
  // Q's operands in shared memory: step of 16 dims, 16 columns, lane, register.
  using Query = uint32_t[kKeySteps][kM * Tile::kTeamWarps][32][4];
  static_assert(Tile::kN % 2 == 0);

  // True if the lane is the one that stores maxima and sums of its columns.
  __device__ static __forceinline__ bool has_heads() { return threadIdx.x % 4 == 0; }
  // The dim of element e of the lane's tile d of dims; at or past V::kSize there is none.
  __device__ static __forceinline__ uint32_t dim(uint32_t d, uint32_t e) {
    const uint32_t t = d / 2;
    return t / Values::kTiles * Values::kDims + Values::value_dim(t % Values::kTiles, d % 2 * 8 + 2 * (threadIdx.x % 4) + e);
  }
};

// A warp's state of its columns: the running maximum and sum of each (base 2), and the sums of V. A lane has columns 16m + g +
// 8h.
template <typename Tile>
struct RowSums {
  static constexpr uint32_t kM = RowShape<Tile>::kM;
  float out[kM][RowShape<Tile>::kDimTiles][4] = {}, row_max[kM][2], row_sum[kM][2] = {};

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (uint32_t m = 0; m < kM; ++m)
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) row_max[m][h] = -infinity();
  }
  __device__ __forceinline__ void rescale_out(uint32_t m, uint32_t h, float factor) {
#pragma unroll
    for (uint32_t t = 0; t < RowShape<Tile>::kDimTiles; ++t) {
      out[m][t][2 * h] *= factor;
      out[m][t][2 * h + 1] *= factor;
    }
  }
};

// Scores of a tile: 16-column tiles, 8-token tiles, fragment.
template <typename Tile>
struct RowScores {
  float e[RowShape<Tile>::kM][RowShape<Tile>::kTokenTiles][4];
};

// A factor of each of the lane's columns, out of those from `factors` on; a warp that is not `live` reads none.
template <typename Tile>
struct RowFactors {
  float e[RowShape<Tile>::kM][2];

  __device__ __forceinline__ RowFactors(const float* factors, bool live) {
#pragma unroll
    for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) e[m][h] = live ? factors[16 * m + threadIdx.x % 32 / 4 + 8 * h] : 0.0f;
  }
};
template <typename Tile>
__device__ __forceinline__ float factor_of(const RowFactors<Tile>& factors, uint32_t m, uint32_t h) {
  return factors.e[m][h];
}

// ---- Q

// Column `col` of the block to shared memory.
template <typename Tile>
__device__ __forceinline__ void store_query_column(typename RowShape<Tile>::Query& query, const QueryColumn<Tile>& x, uint32_t col) {
#pragma unroll
  for (uint32_t n = 0; n < QueryColumn<Tile>::kEach; ++n) {
    const uint32_t pair = n * 32 + threadIdx.x % 32;
    if (!QueryColumn<Tile>::has(n)) continue;
    Vec<typename TileShape<Tile>::Keys::Operand, 2> both;
    pack_pair(both.e, x.x[n][0], x.x[n][1]);
    query[pair / 8][col / 16][col % 8 * 4 + pair % 4][pair / 4 % 2 * 2 + col / 8 % 2] = *(const uint32_t*)&both;
  }
}

// The lane's operands of step `step` for tile `n` of 16 columns of the block.
template <typename Tile>
__device__ __forceinline__ void read_query_rows(uint32_t (&a)[4], const typename RowShape<Tile>::Query& query, uint32_t step, uint32_t n) {
  const Vec<uint32_t, 4> all = *(const Vec<uint32_t, 4>*)query[step][n][threadIdx.x % 32];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) a[i] = all.e[i];
}

// Q of the warp's columns: all in registers (of a warp that is not `live` none), or read block by block.
template <typename Tile>
struct HeldQueryRows {
  using Shape = RowShape<Tile>;
  static constexpr uint32_t kUnroll = Shape::kKeyBlocks > 8 ? 2 : Shape::kKeyBlocks;  // of the loop over blocks
  uint32_t e[Shape::kKeySteps][Shape::kM][4] = {};

  __device__ __forceinline__ HeldQueryRows(const typename Shape::Query& query, uint32_t first, bool live) {
    if (!live) return;
#pragma unroll
    for (uint32_t step = 0; step < Shape::kKeySteps; ++step)
#pragma unroll
      for (uint32_t m = 0; m < Shape::kM; ++m) read_query_rows<Tile>(e[step][m], query, step, first + m);
  }
  __device__ __forceinline__ void load(uint32_t) {}
  __device__ __forceinline__ const uint32_t (&at(uint32_t block, uint32_t step, uint32_t m) const)[4] { return e[block * Shape::Keys::kSteps + step][m]; }
};
template <typename Tile>
struct SharedQueryRows {
  using Shape = RowShape<Tile>;
  static constexpr uint32_t kUnroll = Shape::kKeyBlocks > 8 ? 2 : Shape::kKeyBlocks;
  const typename Shape::Query& query;
  uint32_t first, e[Shape::Keys::kSteps][Shape::kM][4];

  __device__ __forceinline__ SharedQueryRows(const typename Shape::Query& query, uint32_t first) : query(query), first(first) {}
  __device__ __forceinline__ void load(uint32_t block) {
#pragma unroll
    for (uint32_t step = 0; step < Shape::Keys::kSteps; ++step)
#pragma unroll
      for (uint32_t m = 0; m < Shape::kM; ++m) read_query_rows<Tile>(e[step][m], query, block * Shape::Keys::kSteps + step, first + m);
  }
  __device__ __forceinline__ const uint32_t (&at(uint32_t, uint32_t step, uint32_t m) const)[4] { return e[step][m]; }
};

// ---- S = Q K^T

// Block `block` of K of tokens 16t to 16t + 15: for each step of 16 dims the operands of the first 8 tokens and of the others.
template <typename Tile, typename GroupScales>
__device__ __forceinline__ void load_key_operands(uint32_t (&b)[TileShape<Tile>::Keys::kSteps][2][2], uint32_t stage, uint32_t block, uint32_t t, const GroupScales& scale) {
  using Keys = typename TileShape<Tile>::Keys;
  const uint32_t lane = threadIdx.x % 32, at = stage + t * 16 * Tile::kKeyPitch + block * 32;
  if constexpr (kPlain<typename Tile::K::Element>) {
    if (block * 32 + 16 < Tile::kKeyBytes) {
      uint32_t r[4];
      load_matrices(r, at + (lane % 8 + lane / 16 * 8) * Tile::kKeyPitch + lane / 8 % 2 * 16);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) b[0][i / 2][i % 2] = r[i];
    } else {
      uint32_t r[2];
      load_matrices(r, at + lane % 16 * Tile::kKeyPitch);
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) b[0][h][0] = r[h], b[0][h][1] = 0;
    }
  } else {
    uint32_t a[Keys::kSteps][4] = {};
    load_keys<Tile>(a, at + Keys::offset(lane, Tile::kKeyPitch), block, t, scale);
#pragma unroll
    for (uint32_t step = 0; step < Keys::kSteps; ++step)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) b[step][i % 2][i / 2] = a[step][i];
  }
}

// Products of the warp's columns of Q with the tile's K, which begins at `stage` in shared memory.
template <typename Tile, typename Query, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_qk(RowScores<Tile>& s, uint32_t stage, Query& query, const GroupScales& scale = {}) {
  using Shape = RowShape<Tile>;
  using Keys = typename Shape::Keys;
#pragma unroll
  for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Shape::kTokenTiles; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) s.e[m][n][r] = 0.0f;
#pragma unroll Query::kUnroll
  for (uint32_t block = 0; block < Shape::kKeyBlocks; ++block) {
    query.load(block);
#pragma unroll
    for (uint32_t t = 0; t < Tile::kTokens / 16; ++t) {
      uint32_t k[Keys::kSteps][2][2];
      load_key_operands<Tile>(k, stage, block, t, scale);
#pragma unroll
      for (uint32_t step = 0; step < Keys::kSteps; ++step)
#pragma unroll
        for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
          for (uint32_t h = 0; h < 2; ++h) multiply_add<typename Keys::Operand>(s.e[m][2 * t + h], query.at(block, step, m), k[step][h]);
    }
  }
}

// each(token of the tile, m, h, score) for every score of the lane: of its column 16m + g + 8h.
template <typename Tile, typename Each>
__device__ __forceinline__ void for_each_score(RowScores<Tile>& s, const Each& each) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t n = 0; n < RowShape<Tile>::kTokenTiles; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) each(8 * n + 2 * (threadIdx.x % 4) + r % 2, m, r / 2, s.e[m][n][r]);
}

// Scores times their token's scale of K, k_scales(token of the tile).
template <typename Tile, typename KeyScales>
__device__ __forceinline__ void scale_scores(RowScores<Tile>& s, const KeyScales& k_scales) {
#pragma unroll
  for (uint32_t n = 0; n < RowShape<Tile>::kTokenTiles; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const float scale = k_scales(8 * n + 2 * (threadIdx.x % 4) + e);
#pragma unroll
      for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m) {
        s.e[m][n][e] *= scale;
        s.e[m][n][2 + e] *= scale;
      }
    }
}

// ---- Softmax

// The lane's largest score of each column; true if one passes its column's running maximum by more than Tile::kSlack.
template <typename Tile, typename Factor>
__device__ __forceinline__ bool tile_max(float (&high)[RowShape<Tile>::kM][2], const RowScores<Tile>& s, const RowSums<Tile>& sums, const Factor& factor) {
  bool rises = false;
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      high[m][h] = fmaxf(s.e[m][0][2 * h], s.e[m][0][2 * h + 1]);
#pragma unroll
      for (uint32_t n = 1; n < RowShape<Tile>::kTokenTiles; ++n) high[m][h] = fmaxf(high[m][h], fmaxf(s.e[m][n][2 * h], s.e[m][n][2 * h + 1]));
      high[m][h] *= factor_of(factor, m, h);
      rises |= high[m][h] > sums.row_max[m][h] + Tile::kSlack;
    }
  return rises;
}

// The largest of the 4 lanes that share a column.
__device__ __forceinline__ float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// A column whose tile maximum passes the running one by more than Tile::kSlack gets it as row_max; its sums are rescaled.
template <typename Tile>
__device__ __forceinline__ void raise_max(RowSums<Tile>& sums, float (&high)[RowShape<Tile>::kM][2]) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      high[m][h] = row_maximum(high[m][h]);
      const bool higher = high[m][h] > sums.row_max[m][h] + Tile::kSlack;
      const float shrink = higher ? rescale(sums.row_max[m][h], high[m][h]) : 1.0f;
      sums.row_max[m][h] = higher ? high[m][h] : sums.row_max[m][h];
      sums.row_sum[m][h] *= shrink;
      sums.rescale_out(m, h, shrink);
    }
}

// 2^(score - row_max).
template <typename Tile, typename Factor>
__device__ __forceinline__ float weight_of(const RowSums<Tile>& sums, float s, uint32_t m, uint32_t h, const Factor& factor) {
  const float from = sums.row_max[m][h] == -infinity() ? 0.0f : sums.row_max[m][h];  // no token was seen yet
  return exp2_approx(s * factor_of(factor, m, h) - from);
}

// Weights of tokens 16t to 16t + 15, added to row_sum in f32 and rounded to operands of P V.
template <typename Tile, typename Factor>
__device__ __forceinline__ void exponentiate(uint32_t (&weights)[RowShape<Tile>::kM][4], RowSums<Tile>& sums, const RowScores<Tile>& s, uint32_t t, const Factor& factor) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      const uint32_t n = 2 * t + r / 2, h = r % 2;
      const float p[2] = {weight_of(sums, s.e[m][n][2 * h], m, h, factor), weight_of(sums, s.e[m][n][2 * h + 1], m, h, factor)};
      sums.row_sum[m][h] += p[0] + p[1];
      Vec<typename TileShape<Tile>::Values::Operand, 2> both;
      pack_pair(both.e, p[0], p[1]);
      weights[m][r] = *(const uint32_t*)&both;
    }
}

// ---- Weights that carry their token's scale of V (mma_tile.cuh, ValueUnit)

template <typename Tile>
struct RowUnit {
  float unit[RowShape<Tile>::kM][2] = {}, inverse[RowShape<Tile>::kM][2] = {};
};

// raise_max for `out` relative to the unit: the unit shrinks with row_max in its place. A unit below f32's range starts anew.
template <typename Tile>
__device__ __forceinline__ void raise_max(RowSums<Tile>& sums, RowUnit<Tile>& value, float (&high)[RowShape<Tile>::kM][2]) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      high[m][h] = row_maximum(high[m][h]);
      if (!(high[m][h] > sums.row_max[m][h] + Tile::kSlack)) continue;
      const float shrink = rescale(sums.row_max[m][h], high[m][h]);
      sums.row_max[m][h] = high[m][h];
      sums.row_sum[m][h] *= shrink;
      value.unit[m][h] *= shrink;
      value.inverse[m][h] = value.unit[m][h] < 1e-37f ? 0.0f : 1.0f / value.unit[m][h];
      if (value.unit[m][h] >= 1e-37f) continue;
      value.unit[m][h] = 0.0f;
      sums.rescale_out(m, h, 0.0f);
    }
}

// Scores become weights times their token's scale of V, v_scales(token of the tile); row_sum gets the weights alone. A weight of
// 0 stays 0 whatever the scale. The lane's largest weight of each column; returns true if one passes its unit.
template <typename Tile, typename ValueScales, typename Factor>
__device__ __forceinline__ bool weigh_by_value_scales(float (&largest)[RowShape<Tile>::kM][2], RowScores<Tile>& s, RowSums<Tile>& sums, const RowUnit<Tile>& value,
                                                      const ValueScales& v_scales, const Factor& factor) {
  bool grows = false;
#pragma unroll
  for (uint32_t n = 0; n < RowShape<Tile>::kTokenTiles; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const float scale = v_scales(8 * n + 2 * (threadIdx.x % 4) + e);
#pragma unroll
      for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          const float p = weight_of(sums, s.e[m][n][2 * h + e], m, h, factor), w = p == 0.0f ? 0.0f : p * scale;
          sums.row_sum[m][h] += p;
          s.e[m][n][2 * h + e] = w;
          if (n == 0 && e == 0) largest[m][h] = 0.0f;
          if (fabsf(w) < infinity()) largest[m][h] = fmaxf(largest[m][h], fabsf(w));
          grows |= largest[m][h] > value.unit[m][h] * 16.0f;
        }
    }
  return grows;
}

// Columns whose largest weight passes the unit get a larger one; their sums are rescaled.
template <typename Tile>
__device__ __forceinline__ void raise_unit(RowSums<Tile>& sums, RowUnit<Tile>& value, float (&largest)[RowShape<Tile>::kM][2]) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      largest[m][h] = row_maximum(largest[m][h]);
      if (largest[m][h] <= value.unit[m][h] * 16.0f) continue;
      const float higher = __uint_as_float(max(__float_as_uint(largest[m][h]) & 0x7f800000u, 0x00800000u)), shrink = value.unit[m][h] / higher;
      value.unit[m][h] = higher;
      value.inverse[m][h] = 1.0f / higher;
      sums.rescale_out(m, h, shrink);
    }
}

// Weights of tokens 16t to 16t + 15 in units, rounded to operands of P V.
template <typename Tile>
__device__ __forceinline__ void round_weights(uint32_t (&weights)[RowShape<Tile>::kM][4], const RowScores<Tile>& s, const RowUnit<Tile>& value, uint32_t t) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      const uint32_t n = 2 * t + r / 2, h = r % 2;
      Vec<typename TileShape<Tile>::Values::Operand, 2> both;
      pack_pair(both.e, s.e[m][n][2 * h] * value.inverse[m][h], s.e[m][n][2 * h + 1] * value.inverse[m][h]);
      weights[m][r] = *(const uint32_t*)&both;
    }
}

// ---- O += P V

// Block `block` of V of tokens 16t to 16t + 15: for each tile of 16 dims the operands of the first 8 dims and of the others.
template <typename Tile, typename GroupScales>
__device__ __forceinline__ void load_value_operands(uint32_t (&b)[TileShape<Tile>::Values::kTiles][2][2], uint32_t stage, uint32_t block, uint32_t t,
                                                    const GroupScales& scale) {
  using Values = typename TileShape<Tile>::Values;
  if constexpr (kPlain<typename Tile::V::Element>) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t at = stage + TileShape<Tile>::kValuesAt + t * 16 * Tile::kValuePitch + block * 32 + lane % 16 * Tile::kValuePitch;
    if (block * 32 + 16 < Tile::kValueBytes) {
      uint32_t r[4];
      load_transposed(r, at + lane / 16 * 16);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) b[0][i / 2][i % 2] = r[i];
    } else {
      uint32_t r[2];
      load_transposed(r, at);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) b[0][0][i] = r[i], b[0][1][i] = 0;
    }
  } else {
    uint32_t a[Values::kTiles][4] = {};
    load_values<Tile>(a, stage, block, t, scale);
#pragma unroll
    for (uint32_t d = 0; d < Values::kTiles; ++d)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) b[d][i % 2][i / 2] = a[d][i];
  }
}

// Adds V of tokens 16t to 16t + 15, out of the tile at `stage`, times their weights.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_pv(RowSums<Tile>& sums, uint32_t stage, const uint32_t (&weights)[RowShape<Tile>::kM][4], uint32_t t, const GroupScales& scale = {}) {
  using Shape = RowShape<Tile>;
  using Values = typename Shape::Values;
#pragma unroll
  for (uint32_t block = 0; block < Shape::kValueBlocks; ++block) {
    uint32_t v[Values::kTiles][2][2];
    load_value_operands<Tile>(v, stage, block, t, scale);
#pragma unroll
    for (uint32_t d = 0; d < Values::kTiles; ++d)
#pragma unroll
      for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) multiply_add<typename Values::Operand>(sums.out[m][2 * (block * Values::kTiles + d) + h], weights[m], v[d][h]);
  }
}

// True if the lane's part of V of the tile at `stage` has an infinity or NaN.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ bool has_special_tile(uint32_t stage, const GroupScales& scale = {}) {
  using Values = typename TileShape<Tile>::Values;
  bool special = false;
#pragma unroll 1
  for (uint32_t t = 0; t < Tile::kTokens / 16; ++t) {
#pragma unroll 2
    for (uint32_t block = 0; block < TileShape<Tile>::kValueBlocks; ++block) {
      uint32_t v[Values::kTiles][4] = {};
      load_values<Tile>(v, stage, block, t, scale);
#pragma unroll
      for (uint32_t d = 0; d < Values::kTiles; ++d)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) special |= has_special<typename Values::Operand>(v[d][r]);
    }
  }
  return special;
}

// The weights of a tile: 16 tokens, 16 columns, register.
template <typename Tile>
struct RowWeights {
  uint32_t e[Tile::kTokens / 16][RowShape<Tile>::kM][4];
};

// The tokens that the lane's columns see, a bit each: 8t + 2r + e is element e of register r of the weights of tokens 16t and on.
template <typename Tile>
struct SeenTokens {
  static_assert(Tile::kTokens <= 64);
  uint32_t e[RowShape<Tile>::kM];

  // A hidden token has the s `hidden`.
  __device__ __forceinline__ SeenTokens(const RowScores<Tile>& s, float hidden) {
#pragma unroll
    for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m) {
      e[m] = 0;
#pragma unroll
      for (uint32_t i = 0; i < Tile::kTokens / 2; ++i) e[m] |= (s.e[m][i / 8 * 2 + i / 4 % 2][i / 2 % 2 * 2 + i % 2] == hidden ? 0u : 1u) << i;
    }
  }
};

// Adds V of a tile times its weights column by column, each with the tokens that it sees: a token that one column sees and
// another does not may hold infinities or NaN, and 0 times them is NaN. Blocks of dims follow each other,
// in little code and few registers, because it rarely runs.
template <typename Tile, typename GroupScales = NoGroupScales>
__device__ __forceinline__ void multiply_pv_by_column(RowSums<Tile>& sums, uint32_t stage, const RowWeights<Tile>& weights, const SeenTokens<Tile>& seen,
                                                      const GroupScales& scale = {}) {
  using Shape = RowShape<Tile>;
  using Values = typename Shape::Values;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t m = 0; m < Shape::kM; ++m)
#pragma unroll
    for (uint32_t block = 0; block < Shape::kValueBlocks; ++block) {
#pragma unroll 1
      for (uint32_t n = 0; n < Tile::kTokens; ++n) {  // 16 columns for every 16 tokens
        const uint32_t t = n / 16, h = n / 8 % 2;
        const bool mine = g == n % 8;
        uint32_t own[4];
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) {
          own[r] = weights.e[0][m][r];
#pragma unroll
          for (uint32_t i = 1; i < Tile::kTokens / 16; ++i) own[r] = t == i ? weights.e[i][m][r] : own[r];
          own[r] = mine && h == r % 2 ? own[r] : 0;
        }
        const uint32_t bits = __shfl_sync(~0u, seen.e[m], 4 * (n % 8) + j) >> (8 * t + 2 * h);
        const uint32_t early = (bits & 1) * 0xffffu | (bits >> 1 & 1) * 0xffff0000u, late = (bits >> 4 & 1) * 0xffffu | (bits >> 5 & 1) * 0xffff0000u;
        uint32_t v[Values::kTiles][4] = {};
        load_values<Tile>(v, stage, block, t, scale);
#pragma unroll
        for (uint32_t d = 0; d < Values::kTiles; ++d)
#pragma unroll
          for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t b[2] = {v[d][half] & early, v[d][2 + half] & late};
            float(&to)[4] = sums.out[m][2 * (block * Values::kTiles + d) + half];
            float added[4] = {to[0], to[1], to[2], to[3]};
            multiply_add<typename Values::Operand>(added, own, b);
#pragma unroll
            for (uint32_t r = 0; r < 4; ++r) to[r] = mine && r / 2 == h ? added[r] : to[r];
          }
      }
    }
}

// ---- Results

// Multiplies `out` by the unit.
template <typename Tile>
__device__ __forceinline__ void apply_unit(RowSums<Tile>& sums, const RowUnit<Tile>& value) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) sums.rescale_out(m, h, value.unit[m][h]);
}

// Maxima, and sums over all lanes, of 16 columns from `first` on to `merged` in shared memory.
template <typename Tile, typename Merged>
__device__ __forceinline__ void store_row_heads(Merged& merged, uint32_t first, const float (&max)[2], const float (&sum)[2]) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const uint32_t col = first + threadIdx.x % 32 / 4 + 8 * h;
    float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (RowShape<Tile>::has_heads()) merged.max[0][col] = max[h];
    if (RowShape<Tile>::has_heads()) merged.sum[0][col] = all;
  }
}
// Tile `d` of 8 dims of them, times factor(dim).
template <typename Tile, typename Merged, typename Factor>
__device__ __forceinline__ void store_row_dims(Merged& merged, uint32_t first, uint32_t d, const float (&x)[4], const Factor& factor) {
#pragma unroll
  for (uint32_t r = 0; r < 4; ++r) {
    const uint32_t col = first + threadIdx.x % 32 / 4 + r / 2 * 8, dim = RowShape<Tile>::dim(d, r % 2);
    if (dim < Tile::V::kSize) merged.out[0][col][dim] = x[r] * factor(dim);
  }
}
// The warp's columns, which begin at `first`.
template <typename Tile, typename Merged, typename Factor>
__device__ __forceinline__ void store_row_sums(Merged& merged, uint32_t first, const RowSums<Tile>& sums, const Factor& factor) {
#pragma unroll
  for (uint32_t m = 0; m < RowShape<Tile>::kM; ++m) {
    store_row_heads<Tile>(merged, first + 16 * m, sums.row_max[m], sums.row_sum[m]);
#pragma unroll
    for (uint32_t d = 0; d < RowShape<Tile>::kDimTiles; ++d) store_row_dims<Tile>(merged, first + 16 * m, d, sums.out[m][d], factor);
  }
}
