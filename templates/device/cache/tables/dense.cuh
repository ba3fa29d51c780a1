// A row of page ids a request; a continuous cache is the case of one page.
#pragma once

template <typename PageIds>
struct DenseTable : TableBase<PageIds> {
  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    return n <= (uint64_t)cache.table_pages * cache.page_tokens;
  }
  template <typename Cache>
  __device__ static TableSlice list(const Cache& cache, uint32_t b) {
    return {(int64_t)b * cache.table_stride, cache.table_pages, Fault::position};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    return {PageIds::entry(cache.page_table, list.first + i), Fault::none};
  }
};

// A dense table beside a second one, which has the pages of scales.
template <typename PageIds>
struct DenseTables : DenseTable<PageIds> {
  struct List : TableSlice {
    int64_t scales_first;
  };

  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    if (n > (uint64_t)cache.scales_table_pages * cache.page_tokens) return false;
    return n <= (uint64_t)cache.table_pages * cache.page_tokens;
  }
  template <typename Cache>
  __device__ static List list(const Cache& cache, uint32_t b) {
    return {(int64_t)b * cache.table_stride, cache.table_pages, Fault::position, (int64_t)b * cache.scales_table_stride};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const List& list, uint32_t i) {
    const auto id = PageIds::entry(cache.page_table, list.first + i);
    if (i >= cache.scales_table_pages) return PageIds::none(Fault::position);
    return {id, PageIds::entry(cache.scales_page_table, list.scales_first + i), Fault::none};
  }
};
