// compact.cuh and table_rows.cuh: which pages are used, which move where, and the page ids of requests after that.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/cache/compact.cuh"

// A list of 12 ids a request, of one page or of two; windows of 40 tokens in pages of 8.
constexpr uint32_t kColumns = 12;
struct Cache {
  const int32_t* lengths;
  uint32_t page_tokens;
  bool has_any_place;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ static uint32_t first_token(uint32_t n) { return n > 40 ? n - 40 : 0; }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return has_any_place || n <= kColumns * page_tokens; }
};
template <uint32_t kOf>
struct Ids {
  static constexpr uint32_t kIdPages = kOf;
  __device__ static uint64_t entry(const Cache&, uint32_t b, uint32_t i, int64_t stride) { return b * stride + i % kColumns; }
  __device__ static uint64_t fresh(const Cache&, uint32_t b, uint32_t i) { return b * kColumns + i; }
};
struct Plan {
  static constexpr uint32_t kThreads = 64, kHeld = 4;
};

// The values [first, end) of a list become -5: a block a range.
extern "C" __global__ void compact_all(const uint32_t* ranges, int64_t* list) {
  store_all<Plan>(list + blockIdx.x * 200, ranges[2 * blockIdx.x], ranges[2 * blockIdx.x + 1], (int64_t)-5);
}

// A warp a request, of which the last one's pages are past 2^32 tokens; then a list of kept pages. Ids of one page, in block 1 of two.
template <uint32_t kOf>
__device__ __forceinline__ void marks(const int32_t* lengths, const int32_t* list, const int64_t* kept, int32_t* new_ids, uint64_t* errors) {
  const Cache cache = {lengths, 8, false};
  const uint32_t b = threadIdx.x / 32;
  const HeldPages far = {0, 1u << 29, (1u << 29) + 7, true};
  store_used_pages<Ids<kOf>>(new_ids, 60, cache, list, 13, 90, b, b == 3 ? far : held_pages(cache, b), errors + b);
  if (threadIdx.x >= Plan::kThreads) return;
  store_kept_pages<Plan, Ids<kOf>>(new_ids, 60, kept, 70, 90, errors + 4);
  store_kept_pages<Plan, Ids<kOf>>(new_ids, 60, kept, 0, 90, errors + 5);
}
extern "C" __global__ void compact_marks(const int32_t* lengths, const int32_t* list, const int64_t* kept, int32_t* new_ids, uint64_t* errors) {
  if (blockIdx.x == 0) marks<1>(lengths, list, kept, new_ids, errors);
  else marks<2>(lengths, list, kept, new_ids + 64, errors + 6);
}

// A block a range of ids: how many are used, as each thread has it; of each id whether it is, and the rank among the used or free ones.
extern "C" __global__ void compact_walk(const uint32_t* ranges, int32_t* used_ids, int32_t* free_ids, uint32_t* counts, uint32_t* used_ranks,
                                        uint32_t* free_ranks) {
  const uint32_t at = blockIdx.x * 320, first = ranges[2 * blockIdx.x], end = ranges[2 * blockIdx.x + 1];
  counts[blockIdx.x * 64 + threadIdx.x] = sync_count_used<Plan>(used_ids + at, first, end);
  sync_walk<Plan, true>(used_ids + at, first, end, [&](uint32_t id, bool used, uint32_t rank) {
    used_ranks[at + id] = 2 * rank + used;
    used_ids[at + id] = -3;
  });
  sync_walk<Plan, false>(free_ids + at, first, end, [&](uint32_t id, bool used, uint32_t rank) { free_ranks[at + id] = 2 * rank + used; });
}

// A block a pool of 300 pages, of which `plans` has how many are used and how many move.
extern "C" __global__ void compact_moves(const uint32_t* plans, int32_t* new_ids, int64_t* moves) {
  const uint32_t used = plans[2 * blockIdx.x], count = plans[2 * blockIdx.x + 1];
  new_ids += blockIdx.x * 320, moves += blockIdx.x * 320;
  sync_store_targets<Plan>(moves, new_ids, used, count);
  __syncthreads();
  sync_store_sources<Plan>(moves, new_ids, used, 300, count);
}

// A thread a request; in block 1 a list has a place for every number of tokens.
extern "C" __global__ void compact_held(const int32_t* lengths, uint32_t* out) {
  const HeldPages held = held_pages(Cache{lengths, 8, blockIdx.x == 1}, threadIdx.x);
  uint32_t* to = out + 4 * (blockIdx.x * 32 + threadIdx.x);
  to[0] = held.tokens, to[1] = held.begin, to[2] = held.end, to[3] = held.valid;
}

// A block a request of a warp: its ids after the moves, in rows of 14.
extern "C" __global__ void compact_entries(const uint32_t* ranges, const int32_t* list, const int32_t* new_ids, int32_t* to) {
  const uint32_t b = blockIdx.x;
  store_moved_entries<Ids<1>>(to, 14, Cache{nullptr, 8, false}, list, 13, new_ids, 60, b, {0, ranges[2 * b], ranges[2 * b + 1], true});
}

// A block a request that continues parents[b]: whether an earlier one does, and its ids.
extern "C" __global__ void compact_children(const int32_t* parents, const uint32_t* ranges, const int32_t* list, const int32_t* fresh, uint32_t* earlier,
                                            int32_t* to) {
  const uint32_t b = blockIdx.x, parent = load_index(parents, b);
  const bool found = has_earlier_child<32>(parents, b, parent);
  earlier[b * 32 + threadIdx.x] = found;
  if (b >= 6) return;
  const HeldPages held = {0, ranges[3 * b], ranges[3 * b + 1], true};
  store_continued_row<32, Ids<1>>(to, 14, Cache{nullptr, 8, false}, list, 13, fresh, b, parent, held, ranges[3 * b + 2]);
}
