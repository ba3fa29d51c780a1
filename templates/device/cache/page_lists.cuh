// Lists of page ids, and of rows in the pool, that operations make out of a cache's page table. A warp writes a run of
// neighbouring entries; each lane has several of them, 32 apart, whose page ids are on their way at once.
#pragma once

#include "../base/scan.cuh"

// Pages of the requests below `first` that the thread takes: every kThreads-th.
template <bool kBefore, uint32_t kThreads, typename Cache, typename Index>
__device__ __forceinline__ uint64_t earlier_pages(const Cache& cache, const Index* row_offsets, uint32_t first) {
  uint64_t pages = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < first; i += kThreads) pages += pages_of_tokens<kBefore>(cache, row_offsets, i).count;
  return pages;
}

// Entries [first, end) of a list are stored; entry `first` is page 0 of a request, and those below `known` have a page.
struct PageRun {
  uint32_t first, known, end;
};

// The ids of the pages of a lane's entries i, i + 32, ...; of entries that have no page, none.
template <uint32_t kBatch, typename Cache, typename PageIds>
__device__ __forceinline__ void load_page_ids(PageIds (&ids)[kBatch], const Cache& cache, uint32_t b, uint32_t i, const PageRun& run) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    const uint32_t at = i + u * 32;
    ids[u] = at >= run.first && at < run.known ? cache.page_ids(b, at - run.first) : Cache::no_ids(Fault::none);
  }
}

// Stores them to list[i], list[i + 32], ... in ids of kIdPages pages; null_entry where there is no page. An id outside the pool
// is reported.
template <uint32_t kIdPages, uint32_t kBatch, typename Entry, typename Cache, typename PageIds>
__device__ __forceinline__ void store_entries(Entry* list, Entry null_entry, const PageIds (&ids)[kBatch], const Cache& cache, uint32_t b,
                                              uint32_t i, const PageRun& run, uint64_t* errors) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    const uint32_t at = i + u * 32;
    const bool found = ids[u].id < cache.num_pages;
    if (at < run.first || at >= run.end) continue;
    if (!found && at < run.known) report(errors, fault_of(ids[u]), b, token_at(at - run.first, cache.page_tokens));
    list[at] = found ? (Entry)(ids[u].id / kIdPages) : null_entry;
  }
}

// The tokens that a lane's entries i, i + 32, ... below `end` name; -1 past it.
template <uint32_t kBatch>
__device__ __forceinline__ void load_tokens(int32_t (&tokens)[kBatch], const int32_t* from, uint32_t i, uint32_t end) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) tokens[u] = i + u * 32 < end ? from[i + u * 32] : -1;
}

// Columns of a list of `count` blocks become the tokens that they name: column j is token j % kBlock of block list[j / kBlock].
// Negative columns stay, those of negative blocks are -1; columns past the list, and tokens past 2^31 - 1, become that number,
// which has no row in the pool.
template <uint32_t kBlock, uint32_t kBatch>
__device__ __forceinline__ void load_listed_tokens(int32_t (&tokens)[kBatch], const int32_t* list, uint32_t count) {
  constexpr int32_t kPast = 0x7fffffff;
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    const uint32_t column = (uint32_t)tokens[u], i = column / kBlock;
    if (tokens[u] < 0) continue;
    const int32_t block = i < count ? list[i] : kPast;
    tokens[u] = block < 0 ? -1 : block > kPast / (int32_t)kBlock ? kPast : (int32_t)min(block * kBlock + column % kBlock, (uint32_t)kPast);
  }
}

// The ids of their pages; none where the row has no request (`owned`) or the token is negative.
template <uint32_t kBatch, typename Cache, typename PageIds>
__device__ __forceinline__ void load_token_pages(PageIds (&ids)[kBatch], const Cache& cache, uint32_t b, bool owned, const int32_t (&tokens)[kBatch]) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    ids[u] = owned && tokens[u] >= 0 ? cache.page_ids(b, (uint32_t)tokens[u] / cache.page_tokens) : Cache::no_ids(Fault::none);
  }
}

// The row in the pool of a token whose page has these ids; -1, and a report, where there is none.
template <typename Cache, typename PageIds>
__device__ __forceinline__ int32_t pool_row(const Cache& cache, const PageIds& ids, uint32_t b, uint32_t token, uint64_t* errors) {
  if (ids.id < cache.num_pages) {
    const uint64_t row = (uint64_t)ids.id * cache.page_tokens + token % cache.page_tokens;
    if (row <= 0x7fffffffu) return (int32_t)row;
    report(errors, Fault::slot, b, token);
  } else {
    report(errors, fault_of(ids), b, token);
  }
  return -1;
}

// Stores the pool rows of the tokens to to[i], to[i + 32], ... below `end`: negative tokens as they are, -1 in rows of no
// request.
template <uint32_t kBatch, typename Cache, typename PageIds>
__device__ __forceinline__ void store_pool_rows(int32_t* to, const Cache& cache, const PageIds (&ids)[kBatch], uint32_t b, bool owned,
                                                const int32_t (&tokens)[kBatch], uint32_t i, uint32_t end, uint64_t* errors) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    if (i + u * 32 >= end) continue;
    int32_t row = tokens[u];
    if (owned && row >= 0) row = pool_row(cache, ids[u], b, row, errors);
    to[i + u * 32] = row < 0 || owned ? row : -1;
  }
}
