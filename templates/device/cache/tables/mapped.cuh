// A row of page ids a request, in the row that idx_mapping names.
#pragma once

template <typename PageIds>
struct MappedTable : TableBase<PageIds> {
  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    const bool whole = n <= (uint64_t)cache.table_pages * cache.page_tokens;
    return whole && (n == 0 || load_index(cache.idx_mapping, b) < cache.table_rows);
  }
  template <typename Cache>
  __device__ static TableSlice list(const Cache& cache, uint32_t b) {
    const uint32_t row = load_index(cache.idx_mapping, b);
    if (row >= cache.table_rows) return {0, 0, Fault::table};
    return {(int64_t)row * cache.table_stride, cache.table_pages, Fault::position};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    return {PageIds::entry(cache.page_table, list.first + i), Fault::none};
  }
};
