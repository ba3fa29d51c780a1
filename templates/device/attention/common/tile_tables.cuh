// Fragments of K and V that are MAX's nvfp4: the tables of their scales (fp4_tables.cuh) make e4m3 of codes, which are widened
// like others. load_keys and load_values of mma_tile.cuh take them in place of scales.
#pragma once

#include "mma_tile.cuh"
#include "tile_scales.cuh"

template <typename Tile, typename KeyScales>
struct KeyProducts {
  using Keys = typename TileShape<Tile>::Keys;
  const uint8_t* tables;

  // Block `block` of tokens 16m to 16m + 15, which begins at `at` in shared memory.
  __device__ __forceinline__ void load(uint32_t (&a)[Keys::kSteps][4], uint32_t at, uint32_t block, uint32_t m) const {
    if (block * 32 + 16 < Tile::kKeyBytes) load_words<4>(a, at, block, m);
    else load_words<2>(a, at, block, m);
  }

 private:
  template <uint32_t kWords>
  __device__ __forceinline__ void load_words(uint32_t (&a)[Keys::kSteps][4], uint32_t at, uint32_t block, uint32_t m) const {
    const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    uint32_t words[kWords];
    load_matrices(words, at);
#pragma unroll
    for (uint32_t n = 0; n < kWords; ++n) {
      const uint32_t half = n / 2, row = n % 2, dim = block * Keys::kDims + half * Keys::kHalfDims + Keys::kInWord * j;
      const auto table = KeyScales::template tables_at<1>(tables, dim, 16 * m + g + 8 * row);
      uint32_t products[2];
      Fp4Tables::products_of_codes(products, words[n], table.e[0]);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        uint32_t pairs[2];
        widen<true>(e4m3{}, pairs, products[i]);
        a[half * Keys::kHalfSteps + i][row] = pairs[0];
        a[half * Keys::kHalfSteps + i][2 + row] = pairs[1];
      }
    }
  }
};

template <typename Tile, typename ValueScales>
struct ValueProducts {
  using Values = typename TileShape<Tile>::Values;
  const uint8_t* tables;

  // Fragments of V, transposed.
  __device__ __forceinline__ void load(uint32_t (&a)[Values::kTiles][4], uint32_t at, uint32_t block, uint32_t m) const {
    if (block * 32 + 16 < Tile::kValueBytes) load_words<4>(a, at, block, m);
    else load_words<2>(a, at, block, m);
  }

 private:
  template <uint32_t kWords>
  __device__ __forceinline__ void load_words(uint32_t (&a)[Values::kTiles][4], uint32_t at, uint32_t block, uint32_t m) const {
    const uint32_t g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    uint32_t words[kWords];
    load_transposed(words, at);
#pragma unroll
    for (uint32_t n = 0; n < kWords; ++n) {
      const uint32_t half = n / 2, late = n % 2, dim = block * Values::kDims + half * Values::kHalfDims + Values::kTiles * g;
      const auto table = ValueScales::template tables_at<2>(tables, dim, 16 * m + 2 * j + 8 * late);
      uint32_t products[2];
      Fp4Tables::products_of_codes(products, words[n], table.e[0], table.e[1]);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        uint32_t pairs[2];
        widen<true>(e4m3{}, pairs, products[i]);
        a[half * Values::kHalfTiles + i][2 * late] = pairs[0];
        a[half * Values::kHalfTiles + i][2 * late + 1] = pairs[1];
      }
    }
  }
};

template <typename Tile, typename KeyScales>
__device__ __forceinline__ void load_keys(uint32_t (&a)[TileShape<Tile>::Keys::kSteps][4], uint32_t at, uint32_t block, uint32_t m,
                                          const KeyProducts<Tile, KeyScales>& products) {
  products.load(a, at, block, m);
}
template <typename Tile, typename ValueScales>
__device__ __forceinline__ void load_values(uint32_t (&a)[TileShape<Tile>::Values::kTiles][4], uint32_t stage, uint32_t block, uint32_t m,
                                            const ValueProducts<Tile, ValueScales>& products) {
  products.load(a, values_at<Tile>(stage, block, m), block, m);
}
