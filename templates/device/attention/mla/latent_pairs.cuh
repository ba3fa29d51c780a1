// Attention of few columns over latent rows of 8-bit codes with e8m0 scales, 512 dims, by pairs of warps that have tokens of
// their own: S^T = K Q^T, softmax, O^T += V^T P^T, a warp of a pair half of the dims. V is the whole row.
//
// Tokens, then dims, lie on M and columns on N (m16n8k16). Lane 4g + j has, of every 16 x 8 result, rows g and g + 8 of columns
// 2j and 2j + 1: element r of a fragment is row g + r / 2 * 8, column 2j + r % 2.
//
// `Tile` names kCols, kTokens (16), kPitch (bytes from row to row in shared memory), the Element of codes, the PlainElement of
// dims that are not quantized, kCodeBlocks (32 bytes of codes each, of the whole row), kGroupDims of a scale, kScalePitch from a
// token's scales to the next token's, kSteps of 16 dims of Q, kHeld of a half's steps in registers, kWarpsN (1), kSlack,
// QueryElement.
#pragma once

#include "latent_tile.cuh"

// Derived numbers: a warp has kBlocks blocks of codes in its half, or kCommon of them and kPlain blocks of 16 plain dims.
template <typename Tile>
struct PairShape {
  using Keys = KeyFragments<typename Tile::Element>;
  using Values = ValueFragments<typename Tile::Element>;
  using Operand = typename Values::Operand;
  static constexpr uint32_t kN = Tile::kCols / 8, kBlocks = 8, kCommon = Tile::kCodeBlocks - kBlocks, kPlain = 2 * (kBlocks - kCommon);
  static constexpr uint32_t kGroupBlocks = Tile::kGroupDims / 32, kGroups = kBlocks / kGroupBlocks;  // of a scale; of a half
  static constexpr uint32_t kPlainGroups = kCommon / kGroupBlocks;  // beside plain dims
  static constexpr uint32_t kTiles = 2 * kBlocks;  // of 16 dims of O
  static_assert(Keys::kDims == 32 && kCommon % kGroupBlocks == 0 && kTiles == Tile::kSteps / 2);
  using Scores = float[2][32][4 * kN];  // of both halves, as lanes have them
};

// The lane's operands of Q of one half: kHeld steps of 16 dims in registers, the others are read for each product.
template <typename Tile>
struct PairQuery {
  static constexpr uint32_t kN = PairShape<Tile>::kN;
  struct Step {
    uint32_t e[kN][2];
  };
  const typename LatentShape<Tile>::Query& query;
  uint32_t first;
  Step held[Tile::kHeld];

  __device__ __forceinline__ PairQuery(const typename LatentShape<Tile>::Query& query, uint32_t half) : query(query), first(half * (Tile::kSteps / 2)) {
#pragma unroll
    for (uint32_t s = 0; s < Tile::kHeld; ++s) held[s] = read(s);
  }
  __device__ __forceinline__ Step read(uint32_t step) const {
    const Vec<uint32_t, 2 * kN> all = *(const Vec<uint32_t, 2 * kN>*)query[first + step][0][threadIdx.x % 32];
    Step found;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kN; ++i) found.e[i / 2][i % 2] = all.e[i];
    return found;
  }
  __device__ __forceinline__ Step at(uint32_t step) const { return step < Tile::kHeld ? held[step] : read(step); }
};

// Scales of tokens g and g + 8 in the lane's half, as powers of two: infinity for NaN, and 0 for 2^-127.
template <typename Tile>
struct PairScales {
  static constexpr uint32_t kGroups = PairShape<Tile>::kGroups, kWords = kGroups / 4;
  uint32_t words[2][kWords];

  __device__ __forceinline__ PairScales(const uint8_t* scales, uint32_t half) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const auto found = *(const Vec<uint32_t, kWords>*)(scales + (threadIdx.x % 32 / 4 + 8 * h) * Tile::kScalePitch + half * kGroups);
#pragma unroll
      for (uint32_t n = 0; n < kWords; ++n) words[h][n] = found.e[n];
    }
  }
  __device__ __forceinline__ float of(uint32_t group, uint32_t h) const {
    const uint32_t word = words[h][group / 4];
    const uint32_t at = group % 4 * 8;
    return __uint_as_float((at < 23 ? word << (23 - at) : word >> (at - 23)) & 0x7f800000u);
  }
};

// Products of kGroups groups of codes, each multiplied by its tokens' scale: s becomes their sum.
template <uint32_t kGroups, typename Tile>
__device__ __forceinline__ void multiply_code_groups(float (&s)[PairShape<Tile>::kN][4], uint32_t half_rows, const PairQuery<Tile>& query, const PairScales<Tile>& scales) {
  using Shape = PairShape<Tile>;
  using Keys = typename Shape::Keys;
  const uint32_t keys = half_rows + Keys::offset(threadIdx.x % 32, Tile::kPitch);
#pragma unroll
  for (uint32_t group = 0; group < kGroups; ++group) {
    float part[Shape::kN][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < Shape::kGroupBlocks; ++i) {
      const uint32_t block = group * Shape::kGroupBlocks + i;
      uint32_t a[2][4];
      Keys::load(a, keys + block * 32);
#pragma unroll
      for (uint32_t step = 0; step < 2; ++step) {
        const auto b = query.at(2 * block + step);
#pragma unroll
        for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Shape::Operand>(part[n], a[step], b.e[n]);
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) s[n][r] = group == 0 ? part[n][r] * scales.of(group, r / 2) : s[n][r] + part[n][r] * scales.of(group, r / 2);
  }
}
// Adds products of the plain dims; two sums in turn, for products that add to one wait for each other.
template <typename Tile>
__device__ __forceinline__ void multiply_plain(float (&s)[PairShape<Tile>::kN][4], uint32_t half_rows, const PairQuery<Tile>& query) {
  using Shape = PairShape<Tile>;
  using Keys = KeyFragments<typename Tile::PlainElement>;
  const uint32_t keys = half_rows + Shape::kCommon * 32 + Keys::offset(threadIdx.x % 32, Tile::kPitch);
  float part[2][Shape::kN][4] = {};
#pragma unroll
  for (uint32_t i = 0; i < Shape::kPlain; ++i) {
    uint32_t a[1][4];
    Keys::load(a, keys + i * 32);
    const auto b = query.at(2 * Shape::kCommon + i);
#pragma unroll
    for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Keys::Operand>(part[i % 2][n], a[0], b.e[n]);
  }
#pragma unroll
  for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s[n][r] += part[0][n][r] + part[1][n][r];
}
// S^T of a warp's half of the dims, of the tile at `rows`. A half without plain dims and a half with them have separate code, so
// that all of a half's products can be in flight at once.
template <typename Tile>
__device__ __forceinline__ void multiply_half_qk(float (&s)[PairShape<Tile>::kN][4], uint32_t rows, const PairQuery<Tile>& query, const PairScales<Tile>& scales,
                                                 uint32_t half) {
  using Shape = PairShape<Tile>;
  const uint32_t half_rows = rows + half * (Shape::kBlocks * 32);
  if (Shape::kPlain == 0 || half == 0) {
    multiply_code_groups<Shape::kGroups>(s, half_rows, query, scales);
  } else {
    multiply_code_groups<Shape::kPlainGroups>(s, half_rows, query, scales);
    multiply_plain(s, half_rows, query);
  }
}

// A warp's half of the scores, for the other warp; of the warp's own 8 tokens, token lane / 4 gets -inf if it is not `there`.
template <typename Tile>
__device__ __forceinline__ void store_scores(float (&to)[32][4 * PairShape<Tile>::kN], const float (&s)[PairShape<Tile>::kN][4], uint32_t half, bool there) {
#pragma unroll
  for (uint32_t n = 0; n < PairShape<Tile>::kN; ++n) {
    Vec<float, 4> part;
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) part.e[r] = !there && r / 2 == half ? -infinity() : s[n][r];
    *(Vec<float, 4>*)&to[threadIdx.x % 32][4 * n] = part;
  }
}
// Both halves' sum, as scores in base 2.
template <typename Tile>
__device__ __forceinline__ void read_scores(float (&s)[PairShape<Tile>::kN][4], const typename PairShape<Tile>::Scores& from, const float (&qk_scale)[PairShape<Tile>::kN][2]) {
#pragma unroll
  for (uint32_t n = 0; n < PairShape<Tile>::kN; ++n) {
    const auto first = *(const Vec<float, 4>*)&from[0][threadIdx.x % 32][4 * n], second = *(const Vec<float, 4>*)&from[1][threadIdx.x % 32][4 * n];
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s[n][r] = (first.e[r] + second.e[r]) * qk_scale[n][r % 2];
  }
}

// The lane's columns 2j and 2j + 1 of every 8: maxima (base 2), which lanes of a column share, and this lane's part of the sums
// of weights.
template <typename Tile>
struct PairColumns {
  static constexpr uint32_t kN = PairShape<Tile>::kN;
  float row_max[kN][2], row_sum[kN][2];

  __device__ __forceinline__ PairColumns() {
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        row_max[n][c] = -infinity();
        row_sum[n][c] = 0.0f;
      }
  }
};

// O^T of a warp's half: its 16-dim tiles, 8-column tiles, fragment. Tiles of codes are relative to a unit of scales.
template <typename Tile>
struct PairSums {
  using Shape = PairShape<Tile>;
  float e[Shape::kTiles][Shape::kN][4] = {};
  ScaleUnit unit;

  __device__ __forceinline__ bool is_code(uint32_t tile, uint32_t half) const { return tile < 2 * Shape::kCommon || Shape::kPlain == 0 || half == 0; }
  __device__ __forceinline__ void multiply_columns(const float (&by)[Shape::kN][2]) {
#pragma unroll
    for (uint32_t m = 0; m < Shape::kTiles; ++m)
#pragma unroll
      for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) e[m][n][r] *= by[n][r % 2];
  }
  __device__ __forceinline__ void multiply_codes(float by, uint32_t half) {
#pragma unroll
    for (uint32_t m = 0; m < Shape::kTiles; ++m)
#pragma unroll
      for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) e[m][n][r] *= is_code(m, half) ? by : 1.0f;
  }
};

// Scores of 16 tokens become weights: maxima rise if a score passes them by more than kSlack, and sums are rescaled.
template <typename Tile>
__device__ __forceinline__ void weigh_pair(float (&x)[PairShape<Tile>::kN][4], PairColumns<Tile>& columns, PairSums<Tile>& out) {
  constexpr uint32_t kN = PairShape<Tile>::kN;
  float high[kN][2];
  bool rises = false;
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      high[n][c] = fmaxf(x[n][c], x[n][2 + c]);
      rises |= high[n][c] > columns.row_max[n][c] + Tile::kSlack;
    }
  if (__any_sync(~0u, rises)) {
    float shrink[kN][2];
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
#pragma unroll
        for (uint32_t step = 4; step < 32; step *= 2) high[n][c] = fmaxf(high[n][c], __shfl_xor_sync(~0u, high[n][c], step));
        const bool higher = high[n][c] > columns.row_max[n][c] + Tile::kSlack;
        shrink[n][c] = higher ? rescale(columns.row_max[n][c], high[n][c]) : 1.0f;
        columns.row_max[n][c] = higher ? high[n][c] : columns.row_max[n][c];
        columns.row_sum[n][c] *= shrink[n][c];
      }
    out.multiply_columns(shrink);
  }
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      const float from = columns.row_max[n][r % 2];
      x[n][r] = exp2_approx(x[n][r] - (from == -infinity() ? 0.0f : from));
      columns.row_sum[n][r % 2] += x[n][r];
    }
}

// Weights of 16 tokens as operands: tokens on K.
template <typename T, uint32_t kN>
__device__ __forceinline__ void weight_operands(uint32_t (&b)[kN][2], const float (&x)[kN][4]) {
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      Vec<T, 2> pair;
      pack_pair(pair.e, x[n][2 * h], x[n][2 * h + 1]);
      b[n][h] = transposed(*(const uint32_t*)&pair);
    }
}
// The operands times the factors of tokens g and g + 8.
template <uint32_t kN>
__device__ __forceinline__ void scale_operands(uint32_t (&scaled)[kN][2], const uint32_t (&b)[kN][2], const float (&by)[2]) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    Vec<f16, 2> pair;
    pack_pair(pair.e, by[h], by[h]);
    const uint32_t tokens = transposed(*(const uint32_t*)&pair);
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n) scaled[n][h] = multiply_halves(b[n][h], tokens);
  }
}

// Raises the unit above every scale of the warp's half; `failed` becomes true if a scale is NaN.
template <typename Tile>
__device__ __forceinline__ void raise_unit(PairSums<Tile>& out, bool& failed, const PairScales<Tile>& scales, uint32_t half) {
  using Shape = PairShape<Tile>;
  float high = 0.0f;
#pragma unroll
  for (uint32_t group = 0; group < Shape::kGroups; ++group)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h)
      if (group < Shape::kPlainGroups || Shape::kPlain == 0 || half == 0) high = fmaxf(high, scales.of(group, h));
  if (!__any_sync(~0u, high >= out.unit.value)) return;
  failed |= high == infinity();
  high = high < 1e37f ? high : 0.0f;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
  if (out.unit.below(high)) out.multiply_codes(out.unit.raise(high), half);
}
// Adds V of kGroups groups of codes, times weights that carry their tokens' scales.
template <uint32_t kGroups, typename Tile>
__device__ __forceinline__ void add_code_groups(PairSums<Tile>& out, uint32_t half_rows, const uint32_t (&weights)[PairShape<Tile>::kN][2], const PairScales<Tile>& scales) {
  using Shape = PairShape<Tile>;
  using Values = typename Shape::Values;
  const uint32_t values = half_rows + Values::offset(threadIdx.x % 32, Tile::kPitch);
#pragma unroll
  for (uint32_t group = 0; group < kGroups; ++group) {
    uint32_t scaled[Shape::kN][2];
    const float by[2] = {scales.of(group, 0) * out.unit.inverse, scales.of(group, 1) * out.unit.inverse};
    scale_operands(scaled, weights, by);
#pragma unroll
    for (uint32_t i = 0; i < Shape::kGroupBlocks; ++i) {
      const uint32_t block = group * Shape::kGroupBlocks + i;
      uint32_t a[2][4];
      Values::load(a, values + block * 32);
#pragma unroll
      for (uint32_t t = 0; t < 2; ++t)
#pragma unroll
        for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Shape::Operand>(out.e[2 * block + t][n], a[t], scaled[n]);
    }
  }
}
// Adds V of the plain dims.
template <typename Tile>
__device__ __forceinline__ void add_plain(PairSums<Tile>& out, uint32_t half_rows, const float (&x)[PairShape<Tile>::kN][4]) {
  using Shape = PairShape<Tile>;
  using Values = ValueFragments<typename Tile::PlainElement>;
  const uint32_t values = half_rows + Shape::kCommon * 32 + Values::offset(threadIdx.x % 32, Tile::kPitch);
  uint32_t weights[Shape::kN][2];
  weight_operands<typename Values::Operand>(weights, x);
#pragma unroll
  for (uint32_t i = 0; i < Shape::kPlain; ++i) {
    uint32_t a[1][4];
    Values::load(a, values + i * 32);
#pragma unroll
    for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Values::Operand>(out.e[2 * Shape::kCommon + i][n], a[0], weights[n]);
  }
}
// Adds V of the tile at `rows`, of the warp's half of the dims, times the weights x. `failed` becomes true if a scale is NaN.
template <typename Tile>
__device__ __forceinline__ void multiply_half_pv(PairSums<Tile>& out, bool& failed, uint32_t rows, const float (&x)[PairShape<Tile>::kN][4], const PairScales<Tile>& scales,
                                                 uint32_t half) {
  using Shape = PairShape<Tile>;
  const uint32_t half_rows = rows + half * (Shape::kBlocks * 32);
  raise_unit(out, failed, scales, half);
  uint32_t weights[Shape::kN][2];
  weight_operands<typename Shape::Operand>(weights, x);
  if (Shape::kPlain == 0 || half == 0) {
    add_code_groups<Shape::kGroups>(out, half_rows, weights, scales);
  } else {
    add_code_groups<Shape::kPlainGroups>(out, half_rows, weights, scales);
    add_plain(out, half_rows, x);
  }
}

// A pair's columns to `merged`: maxima, sums of weights, and the warp's half of O.
template <typename Merged, typename Tile>
__device__ __forceinline__ void store_pair(Merged& merged, uint32_t pair, uint32_t half, const PairColumns<Tile>& columns, const PairSums<Tile>& out) {
  using Shape = PairShape<Tile>;
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      float sum = columns.row_sum[n][c];
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (half == 0 && g == 0) merged.max[pair][8 * n + 2 * j + c] = columns.row_max[n][c];
      if (half == 0 && g == 0) merged.sum[pair][8 * n + 2 * j + c] = sum;
    }
  const float factor = Shape::Values::kFactor * out.unit.value;
#pragma unroll
  for (uint32_t m = 0; m < Shape::kTiles; ++m)
#pragma unroll
    for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
        const uint32_t row = g + r / 2 * 8;
        const bool code = out.is_code(m, half);
        const uint32_t dim = (half * Shape::kTiles + m) * 16 + (code ? row % 8 * 2 + row / 8 : row);
        merged.out[pair][8 * n + 2 * j + r % 2][dim] = out.e[m][n][r] * (code ? factor : 1.0f);
      }
}
