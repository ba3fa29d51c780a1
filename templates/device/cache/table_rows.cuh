// The page ids of requests as operations rewrite them.
//
// `Entries` is spelled out by the kernel for each list of page ids: kIdPages pages of an id, and entry(cache, b, i, stride),
// where the list has the id of page i of request b; stride: of the list's rows.
#pragma once

// The pages [begin, end) that hold a request's tokens; `valid` is false for a length that cannot be, or that its table has no
// place for.
struct HeldPages {
  uint32_t tokens, begin, end;
  bool valid;
};
template <typename Cache>
__device__ __forceinline__ HeldPages held_pages(const Cache& cache, uint32_t b) {
  const uint32_t tokens = cache.length(b), first_token = Cache::first_token(tokens);
  const bool valid = tokens != kU32Max && cache.holds(b, first_token, tokens);
  return {tokens, first_token / cache.page_tokens, tokens / cache.page_tokens + (tokens % cache.page_tokens != 0), valid};
}

// Stores request b's entries of the pages that hold tokens, as they are after the moves, a lane of the warp every 32nd one.
// Entries of ids from num_ids on, and of those that are free in new_ids, stay as they are.
template <typename Entries, typename Cache, typename Id>
__device__ __forceinline__ void store_moved_entries(Id* to, int64_t to_stride, const Cache& cache, const Id* list, int64_t stride, const Id* new_ids,
                                                    uint32_t num_ids, uint32_t b, const HeldPages& held) {
#pragma unroll 4
  for (uint32_t i = held.begin + threadIdx.x % 32; i < held.end; i += 32) {
    const uint64_t at = Entries::entry(cache, b, i, stride);
    const Id entry = list[at];
    const uint32_t id = load_index(list, at);
    const Id found = id < num_ids ? new_ids[id] : entry;
    to[Entries::entry(cache, b, i, to_stride)] = found == (Id)-1 ? entry : found;
  }
}

// True if one of the requests before b continues the same parent; a thread checks every kThreads-th of them.
template <uint32_t kThreads, typename Index>
__device__ __forceinline__ bool has_earlier_child(const Index* parents, uint32_t b, uint32_t parent) {
  bool earlier = false;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < b; i += kThreads) earlier |= load_index(parents, i) == parent;
  return earlier;
}

// Stores request b's ids of the pages [held.begin, held.end): its parent's up to page `copied`, from there on those of its free
// pages, which `fresh` has at Entries::fresh(cache, b, i). By kThreads threads.
template <uint32_t kThreads, typename Entries, typename Cache, typename Id>
__device__ __forceinline__ void store_continued_row(Id* to, int64_t to_stride, const Cache& cache, const Id* list, int64_t stride, const Id* fresh,
                                                    uint32_t b, uint32_t parent, const HeldPages& held, uint32_t copied) {
#pragma unroll 4
  for (uint32_t i = held.begin + threadIdx.x; i < held.end; i += kThreads) {
    to[Entries::entry(cache, b, i, to_stride)] = i < copied ? list[Entries::entry(cache, parent, i, stride)] : fresh[Entries::fresh(cache, b, i)];
  }
}
