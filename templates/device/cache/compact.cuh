// Compaction: makes the used pages of a pool the first ones. Finds the used pages, plans the moves, and gives the ids after them.
//
// new_ids[id], for every id of the pool: during planning, 1 if the page is used; then the page's id after the moves, -1 if it is
// free. `Plan` names kThreads of the planner's block and kHeld ids of a thread at a time.
#pragma once

#include "../base/scan.cuh"
#include "pages.cuh"
#include "table_rows.cuh"

// Marks the pages of request b's tokens, a lane of the warp every 32nd one. An id outside the pool is reported.
template <typename Entries, typename Cache, typename Id>
__device__ __forceinline__ void store_used_pages(Id* new_ids, uint32_t num_ids, const Cache& cache, const Id* list, int64_t stride, uint32_t num_pages,
                                                 uint32_t b, const HeldPages& held, uint64_t* errors) {
#pragma unroll 4
  for (uint32_t i = held.begin + threadIdx.x % 32; i < held.end; i += 32) {
    const uint32_t id = load_index(list, Entries::entry(cache, b, i, stride));
    if (id < num_ids && id * (uint64_t)Entries::kIdPages < num_pages) {
      atomicExch((uint32_t*)(new_ids + id), 1);  // several requests may share it
    } else {
      report(errors, Fault::page_id, b, (uint32_t)min((uint64_t)i * cache.page_tokens, (uint64_t)kU32Max));
    }
  }
}

// Marks the pages that kept[num_kept] names, a thread each in turn; -1 is skipped, an id outside the pool reported.
template <typename Plan, typename Entries, typename Id, typename Index>
__device__ __forceinline__ void store_kept_pages(Id* new_ids, uint32_t num_ids, const Index* kept, uint32_t num_kept, uint32_t num_pages, uint64_t* errors) {
  for (uint32_t i = threadIdx.x; i < num_kept; i += Plan::kThreads) {
    if (skips(kept, i)) continue;
    const uint32_t id = load_index(kept, i);
    if (id < num_ids && id * (uint64_t)Entries::kIdPages < num_pages) {
      atomicExch((uint32_t*)(new_ids + id), 1);
    } else {
      report(errors, Fault::pair, i, i);
    }
  }
}

// How many ids of [first, end) are used. All threads call it.
template <typename Plan, typename Id>
__device__ __forceinline__ uint32_t sync_count_used(const Id* new_ids, uint32_t first, uint32_t end) {
  uint32_t mine = 0, all;
#pragma unroll 8
  for (uint64_t i = (uint64_t)first + threadIdx.x; i < end; i += Plan::kThreads) mine += new_ids[i] != 0;
  sync_scan<Plan::kThreads>(mine, all);
  return all;
}

// Goes through the ids [first, end), kHeld neighbouring ones of a thread at a time: visit(id, used, rank) for each, `rank`
// counting those before it that are used == kUsed. All threads call it; a visit may write new_ids[id].
template <typename Plan, bool kUsed, typename Id, typename Visit>
__device__ __forceinline__ void sync_walk(const Id* new_ids, uint32_t first, uint32_t end, const Visit& visit) {
  uint32_t rank = 0;
#pragma unroll 1
  for (uint64_t base = first; base < end; base += Plan::kThreads * Plan::kHeld) {
    const uint64_t mine = base + threadIdx.x * Plan::kHeld;
    uint32_t used = 0, count = 0;
#pragma unroll
    for (uint32_t j = 0; j < Plan::kHeld; ++j) {
      const bool is = mine + j < end && new_ids[mine + j] != 0;
      used |= (uint32_t)is << j;
      count += mine + j < end && is == kUsed;
    }
    uint32_t all;
    uint32_t next = rank + sync_scan<Plan::kThreads>(count, all);
#pragma unroll
    for (uint32_t j = 0; j < Plan::kHeld; ++j) {
      const bool is = used >> j & 1;
      if (mine + j >= end) break;
      visit((uint32_t)(mine + j), is, next);
      next += is == kUsed;
    }
    rank += all;
  }
}

// The free ids below `used` are the targets of the moves, in their order: moves[2 r + 1], of `count`. Used ones stay.
template <typename Plan, typename Id, typename Index>
__device__ __forceinline__ void sync_store_targets(Index* moves, Id* new_ids, uint32_t used, uint32_t count) {
  sync_walk<Plan, false>(new_ids, 0, used, [&](uint32_t id, bool is_used, uint32_t rank) {
    if (!is_used && rank < count) moves[2 * (uint64_t)rank + 1] = id;
    new_ids[id] = is_used ? (Id)id : (Id)-1;
  });
}
// The used ids from `used` on are their sources, in their order: moves[2 r]. Entries past the last move stay.
template <typename Plan, typename Id, typename Index>
__device__ __forceinline__ void sync_store_sources(Index* moves, Id* new_ids, uint32_t used, uint32_t num_ids, uint32_t count) {
  sync_walk<Plan, true>(new_ids, used, num_ids, [&](uint32_t id, bool is_used, uint32_t rank) {
    const bool moves_away = is_used && rank < count;
    if (moves_away) moves[2 * (uint64_t)rank] = id;
    new_ids[id] = moves_away ? (Id)moves[2 * (uint64_t)rank + 1] : is_used ? (Id)id : (Id)-1;
  });
}

// Stores `value` to list[first], ..., list[end - 1].
template <typename Plan, typename T>
__device__ __forceinline__ void store_all(T* list, uint64_t first, uint64_t end, T value) {
#pragma unroll 4
  for (uint64_t i = first + threadIdx.x; i < end; i += Plan::kThreads) list[i] = value;
}
