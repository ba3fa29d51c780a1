// Rows of latent caches of any element type, on their way into one tile in shared memory: 16 neighbouring dims at a time, codes
// and scales, wait in registers and are dequantized when they are stored.
//
// `Tile` names kThreads, kTokens, kPitch (bytes from row to row of the tile), the Element of the tile and kRowUnits of 16 dims of
// a row. `Role` is a cache's KeyRole.
#pragma once

#include "latent_tile.cuh"

// The lists of a row of q, one a cache: the entries, their count, and the tile that begins with the first entry.
struct KeyList {
  const int32_t* entries;
  uint32_t count, first_tile;
};

// The list of a tile.
template <uint32_t kLists>
__device__ __forceinline__ uint32_t list_of(const KeyList (&lists)[kLists], uint32_t tile) {
  uint32_t found = 0;
#pragma unroll
  for (uint32_t n = 1; n < kLists; ++n) found += tile >= lists[n].first_tile;
  return found;
}

// The list's entry for token `token` of a tile; -1 past its end.
template <typename Tile, uint32_t kLists>
__device__ __forceinline__ int32_t listed_entry(const KeyList (&lists)[kLists], uint32_t tile, uint32_t token) {
  KeyList list = lists[0];
#pragma unroll
  for (uint32_t n = 1; n < kLists; ++n)
    if (tile >= lists[n].first_tile) list = lists[n];
  const uint32_t entry = (tile - list.first_tile) * Tile::kTokens + token;
  return entry < list.count ? in_global(list.entries)[entry] : -1;
}

// A row of a cache counted over all of its pages; kNoEntry: none.
constexpr uint32_t kNoEntry = kU32Max;

// 16 dims of a row as some cache stores them: at most codes of a byte, each with a scale and a zero point of its own.
struct alignas(16) RowUnit {
  static constexpr uint32_t kDims = 16, kWords = 36;
  uint32_t words[kWords];
};

// A thread's units of a tile: units threadIdx.x, threadIdx.x + kThreads and so on; a row's units follow each other.
template <typename Tile>
struct TileUnits {
  static constexpr uint32_t kAll = Tile::kTokens * Tile::kRowUnits, kMine = (kAll + Tile::kThreads - 1) / Tile::kThreads;
  RowUnit e[kMine];

  __device__ static __forceinline__ bool has(uint32_t n) { return kAll % Tile::kThreads == 0 || n * Tile::kThreads + threadIdx.x < kAll; }
  __device__ static __forceinline__ uint32_t token(uint32_t n) { return (n * Tile::kThreads + threadIdx.x) / Tile::kRowUnits; }
  __device__ static __forceinline__ uint32_t dim(uint32_t n) { return (n * Tile::kThreads + threadIdx.x) % Tile::kRowUnits * RowUnit::kDims; }
};

template <typename S, typename Cache, typename Page>
__device__ __forceinline__ void load_unit(RowUnit& unit, const Cache& cache, const Page& page, uint32_t token, uint32_t dim) {
  using Found = Stored<S, RowUnit::kDims>;
  static_assert(sizeof(Found) <= sizeof(RowUnit) && S::kResidual == 0);
  load_stored((Found&)unit, cache, page, token, 0, dim - S::kBegin);
}
template <typename S, typename E, typename Cache>
__device__ __forceinline__ void widen_unit(Vec<E, RowUnit::kDims>& out, const RowUnit& unit, const Cache& cache) {
  dequantize_stored(out, (const Stored<S, RowUnit::kDims>&)unit, global_scale_of<S>(cache));
}

// Starts the loads of the rows that `entries` names, physical rows of this cache; kNoEntry becomes zeros.
template <typename Role, typename Tile, typename Cache>
__device__ __forceinline__ void load_units(TileUnits<Tile>& units, const Cache& cache, const uint32_t* entries) {
#pragma unroll
  for (uint32_t n = 0; n < TileUnits<Tile>::kMine; ++n) {
    units.e[n] = {};
    if (!TileUnits<Tile>::has(n)) continue;
    const uint32_t entry = entries[TileUnits<Tile>::token(n)], dim = TileUnits<Tile>::dim(n);
    const auto page = cache.page_at(entry / cache.page_tokens);
    const uint32_t token = entry % cache.page_tokens;
    if (entry == kNoEntry || !page.valid) continue;
    if constexpr (kSame<typename Role::Rope, void>) {
      load_unit<typename Role::Main>(units.e[n], cache, page, token, dim);
    } else {
      if (dim < Role::Rope::kBegin) load_unit<typename Role::Main>(units.e[n], cache, page, token, dim);
      else load_unit<typename Role::Rope>(units.e[n], cache, page, token, dim);
    }
  }
}

// Stores their values to the tile at `rows`.
template <typename Role, typename Tile, typename Cache>
__device__ __forceinline__ void store_units(uint8_t* rows, const TileUnits<Tile>& units, const Cache& cache) {
#pragma unroll
  for (uint32_t n = 0; n < TileUnits<Tile>::kMine; ++n) {
    if (!TileUnits<Tile>::has(n)) continue;
    const uint32_t dim = TileUnits<Tile>::dim(n);
    Vec<typename Tile::Element, RowUnit::kDims> values;
    if constexpr (kSame<typename Role::Rope, void>) {
      widen_unit<typename Role::Main>(values, units.e[n], cache);
    } else {
      if (dim < Role::Rope::kBegin) widen_unit<typename Role::Main>(values, units.e[n], cache);
      else widen_unit<typename Role::Rope>(values, units.e[n], cache);
    }
    auto* to = (Vec<typename Tile::Element, 8>*)(rows + TileUnits<Tile>::token(n) * Tile::kPitch + dim * 2);
    to[0] = *(const Vec<typename Tile::Element, 8>*)&values.e[0];
    to[1] = *(const Vec<typename Tile::Element, 8>*)&values.e[8];
  }
}
