// CSR whose lengths come from the number of pages and the tokens in the last one.
#pragma once

#include "csr.cuh"

template <typename PageIds>
struct CsrLastTable : CsrTable<PageIds> {
  template <typename Cache>
  __device__ static const uint32_t* lengths_nd(const Cache& cache) {
    static_assert(kNever<Cache>, "cache_lengths_nd: the lengths of this cache lie in its page table; use cache_length(b)");
    return nullptr;
  }
  template <typename Cache>
  __device__ static uint32_t length(const Cache& cache, uint32_t b) {
    const uint32_t begin = load_index(cache.page_indptr, b), end = load_index(cache.page_indptr, b + 1);
    if (end < begin || end > cache.num_indices) return kU32Max;
    if (end == begin) return 0;
    const uint64_t tokens = (uint64_t)(end - begin - 1) * cache.page_tokens + load_index(cache.last_page_len, b);
    return tokens < kU32Max ? (uint32_t)tokens : kU32Max;
  }
};
