// The base of caches of tokens. cache.cuh has the struct's fields, what a page is (PageRef), and the segments K and V; its struct
// derives from PagedCache, or from TailedCache where K's newest tokens wait in a tail until they are quantized.
//
// Two levels: page(b, i) looks a page up and checks its ids once; below it, the places of elements and scales inside the page are
// constant expressions of the segments. No page id of a table makes a pointer past the pool.
#pragma once

#include "../base/types.cuh"
#include "../quant/elements.cuh"
#include "../base/fault.cuh"
#include "../base/launch.cuh"
#include "../base/index.cuh"
#include "../memory/copy.cuh"
#include "../quant/quantize.cuh"
#include "segment.cuh"
#include "kv_cache.cuh"
#include "operands.cuh"

// The ids of a page as the page table has them: unchecked, kNone where fault is set. So one comparison with the pool's size
// decides whether a page is good. An entry of the table counts kPages pages.
template <typename T, uint32_t kPages = 1>
struct PageId {
  static constexpr T kNone = (T)-1;  // past every pool
  T id;
  Fault fault;

  __device__ static PageId none(Fault fault) { return {kNone, fault}; }
  // Entry i of a page table.
  template <typename Entry>
  __device__ static T entry(const Entry* table, uint64_t i) {
    return load_page_id(table, i) * (T)kPages;
  }
  template <typename Cache>
  __device__ auto page(const Cache& cache) const { return cache.page_at(id); }
  template <typename Cache>
  __device__ static auto nth_page(const Cache& cache, uint32_t n) { return cache.page_at(n); }
};

// The ids of K's page and of V's.
template <typename T, uint32_t kPages = 1>
struct KvPageIds {
  static constexpr T kNone = (T)-1;
  T k_id, v_id;
  Fault fault;

  __device__ static KvPageIds none(Fault fault) { return {kNone, kNone, fault}; }
  template <typename Entry>
  __device__ static T entry(const Entry* table, uint64_t i) {
    return load_page_id(table, i) * (T)kPages;
  }
  template <typename Cache>
  __device__ auto page(const Cache& cache) const { return cache.page_at(k_id, v_id); }
  template <typename Cache>
  __device__ static auto nth_page(const Cache& cache, uint32_t n) { return cache.page_at(n, n); }
};

// The ids of a page of values, and of one of their scales.
template <typename T, uint32_t kPages = 1>
struct ScaledPageIds {
  static constexpr T kNone = (T)-1;
  T id, scale_id;
  Fault fault;

  __device__ static ScaledPageIds none(Fault fault) { return {kNone, kNone, fault}; }
  template <typename Entry>
  __device__ static T entry(const Entry* table, uint64_t i) {
    return load_page_id(table, i) * (T)kPages;
  }
  template <typename Cache>
  __device__ auto page(const Cache& cache) const { return cache.page_at(id, scale_id); }
  template <typename Cache>
  __device__ static auto nth_page(const Cache& cache, uint32_t n) { return cache.page_at(n, n); }
};

// Where the page table has the ids of a request's pages: from entry `first` on, so many. `past`: what is wrong with others.
struct TableSlice {
  int64_t first;
  uint32_t count;
  Fault past;
};

// The base of page tables (device/cache/tables/): lengths are an array, and all tokens stay. A form says
// besides holds(), list() and ids().
template <typename PageIds>
struct TableBase {
  using Ids = PageIds;
  using List = TableSlice;

  template <typename Cache>
  __device__ static auto lengths_nd(const Cache& cache) { return cache.lengths; }
  template <typename Cache>
  __device__ static uint32_t length(const Cache& cache, uint32_t b) { return load_index(cache.lengths, b); }
  __device__ static constexpr uint32_t first_token(uint32_t n) { return 0; }
  template <typename Cache>
  __device__ static bool stored(const Cache& cache, uint32_t b, uint32_t token) { return true; }
  template <typename Cache>
  __device__ static bool reaches(const Cache& cache, uint32_t b, uint32_t token) { return true; }
  template <typename Cache>
  __device__ static bool keeps(const Cache& cache, uint32_t token, uint32_t last) { return true; }
};

// The look-up of a page. `Values` is a page's pointers to values and scales, `Table` the form of the page table. Methods reach
// the struct by a cast: calls of one that returned it would be inlined in another order, and the machine code of some kernels
// would be longer.
template <typename Cache, typename Values, typename Table>
struct PageLookUp {
  using Ids = typename Table::Ids;
  using List = typename Table::List;
  static constexpr bool kIsMla = false;        // K only
  static constexpr uint32_t kRate = 1;         // tokens that an entry stands for: lengths count tokens, pages entries
  static constexpr uint32_t kTableVector = 1;  // entries of the page table that are aligned together
  static constexpr auto kNoId = Ids::kNone;    // past every pool

  __device__ auto lengths_nd() const { return Table::lengths_nd((const Cache&)*this); }

  // Tokens of request b as the engine counts them: before or after this step, as cache.cuh says. A wrong number is kU32Max.
  __device__ uint32_t length(uint32_t b) const { return Table::length((const Cache&)*this, b); }

  // The oldest of n tokens that the cache still holds.
  __device__ static constexpr uint32_t first_token(uint32_t n) { return Table::first_token(n); }

  // True where the table of request b has a page for every token in [first, n).
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const {
    return Table::holds((const Cache&)*this, b, first, n / Cache::kRate);
  }

  // True where a page of the table can still hold this token.
  __device__ bool stored(uint32_t b, uint32_t token) const { return Table::stored((const Cache&)*this, b, token); }

  // True where a write of tokens up to `last` leaves the page of `token` to it.
  __device__ bool keeps(uint32_t token, uint32_t last) const { return Table::keeps((const Cache&)*this, token, last); }

  // True where the table has a place for this token that no other token holds, tokens of this step included.
  __device__ bool reaches(uint32_t b, uint32_t token) const { return Table::reaches((const Cache&)*this, b, token); }

  // Page n of every pool.
  __device__ Values nth_page(uint32_t n) const { return Ids::nth_page((const Cache&)*this, n); }

  __device__ static Ids no_ids(Fault fault) { return Ids::none(fault); }
  __device__ static List no_list(Fault fault) { return {0, 0, fault}; }

  // Entry i of a page table as a page id.
  template <typename Entry>
  __device__ static auto entry_id(const Entry* table, uint64_t i) { return Ids::entry(table, i); }

  // The pages of request b, which loops over its tokens ask for once.
  __device__ List page_list(uint32_t b) const { return Table::list((const Cache&)*this, b); }

  // The ids of page i of a request, counted from its first token.
  __device__ Ids page_ids(const List& list, uint32_t i) const {
    if (i >= list.count) return no_ids(list.past);
    return Table::ids((const Cache&)*this, list, i);
  }
  __device__ Ids page_ids(uint32_t b, uint32_t i) const { return page_ids(page_list(b), i); }

  // The values and scales of the page of ids that were looked up before.
  __device__ Values page(const Ids& found) const {
    Values page = found.page((const Cache&)*this);
    if (found.fault != Fault::none) page.fault = found.fault;
    return page;
  }
  __device__ bool has_page(const Ids& found) const { return page(found).valid; }

  // kCount neighbouring ids by one read, where the row of the table has them all; ids past the table are ~0.
  template <uint32_t kCount>
  __device__ Vec<uint64_t, kCount> page_id_chunk(uint32_t b, uint32_t i) const {
    const Cache& cache = (const Cache&)*this;
    return id_chunk<kCount>(cache.page_table + (int64_t)b * cache.table_stride, cache.table_pages, i);
  }

 private:
  template <uint32_t kCount, typename T>
  __device__ static Vec<uint64_t, kCount> id_chunk(const T* row, uint32_t table_pages, uint32_t i) {
    using Entries = Vec<T, kCount>;
    Vec<uint64_t, kCount> ids;
    Entries entries;
    const bool whole = i < table_pages && table_pages - i >= kCount;
    if (whole) entries = *(const Entries*)(row + i);
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) {
      const bool inside = whole || (i < table_pages && j < table_pages - i);
      ids.e[j] = inside ? (uint64_t)(whole ? entry_id(entries.e, j) : entry_id(row, i + j)) : ~0ull;
    }
    return ids;
  }
};

// A cache whose tokens are all stored one way.
template <typename Cache, typename PageRef, typename Table>
struct PagedCache : PageLookUp<Cache, PageRef, Table> {
  using Page = PageRef;
  using PageLookUp<Cache, PageRef, Table>::page;

  __device__ Page page(uint32_t b, uint32_t i) const { return page(this->page_ids(b, i)); }

  // The page of a token, this step's included.
  __device__ Page page_of(uint32_t b, uint32_t token) const {
    return this->reaches(b, token) ? page(b, token / ((const Cache&)*this).page_tokens) : Page::none(Fault::position);
  }
};

// A cache whose newest tokens of K wait in a tail: k_tail has those of each request, k_sealed how many tokens are quantized.
template <typename Cache, typename PageRef, typename Values, typename Table>
struct TailedCache : PageLookUp<Cache, Values, Table> {
  using Page = PageRef;
  using PageLookUp<Cache, Values, Table>::page;

  // The request's newest tokens of K.
  __device__ auto* tail(uint32_t b) const {
    const Cache& cache = (const Cache&)*this;
    return cache.k_tail + (int64_t)b * cache.k_tail_stride;
  }

  // The page's values and scales, for writes: k_sealed is not read, since seal sets it while other blocks look pages up.
  __device__ Values page_values(uint32_t b, uint32_t i) const { return page(this->page_ids(b, i)); }

  // `sealed` is k_sealed[b], which a kernel may read once a request.
  __device__ Page page(uint32_t b, uint32_t i, uint32_t sealed) const {
    const uint32_t begin = i * Cache::page_tokens;
    const Values page = page_values(b, i);
    return Page::with_tail(page, tail(b), sealed > begin ? sealed - begin : 0);
  }
  __device__ Page page(uint32_t b, uint32_t i) const { return page(b, i, load_index(((const Cache&)*this).k_sealed, b)); }

  // The page of a token, this step's included.
  __device__ Page page_of(uint32_t b, uint32_t token) const {
    return this->reaches(b, token) ? page(b, token / Cache::page_tokens) : Page::none(Fault::position);
  }
};
