// A slot per token, in the row that the request's id names.
#pragma once

template <typename PageIds>
struct IndirectTable : TableBase<PageIds> {
  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    return n <= cache.table_pages && (n == 0 || load_index(cache.request_ids, b) < cache.table_rows);
  }
  template <typename Cache>
  __device__ static TableSlice list(const Cache& cache, uint32_t b) {
    const uint32_t row = load_index(cache.request_ids, b);
    if (row >= cache.table_rows) return {0, 0, Fault::table};
    return {(int64_t)row * cache.table_stride, cache.table_pages, Fault::position};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    return {PageIds::entry(cache.req_to_token, list.first + i), Fault::none};
  }
};
