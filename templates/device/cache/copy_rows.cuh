// Rows of a caller's arrays copied from and to tokens of the cache. A slot in shared memory says where the token of a row lies; a
// run is one kind of what a token stores (values, codes or scales of a segment) and its place in a row:
//
//   struct KeyRun {
//     using Stored = Values<Key, bf16>;        // a view of stored.cuh
//     static constexpr uint32_t kWidth = 8;    // elements of a vector, which one access moves
//     static constexpr uint32_t kVectors = 16;  // vectors of a token
//     static constexpr uint32_t kHeadDims = 64;  // elements of a head in the caller's row
//   };
#pragma once

#include "../base/scan.cuh"
#include "stored.cuh"

// Where the token of a row lies. A page without pointers: its row gets missing(). `skip`: the row is not written.
struct StoredToken {
  PageRef page;
  uint32_t token;  // in the page
  bool skip;

  template <typename Stored>
  __device__ __forceinline__ typename Stored::Type missing() const { return Stored::missing(); }
};

// A row's slot, if the row can also be a gap, which becomes zeros.
struct GapSlot {
  PageRef page;
  uint32_t token;
  bool skip, gap;

  template <typename Stored>
  __device__ __forceinline__ typename Stored::Type missing() const { return gap ? from_f32<typename Stored::Type>(0.0f) : Stored::missing(); }
};

// Where a row is stored: a token of a page; a page without pointers: the row is not stored.
struct TargetSlot {
  PageRef page;
  uint32_t token;
};

// Row `row` as token starts[b] + (row - begin) of the request b whose rows are `range`. Rows of no request, and of contradictory
// offsets, are skipped. Bad offsets, starts and page ids are reported.
template <typename Cache, typename Index>
__device__ __forceinline__ StoredToken token_of_row(const Cache& cache, const RowRange& range, const Index* starts, uint32_t row, uint64_t* errors) {
  const auto [b, begin, end, padding, valid] = range;
  if (padding) return {no_page(Fault::none), 0, true};
  if (!valid) {
    report(errors, Fault::row_offsets, b, row);
    return {no_page(Fault::none), 0, true};
  }
  const uint32_t start = starts == nullptr ? 0 : load_index(starts, b);
  if (bad_run(start, end - begin)) {
    report(errors, Fault::length, b, row - begin);
    return {no_page(Fault::length), 0, false};
  }
  const uint32_t token = start + (row - begin);
  const PageRef page = cache.stored(b, token) ? cache.page(b, token / cache.page_tokens) : no_page(Fault::position);
  if (page.fault != Fault::none) report(errors, page.fault, b, token);
  return {page, token % cache.page_tokens, false};
}

// token_of_row with the row's request found by row_offsets.
template <typename Cache, typename Index>
__device__ StoredToken find_token(const Cache& cache, const Index* row_offsets, const Index* starts, uint32_t row, uint32_t num_rows,
                                uint64_t* errors) {
  return token_of_row(cache, range_of(row_offsets, cache.batch, row, num_rows), starts, row, errors);
}

// The token that slots[query * slots_stride + slot] names, of the request of query row `query`: a gap if the number is negative,
// skipped if the row belongs to no request. Bad offsets, tokens and page ids are reported.
template <typename Cache, typename Index, typename Token>
__device__ GapSlot find_named_token(const Cache& cache, const Index* row_offsets, const Token* slots, int64_t slots_stride, uint32_t query,
                                    uint32_t slot, uint32_t num_rows, uint64_t* errors) {
  const int64_t wanted = slots[query * slots_stride + slot];
  const RowRange whose = range_of(row_offsets, cache.batch, query, num_rows);
  GapSlot found = {no_page(Fault::none), 0, whose.padding || !whose.valid, wanted < 0};
  if (!whose.padding && !whose.valid && slot == 0) report(errors, Fault::row_offsets, whose.b, query);
  if (found.skip || found.gap) return found;
  const uint32_t token = wanted < (int64_t)kU32Max ? (uint32_t)wanted : kU32Max;
  const bool stored = token != kU32Max && cache.stored(whose.b, token);
  found.page = stored ? cache.page(whose.b, token / cache.page_tokens) : no_page(Fault::position);
  found.token = token % cache.page_tokens;
  if (found.page.fault != Fault::none) report(errors, found.page.fault, whose.b, token);
  return found;
}

// The token in slots[row], page * page_tokens + its number in the page: skipped for -1. A slot past the pool is reported.
template <typename Cache, typename Index>
__device__ __forceinline__ StoredToken find_slot(const Cache& cache, const Index* slots, uint32_t row, uint64_t* errors) {
  const int64_t slot = slots[row];
  if (slot == -1) return {no_page(Fault::none), 0, true};
  const PageRef page = cache.page_at((uint64_t)slot / cache.page_tokens);
  if (page.fault != Fault::none) report(errors, Fault::slot, row, row);
  return {page, (uint32_t)((uint64_t)slot % cache.page_tokens), false};
}

// The destination of row `row`: token starts[b] + (row - row_offsets[b]) of the request b that it belongs to. Rows of no request,
// and tokens that a ring no longer holds, go to no page. Bad offsets, starts and page ids, and tokens past the length, are
// reported.
template <typename Cache, typename Index>
__device__ TargetSlot find_target(const Cache& cache, const Index* row_offsets, const Index* starts, uint32_t row, uint32_t num_rows,
                                  uint64_t* errors) {
  const TargetSlot none = {no_page(Fault::none), 0};
  const auto [b, begin, end, padding, valid] = range_of(row_offsets, cache.batch, row, num_rows);
  if (padding) return none;
  if (!valid) {
    report(errors, Fault::row_offsets, b, row);
    return none;
  }
  const uint32_t start = starts == nullptr ? 0 : load_index(starts, b);
  if (bad_run(start, end - begin)) {
    report(errors, Fault::length, b, row - begin);
    return none;
  }
  const uint32_t token = start + (row - begin);
  if (!cache.stored(b, token)) {
    const uint32_t n = cache.length(b);
    if (n == kU32Max || token >= n) report(errors, Fault::position, b, token);
    return none;
  }
  const PageRef page = cache.page(b, token / cache.page_tokens);
  if (page.fault != Fault::none) report(errors, page.fault, b, token);
  return {page, token % cache.page_tokens};
}

// Key `row` of a chunk: key cache_offsets[b] + (row - buffer_row_offsets[b]) of the request b that the row belongs to. Rows
// behind a request's tokens up to a multiple of kAlignment are gaps, rows of no request skipped. Bad offsets, lengths and page
// ids are reported. kBefore: lengths do not count this step's tokens, which row_offsets (null: none) do.
template <bool kBefore, uint64_t kAlignment, typename Cache, typename Index>
__device__ GapSlot find_key(const Cache& cache, const Index* buffer_row_offsets, const Index* cache_offsets, const Index* row_offsets, uint32_t row,
                            uint32_t num_rows, uint64_t* errors) {
  const auto [b, begin, end, outside, valid] = range_of(buffer_row_offsets, cache.batch, row, num_rows);
  GapSlot found = {no_page(Fault::none), 0, outside || !valid, false};
  if (!outside && !valid) report(errors, Fault::row_offsets, b, row);
  if (found.skip) return found;
  const uint32_t from = load_index(cache_offsets, b), i = row - begin, token = from + i;
  const Counted tokens = tokens_of<kBefore>(cache, row_offsets, b);
  Fault fault = tokens.fault;
  uint32_t position = i;
  if (fault == Fault::none && bad_run(from, end - begin)) fault = Fault::length;
  if (fault == Fault::none && token >= tokens.count) {
    found.gap = token < (tokens.count + kAlignment - 1) / kAlignment * kAlignment;
    if (found.gap) return found;
    fault = Fault::position;
    position = token;
  }
  if (fault == Fault::none) {
    found.page = cache.page(b, token / cache.page_tokens);
    found.token = token % cache.page_tokens;
    fault = found.page.fault;
    position = token;
  }
  if (fault != Fault::none) report(errors, fault, b, position);
  return found;
}

// Where element i of a token's run lies in the caller's row, whose heads have kHeadDims elements.
template <typename Run>
__device__ __forceinline__ constexpr uint32_t place_in_row(uint32_t i) {
  using Stored = typename Run::Stored;
  if constexpr (Stored::kDims == Run::kHeadDims) {
    return i;
  } else {
    return i / Stored::kDims * Run::kHeadDims + i % Stored::kDims + Stored::kBegin;
  }
}

// Loads a thread's vectors of `rows` rows, kThreads vectors apart from number `base` on: (row, vector) in order.
template <typename Run, uint32_t kThreads, uint32_t kInFlight, typename Slot, typename Cache>
__device__ __forceinline__ void load_vectors(Vec<typename Run::Stored::Type, Run::kWidth> (&value)[kInFlight], const typename Run::Stored& stored,
                                             const Cache& cache, const Slot* slots, uint32_t base, uint32_t rows) {
#pragma unroll
  for (uint32_t u = 0; u < kInFlight; ++u) {
    const uint32_t i = base + u * kThreads;
    if (i >= rows * Run::kVectors) continue;
    const Slot& from = slots[i / Run::kVectors];
    fill(value[u], from.template missing<typename Run::Stored>());
    if (Run::Stored::found(from.page)) stored.load(value[u], cache, from.page, from.token, i % Run::kVectors * Run::kWidth);
  }
}

// Writes rows [first, first + rows) of `out`: each is the run of its slot's token. All threads call it; kInFlight vectors of a
// thread are on their way at once.
template <typename Run, uint32_t kThreads, uint32_t kInFlight, typename Out, typename Slot, typename Cache>
__device__ __forceinline__ void store_rows(Out* out, int64_t stride, uint32_t first, uint32_t rows, const Slot* slots, const Cache& cache) {
  using Type = typename Run::Stored::Type;
  const typename Run::Stored stored(cache);
  for (uint32_t base = threadIdx.x; base < rows * Run::kVectors; base += kThreads * kInFlight) {
    Vec<Type, Run::kWidth> value[kInFlight];
    load_vectors<Run, kThreads>(value, stored, cache, slots, base, rows);
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      const uint32_t i = base + u * kThreads, row = i / Run::kVectors;
      if (i >= rows * Run::kVectors || slots[row].skip) continue;
      store<Run::kWidth>((Type*)(out + (first + row) * stride + place_in_row<Run>(i % Run::kVectors * Run::kWidth)), value[u]);
    }
  }
}

// store_rows if each row has a place of its own: element places[row] of `out`.
template <typename Run, uint32_t kThreads, uint32_t kInFlight, typename Out, typename Slot, typename Cache>
__device__ __forceinline__ void store_rows_at(Out* out, const int64_t* places, uint32_t rows, const Slot* slots, const Cache& cache) {
  using Type = typename Run::Stored::Type;
  const typename Run::Stored stored(cache);
  for (uint32_t base = threadIdx.x; base < rows * Run::kVectors; base += kThreads * kInFlight) {
    Vec<Type, Run::kWidth> value[kInFlight];
    load_vectors<Run, kThreads>(value, stored, cache, slots, base, rows);
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      const uint32_t i = base + u * kThreads, row = i / Run::kVectors;
      if (i >= rows * Run::kVectors || slots[row].skip) continue;
      store<Run::kWidth>((Type*)(out + places[row] + place_in_row<Run>(i % Run::kVectors * Run::kWidth)), value[u]);
    }
  }
}

// A vector of a thread: which row of the block, and which vector of it. Threads walk the vectors of a row, or, Run::kByToken, the
// rows first, where neighbouring tokens share sectors of the pages.
struct RowVector {
  uint32_t row, vector;
};
template <typename Run>
__device__ __forceinline__ RowVector row_vector(uint32_t i) {
  if constexpr (Run::kByToken) {
    return {i % Run::kRows, i / Run::kRows};
  } else {
    return {i / Run::kVectors, i % Run::kVectors};
  }
}

// Stores rows [first, first + rows) of `in`, at most Run::kRows, as the tokens of their slots. All threads call it.
template <typename Run, uint32_t kThreads, uint32_t kInFlight, typename In, typename Slot, typename Cache>
__device__ __forceinline__ void store_tokens(const In* in, int64_t stride, uint32_t first, uint32_t rows, const Slot* slots, const Cache& cache) {
  using Type = typename Run::Stored::Type;
  const typename Run::Stored stored(cache);
  const uint32_t end = (Run::kByToken ? Run::kRows : rows) * Run::kVectors;
  for (uint32_t base = threadIdx.x; base < end; base += kThreads * kInFlight) {
    Vec<Type, Run::kWidth> value[kInFlight];
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      const uint32_t i = base + u * kThreads;
      const auto [row, vector] = row_vector<Run>(i);
      fill(value[u], Type{});  // so that the vector stays words in registers, loaded or not
      if (i >= end || (Run::kByToken && row >= rows)) continue;
      load<Run::kWidth>(value[u], (const Type*)(in + (first + row) * stride + place_in_row<Run>(vector * Run::kWidth)));
    }
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      const uint32_t i = base + u * kThreads;
      const auto [row, vector] = row_vector<Run>(i);
      if (i >= end) break;
      if (Run::kByToken && row >= rows) continue;
      if (Run::Stored::found(slots[row].page)) stored.store(cache, slots[row].page, slots[row].token, vector * Run::kWidth, value[u]);
    }
  }
}
