// All page ids in one list, a slice a request.
#pragma once

template <typename PageIds>
struct CsrTable : TableBase<PageIds> {
  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    const uint32_t begin = load_index(cache.page_indptr, b), end = load_index(cache.page_indptr, b + 1);
    return n <= (end >= begin && end <= cache.num_indices ? (uint64_t)(end - begin) * cache.page_tokens : 0);
  }
  template <typename Cache>
  __device__ static TableSlice list(const Cache& cache, uint32_t b) {
    const uint32_t begin = load_index(cache.page_indptr, b), end = load_index(cache.page_indptr, b + 1);
    if (end < begin || end > cache.num_indices) return {0, 0, Fault::table};
    return {begin, end - begin, Fault::position};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    return {PageIds::entry(cache.page_indices, list.first + i), Fault::none};
  }
};
