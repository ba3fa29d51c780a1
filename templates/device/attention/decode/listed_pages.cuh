// Pages of a request that a call lists, in place of all: place p of a list is token p % page_tokens of the page that entry p /
// page_tokens names, a number in the request's page table. Entries of -1 name none.
#pragma once

#include "../../base/scan.cuh"

struct ListedPages {
  static constexpr uint32_t kNone = kU32Max;  // -1, as entries have it; what lies past a list; the tile and the token of no page
  const int32_t* entries;
  uint32_t count;  // entries
  uint32_t pages;  // those that the request's tokens have

  // The page that entry i names, unchecked; kNone past the list.
  __device__ uint32_t page(uint32_t i) const { return i < count ? (uint32_t)entries[i] : kNone; }

  // The token at a place; kNone where there is none.
  __device__ uint32_t token(uint32_t place, uint32_t page_tokens) const {
    const uint32_t found = page(place / page_tokens);
    return found < pages ? found * page_tokens + place % page_tokens : kNone;
  }

  // Tile n of the list as a tile of its request, of which kPageTiles make a page; kNone where that is none of [begin, end).
  template <uint32_t kPageTiles>
  __device__ uint32_t tile(uint32_t n, uint32_t begin, uint32_t end) const {
    const uint32_t found = page(n / kPageTiles), tile = found * kPageTiles + n % kPageTiles;
    return found < pages && tile >= begin && tile < end ? tile : kNone;
  }
};

// The list of `count` entries from `entries` on, of a request of so many tokens. More entries than `columns`, or more places than
// 2^31, are reported, and none count.
__device__ __forceinline__ ListedPages listed_pages(bool& failed, const int32_t* entries, uint32_t count, uint32_t columns, uint32_t page_tokens,
                                                    uint32_t b, uint32_t tokens, uint64_t* errors) {
  const bool wrong = !failed && (count > columns || count > 0x80000000u / page_tokens);
  if (wrong && threadIdx.x == 0) report(errors, Fault::length, b, count);
  failed |= wrong;
  return {entries, failed ? 0 : count, tokens / page_tokens + (tokens % page_tokens != 0)};
}

// True if an entry is neither -1 nor the number of a page with tokens. Each of the block's kThreads threads checks entries of its
// own. A wrong entry is reported at its page's first token.
template <uint32_t kThreads>
__device__ __forceinline__ bool has_wrong_page(const ListedPages& list, uint32_t page_tokens, uint32_t b, uint64_t* errors) {
  bool wrong = false;
  for (uint32_t i = threadIdx.x; i < list.count; i += kThreads) {
    const uint32_t page = list.page(i);
    if (page == ListedPages::kNone || page < list.pages) continue;
    report(errors, Fault::position, b, token_at(page, page_tokens));
    wrong = true;
  }
  return wrong;
}
