// No pages: the rows of request b are [kv_offsets[b], kv_offsets[b + 1]), one page that begins at any row.
#pragma once

template <typename PageIds>
struct OffsetsTable : TableBase<PageIds> {
  template <typename Cache>
  __device__ static const uint32_t* lengths_nd(const Cache& cache) {
    static_assert(kNever<Cache>, "cache_lengths_nd: the lengths of this cache lie in its page table; use cache_length(b)");
    return nullptr;
  }
  template <typename Cache>
  __device__ static uint32_t length(const Cache& cache, uint32_t b) {
    const uint32_t begin = load_index(cache.kv_offsets, b), end = load_index(cache.kv_offsets, b + 1);
    return begin <= end && end <= cache.num_pages && end - begin <= cache.page_tokens ? end - begin : kU32Max;
  }
  template <typename Cache>
  __device__ static bool holds(const Cache& cache, uint32_t b, uint32_t first, uint32_t n) {
    const uint32_t most = length(cache, b);
    return most != kU32Max && n <= most;
  }
  template <typename Cache>
  __device__ static bool stored(const Cache& cache, uint32_t b, uint32_t token) {
    return token < length(cache, b);  // of bad offsets all are, for list() to say what is wrong
  }
  template <typename Cache>
  __device__ static bool reaches(const Cache& cache, uint32_t b, uint32_t token) {
    return token < length(cache, b);
  }
  template <typename Cache>
  __device__ static TableSlice list(const Cache& cache, uint32_t b) {
    const uint32_t begin = load_index(cache.kv_offsets, b), end = load_index(cache.kv_offsets, b + 1);
    if (begin > end || end > cache.num_pages) return {0, 0, Fault::table};
    return {begin, begin < end ? 1u : 0, Fault::position};
  }
  template <typename Cache>
  __device__ static PageIds ids(const Cache& cache, const TableSlice& list, uint32_t i) {
    return {(uint32_t)list.first, Fault::none};
  }
};
