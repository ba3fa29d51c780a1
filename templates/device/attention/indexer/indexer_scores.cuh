// Scores of a tile of keys for every head of some rows of q, on tensor cores: w relu(q k), added up over heads.
//
// Keys lie on M, heads on N: a thread adds up its own columns, and three shuffles the four threads of a key. Rows of keys and of
// q are 128 bytes a panel, whose 16-byte chunks stand at chunk ^ row % 8: ldmatrix meets no bank twice, and wgmma reads the same
// tile. Thread 32w + 4g + j has the sums of keys 64m + 16w + 8h + g, number 2m + h of its four, and stores that of number j.
//
// `Tile` names Element (of keys and q), kHeads, kRows, kTokens (128, of as many threads), kRowBytes, and kTogether: rows of q
// that a product of a warpgroup has; 0: sm_90a has the products of warps too.
#pragma once

#include "../common/fragments.cuh"
#include "../../memory/cp_async.cuh"
#include "../../memory/mbarrier.cuh"
#include "../../mma/mma_codes.cuh"
#include "../../mma/warpgroups.cuh"
#include "../../mma/wgmma_codes.cuh"

// The bytes of a panel of a tile, and of q.
template <typename Tile>
constexpr uint32_t kKeyPanel = Tile::kTokens * 128;
template <typename Tile>
constexpr uint32_t kQueryPanel = Tile::kRows * Tile::kHeads * 128;

// ---- Copies

// Starts the copies of a warp's 32 rows to the tile at `stage`: `row` is the address of this thread's row; null: zeros. 8 lanes
// copy 128 bytes.
template <typename Tile>
__device__ __forceinline__ void copy_keys_async(uint32_t stage, const uint8_t* row) {
  const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * 32;
#pragma unroll
  for (uint32_t step = 0; step < 8; ++step) {
    const uint32_t mine = 4 * step + lane / 8, to = stage + (first + mine) * 128 + (lane % 8 ^ mine % 8) * 16;
    const uint8_t* from = (const uint8_t*)__shfl_sync(~0u, (uint64_t)row, mine);
#pragma unroll
    for (uint32_t p = 0; p < Tile::kRowBytes / 128; ++p) cp_async<16>(to + p * kKeyPanel<Tile>, from + p * 128 + lane % 8 * 16, from != nullptr);
  }
}

// Starts the copies of q's heads of `rows` rows, `stride` bytes apart, to the panels at `query`; zeros for rows past them.
template <typename Tile>
__device__ __forceinline__ void copy_queries_async(uint32_t query, const uint8_t* q, int64_t stride, uint32_t rows) {
  constexpr uint32_t kPieces = Tile::kRowBytes / 16, kColumns = Tile::kRows * Tile::kHeads;
#pragma unroll 4
  for (uint32_t n = threadIdx.x; n < kColumns * kPieces; n += Tile::kTokens) {
    const uint32_t column = n / kPieces, piece = n % kPieces, row = column / Tile::kHeads;
    const uint8_t* from = q + row * stride + column % Tile::kHeads * Tile::kRowBytes + piece * 16;
    cp_async<16>(query + piece / 8 * kQueryPanel<Tile> + column * 128 + (piece % 8 ^ column % 8) * 16, from, row < rows);
  }
}

// Copies the weights of q's rows, `stride` elements apart.
template <typename Tile>
__device__ __forceinline__ void copy_weights_async(uint32_t to, const float* weights, int64_t stride, uint32_t rows) {
  for (uint32_t n = threadIdx.x; n < Tile::kRows * Tile::kHeads; n += Tile::kTokens) {
    const uint32_t row = n / Tile::kHeads;
    cp_async<4>(to + 4 * n, weights + row * stride + n % Tile::kHeads, row < rows);
  }
}

// Between a thread's copies and products of a warpgroup that read them.
__device__ __forceinline__ void fence_products() {
  if constexpr (kWarpgroups) fence_async_shared();
}

// ---- Sums

// The key of a tile whose score this thread stores.
__device__ __forceinline__ uint32_t thread_key() {
  const uint32_t j = threadIdx.x % 4;
  return j / 2 * 64 + threadIdx.x / 32 * 16 + j % 2 * 8 + threadIdx.x % 32 / 4;
}

// Adds w relu(x) of two neighbouring heads. A NaN stays one.
__device__ __forceinline__ void add_weighed(float& sum, float x0, float x1, const Vec<float, 2>& w) {
  sum = fmaf(max_nan(x0, 0.0f), w.e[0], sum);
  sum = fmaf(max_nan(x1, 0.0f), w.e[1], sum);
}

// Lane j of a quad gets the sum of x[j] over the quad's four lanes.
__device__ __forceinline__ float sum_of_quad(const float (&x)[4]) {
  const bool odd = threadIdx.x % 2, upper = threadIdx.x % 4 / 2;
  const float low = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
  const float high = (odd ? x[3] : x[2]) + __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
}

// The largest `x` of a block of kBlock neighbouring keys, one of which is the thread's (thread_key). A NaN is larger than all.
template <uint32_t kBlock>
__device__ __forceinline__ float max_of_block(float x) {
  static_assert(kBlock <= 16, "keys that a warp has side by side");
  constexpr uint32_t kLanes[4] = {4, 8, 16, 1};  // what tells lanes apart whose keys differ in bit 0, 1, 2 and 3
#pragma unroll
  for (uint32_t bit = 0; 1u << bit < kBlock; ++bit) x = max_nan(x, __shfl_xor_sync(~0u, x, kLanes[bit]));
  return x;
}

// ---- Products of a warp: the operands of its 32 keys stay in registers, q's are read from shared memory

// kWidens: codes are widened to f16 before they are multiplied. kScoreFactor multiplies sums of such products.
template <typename E>
constexpr bool kWidens = kSame<E, e4m3> && !kCodeProducts;
template <typename E>
constexpr float kScoreFactor = kWidens<E> ? kFragmentFactor<E> * kFragmentFactor<E> : 1.0f;

template <typename Tile, bool kGroups>
struct TileKeys;

template <typename Tile>
struct TileKeys<Tile, false> {
  using Element = typename Tile::Element;
  static constexpr uint32_t kTogether = 1;
  static constexpr uint32_t kSteps = Tile::kRowBytes / 32, kPer = 1 + kWidens<Element>;  // steps of 32 bytes, products of each
  uint32_t keys[2][kSteps * kPer][4];

  __device__ __forceinline__ void load(uint32_t tile) {
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
#pragma unroll
    for (uint32_t m = 0; m < 2; ++m)
#pragma unroll
      for (uint32_t s = 0; s < kSteps; ++s) {
        uint32_t words[4];
        load_matrices(words, tile + s / 4 * kKeyPanel<Tile> + (m * 64 + row) * 128 + (s % 4 * 2 + half ^ row % 8) * 16);
        operand(&keys[m][s * kPer], words);
      }
  }

  // The scores of row `row` of q.
  __device__ __forceinline__ void await_scores(float (&out)[1][4], uint32_t query, const float* weights, uint32_t row) const {
    const uint32_t column = threadIdx.x % 8, at = query + (row * Tile::kHeads + column) * 128;
    float sums[4] = {};
#pragma unroll 2
    for (uint32_t n = 0; n < Tile::kHeads; n += 8) {
      float c[2][4] = {};
#pragma unroll
      for (uint32_t s = 0; s < kSteps; s += 2) {
        uint32_t b[2][2];
        load_matrices((uint32_t(&)[4])b, at + n * 128 + s / 4 * kQueryPanel<Tile> + (s % 4 * 2 + threadIdx.x % 32 / 8 ^ column) * 16);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) multiply(c, s + i, b[i]);
      }
      const Vec<float, 2> w = *(const Vec<float, 2>*)(weights + row * Tile::kHeads + n + threadIdx.x % 4 * 2);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) add_weighed(sums[i], c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1], w);
    }
    for (uint32_t i = 0; i < 4; ++i) out[0][i] = sums[i] * kScoreFactor<Element>;
  }

 private:
  // Words of 16 rows as operands: both halves of 32 bytes, or of each half its own, widened, with the dims of a lane side by
  // side.
  __device__ static __forceinline__ void operand(uint32_t (*out)[4], const uint32_t (&words)[4]) {
    if constexpr (!kWidens<Element>) {
      for (uint32_t i = 0; i < 4; ++i) out[0][i] = words[i];
    } else {
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t pair[2];
        widen<true>(Element{}, pair, words[i]);
        out[i / 2][i % 2] = pair[0];
        out[i / 2][i % 2 + 2] = pair[1];
      }
    }
  }
  // c += K q of 32 bytes.
  __device__ __forceinline__ void multiply(float (&c)[2][4], uint32_t s, const uint32_t (&b)[2]) const {
    if constexpr (kWidens<Element>) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        uint32_t pair[2];
        widen<true>(Element{}, pair, b[i]);
        for (uint32_t m = 0; m < 2; ++m) multiply_add<f16>(c[m], keys[m][s * 2 + i], pair);
      }
    } else if constexpr (kSame<Element, e4m3>) {
      for (uint32_t m = 0; m < 2; ++m) multiply_add_codes(c[m], keys[m][s], b);
    } else {
      for (uint32_t m = 0; m < 2; ++m) multiply_add<Element>(c[m], keys[m][s], b);
    }
  }
};

// ---- Products of a warpgroup: both operands in shared memory, kTogether rows of q at once

// Adds up the heads of 64 keys, to numbers i and i + 1 of each row.
template <typename Tile>
__device__ __forceinline__ void add_heads(float (&out)[Tile::kTogether][4], const float (&d)[Tile::kTogether * Tile::kHeads / 2], uint32_t i, const float* weights) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kTogether * Tile::kHeads; n += 8) {
    const Vec<float, 2> w = *(const Vec<float, 2>*)(weights + n + threadIdx.x % 4 * 2);
    add_weighed(out[n / Tile::kHeads][i], d[n / 2], d[n / 2 + 1], w);
    add_weighed(out[n / Tile::kHeads][i + 1], d[n / 2 + 2], d[n / 2 + 3], w);
  }
}

template <typename Tile>
struct TileKeys<Tile, true> {
  using Element = typename Tile::Element;
  static constexpr uint32_t kTogether = Tile::kTogether, kColumns = kTogether * Tile::kHeads;
  uint64_t keys;

  __device__ __forceinline__ void load(uint32_t tile) { keys = swizzled_tile(tile); }

  // The scores of kTogether rows of q from `row` on: those of 64 keys are added up beside the products of the other 64.
  __device__ __forceinline__ void await_scores(float (&out)[kTogether][4], uint32_t query, const float* weights, uint32_t row) const {
    const uint64_t heads = swizzled_tile(query + row * Tile::kHeads * 128);
    float d[2][kColumns / 2];
    wgmma_fence();
#pragma unroll
    for (uint32_t m = 0; m < 2; ++m) {
#pragma unroll
      for (uint32_t s = 0; s < Tile::kRowBytes / 32; ++s) begin_product(d[m], tile_at(keys, s / 4 * (kKeyPanel<Tile> / 16) + m * 512 + s % 4 * 2), tile_at(heads, s / 4 * (kQueryPanel<Tile> / 16) + s % 4 * 2), s > 0);
      wgmma_commit();
    }
#pragma unroll
    for (uint32_t u = 0; u < kTogether; ++u) out[u][0] = out[u][1] = out[u][2] = out[u][3] = 0.0f;
    wgmma_wait<1>();
    wgmma_done(d[0]);
    add_heads<Tile>(out, d[0], 0, weights + row * Tile::kHeads);
    wgmma_wait<0>();
    wgmma_done(d[1]);
    add_heads<Tile>(out, d[1], 2, weights + row * Tile::kHeads);
  }

 private:
  __device__ static __forceinline__ void begin_product(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
    if constexpr (kSame<Element, e4m3>) multiply_codes(d, a, b, add);
    else multiply_keys<Element>(d, a, b, add);
  }
};

// The keys of a tile as this architecture multiplies them.
template <typename Tile>
using Keys = TileKeys<Tile, kWarpgroups && Tile::kTogether != 0>;
