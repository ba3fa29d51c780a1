// Attention of few columns over latent rows of 8-bit codes with e8m0 scales, 512 dims, by warpgroups that have tokens of their
// own (sm_90a): S^T = K Q^T, softmax, O^T += V^T P^T. V is the whole row.
//
// Tokens, then dims, lie on M and columns on N (m64nNk16). Rows are widened on their way to registers, where A is; Q and P lie in
// shared memory as rows of 128 bytes a column (device/mma/wgmma.cuh): a panel of Q has 64 dims, one of P a tile's 64 tokens.
// Thread 32w + 4g + j of a warpgroup has tokens 16w + g and 16w + g + 8, or those rows of 64 dims, and columns 8n + 2j and 8n +
// 2j + 1: element r of fragment n is row g + r / 2 * 8, column 8n + 2j + r % 2.
//
// A group is 64 dims, which share a scale of each token if they are codes: kCodeGroups of kGroups, then groups that are not
// quantized. P has a panel for each group, times the tokens' scales of that group, in units of a power of two above all of them.
//
// `Tile` names kCols, kTokens (64), kPitch (bytes from row to row in shared memory), the PlainElement of dims that are not
// quantized, kCodeBlocks (32 codes each), kSlack, and the names that QueryColumn reads.
#pragma once

#include "latent_tile.cuh"
#include "../../mma/wgmma_narrow.cuh"

template <typename Tile>
struct WarpgroupShape {
  using Keys = KeyFragments<e4m3>;
  using Operand = typename Keys::Operand;
  using PlainKeys = KeyFragments<typename Tile::PlainElement>;
  using PlainValues = ValueFragments<typename Tile::PlainElement>;
  using PlainOperand = typename PlainKeys::Operand;
  static constexpr uint32_t kN = Tile::kCols / 8, kGroups = 8, kCodeGroups = Tile::kCodeBlocks / 2, kCodeBytes = 64 * kCodeGroups;
  static constexpr uint32_t kPanelBytes = 128 * Tile::kCols;
  static_assert(Tile::kTokens == 64 && Tile::kCodeBlocks % 2 == 0);
  using Fragment = float[kN][4];

  __device__ static uint32_t warp() { return threadIdx.x / 32 % 4; }
};

// A fragment of products.
template <uint32_t kN>
__device__ __forceinline__ float (&flat(float (&x)[kN][4]))[4 * kN] { return *(float(*)[4 * kN])x; }

// ---- Q

// Stores a column of q to the panels of Q, times `down` and the power of two that divides fragments of codes.
template <typename Tile, typename KeyPart>
__device__ __forceinline__ void store_query_panels(uint8_t* query, const QueryColumn<Tile, KeyPart>& x, uint32_t col, float down) {
  using Column = QueryColumn<Tile, KeyPart>;
#pragma unroll
  for (uint32_t n = 0; n < Column::kEach; ++n) {
    const uint32_t pair = n * 32 + threadIdx.x % 32, step = pair / 8;
    Vec<typename Column::Keys::Operand, 2> key;
    Vec<typename Tile::QueryElement, 2> plain;
    pack_pair(key.e, x.x[n][0] * (down * Column::Keys::kFactor), x.x[n][1] * (down * Column::Keys::kFactor));
    pack_pair(plain.e, x.x[n][0] * down, x.x[n][1] * down);
    uint8_t* to = query + step / 4 * WarpgroupShape<Tile>::kPanelBytes + col * 128 + (pair / 4 % 8 ^ col % 8) * 16 + pair % 4 * 4;
    *(uint32_t*)to = step < Column::kKeySteps ? *(const uint32_t*)&key : *(const uint32_t*)&plain;
  }
}

// Scales of the thread's two tokens, as powers of two: infinity for NaN, and 0 for 2^-127.
template <typename Tile>
struct TokenScales {
  using Shape = WarpgroupShape<Tile>;
  uint32_t words[2][2];

  // Loads them from a tile's scales, 8 bytes a token.
  __device__ __forceinline__ explicit TokenScales(const uint8_t* scales) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const auto found = *(const Vec<uint32_t, 2>*)(scales + (Shape::warp() * 16 + threadIdx.x % 32 / 4 + 8 * h) * 8);
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n) words[h][n] = found.e[n];
    }
  }
  __device__ __forceinline__ float of(uint32_t group, uint32_t h) const {
    const uint32_t word = words[h][group / 4], at = group % 4 * 8;
    return __uint_as_float((at < 23 ? word << (23 - at) : word >> (at - 23)) & 0x7f800000u);
  }
  __device__ __forceinline__ float largest() const {
    float high = 0.0f;
#pragma unroll
    for (uint32_t group = 0; group < Shape::kCodeGroups; ++group) high = fmaxf(high, fmaxf(of(group, 0), of(group, 1)));
    return high;
  }
};

// ---- S^T = K Q^T

// A group of K or V as it lies in shared memory, the warp's fragments of it: of codes, 16 rows by 32 bytes each half; of plain
// dims, four steps.
struct StoredGroup {
  uint32_t e[4][4];
};

// K of a group, of the warp's 16 tokens. `keys` is the address of the lane's fragments.
template <typename Tile>
__device__ __forceinline__ void load_keys(StoredGroup& stored, uint32_t keys, uint32_t group) {
  using Shape = WarpgroupShape<Tile>;
  if (group < Shape::kCodeGroups) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) load_matrices(stored.e[i], keys + group * 64 + i * 32);
  } else {
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) load_matrices(stored.e[k], keys + Shape::kCodeBytes + (group - Shape::kCodeGroups) * 128 + k * 32);
  }
}
// As operands: four steps of 16 dims.
template <typename Tile>
__device__ __forceinline__ void widen_keys(uint32_t (&a)[4][4], const StoredGroup& stored, uint32_t group) {
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) a[k][i] = stored.e[k][i];
  if (group >= WarpgroupShape<Tile>::kCodeGroups) return;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      uint32_t dims[2];
      widen<true>(e4m3{}, dims, stored.e[k / 2][k % 2 * 2 + h]);
      a[k][h] = dims[0];
      a[k][h + 2] = dims[1];
    }
}
// Products of a group; asynchronous.
template <typename Tile>
__device__ __forceinline__ void begin_group(float (&sums)[WarpgroupShape<Tile>::kN][4], const uint32_t (&a)[4][4], uint64_t panels, uint32_t group, bool add) {
  using Shape = WarpgroupShape<Tile>;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    const uint64_t b = tile_at(panels, group * (Shape::kPanelBytes / 16) + k * 2);
    if (group < Shape::kCodeGroups) multiply_keys<typename Shape::Operand>(flat(sums), a[k], b, add || k > 0);
    else multiply_keys<typename Shape::PlainOperand>(flat(sums), a[k], b, add || k > 0);
  }
}
// Adds a group's products, times its tokens' scales if they are codes.
template <typename Tile>
__device__ __forceinline__ void add_group(float (&s)[WarpgroupShape<Tile>::kN][4], const float (&part)[WarpgroupShape<Tile>::kN][4], const TokenScales<Tile>& scales,
                                          uint32_t group) {
  using Shape = WarpgroupShape<Tile>;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      if (group >= Shape::kCodeGroups) s[n][r] += part[n][r];
      else s[n][r] = group == 0 ? part[n][r] * scales.of(group, r / 2) : s[n][r] + part[n][r] * scales.of(group, r / 2);
    }
}
// S^T of the tile at `rows`. While a group is multiplied the next one is widened, and the group after it is read.
template <typename Tile>
__device__ __forceinline__ void multiply_tile_qk(float (&s)[WarpgroupShape<Tile>::kN][4], uint32_t rows, uint64_t query, const TokenScales<Tile>& scales) {
  using Shape = WarpgroupShape<Tile>;
  const uint32_t keys = rows + Shape::warp() * 16 * Tile::kPitch + Shape::Keys::offset(threadIdx.x % 32, Tile::kPitch);
  typename Shape::Fragment part[3];
  StoredGroup stored[2];
  uint32_t a[3][4][4];
  load_keys<Tile>(stored[0], keys, 0);
  load_keys<Tile>(stored[1], keys, 1);
  widen_keys<Tile>(a[0], stored[0], 0);
#pragma unroll
  for (uint32_t group = 0; group < Shape::kGroups; ++group) {
    if (group + 2 < Shape::kGroups) load_keys<Tile>(stored[group % 2], keys, group + 2);
    wgmma_fence();
    begin_group<Tile>(part[group % 3], a[group % 3], query, group, false);
    wgmma_commit();
    wgmma_wait<1>();  // the group before
    if (group > 0) wgmma_done(flat(part[(group + 2) % 3]));
    if (group + 1 < Shape::kGroups) widen_keys<Tile>(a[(group + 1) % 3], stored[(group + 1) % 2], group + 1);
    if (group > 0) add_group<Tile>(s, part[(group + 2) % 3], scales, group - 1);
  }
  wgmma_wait<0>();
  wgmma_done(flat(part[(Shape::kGroups - 1) % 3]));
  add_group<Tile>(s, part[(Shape::kGroups - 1) % 3], scales, Shape::kGroups - 1);
}

// ---- Softmax

// Products become scores in base 2; a token that is not `there` gets -inf.
template <uint32_t kN>
__device__ __forceinline__ void scale_and_hide(float (&s)[kN][4], const float (&qk_scale)[kN][2], const bool (&there)[2]) {
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) s[n][r] = there[r / 2] ? s[n][r] * qk_scale[n][r % 2] : -infinity();
}

// The thread's columns: maxima (base 2), which all threads of a column share, and this thread's part of the sums of weights.
template <typename Tile>
struct TileColumns {
  static constexpr uint32_t kN = WarpgroupShape<Tile>::kN;
  float row_max[kN][2], row_sum[kN][2];

  __device__ __forceinline__ TileColumns() {
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        row_max[n][c] = -infinity();
        row_sum[n][c] = 0.0f;
      }
  }
  // True if one of the scores passes its column's maximum by more than kSlack.
  __device__ __forceinline__ bool passed(const float (&s)[kN][4]) const {
    bool found = false;
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) found |= fmaxf(s[n][c], s[n][2 + c]) > row_max[n][c] + Tile::kSlack;
    return found;
  }
  __device__ __forceinline__ void add(const float (&weights)[kN][4]) {
#pragma unroll
    for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) row_sum[n][r % 2] += weights[n][r];
  }
};

// O^T of 512 dims, in groups. Groups of codes are relative to a unit of scales.
template <typename Tile>
struct TileSums {
  using Shape = WarpgroupShape<Tile>;
  typename Shape::Fragment e[Shape::kGroups] = {};
  ScaleUnit unit;

  // Multiplies by a factor of each column, and groups of codes by one more factor.
  __device__ __forceinline__ void multiply(const float (&by)[Shape::kN][2], float codes_by) {
#pragma unroll
    for (uint32_t group = 0; group < Shape::kGroups; ++group)
#pragma unroll
      for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) e[group][n][r] *= group < Shape::kCodeGroups ? by[n][r % 2] * codes_by : by[n][r % 2];
  }
};

// Exchange between the warps of a warpgroup: largest scores of columns and largest scales; at the end, sums of weights.
template <typename Tile>
struct Told {
  float columns[4][Tile::kCols], scale[4];
};

// Raises maxima to the largest scores of the tile if these pass them by more than kSlack, and the unit above `scale`, the
// thread's largest scale; sums are rescaled. `failed` becomes true if a scale is NaN. All threads of a warpgroup call it; they
// meet at barrier `id`.
template <typename Tile>
__device__ __forceinline__ void sync_raise(Told<Tile>& told, uint32_t id, const float (&s)[WarpgroupShape<Tile>::kN][4], float scale, TileColumns<Tile>& columns,
                                           TileSums<Tile>& out, bool& failed) {
  constexpr uint32_t kN = WarpgroupShape<Tile>::kN;
  const uint32_t warp = WarpgroupShape<Tile>::warp(), lane = threadIdx.x % 32;
  failed |= scale == infinity();
  scale = scale < 1e37f ? scale : 0.0f;
#pragma unroll
  for (uint32_t step = 4; step < 32; step *= 2) scale = fmaxf(scale, __shfl_xor_sync(~0u, scale, step));
  if (lane == 0) told.scale[warp] = scale;
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      float high = fmaxf(s[n][c], s[n][2 + c]);
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
      if (lane < 4) told.columns[warp][8 * n + 2 * lane + c] = high;
    }
  named_barrier(id, 128);
  float shrink[kN][2];
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      float high = -infinity();
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) high = fmaxf(high, told.columns[w][8 * n + 2 * (lane % 4) + c]);
      const bool higher = high > columns.row_max[n][c] + Tile::kSlack;
      shrink[n][c] = higher ? rescale(columns.row_max[n][c], high) : 1.0f;
      columns.row_max[n][c] = higher ? high : columns.row_max[n][c];
      columns.row_sum[n][c] *= shrink[n][c];
    }
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) scale = fmaxf(scale, told.scale[w]);
  float codes_by = 1.0f;
  if (out.unit.below(scale)) codes_by = out.unit.raise(scale);
  out.multiply(shrink, codes_by);
}

// Weights 2^(score - row_max).
template <typename Tile>
__device__ __forceinline__ void weigh(float (&x)[WarpgroupShape<Tile>::kN][4], const float (&s)[WarpgroupShape<Tile>::kN][4], const TileColumns<Tile>& columns) {
#pragma unroll
  for (uint32_t n = 0; n < WarpgroupShape<Tile>::kN; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      const float from = columns.row_max[n][r % 2];
      x[n][r] = exp2_approx(s[n][r] - (from == -infinity() ? 0.0f : from));
    }
}

// Weights of the thread's tokens as pairs of columns: fragment n, token h.
template <typename T, uint32_t kN>
__device__ __forceinline__ void pack_weights(uint32_t (&pairs)[2 * kN], const float (&x)[kN][4]) {
#pragma unroll
  for (uint32_t n = 0; n < kN; ++n)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      Vec<T, 2> pair;
      pack_pair(pair.e, x[n][2 * h], x[n][2 * h + 1]);
      pairs[2 * n + h] = *(const uint32_t*)&pair;
    }
}
// Stores weights to the panels of P: for each group of codes times its tokens' scales, for other groups as they are.
template <typename Tile>
__device__ __forceinline__ void store_weights(uint32_t panels, const float (&x)[WarpgroupShape<Tile>::kN][4], const TokenScales<Tile>& scales, const ScaleUnit& unit) {
  using Shape = WarpgroupShape<Tile>;
  // Lane 8m + i gives the place of row i of matrix m: a column of 8 tokens.
  const uint32_t lane = threadIdx.x % 32, col = lane / 16 * 8 + lane % 8;
  const uint32_t to = panels + col % Tile::kCols * 128 + (Shape::warp() * 2 + lane / 8 % 2 ^ lane % 8) * 16;
  uint32_t weights[2 * Shape::kN], plain[2 * Shape::kN];
  pack_weights<typename Shape::Operand>(weights, x);
#pragma unroll
  for (uint32_t group = 0; group < Shape::kCodeGroups; ++group) {
    Vec<f16, 2> both;
    pack_pair(both.e, scales.of(group, 0) * unit.inverse, scales.of(group, 1) * unit.inverse);
    const uint32_t by = *(const uint32_t*)&both;
    uint32_t scaled[2 * Shape::kN];
#pragma unroll
    for (uint32_t n = 0; n < 2 * Shape::kN; n += 2) {
      scaled[n] = multiply_by_half<0>(weights[n], by);
      scaled[n + 1] = multiply_by_half<1>(weights[n + 1], by);
    }
    store_transposed(to + group * Shape::kPanelBytes, scaled);
  }
  pack_weights<typename Shape::PlainOperand>(plain, x);
#pragma unroll
  for (uint32_t group = Shape::kCodeGroups; group < Shape::kGroups; ++group) store_transposed(to + group * Shape::kPanelBytes, plain);
}

// ---- O^T += V^T P^T

// V of a group, the warp's 16 dims of it, of all tokens.
template <typename Tile>
__device__ __forceinline__ void load_values(StoredGroup& stored, uint32_t rows, uint32_t group) {
  using Shape = WarpgroupShape<Tile>;
  const uint32_t lane = threadIdx.x % 32, warp = Shape::warp();
  if (group < Shape::kCodeGroups) {
    const uint32_t values = rows + lane * Tile::kPitch + warp * 16 + group * 64;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) load_transposed(stored.e[i], values + i * 32 * Tile::kPitch);
  } else {
    const uint32_t values = rows + Shape::PlainValues::offset(lane, Tile::kPitch) + warp * 32 + Shape::kCodeBytes + (group - Shape::kCodeGroups) * 128;
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) load_transposed(stored.e[k], values + k * 16 * Tile::kPitch);
  }
}
// As operands: four steps of 16 tokens.
template <typename Tile>
__device__ __forceinline__ void widen_values(uint32_t (&a)[4][4], const StoredGroup& stored, uint32_t group) {
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) a[k][i] = stored.e[k][i];
  if (group >= WarpgroupShape<Tile>::kCodeGroups) return;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      uint32_t dims[2];  // 2g and 2g + 1, of tokens 2j and 2j + 1
      widen<false>(e4m3{}, dims, stored.e[k / 2][k % 2 * 2 + h]);
      a[k][2 * h] = dims[0];
      a[k][2 * h + 1] = dims[1];
    }
}
// Adds V of the tile at `rows`, times the weights in the panels of P. While a group is multiplied the next one is widened, and
// the group after it is read.
template <typename Tile>
__device__ __forceinline__ void multiply_tile_pv(TileSums<Tile>& out, uint32_t rows, uint64_t weights) {
  using Shape = WarpgroupShape<Tile>;
  StoredGroup stored[2];
  uint32_t a[3][4][4];
  load_values<Tile>(stored[0], rows, 0);
  load_values<Tile>(stored[1], rows, 1);
  widen_values<Tile>(a[0], stored[0], 0);
#pragma unroll
  for (uint32_t group = 0; group < Shape::kGroups; ++group) {
    if (group + 2 < Shape::kGroups) load_values<Tile>(stored[group % 2], rows, group + 2);
    wgmma_fence();
    begin_group<Tile>(out.e[group], a[group % 3], weights, group, true);
    wgmma_commit();
    wgmma_wait<1>();  // the group before
    if (group + 1 < Shape::kGroups) widen_values<Tile>(a[(group + 1) % 3], stored[(group + 1) % 2], group + 1);
  }
  wgmma_wait<0>();
#pragma unroll
  for (uint32_t group = 0; group < Shape::kGroups; ++group) wgmma_done(flat(out.e[group]));
}

// ---- Results

// A warp's sums of weights, for the others of its warpgroup.
template <typename Tile>
__device__ __forceinline__ void store_row_sums(Told<Tile>& told, const TileColumns<Tile>& columns) {
#pragma unroll
  for (uint32_t n = 0; n < WarpgroupShape<Tile>::kN; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      float sum = columns.row_sum[n][c];
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (threadIdx.x % 32 < 4) told.columns[WarpgroupShape<Tile>::warp()][8 * n + 2 * (threadIdx.x % 4) + c] = sum;
    }
}
// A warpgroup's columns to `merged`: maxima, sums of weights out of `told`, and O.
template <typename Merged, typename Tile>
__device__ __forceinline__ void store_warpgroup(Merged& merged, uint32_t warpgroup, const Told<Tile>& told, const TileColumns<Tile>& columns, const TileSums<Tile>& out) {
  using Shape = WarpgroupShape<Tile>;
  const uint32_t warp = Shape::warp(), g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const float factor = Shape::Keys::kFactor * out.unit.value;
#pragma unroll
  for (uint32_t n = 0; n < Shape::kN; ++n)
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      const uint32_t col = 8 * n + 2 * j + c;
      if (warp == 0 && g == 0) merged.max[warpgroup][col] = columns.row_max[n][c];
      if (warp == 0 && g == 0) merged.sum[warpgroup][col] = (told.columns[0][col] + told.columns[1][col]) + (told.columns[2][col] + told.columns[3][col]);
#pragma unroll
      for (uint32_t group = 0; group < Shape::kGroups; ++group) {
        float* to = &merged.out[warpgroup][col][group * 64 + warp * 16];
        const float x[2] = {out.e[group][n][c], out.e[group][n][2 + c]};  // of codes neighbouring dims
        if (group < Shape::kCodeGroups) *(Vec<float, 2>*)(to + 2 * g) = {x[0] * factor, x[1] * factor};
        else to[g] = x[0], to[g + 8] = x[1];
      }
    }
}
