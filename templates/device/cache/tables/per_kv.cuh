// Two rows of page ids a request: K's, then V's.
#pragma once

#include "dense.cuh"

template <typename PageIds>
struct PerKvTable : DenseTable<PageIds> {
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    const auto k_id = PageIds::entry(cache.page_table, list.first + i);
    const auto v_id = PageIds::entry(cache.page_table, list.first + cache.kv_table_stride + i);
    return {k_id, v_id, Fault::none};
  }
};
