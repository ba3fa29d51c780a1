// Attention of a tile of latent rows by two warpgroups (sm_90a), products in shared memory: S = Q K^T, softmax, O += P V.
//
// A row lies in panels of 64 dims: 128 bytes a token, whose 16-byte chunks stand at chunk ^ token % 8 (device/mma/wgmma.cuh).
// Columns lie on M: thread 32w + 4g + j of a warpgroup has columns 16w + g and 16w + g + 8. Elements 4n + 2h and 4n + 2h + 1 of
// its fragments are column h's, tokens (of S) or dims (of O) 8n + 2j and 8n + 2j + 1.
//
// `Tile` names the Element of rows, kCols, kTokens, kSlack, kPanels of a row and of Q, kMine of them whose dims of O a warpgroup
// has, kRopePanels that are K alone, and the bytes of a panel of a tile and of Q (kPanelBytes, kQueryPanelBytes).
#pragma once

#include "latent_tile.cuh"
#include "../../mma/wgmma.cuh"

// The thread's column h, 0 or 1.
__device__ __forceinline__ uint32_t thread_column(uint32_t h) { return threadIdx.x / 32 % 4 * 16 + h * 8 + threadIdx.x % 32 / 4; }

// ---- Copies

// The token of a tile whose row address this lane has. A warp copies rows 4w to 4w + 3 and the 4 rows 16 further on; lane n % 8
// has one of them.
__device__ __forceinline__ uint32_t known_token() { return threadIdx.x / 32 % 4 * 4 + threadIdx.x % 4 + threadIdx.x / 4 % 2 * 16; }

// Starts the copies of a warpgroup's part of a tile to `stage`: its panels of V of all rows, and 16 rows of the dims of K alone.
// `row` and `rope` are the addresses of known_token()'s row; null: zeros. 8 lanes copy a panel of a row.
template <typename Tile>
__device__ __forceinline__ void copy_part_async(uint32_t stage, uint32_t group, const uint8_t* row, const uint8_t* rope) {
  const uint32_t lane = threadIdx.x % 32, eight = lane / 8, copied = threadIdx.x / 32 % 4 * 4 + eight;
  const uint32_t at = stage + copied * 128 + (lane % 8 ^ copied % 8) * 16;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint8_t* from = (const uint8_t*)__shfl_sync(~0u, (uint64_t)row, half * 4 + eight);
    const uint8_t* mine = from + (group * Tile::kMine * 128 + lane % 8 * 16);
    const uint32_t to = at + group * Tile::kMine * Tile::kPanelBytes + half * 16 * 128;
#pragma unroll
    for (uint32_t p = 0; p < Tile::kMine; ++p) cp_async<16>(to + p * Tile::kPanelBytes, mine + p * 128, from != nullptr);
  }
  const uint8_t* from = (const uint8_t*)__shfl_sync(~0u, (uint64_t)rope, group * 4 + eight);
  const uint8_t* mine = from + lane % 8 * 16;
  const uint32_t to = at + 2 * Tile::kMine * Tile::kPanelBytes + group * 16 * 128;
#pragma unroll
  for (uint32_t p = 0; p < Tile::kRopePanels; ++p) cp_async<16>(to + p * Tile::kPanelBytes, mine + p * 128, from != nullptr);
}

// Starts the copy of a column of Q at `row` to the panels at `query`, by 8 lanes; zeros where it is not `live`.
template <typename Tile>
__device__ __forceinline__ void copy_query_async(uint8_t* query, uint32_t col, const typename Tile::Element* row, bool live) {
  const uint32_t eighth = threadIdx.x % 8;
  const typename Tile::Element* from = row + eighth * 8;
#pragma unroll
  for (uint32_t p = 0; p < Tile::kPanels; ++p) cp_async16(query + p * Tile::kQueryPanelBytes + col * 128 + (eighth ^ col % 8) * 16, from + p * 64, live);
}

// Turns infinities and NaN of V into zeros, in tokens [from, until) of the tile in `stage`; a warp of a warpgroup a token.
template <typename Tile>
__device__ __forceinline__ void clear_special_panels(uint8_t* stage, uint32_t from, uint32_t until) {
  for (uint32_t token = from + threadIdx.x / 32 % 4; token < until; token += 4)
#pragma unroll 1
    for (uint32_t p = 0; p < 2 * Tile::kMine; ++p) clear_special<typename Tile::Element, 64>(stage + p * Tile::kPanelBytes + token * 128);
}

// ---- Products, which are asynchronous: a kernel fences before them, commits and waits after them

// Q of the first kHeld steps of 16 dims, of the 16 columns of a warp, as operands in registers.
template <typename Tile, uint32_t kHeld>
__device__ __forceinline__ void load_query(uint32_t (&held)[kHeld][4], const uint8_t* query) {
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (uint32_t k = 0; k < kHeld; ++k)
    load_matrices(held[k], matrix_address(query) + k / 4 * Tile::kQueryPanelBytes + row * 128 + (k % 4 * 2 + lane / 16 ^ lane % 8) * 16);
}

// S = Q K^T of a tile: the first kHeld steps of Q from registers, the others out of its panels.
template <typename Tile, uint32_t kHeld>
__device__ __forceinline__ void begin_qk(float (&s)[16], const uint32_t (&held)[kHeld][4], uint64_t query, uint64_t keys) {
  const uint64_t a = fresh_tile(query);
#pragma unroll
  for (uint32_t k = 0; k < Tile::kPanels * 4; ++k) {
    const uint64_t b = keys + k / 4 * (Tile::kPanelBytes / 16) + k % 4 * 2;
    if (k < kHeld) multiply_keys<typename Tile::Element>(s, held[k], b, k > 0);
    else multiply_keys<typename Tile::Element>(s, a + k / 4 * (Tile::kQueryPanelBytes / 16) + k % 4 * 2, b, k > 0);
  }
}

// O += P V of a tile, of a warpgroup's dims of V.
template <typename Tile>
__device__ __forceinline__ void begin_pv(float (&out)[128], uint64_t weights, uint64_t values) {
#pragma unroll
  for (uint32_t k = 0; k < Tile::kTokens / 16; ++k) multiply_values<typename Tile::Element>(out, weights + k * 2, values + k * (16 * 128 / 16), true);
}

// ---- Softmax

// The thread's two columns: the maximum so far (base 2), and this thread's part of the sum of weights. Each warpgroup follows the
// other's maxima, tile by tile, and sums the weights of its own tiles.
struct PairSoftmax {
  float row_max[2] = {-infinity(), -infinity()}, row_sum[2] = {};
};

// Products of tokens from `first` on become scores in base 2; tokens from a column's `seen` on get -inf.
__device__ __forceinline__ void scale_and_hide_pair(float (&s)[16], float qk_scale, uint32_t first, const uint32_t (&seen)[2]) {
#pragma unroll
  for (uint32_t n = 0; n < 16; ++n) {
    const uint32_t h = n / 2 % 2, token = first + n / 4 * 8 + 2 * (threadIdx.x % 4) + n % 2;
    s[n] = token < seen[h] ? s[n] * qk_scale : -infinity();
  }
}

// Raises a column's maximum to the largest score of its four threads if that passes it by more than kSlack; `shrink` becomes the
// factor of sums relative to the old maximum. row_max[column] gets the new maximum. Scores are s times `factor`.
template <typename Tile, uint32_t N>
__device__ __forceinline__ void store_raised_max(float (&row_max)[Tile::kCols], PairSoftmax& sums, float (&shrink)[2], const float (&s)[N], float factor = 1.0f) {
  float high[2] = {-infinity(), -infinity()};
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) high[n / 2 % 2] = fmaxf(high[n / 2 % 2], s[n]);
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (uint32_t step = 1; step < 4; step *= 2) high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], step));
    high[h] *= factor;
    const bool rises = high[h] > sums.row_max[h] + Tile::kSlack;
    const float higher = rises ? high[h] : sums.row_max[h];
    shrink[h] = rises ? rescale(sums.row_max[h], higher) : 1.0f;
    sums.row_max[h] = higher;
    sums.row_sum[h] *= shrink[h];
    if (threadIdx.x % 4 == 0) row_max[thread_column(h)] = higher;
  }
}

// Follows the maxima that the other warpgroup has raised; returns the factors of sums relative to the old maxima.
template <uint32_t kCols>
__device__ __forceinline__ void follow_max(float (&shrink)[2], PairSoftmax& sums, const float (&row_max)[kCols]) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const float higher = row_max[thread_column(h)];
    shrink[h] = higher == sums.row_max[h] ? 1.0f : rescale(sums.row_max[h], higher);
    sums.row_max[h] = higher;
    sums.row_sum[h] *= shrink[h];
  }
}

// Weights 2^(score - row_max), added to row_sum in f32; as 16 bits to `weights`: 128 bytes a column, the first half for an even
// tile, the second half for an odd tile.
template <typename Tile>
__device__ __forceinline__ void store_weights(uint8_t* weights, uint32_t odd, float (&s)[16], PairSoftmax& sums) {
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const float from[2] = {sums.row_max[0] == -infinity() ? 0.0f : sums.row_max[0], sums.row_max[1] == -infinity() ? 0.0f : sums.row_max[1]};
#pragma unroll
  for (uint32_t n = 0; n < 16; n += 2) {
    const uint32_t h = n / 2 % 2;
#pragma unroll
    for (uint32_t i = n; i < n + 2; ++i) {
      s[i] = exp2_approx(s[i] - from[h]);
      sums.row_sum[h] += s[i];
    }
    uint32_t pair;
    pack_pair((typename Tile::Element*)&pair, s[n], s[n + 1]);
    *(uint32_t*)(weights + thread_column(h) * 128 + (odd * 4 + n / 4 ^ g) * 16 + j * 4) = pair;
  }
}

// Makes sums relative to the raised maxima; does nothing if no column of the warp has risen.
__device__ __forceinline__ void multiply_columns(float (&out)[128], const float (&shrink)[2]) {
  if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (uint32_t n = 0; n < 128; ++n) out[n] *= shrink[n / 2 % 2];
}

// ---- Tiles of 64 tokens, with O of a warpgroup as two products of 128 dims: ptxas takes no larger products if a block has 512
// threads

// The part of S = Q K^T that panels [kFrom, kUntil) have, with Q out of its panels.
template <typename Tile, uint32_t kFrom, uint32_t kUntil>
__device__ __forceinline__ void begin_qk_panels(float (&s)[32], uint64_t query, uint64_t keys) {
  const uint64_t a = fresh_address(query), b = fresh_address(keys);
#pragma unroll
  for (uint32_t k = kFrom * 4; k < kUntil * 4; ++k)
    multiply_keys<typename Tile::Element>(s, tile_at(a, k / 4 * (Tile::kQueryPanelBytes / 16) + k % 4 * 2), tile_at(b, k / 4 * (Tile::kPanelBytes / 16) + k % 4 * 2), k > 0);
}

// O += P V of a warpgroup's dims of V, with another one's weights out of shared memory, and with its own in registers.
template <typename Tile>
__device__ __forceinline__ void begin_pv(float (&out)[2][64], uint64_t weights, uint64_t values) {
#pragma unroll
  for (uint32_t k = 0; k < Tile::kTokens / 16; ++k)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      multiply_values<typename Tile::Element>(out[half], tile_at(weights, k * 2), tile_at(values, k * (16 * 128 / 16) + half * (2 * Tile::kPanelBytes / 16)), true);
}
template <typename Tile>
__device__ __forceinline__ void begin_pv(float (&out)[2][64], const uint32_t (&weights)[4][4], uint64_t values) {
#pragma unroll
  for (uint32_t k = 0; k < Tile::kTokens / 16; ++k)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      multiply_values<typename Tile::Element>(out[half], weights[k], tile_at(values, k * (16 * 128 / 16) + half * (2 * Tile::kPanelBytes / 16)), true);
}
__device__ __forceinline__ void multiply_columns(float (&out)[2][64], const float (&shrink)[2]) { multiply_columns(*(float(*)[128])out, shrink); }

// Products of tokens without a bit in `live` become -inf.
__device__ __forceinline__ void hide_pair(float (&s)[32], uint64_t live) {
  if (live == ~0ull) return;
  const uint64_t mine = live >> 2 * (threadIdx.x % 4);
#pragma unroll
  for (uint32_t n = 0; n < 32; ++n) s[n] = mine >> (n / 4 * 8 + n % 2) & 1 ? s[n] : -infinity();
}

// Weights 2^(s * factor - row_max), added to row_sum in f32; in 16 bits as operands: step of 16 tokens, registers.
template <typename Tile>
__device__ __forceinline__ void exponentiate_pair(uint32_t (&weights)[4][4], float (&s)[32], PairSoftmax& sums, float factor) {
  const float from[2] = {sums.row_max[0] == -infinity() ? 0.0f : sums.row_max[0], sums.row_max[1] == -infinity() ? 0.0f : sums.row_max[1]};
#pragma unroll
  for (uint32_t n = 0; n < 32; n += 2) {
    const uint32_t h = n / 2 % 2;
#pragma unroll
    for (uint32_t i = n; i < n + 2; ++i) {
      s[i] = exp2_approx(s[i] * factor - from[h]);
      sums.row_sum[h] += s[i];
    }
    pack_pair((typename Tile::Element*)&weights[n / 8][n / 4 % 2 * 2 + h], s[n], s[n + 1]);
  }
}
// To `to`, 128 bytes a column.
template <typename Tile>
__device__ __forceinline__ void store_weights(uint8_t* to, const uint32_t (&weights)[4][4]) {
  const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t n = 0; n < 8; ++n)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) *(uint32_t*)(to + thread_column(h) * 128 + (n ^ g) * 16 + j * 4) = weights[n / 2][n % 2 * 2 + h];
}

// ---- Results

// A warpgroup's half of O to `merged`.
template <typename Tile, typename Merged>
__device__ __forceinline__ void store_half(Merged& merged, uint32_t group, const float (&out)[128]) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    float* to = &merged.out[0][thread_column(h)][group * Tile::kMine * 64 + 2 * (threadIdx.x % 4)];
#pragma unroll
    for (uint32_t n = 0; n < Tile::kMine * 8; ++n) {
      const Vec<float, 2> both = {out[4 * n + 2 * h], out[4 * n + 2 * h + 1]};
      *(Vec<float, 2>*)(to + n * 8) = both;
    }
  }
}

// The sum over the four threads of a column.
__device__ __forceinline__ float sum_of_four(float x) {
#pragma unroll
  for (uint32_t step = 1; step < 4; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
// The columns' sums of one warpgroup's tiles to `merged`; after a barrier, by the other one: the sums of both, and the maxima.
template <typename Merged>
__device__ __forceinline__ void store_row_sums(Merged& merged, const PairSoftmax& sums) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const float row_sum = sum_of_four(sums.row_sum[h]);
    if (threadIdx.x % 4 == 0) merged.sum[0][thread_column(h)] = row_sum;
  }
}
template <typename Merged>
__device__ __forceinline__ void store_both_sums(Merged& merged, const PairSoftmax& sums) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const float row_sum = sum_of_four(sums.row_sum[h]);
    if (threadIdx.x % 4 == 0) merged.max[0][thread_column(h)] = sums.row_max[h];
    if (threadIdx.x % 4 == 0) merged.sum[0][thread_column(h)] += row_sum;
  }
}
