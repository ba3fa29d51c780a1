// Attention of few columns over latent rows of 8-bit codes with e8m0 scales, 512 dims, by pairs of warps that have tokens of their own: S^T =
// K Q^T, softmax, O^T += V^T P^T, a warp of a pair half of the dims. V is the whole row.
//
// Tokens, then dims, lie on M and columns on N (m16n8k16). Lane 4g + j has, of every 16 x 8 result, rows g and g + 8 of columns 2j and
// 2j + 1: element r of a fragment is row g + r / 2 * 8, column 2j + r % 2.
//
// `Tile` names kCols, kTokens (16), kPitch (bytes from row to row in shared memory), the Element of codes and the PlainElement of what
// is not quantized, kCodeBlocks (32 bytes of codes each, of the whole row), kGroupDims of a scale, kScalePitch
// from a token's scales to the next one's, kSteps of 16 dims of Q, kWarpsN (1), kSlack, QueryElement.
#pragma once

#include "latent_tile.cuh"

// What follows: a warp has kBlocks blocks of codes in its half, or kCommon of them and kPlain blocks of 16 plain dims.
template <typename Tile>
struct PairShape {
  using Keys = KeyFragments<typename Tile::Element>;
  using Values = ValueFragments<typename Tile::Element>;
  using Operand = typename Values::Operand;
  static constexpr uint32_t kN = Tile::kCols / 8, kBlocks = 8, kCommon = Tile::kCodeBlocks - kBlocks, kPlain = 2 * (kBlocks - kCommon);
  static constexpr uint32_t kGroupBlocks = Tile::kGroupDims / 32, kGroups = kBlocks / kGroupBlocks;  // of a scale; of a half
  static constexpr uint32_t kTiles = 2 * kBlocks;  // of 16 dims of O
  static_assert(Keys::kDims == 32 && kCommon % kGroupBlocks == 0 && kTiles == Tile::kSteps / 2);
  using Scores = float[2][32][4 * kN];  // of both halves, as lanes have them
};

// The lane's operands of Q of one half.
template <typename Tile>
struct PairQuery {
  static constexpr uint32_t kN = PairShape<Tile>::kN;
  uint32_t e[Tile::kSteps / 2][kN][2];

  __device__ __forceinline__ PairQuery(const typename LatentShape<Tile>::Query& query, uint32_t half) {
#pragma unroll
    for (uint32_t s = 0; s < Tile::kSteps / 2; ++s) {
      const Vec<uint32_t, 2 * kN> all = *(const Vec<uint32_t, 2 * kN>*)query[half * (Tile::kSteps / 2) + s][0][threadIdx.x % 32];
#pragma unroll
      for (uint32_t i = 0; i < 2 * kN; ++i) e[s][i / 2][i % 2] = all.e[i];
    }
  }
};

// Scales of tokens g and g + 8 in the lane's half, as powers of two; whether one of them is NaN. (2^-127 counts as 0.)
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
  // Whether one of the token's is 255, NaN; bytes behind the last scale are none.
  __device__ __forceinline__ bool nan(uint32_t h, uint32_t half) const {
    uint32_t found = 0;
#pragma unroll
    for (uint32_t n = 0; n < kWords; ++n) {
      const uint32_t left = half == 0 || PairShape<Tile>::kPlain == 0 ? 4 : PairShape<Tile>::kCommon / PairShape<Tile>::kGroupBlocks - min(4 * n, PairShape<Tile>::kCommon / PairShape<Tile>::kGroupBlocks);
      const uint32_t word = left < 4 ? words[h][n] & ((1u << 8 * left) - 1) : words[h][n];
      found |= ((word & ~kByteSigns) + 0x01010101u) & word & kByteSigns;
    }
    return found != 0;
  }
};

// S^T of a warp's half of the dims.
template <typename Tile>
__device__ __forceinline__ void multiply_half_qk(float (&s)[PairShape<Tile>::kN][4], uint32_t rows, const PairQuery<Tile>& query, const PairScales<Tile>& scales,
                                                 uint32_t half) {
  using Shape = PairShape<Tile>;
  using Keys = typename Shape::Keys;
  using Plain = KeyFragments<typename Tile::PlainElement>;
  const uint32_t keys = rows + half * (Shape::kBlocks * 32) + Keys::offset(threadIdx.x % 32, Tile::kPitch);
  const auto multiply_code_groups = [&](uint32_t first, uint32_t last) {
#pragma unroll
    for (uint32_t group = first; group < last; ++group) {
      float part[Shape::kN][4] = {};
#pragma unroll
      for (uint32_t i = 0; i < Shape::kGroupBlocks; ++i) {
        const uint32_t block = group * Shape::kGroupBlocks + i;
        uint32_t a[2][4];
        Keys::load(a, keys + block * 32);
#pragma unroll
        for (uint32_t step = 0; step < 2; ++step)
#pragma unroll
          for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Shape::Operand>(part[n], a[step], query.e[2 * block + step][n]);
      }
#pragma unroll
      for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) s[n][r] = group == 0 ? part[n][r] * scales.of(group, r / 2) : s[n][r] + part[n][r] * scales.of(group, r / 2);
    }
  };
  multiply_code_groups(0, Shape::kCommon / Shape::kGroupBlocks);
  if (Shape::kPlain == 0 || half == 0) {
    multiply_code_groups(Shape::kCommon / Shape::kGroupBlocks, Shape::kGroups);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < Shape::kPlain; ++i) {
      uint32_t a[1][4];
      Plain::load(a, keys + Shape::kCommon * 32 + i * 32);
#pragma unroll
      for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Plain::Operand>(s[n], a[0], query.e[2 * Shape::kCommon + i][n]);
    }
  }
}

// A warp's half of the scores, for the other warp; NaN of tokens with a scale that is none.
template <typename Tile>
__device__ __forceinline__ void exchange_put(float (&to)[32][4 * PairShape<Tile>::kN], const float (&s)[PairShape<Tile>::kN][4], const PairScales<Tile>& scales,
                                             uint32_t half) {
#pragma unroll
  for (uint32_t n = 0; n < PairShape<Tile>::kN; ++n) {
    Vec<float, 4> part;
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) part.e[r] = scales.nan(r / 2, half) ? nan_f32() : s[n][r];
    *(Vec<float, 4>*)&to[threadIdx.x % 32][4 * n] = part;
  }
}
// Both halves' sum, as scores in base 2; -inf of tokens that are not found.
template <typename Tile>
__device__ __forceinline__ void exchange_take(float (&s)[PairShape<Tile>::kN][4], const typename PairShape<Tile>::Scores& from, const float (&qk_scale)[Tile::kCols],
                                              const uint8_t* const (&found)[16]) {
  const uint32_t lane = threadIdx.x % 32;
  const bool sees[2] = {found[lane / 4] != nullptr, found[lane / 4 + 8] != nullptr};
#pragma unroll
  for (uint32_t n = 0; n < PairShape<Tile>::kN; ++n) {
    const auto first = *(const Vec<float, 4>*)&from[0][lane][4 * n], second = *(const Vec<float, 4>*)&from[1][lane][4 * n];
    const auto by = *(const Vec<float, 2>*)&qk_scale[8 * n + 2 * (lane % 4)];
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s[n][r] = sees[r / 2] ? (first.e[r] + second.e[r]) * by.e[r % 2] : -infinity();
  }
}

// The lane's columns 2j and 2j + 1 of every 8: maxima (base 2), which lanes of a column share, and this lane's part of the sums of weights.
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

// Scores of 16 tokens become weights: maxima rise where a score passes them by more than kSlack, and sums follow.
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

// Weights of 16 tokens, times what each token has, as operands: tokens on K.
template <typename T, uint32_t kN>
__device__ __forceinline__ void weight_operands(uint32_t (&b)[kN][2], const float (&x)[kN][4], const float (&by)[2]) {
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      Vec<T, 2> pair;
      pack_pair(pair.e, x[n][2 * h] * by[h], x[n][2 * h + 1] * by[h]);
      b[n][h] = transposed(*(const uint32_t*)&pair);
    }
}

// Adds V of a tile's 16 tokens, of the warp's half of the dims, times their weights.
template <typename Tile>
__device__ __forceinline__ void multiply_half_pv(PairSums<Tile>& out, uint32_t rows, const float (&x)[PairShape<Tile>::kN][4], const PairScales<Tile>& scales,
                                                 uint32_t half) {
  using Shape = PairShape<Tile>;
  using Values = typename Shape::Values;
  using Plain = ValueFragments<typename Tile::PlainElement>;
  const uint32_t blocks = rows + half * (Shape::kBlocks * 32), values = blocks + Values::offset(threadIdx.x % 32, Tile::kPitch);
  const uint32_t groups = Shape::kPlain == 0 || half == 0 ? Shape::kGroups : Shape::kCommon / Shape::kGroupBlocks;
  // The unit rises above every scale of the tile.
  float high = 0.0f;
#pragma unroll
  for (uint32_t group = 0; group < Shape::kGroups; ++group)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) high = fmaxf(high, group < groups ? scales.of(group, h) : 0.0f);
  if (__any_sync(~0u, high >= out.unit.value)) {
    high = high < 1e37f ? high : 0.0f;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
    if (out.unit.below(high)) out.multiply_codes(out.unit.raise(high), half);
  }
  const auto multiply_code_groups = [&](uint32_t first, uint32_t last) {
#pragma unroll
    for (uint32_t group = first; group < last; ++group) {
      uint32_t weights[Shape::kN][2];
      const float by[2] = {scales.of(group, 0) * out.unit.inverse, scales.of(group, 1) * out.unit.inverse};
      weight_operands<typename Shape::Operand>(weights, x, by);
#pragma unroll
      for (uint32_t i = 0; i < Shape::kGroupBlocks; ++i) {
        const uint32_t block = group * Shape::kGroupBlocks + i;
        uint32_t a[2][4];
        Values::load(a, values + block * 32);
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t)
#pragma unroll
          for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Shape::Operand>(out.e[2 * block + t][n], a[t], weights[n]);
      }
    }
  };
  multiply_code_groups(0, Shape::kCommon / Shape::kGroupBlocks);
  if (Shape::kPlain == 0 || half == 0) {
    multiply_code_groups(Shape::kCommon / Shape::kGroupBlocks, Shape::kGroups);
  } else {
    uint32_t weights[Shape::kN][2];
    const float one[2] = {1.0f, 1.0f};
    weight_operands<typename Plain::Operand>(weights, x, one);
    const uint32_t plain = blocks + Plain::offset(threadIdx.x % 32, Tile::kPitch) + Shape::kCommon * 32;
#pragma unroll
    for (uint32_t i = 0; i < Shape::kPlain; ++i) {
      uint32_t a[1][4];
      Plain::load(a, plain + i * 32);
#pragma unroll
      for (uint32_t n = 0; n < Shape::kN; ++n) multiply_add<typename Plain::Operand>(out.e[2 * Shape::kCommon + i][n], a[0], weights[n]);
    }
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
