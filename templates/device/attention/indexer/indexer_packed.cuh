// Keys and q of e2m1 codes with an e8m0 scale for 32 dims (MXFP4): widened to bf16, scales included, which is exact; keys in
// registers, once a tile, q on its way to shared memory, once a group. Then products are those of bf16.
//
// A key's 64 bytes lie in a tile as four chunks of 16, which stand at chunk ^ row / 2 % 4: ldmatrix meets no bank twice. A lane
// gets eight neighbouring dims of each: pairs 0 and 1 are operands of one step of 16, pairs 2 and 3 of the next one, and q's dims
// follow: chunk x of 32 dims of its row has pair x of all four lanes.
//
// `Tile` is the Tile of indexer_scores.cuh, with the bytes of codes as kRowBytes.
#pragma once

#include "../common/bf16_codes.cuh"
#include "indexer_scores.cuh"

// The tile with codes widened to bf16, as products take it.
template <typename Tile>
struct WideTile {
  using Element = bf16;
  static constexpr uint32_t kHeads = Tile::kHeads, kRows = Tile::kRows, kTokens = Tile::kTokens, kRowBytes = 256, kTogether = Tile::kTogether;
};

// The eight values of a word as pairs of neighbours, times 2^(exponent - 127); exponent 255 makes them NaN.
__device__ __forceinline__ void widen_scaled(uint32_t (&out)[4], uint32_t word, uint32_t exponent) {
  const uint32_t scale = bf16_powers(exponent * 0x10001u);
  widen<true>(InBf16<e2m1x2>{}, out, word);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) out[i] = multiply_bf16(out[i], scale);
}

// Starts the copies of a warp's 32 rows to the tile at `stage`: `row` is the address of this thread's row; null: zeros. 4 lanes
// copy a row.
template <typename Tile>
__device__ __forceinline__ void copy_packed_keys_async(uint32_t stage, const uint8_t* row) {
  const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * 32;
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step) {
    const uint32_t mine = 8 * step + lane / 4;
    const uint8_t* from = (const uint8_t*)__shfl_sync(~0u, (uint64_t)row, mine);
    cp_async<16>(stage + (first + mine) * 64 + (lane % 4 ^ mine / 2 % 4) * 16, from + lane % 4 * 16, from != nullptr);
  }
}

// Stores q's heads of `rows` rows to the panels at `query`, widened; zeros for rows past them. Strides are in elements.
template <typename Tile>
__device__ __forceinline__ void store_packed_queries(uint8_t* query, const uint8_t* q, int64_t stride, const int32_t* scales, int64_t scales_stride,
                                                     uint32_t rows) {
  constexpr uint32_t kColumns = Tile::kRows * Tile::kHeads;
#pragma unroll 2
  for (uint32_t n = threadIdx.x; n < kColumns * 4; n += Tile::kTokens) {
    const uint32_t column = n / 4, block = n % 4, row = column / Tile::kHeads, head = column % Tile::kHeads;
    Vec<uint32_t, 4> codes = {};
    uint32_t word = 0;
    if (row < rows) {
      codes = *(const Vec<uint32_t, 4>*)(q + row * stride + head * 64 + block * 16);
      word = scales[row * scales_stride + head];
    }
    uint32_t pairs[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) widen_scaled(pairs[i], codes.e[i], word >> 8 * block & 255);
#pragma unroll
    for (uint32_t x = 0; x < 4; ++x) {
      const uint32_t piece = 4 * block + x;
      const Vec<uint32_t, 4> chunk = {pairs[0][x], pairs[1][x], pairs[2][x], pairs[3][x]};
      *(Vec<uint32_t, 4>*)(query + piece / 8 * kQueryPanel<WideTile<Tile>> + column * 128 + (piece % 8 ^ column % 8) * 16) = chunk;
    }
  }
}

// A lane's operands of keys 16w + g and 16w + g + 8 of both halves of a tile; `scales` are the tile's, four a key.
template <typename Tile>
__device__ __forceinline__ void load_packed_keys(uint32_t (&keys)[2][8][4], uint32_t tile, const uint32_t* scales) {
  const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16, row = first + lane % 16;
#pragma unroll
  for (uint32_t m = 0; m < 2; ++m) {
    const uint32_t own[2] = {scales[m * 64 + first + lane / 4], scales[m * 64 + first + lane / 4 + 8]};
#pragma unroll
    for (uint32_t two = 0; two < 2; ++two) {
      uint32_t words[4];
      load_matrices(words, tile + (m * 64 + row) * 64 + (two * 2 + lane / 16 ^ row / 2 % 4) * 16);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t block = two * 2 + i / 2, half = i % 2;
        uint32_t pairs[4];
        widen_scaled(pairs, words[i], own[half] >> 8 * block & 255);
        keys[m][block * 2][half] = pairs[0], keys[m][block * 2][half + 2] = pairs[1];
        keys[m][block * 2 + 1][half] = pairs[2], keys[m][block * 2 + 1][half + 2] = pairs[3];
      }
    }
  }
}

template <typename Tile, bool kGroups>
struct PackedTileKeys;

// ---- Products of a warp

template <typename Tile>
struct PackedTileKeys<Tile, false> {
  static constexpr uint32_t kTogether = 1;
  TileKeys<WideTile<Tile>, false> wide;

  __device__ __forceinline__ void load(uint32_t tile, const uint32_t* scales) { load_packed_keys<Tile>(wide.keys, tile, scales); }
  __device__ __forceinline__ void await_scores(float (&out)[1][4], uint32_t query, const float* weights, uint32_t row) const {
    wide.await_scores(out, query, weights, row);
  }
};

// ---- Products of a warpgroup: keys from registers

template <typename Tile>
struct PackedTileKeys<Tile, true> {
  static constexpr uint32_t kTogether = Tile::kTogether, kColumns = kTogether * Tile::kHeads;
  uint32_t keys[2][8][4];

  __device__ __forceinline__ void load(uint32_t tile, const uint32_t* scales) { load_packed_keys<Tile>(keys, tile, scales); }
  // The scores of kTogether rows of q from `row` on.
  __device__ __forceinline__ void await_scores(float (&out)[kTogether][4], uint32_t query, const float* weights, uint32_t row) const {
    const uint64_t heads = swizzled_tile(query + row * Tile::kHeads * 128);
    float d[2][kColumns / 2];
    wgmma_fence();
#pragma unroll
    for (uint32_t m = 0; m < 2; ++m) {
#pragma unroll
      for (uint32_t s = 0; s < 8; ++s) multiply_keys<bf16>(d[m], keys[m][s], tile_at(heads, s / 4 * (kQueryPanel<WideTile<Tile>> / 16) + s % 4 * 2), s > 0);
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
};

// The keys of a tile as this architecture multiplies them.
template <typename Tile>
using PackedKeys = PackedTileKeys<Tile, kWarpgroups && Tile::kTogether != 0>;
