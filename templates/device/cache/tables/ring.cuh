// A row of page ids used as a ring: the last kWindow tokens live. Page i lies in column i % table_pages, so that a column has one
// page at a time. The rule, for every token: it is reachable if it is no older than the oldest living one and no other page took
// its column. That is the newest token's page up to the newest (keeps); past it, this step's tokens have pages whose columns hold
// nothing alive, where the step's first token, if lengths come before it (kBefore), has pushed the oldest one out of the window.
#pragma once

template <typename PageIds, uint32_t kWindow, bool kBefore>
struct RingTable : TableBase<PageIds> {
  __device__ static constexpr uint32_t first_token(uint32_t n) { return n > kWindow ? n - kWindow : 0; }
  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    return first >= n || (n - 1) / cache.page_tokens - first / cache.page_tokens < cache.table_pages;
  }
  template <typename Cache>
  __device__ static bool stored(const Cache& cache, uint32_t b, uint32_t token) {
    const uint32_t n = cache.length(b);
    return n != kU32Max && token < n && token >= first_token(n) && keeps(cache, token, n - 1);
  }
  template <typename Cache>
  __device__ static bool reaches(const Cache& cache, uint32_t b, uint32_t token) {
    const uint32_t n = cache.length(b);
    if (n == kU32Max || token < first_token(n)) return false;
    return token < n ? keeps(cache, token, n - 1) : keeps(cache, first_token(kBefore ? n + 1 : n), token);
  }
  template <typename Cache>
  __device__ static bool keeps(const Cache& cache, uint32_t token, uint32_t last) {
    return last / cache.page_tokens - token / cache.page_tokens < cache.table_pages;
  }
  template <typename Cache>
  __device__ static TableSlice list(const Cache& cache, uint32_t b) {
    return {(int64_t)b * cache.table_stride, cache.table_pages == 0 ? 0 : kU32Max, Fault::position};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    // A table without columns: asm, since the compiler moves the division above a plain `table_pages == 0 ? 1 : table_pages`.
    uint32_t columns;
    asm("max.u32 %0, %1, 1;" : "=r"(columns) : "r"(cache.table_pages));
    return {PageIds::entry(cache.page_table, list.first + i % columns), Fault::none};
  }
};
