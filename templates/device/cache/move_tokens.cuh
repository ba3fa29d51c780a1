// Tokens of a layer copied onto others: a request's pairs, so many at once that every thread has kInFlight vectors on their way.
#pragma once

#include "copy_rows.cuh"

// A token and where it goes; pages without pointers: nothing moves.
struct MovedToken {
  PageRef from, to;
  uint32_t from_token, to_token;
};

// The pairs of request b: none where the offsets around it decrease or pass num_rows, which is reported.
template <typename Index>
__device__ __forceinline__ RowRange pairs_of(const Index* offsets, uint32_t batch, uint32_t b, uint32_t num_rows, uint64_t* errors) {
  const uint32_t begin = load_index(offsets, b);
  const RowRange pairs = range_at(offsets, batch, b, begin, num_rows);
  if (pairs.valid || begin == pairs.end) return pairs;
  if (threadIdx.x == 0) report(errors, Fault::row_offsets, b, min(begin, num_rows));
  return {b, 0, 0, true, false};
}

// Pair `i` of request b: slot src[i] to slot dst[i]. -1 in either, and a slot onto itself, is none; a slot past the pool is
// reported.
template <typename Cache, typename Slot>
__device__ __forceinline__ MovedToken find_move(const Cache& cache, const Slot* src, const Slot* dst, uint32_t b, uint32_t i, uint64_t* errors) {
  const int64_t from = src[i], to = dst[i];
  const MovedToken none = {no_page(Fault::none), no_page(Fault::none), 0, 0};
  if (from == -1 || to == -1) return none;
  const PageRef source = cache.page_at((uint64_t)from / cache.page_tokens), target = cache.page_at((uint64_t)to / cache.page_tokens);
  if (source.fault != Fault::none || target.fault != Fault::none) {
    report(errors, Fault::slot, b, i);
    return none;
  }
  if (from == to) return none;
  return {source, target, (uint32_t)((uint64_t)from % cache.page_tokens), (uint32_t)((uint64_t)to % cache.page_tokens)};
}

// One run of `count` tokens. All pairs of a round (as many as the block's threads have vectors for) are loaded before the first
// is stored; no later pair reads a stored row. All threads call it.
template <typename Run, uint32_t kThreads, uint32_t kInFlight, typename Cache>
__device__ __forceinline__ void store_moved(const Cache& cache, const MovedToken* moves, uint32_t count) {
  using Type = typename Run::Stored::Type;
  constexpr uint32_t kUnits = kThreads * kInFlight, kColumns = Run::kVectors < kUnits ? Run::kVectors : kUnits, kPairs = kUnits / kColumns;
  const typename Run::Stored stored(cache);
  for (uint32_t column0 = 0; column0 < Run::kVectors; column0 += kColumns)
    for (uint32_t pair0 = 0; pair0 < count; pair0 += kPairs) {
      Vec<Type, Run::kWidth> value[kInFlight];
#pragma unroll
      for (uint32_t u = 0; u < kInFlight; ++u) {
        const uint32_t i = threadIdx.x + u * kThreads, pair = pair0 + i / kColumns, column = column0 + i % kColumns;
        fill(value[u], Type{});  // so that the vector stays words in registers, loaded or not
        if (i / kColumns >= kPairs || pair >= count || column >= Run::kVectors || !Run::Stored::found(moves[pair].from)) continue;
        stored.load(value[u], cache, moves[pair].from, moves[pair].from_token, column * Run::kWidth);
      }
      __syncthreads();  // all are loaded
#pragma unroll
      for (uint32_t u = 0; u < kInFlight; ++u) {
        const uint32_t i = threadIdx.x + u * kThreads, pair = pair0 + i / kColumns, column = column0 + i % kColumns;
        if (i / kColumns >= kPairs || pair >= count || column >= Run::kVectors || !Run::Stored::found(moves[pair].to)) continue;
        stored.store(cache, moves[pair].to, moves[pair].to_token, column * Run::kWidth, value[u]);
      }
    }
}
