// Addresses of the rows that a list names: one for a lane, or two of tokens that are 8 apart.
#pragma once

#include "row_units.cuh"

// Addresses of a row and of its scales; null for no row.
struct RowPlace {
  const uint8_t *row, *scales;
};
template <typename S, typename Cache>
__device__ __forceinline__ RowPlace find_rows(const Cache& cache, int32_t entry) {
  const uint32_t offset = (uint32_t)entry % cache.page_tokens;
  const auto page = cache.page_at((uint32_t)entry / cache.page_tokens);
  if (entry < 0 || !page.valid) return {};
  return {(const uint8_t*)element_at<S>(page, offset, 0, 0), (const uint8_t*)scale_at<S>(cache, page, offset, 0, 0)};
}

// The list's entries for tokens `token` and `token` + 8 of a tile; -1 past its end.
struct ListedPair {
  int32_t e[2];
};
template <typename Tile, uint32_t kLists>
__device__ __forceinline__ ListedPair listed_pair(const KeyList (&lists)[kLists], uint32_t tile, uint32_t token) {
  KeyList list = lists[0];
#pragma unroll
  for (uint32_t n = 1; n < kLists; ++n)
    if (tile >= lists[n].first_tile) list = lists[n];
  const uint32_t entry = (tile - list.first_tile) * Tile::kTokens + token;
  ListedPair found = {-1, -1};
  // asm: the compiler would branch around a load.
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h)
    asm volatile("{ .reg .pred p; setp.lt.u32 p, %2, %3; @p ld.global.s32 %0, [%1]; }"
                 : "+r"(found.e[h])
                 : "l"(list.entries + entry + 8 * h), "r"(entry + 8 * h), "r"(list.count));
  return found;
}
// Addresses of both rows, and of scales: the second row's for every second lane, the first one's for the others; null for no row.
struct RowPair {
  const uint8_t *rows[2], *scales;
};
template <typename S, typename Cache>
__device__ __forceinline__ RowPair find_rows(const Cache& cache, const ListedPair& entries) {
  RowPair found;
  const uint8_t* scales[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const uint32_t entry = (uint32_t)entries.e[h], offset = entry % cache.page_tokens;
    const auto page = cache.page_at(entry / cache.page_tokens);
    const bool valid = entries.e[h] >= 0 && page.valid;
    found.rows[h] = valid ? (const uint8_t*)element_at<S>(page, offset, 0, 0) : nullptr;
    scales[h] = valid ? (const uint8_t*)scale_at<S>(cache, page, offset, 0, 0) : nullptr;
  }
  found.scales = threadIdx.x % 2 == 0 ? scales[0] : scales[1];
  return found;
}
