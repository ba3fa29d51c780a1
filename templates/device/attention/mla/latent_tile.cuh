// Attention of a tile of latent rows on tensor cores, m16n8k16, by all warps of a block: S^T = K Q^T, softmax, O^T += V^T P^T.
//
// A row is K of all columns, and its first dims are V. Tokens, then dims, lie on M and columns on N. Lane 4g + j has, of every
// 16 x 8 result, rows g and g + 8 of columns 2j and 2j + 1: element r of a fragment is row g + r / 2 * 8, column 2j + r % 2.
//
//   K Q^T     kWarpsM x kWarpsN x kWarpsK warps: 16 tokens, 8 kN columns and each kWarpsK-th 32-byte block of K's dims; sums
//             over a warp's blocks are added in shared memory (ColumnThreads::read)
//   softmax   kThreads / kCols neighbouring threads a column (ColumnThreads, Weights of latent.cuh)
//   V^T P^T   each warp all tokens and columns, and kMineValues 32-byte blocks of V's dims
//
// `Tile` names kThreads, kCols, kTokens, kPitch (bytes from row to row in shared memory), kSteps of 16 dims of Q, kValueDims,
// kWarpsM, kWarpsN, kWarpsK, the Element of V and QueryElement of q. A part of K names its Element, its kBlocks of 32 bytes,
// where in a row they begin (kAt, bytes) and where in Q (kFirstStep). Scales names kGroups of a row, kGroupDims, kAt in a stage,
// kPitch between tokens.
#pragma once

#include "../common/columns.cuh"
#include "latent.cuh"

// The stage `ahead` (at most kStages) after `stage` in a ring; kStages - 1 ahead is the stage before.
template <uint32_t kStages>
__device__ __forceinline__ uint32_t ring_at(uint32_t stage, uint32_t ahead) {
  return stage + ahead < kStages ? stage + ahead : stage + ahead - kStages;
}

// Numbers derived from a tile: kN tiles of 8 columns of a warp of K Q^T, blocks of V of a warp of V^T P^T.
template <typename Tile>
struct LatentShape {
  using Values = ValueFragments<typename Tile::Element>;
  using Operand = typename Values::Operand;  // what is multiplied
  static constexpr uint32_t kWarps = Tile::kThreads / 32, kN = Tile::kCols / 8 / Tile::kWarpsN;
  static constexpr uint32_t kValueBlocks = Tile::kValueDims / Values::kDims, kMineValues = (kValueBlocks + kWarps - 1) / kWarps;
  using Query = uint32_t[Tile::kSteps][Tile::kWarpsN][32][2 * kN];  // Q's operands: step, warp along columns, lane, its registers
  using Scores = float[Tile::kWarpsK][Tile::kCols][Tile::kTokens + 4];  // products of a warp along dims; + 4: no bank conflicts

  __device__ static uint32_t warp_m() { return threadIdx.x / 32 % Tile::kWarpsM; }
  __device__ static uint32_t warp_n() { return threadIdx.x / 32 / Tile::kWarpsM % Tile::kWarpsN; }
  __device__ static uint32_t warp_k() { return threadIdx.x / 32 / (Tile::kWarpsM * Tile::kWarpsN); }
};

// ---- Addresses and copies

// Starts the copies of a tile's rows, or of a part of them, to `to`: `Copy` names kThreads, kTokens, kPitch, and the kPieces of
// 16 bytes of a row, of which kLanes lanes copy kTogether rows. rows[token] is the address of a row; null: zeros.
template <typename Copy>
__device__ __forceinline__ void copy_rows_async(uint32_t to, const uint8_t* const* rows) {
  copy_rows<Copy::kThreads, Copy::kTokens, Copy::kPitch, Copy::kPieces, Copy::kLanes, Copy::kTogether>(to, rows);
}
// Copies a tile's f32 scales, which have a pool of their own, one copy a scale.
template <typename Tile, typename Scales>
__device__ __forceinline__ void copy_scales_async(uint32_t to, const uint8_t* const* rows) {
  for (uint32_t i = threadIdx.x; i < Tile::kTokens * Scales::kGroups; i += Tile::kThreads) {
    const uint8_t* from = rows[i / Scales::kGroups];
    cp_async<4>(to + i * 4, from + i % Scales::kGroups * 4, from != nullptr);
  }
}

// The count of the chunk's tokens that row i sees: row i of r stands at tokens - r + i and sees the tokens up to there.
__device__ __forceinline__ uint32_t tokens_seen(const KvChunk& chunk, uint32_t i) {
  const uint32_t end = chunk.tokens > chunk.rows - 1 - i ? min(chunk.tokens + i + 1 - chunk.rows, chunk.end) : 0;
  return end < chunk.begin ? 0 : end - chunk.begin;
}

// Turns infinities and NaN of V into zeros, in tokens [from, until) of the tile in `stage`; a warp a token.
template <typename Tile>
__device__ __forceinline__ void clear_special_values(uint8_t* stage, uint32_t from, uint32_t until) {
  for (uint32_t token = from + threadIdx.x / 32; token < until; token += LatentShape<Tile>::kWarps)
    clear_special<typename Tile::Element, Tile::kValueDims>(stage + token * Tile::kPitch);
}
// Turns scales of these tokens that are infinite, NaN, or at least 1e37, into zeros; a thread a scale.
template <typename Tile, typename Scales>
__device__ __forceinline__ void clear_special_scales(uint8_t* stage, uint32_t from, uint32_t until) {
  for (uint32_t i = threadIdx.x + from * Scales::kGroups; i < until * Scales::kGroups; i += Tile::kThreads) {
    float& scale = *(float*)(stage + Scales::kAt + i / Scales::kGroups * Scales::kPitch + i % Scales::kGroups * 4);
    if (!(fabsf(scale) < 1e37f)) scale = 0.0f;
  }
}

// ---- Q

// A column of q as a warp holds it: pairs of neighbouring elements, pair n * 32 + lane; 8 pairs are a step of 16 dims.
template <typename Tile, typename KeyPart>
struct QueryColumn {
  using T = typename Tile::QueryElement;
  using Keys = KeyFragments<typename KeyPart::Element>;
  using RopeKeys = KeyFragments<T>;  // of steps behind KeyPart's
  static constexpr uint32_t kKeySteps = KeyPart::kBlocks * Keys::kSteps, kPairs = Tile::kSteps * 8, kEach = (kPairs + 31) / 32;
  float x[kEach][2];

  // The column at `row`; zeros if it is not `live`.
  __device__ __forceinline__ void load(const T* row, bool live) {
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n) {
      const uint32_t pair = n * 32 + threadIdx.x % 32, step = pair / 8, half = pair / 4 % 2;
      const uint32_t key_dim = step / Keys::kSteps * Keys::kDims + Keys::key_dim(step % Keys::kSteps, pair % 4, half, 0);
      const uint32_t rope_dim = KeyPart::kBlocks * Keys::kDims + (step - kKeySteps) * RopeKeys::kDims + RopeKeys::key_dim(0, pair % 4, half, 0);
      Vec<T, 2> both = {};
      if (pair < kPairs && live) both = *(const Vec<T, 2>*)(row + (step < kKeySteps ? key_dim : rope_dim));
      x[n][0] = to_f32(both.e[0]);
      x[n][1] = to_f32(both.e[1]);
    }
  }

  // The column's factor 2^-n, with which f16 holds its elements, the largest in [1, 2); qk_scale is multiplied by 2^n. The factor
  // is 1 for a column of zeros, infinities or NaN.
  __device__ __forceinline__ float normalize(float& qk_scale) const {
    float high = 0.0f;
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n) high = fmaxf(high, fmaxf(fabsf(x[n][0]), fabsf(x[n][1])));
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
    const uint32_t exponent = __float_as_uint(high) >> 23;
    const bool usual = exponent > 0 && exponent < 254;
    qk_scale *= usual ? __uint_as_float(exponent << 23) : 1.0f;
    return usual ? __uint_as_float((254 - exponent) << 23) : 1.0f;
  }

  // Stores the column to shared memory as operands of products, times `down` and the power of two that divides fragments of
  // codes.
  __device__ __forceinline__ void store(typename LatentShape<Tile>::Query& query, uint32_t col, float down = 1.0f) const {
    constexpr uint32_t kN = LatentShape<Tile>::kN;
#pragma unroll
    for (uint32_t n = 0; n < kEach; ++n) {
      const uint32_t pair = n * 32 + threadIdx.x % 32, step = pair / 8;
      if (pair >= kPairs) continue;
      Vec<typename Keys::Operand, 2> key;
      Vec<T, 2> rope;
      pack_pair(key.e, x[n][0] * (down * Keys::kFactor), x[n][1] * (down * Keys::kFactor));
      pack_pair(rope.e, x[n][0] * down, x[n][1] * down);
      query[step][col / 8 / kN][col % 8 * 4 + pair % 4][col / 8 % kN * 2 + pair / 4 % 2] =
          step < kKeySteps ? *(const uint32_t*)&key : *(const uint32_t*)&rope;
    }
  }
};

// The lane's operands of one step, for the warp's kN tiles of 8 columns.
template <typename Tile>
struct QueryFragment {
  uint32_t e[LatentShape<Tile>::kN][2];
};
template <typename Tile>
__device__ __forceinline__ QueryFragment<Tile> read_query(const typename LatentShape<Tile>::Query& query, uint32_t step) {
  constexpr uint32_t kN = LatentShape<Tile>::kN;
  const Vec<uint32_t, 2 * kN> all = *(const Vec<uint32_t, 2 * kN>*)query[step][LatentShape<Tile>::warp_n()][threadIdx.x % 32];
  QueryFragment<Tile> b;
#pragma unroll
  for (uint32_t i = 0; i < 2 * kN; ++i) b.e[i / 2][i % 2] = all.e[i];
  return b;
}

// The blocks of a part of K that a warp multiplies: kMine at most of each of kScaleGroups groups of blocks, whose dims share a
// scale.
template <typename Tile, typename KeyPart, uint32_t kScaleGroups>
struct WarpBlocks {
  using Keys = KeyFragments<typename KeyPart::Element>;
  static constexpr uint32_t kGroups = kScaleGroups, kGroupBlocks = KeyPart::kBlocks / kGroups;
  static constexpr uint32_t kMine = (kGroupBlocks + Tile::kWarpsK - 1) / Tile::kWarpsK, kAt = KeyPart::kAt;

  __device__ static __forceinline__ bool has(uint32_t i) {
    return kGroupBlocks % Tile::kWarpsK == 0 || i * Tile::kWarpsK + LatentShape<Tile>::warp_k() < kGroupBlocks;
  }
  __device__ static __forceinline__ uint32_t block(uint32_t group, uint32_t i) {
    return group * kGroupBlocks + i * Tile::kWarpsK + LatentShape<Tile>::warp_k();
  }
  __device__ static __forceinline__ uint32_t query_step(uint32_t group, uint32_t i, uint32_t step) {
    return KeyPart::kFirstStep + block(group, i) * Keys::kSteps + step;
  }
};

// Q of a part of K for the warp's columns and blocks: in registers, or read from shared memory for each product.
template <typename Tile, typename KeyPart, uint32_t kScaleGroups = 1>
struct HeldQuery {
  using Shape = LatentShape<Tile>;
  using Blocks = WarpBlocks<Tile, KeyPart, kScaleGroups>;
  static constexpr uint32_t kSteps = Blocks::Keys::kSteps;
  QueryFragment<Tile> e[kScaleGroups * Blocks::kMine * kSteps];

  __device__ __forceinline__ explicit HeldQuery(const typename Shape::Query& query) {
#pragma unroll
    for (uint32_t n = 0; n < kScaleGroups * Blocks::kMine * kSteps; ++n) {
      const uint32_t group = n / (Blocks::kMine * kSteps), i = n / kSteps % Blocks::kMine;
      if (Blocks::has(i)) e[n] = read_query<Tile>(query, Blocks::query_step(group, i, n % kSteps));
    }
  }
  __device__ __forceinline__ const QueryFragment<Tile>& at(uint32_t group, uint32_t i, uint32_t step) const { return e[(group * Blocks::kMine + i) * kSteps + step]; }
};
template <typename Tile, typename KeyPart, uint32_t kScaleGroups = 1>
struct SharedQuery {
  using Shape = LatentShape<Tile>;
  using Blocks = WarpBlocks<Tile, KeyPart, kScaleGroups>;
  const typename Shape::Query& query;

  __device__ __forceinline__ explicit SharedQuery(const typename Shape::Query& query) : query(query) {}
  __device__ __forceinline__ QueryFragment<Tile> at(uint32_t group, uint32_t i, uint32_t step) const {
    return read_query<Tile>(query, Blocks::query_step(group, i, step));
  }
};

// ---- S^T = K Q^T

// Products of the warp's 16 tokens with its columns, summed over its blocks.
template <typename Tile>
struct Products {
  float e[LatentShape<Tile>::kN][4];
};

// The address of the lane's fragments of K, in the tile at `stage` in shared memory.
template <typename Tile, typename Keys>
__device__ __forceinline__ uint32_t warp_keys(uint32_t stage) {
  return stage + LatentShape<Tile>::warp_m() * 16 * Tile::kPitch + Keys::offset(threadIdx.x % 32, Tile::kPitch);
}

// Products of the warp's blocks of one group; two sums in turn, because products that add to one sum wait for each other.
template <typename Tile, typename Query>
__device__ __forceinline__ void multiply_group(Products<Tile>& s, uint32_t stage, const Query& query, uint32_t group) {
  using Blocks = typename Query::Blocks;
  using Keys = typename Blocks::Keys;
  const uint32_t keys = warp_keys<Tile, Keys>(stage) + Blocks::kAt;
  Products<Tile> part[2] = {};
#pragma unroll
  for (uint32_t i = 0; i < Blocks::kMine; ++i) {
    if (!Blocks::has(i)) break;
    uint32_t a[Keys::kSteps][4];
    Keys::load(a, keys + Blocks::block(group, i) * 32);
#pragma unroll
    for (uint32_t step = 0; step < Keys::kSteps; ++step) {
      const QueryFragment<Tile> b = query.at(group, i, step);
#pragma unroll
      for (uint32_t n = 0; n < LatentShape<Tile>::kN; ++n) multiply_add<typename Keys::Operand>(part[(i * Keys::kSteps + step) % 2].e[n], a[step], b.e[n]);
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < LatentShape<Tile>::kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s.e[n][r] = part[0].e[n][r] + part[1].e[n][r];
}

// Products with the part of K that `query` is for, which has no scales.
template <typename Tile, typename Query>
__device__ __forceinline__ void multiply_qk(Products<Tile>& s, uint32_t stage, const Query& query) {
  multiply_group(s, stage, query, 0);
}

// Products with a part of K that has scales in the same stage: the sum of each group's dims is multiplied by its token's scale.
// largest[warp along tokens][group] becomes the largest usual scale of those 16 tokens.
template <typename Scales, typename Tile, typename Query>
__device__ __forceinline__ void multiply_scaled_qk(Products<Tile>& s, float (&largest)[Tile::kWarpsM][Scales::kGroups], uint32_t stage, const uint8_t* stage_bytes,
                                                   const Query& query) {
  using Shape = LatentShape<Tile>;
  const uint8_t* scales = stage_bytes + (Shape::warp_m() * 16 + threadIdx.x % 32 / 4) * Scales::kPitch + Scales::kAt;
#pragma unroll
  for (uint32_t group = 0; group < Scales::kGroups; ++group) {
    Products<Tile> part;
    multiply_group(part, stage, query, group);
    const float scale[2] = {*(const float*)(scales + 4 * group), *(const float*)(scales + 8 * Scales::kPitch + 4 * group)};
    if (Shape::warp_n() == 0 && Shape::warp_k() == 0) {
      const float high = largest_of_rows(scale);
      if (threadIdx.x % 32 == 0) largest[Shape::warp_m()][group] = high;
    }
#pragma unroll
    for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) s.e[n][r] = group == 0 ? part.e[n][r] * scale[r / 2] : s.e[n][r] + part.e[n][r] * scale[r / 2];
  }
}

// Adds products with another part of K, RoPE dims of 16 bits.
template <typename Tile, typename Query>
__device__ __forceinline__ void add_rope_qk(Products<Tile>& s, uint32_t stage, const Query& query) {
  using Blocks = typename Query::Blocks;
  using Keys = typename Blocks::Keys;
  const uint32_t keys = warp_keys<Tile, Keys>(stage) + Blocks::kAt;
#pragma unroll
  for (uint32_t i = 0; i < Blocks::kMine; ++i) {
    if (!Blocks::has(i)) break;
    uint32_t a[1][4];
    Keys::load(a, keys + Blocks::block(0, i) * 32);
    const QueryFragment<Tile> b = query.at(0, i, 0);
#pragma unroll
    for (uint32_t n = 0; n < LatentShape<Tile>::kN; ++n) multiply_add<typename Keys::Operand>(s.e[n], a[0], b.e[n]);
  }
}

// The warp's products to scores[warp along dims][column][token].
template <typename Tile>
__device__ __forceinline__ void store_products(typename LatentShape<Tile>::Scores& scores, const Products<Tile>& s) {
  using Shape = LatentShape<Tile>;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r)
      scores[Shape::warp_k()][(Shape::warp_n() * Shape::kN + n) * 8 + 2 * j + r % 2][Shape::warp_m() * 16 + g + r / 2 * 8] = s.e[n][r];
}

// ---- Softmax, by the threads of a column

// The column's running maximum (base 2), which its threads share, and this thread's part of the sum of weights.
struct ColumnSoftmax {
  float row_max = -infinity(), row_sum = 0.0f;
};

// Products become scores in base 2; tokens for which `sees` is false get -inf.
template <typename Softmax, typename Sees>
__device__ __forceinline__ void scale_and_hide(float (&x)[Softmax::kEach], float qk_scale, const Sees& sees) {
#pragma unroll
  for (uint32_t n = 0; n < Softmax::kEach; ++n) x[n] = sees(Softmax::token(n)) ? x[n] * qk_scale : -infinity();
}

// Raises the maximum to the column's largest score if that passes it by more than kSlack, and returns true then. `shrink` becomes
// the factor of sums relative to the old maximum, 1 if it stays.
template <typename Tile, typename Softmax>
__device__ __forceinline__ bool raise_max(ColumnSoftmax& sums, float& shrink, const float (&x)[Softmax::kEach]) {
  float high = -infinity();
#pragma unroll
  for (uint32_t n = 0; n < Softmax::kEach; ++n) high = fmaxf(high, x[n]);
  high = Softmax::largest(high);
  const bool rises = high > sums.row_max + Tile::kSlack;
  const float higher = rises ? high : sums.row_max;
  shrink = rises ? rescale(sums.row_max, higher) : 1.0f;
  sums.row_max = higher;
  sums.row_sum *= shrink;
  return rises;
}

// Weights 2^(score - row_max), which are added to row_sum in f32.
template <typename Softmax>
__device__ __forceinline__ void exponentiate(float (&x)[Softmax::kEach], ColumnSoftmax& sums) {
  const float from = sums.row_max == -infinity() ? 0.0f : sums.row_max;  // no token was seen yet
#pragma unroll
  for (uint32_t n = 0; n < Softmax::kEach; ++n) {
    x[n] = exp2_approx(x[n] - from);
    sums.row_sum += x[n];
  }
}

// ---- O^T += V^T P^T

// The warp's sums: its 16-dim tiles of V, 8-column tiles, fragment.
template <typename Tile>
struct ValueSums {
  using Shape = LatentShape<Tile>;
  static constexpr uint32_t kTiles = Shape::kMineValues * Shape::Values::kTiles, kN = Tile::kCols / 8;
  float e[kTiles][kN][4] = {};

  __device__ __forceinline__ void multiply(float by) {
#pragma unroll
    for (uint32_t m = 0; m < kTiles; ++m)
#pragma unroll
      for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) e[m][n][r] *= by;
  }
  __device__ __forceinline__ void multiply_columns(const float (&shrink)[Tile::kCols]) {
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n) {
      const Vec<float, 2> by = *(const Vec<float, 2>*)&shrink[8 * n + 2 * (threadIdx.x % 4)];
#pragma unroll
      for (uint32_t m = 0; m < kTiles; ++m)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) e[m][n][r] *= by.e[r % 2];
    }
  }
};

// The group of scales that the dims of this warp's blocks of V share.
template <typename Tile, typename Scales>
__device__ __forceinline__ uint32_t value_group() {
  using Shape = LatentShape<Tile>;
  return min(threadIdx.x / 32 * Shape::kMineValues * Shape::Values::kDims / Scales::kGroupDims, Scales::kGroups - 1);
}
// The largest usual scale of a group in a tile, from the results of the warps along tokens.
template <uint32_t kWarpsM, uint32_t kGroups>
__device__ __forceinline__ float largest_scale(const float (&found)[kWarpsM][kGroups], uint32_t group) {
  float largest = found[0][group];
#pragma unroll
  for (uint32_t m = 1; m < kWarpsM; ++m) largest = fmaxf(largest, found[m][group]);
  return largest;
}
// Weights of tokens 16k to 16k + 15 times their tokens' scales of `group`, in units.
template <typename Scales, uint32_t kN>
__device__ __forceinline__ void scale_weights(uint32_t (&weights)[kN][2], const uint8_t* stage_bytes, uint32_t k, uint32_t group, const ScaleUnit& unit) {
  uint32_t scales[2];
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint8_t* at = stage_bytes + (k * 16 + half * 8 + 2 * (threadIdx.x % 4)) * Scales::kPitch + Scales::kAt + group * 4;
    Vec<f16, 2> both;
    pack_pair(both.e, *(const float*)at * unit.inverse, *(const float*)(at + Scales::kPitch) * unit.inverse);
    scales[half] = *(const uint32_t*)&both;
  }
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) weights[n][half] = multiply_halves(weights[n][half], scales[half]);
}

// Adds V of tokens 16k to 16k + 15, out of the tile at `stage`, times their weights.
template <typename Tile, uint32_t kN>
__device__ __forceinline__ void multiply_pv(ValueSums<Tile>& out, uint32_t stage, const uint32_t (&weights)[kN][2], uint32_t k) {
  using Shape = LatentShape<Tile>;
  using Values = typename Shape::Values;
  const uint32_t first = threadIdx.x / 32 * Shape::kMineValues;
  const uint32_t values = stage + Values::offset(threadIdx.x % 32, Tile::kPitch) + k * 16 * Tile::kPitch + first * 32;
#pragma unroll
  for (uint32_t v = 0; v < Shape::kMineValues; ++v) {
    if (Shape::kValueBlocks % Shape::kWarps != 0 && first + v >= Shape::kValueBlocks) break;
    uint32_t a[Values::kTiles][4];
    Values::load(a, values + v * 32);
#pragma unroll
    for (uint32_t t = 0; t < Values::kTiles; ++t)
#pragma unroll
      for (uint32_t n = 0; n < kN; ++n) multiply_add<typename Shape::Operand>(out.e[v * Values::kTiles + t][n], a[t], weights[n]);
  }
}

// ---- Results

// The block's columns to `merged` in shared memory: row_max, row_sum over a column's threads, and `out` times `factor` and the
// power of two that fragments of codes are divided by.
template <typename Softmax, typename Merged, typename Tile>
__device__ __forceinline__ void store_sums(Merged& merged, const ColumnSoftmax& sums, const ValueSums<Tile>& out, float factor = 1.0f) {
  using Shape = LatentShape<Tile>;
  using Values = typename Shape::Values;
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const float row_sum = Softmax::total(sums.row_sum);
  if (Softmax::member() == 0) merged.max[0][Softmax::col()] = sums.row_max;
  if (Softmax::member() == 0) merged.sum[0][Softmax::col()] = row_sum;
#pragma unroll
  for (uint32_t m = 0; m < ValueSums<Tile>::kTiles; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Tile::kCols / 8; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
        const uint32_t block = warp * Shape::kMineValues + m / Values::kTiles;
        if (Shape::kValueBlocks % Shape::kWarps != 0 && block >= Shape::kValueBlocks) continue;
        const uint32_t dim = block * Values::kDims + Values::value_dim(m % Values::kTiles, g + r / 2 * 8);
        merged.out[0][8 * n + 2 * j + r % 2][dim] = out.e[m][n][r] * Values::kFactor * factor;
      }
}
