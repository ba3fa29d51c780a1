// Lists of blocks of keys: a row has scores for its listed keys alone. The blocks of a grid divide the lists.
//
// A list's columns come in tiles of kTokens keys. A row needs at most `front` tiles, the tiles of all blocks that it
// sees: these are divided evenly. Tiles behind them are mostly padding, and are divided separately. So short and long requests
// side by side leave no multiprocessor idle, and lists may have their numbers in any order, anywhere.
//
// `Work` is the Work of indexer_work.cuh with kRows = 1, and kBlock: the keys of a block, a divisor of kTokens.
#pragma once

#include "indexer_work.cuh"

constexpr uint32_t kUnlisted = kU32Max;  // the key of a column that names none

// The key that column `column` of the `tile`-th tile of a list names: kUnlisted if its number is no block that the row sees.
// The row sees the first `seen` keys.
template <typename Work>
__device__ __forceinline__ uint32_t listed_key(const int32_t* list, uint32_t count, uint32_t seen, uint32_t tile, uint32_t column) {
  constexpr uint32_t kPer = Work::kTokens / Work::kBlock;  // blocks of a tile
  const uint32_t i = tile * kPer + column / Work::kBlock;
  if (i >= count) return kUnlisted;
  const uint32_t block = (uint32_t)list[i], within = column % Work::kBlock;
  if (block > seen / Work::kBlock) return kUnlisted;  // negative ones are large
  const uint32_t first = block * Work::kBlock;
  return within < seen - first ? first + within : kUnlisted;
}

// The tiles of lists of `tiles` tiles each that a request's rows have in one part: in front, or behind it.
template <typename Work>
struct ListTiles {
  ScoredRequest request;
  uint32_t tiles;
  bool behind;

  // Keys that row i sees.
  __device__ __forceinline__ uint32_t seen(uint32_t i) const { return request.seen_by<Work>(i); }

  // Tiles that row i needs at most for the blocks that it sees.
  __device__ __forceinline__ uint32_t front(uint32_t i) const { return min(tiles, seen(i) / Work::kTokens + (seen(i) % Work::kTokens != 0)); }

  // Tiles of the rows before row i. Rows that need a whole list come after the others.
  __device__ __forceinline__ uint32_t before(uint32_t i) const {
    if (request.fault != Fault::none) return 0;
    const int64_t whole = (int64_t)(((uint64_t)tiles * Work::kTokens + 1) * Work::kRate) + request.rows - request.tokens - 1;
    const uint32_t part = whole < 0 ? 0 : (uint32_t)min(whole, (int64_t)i);
    const uint32_t fronts = request.tiles_before<Work>(part) + (i - part) * tiles;
    return behind ? i * tiles - fronts : fronts;
  }

  // The row that has tile `at`.
  __device__ __forceinline__ uint32_t row_with(uint32_t at) const {
    uint32_t low = 0, high = request.rows;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      if (before(middle) <= at) low = middle;
      else high = middle;
    }
    return low;
  }
};

// The share of this block in one part of the lists' tiles.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ TileShare sync_list_share(const Cache& cache, const Index* row_offsets, uint32_t num_rows, uint32_t tiles, bool behind) {
  const bool wrong = row_offsets != nullptr && bad_total(row_offsets, cache.batch, num_rows);
  return sync_share_of<Work::kThreads>(cache.batch, wrong, [&](uint32_t b, bool& bad) {
    if (b >= cache.batch) return 0u;
    const ScoredRequest request = scored_request<Work>(cache, row_offsets, b, num_rows, kU32Max);
    bad |= request.fault != Fault::none;
    return ListTiles<Work>{request, tiles, behind}.before(request.rows);
  });
}

// The tiles [begin, end) of row `row` of the call, which sees `seen` keys, that a block takes; `count` of its share.
struct ListRun {
  uint32_t row, seen, begin, end, count;
};

// The tiles of row i from the part's tile `first` of the row on, at most `most`.
template <typename Work>
__device__ __forceinline__ ListRun list_run(const ListTiles<Work>& lists, uint32_t i, uint32_t first, uint32_t most) {
  const uint32_t front = lists.front(i), begin = lists.behind ? front : 0, all = lists.behind ? lists.tiles - front : front;
  const uint32_t count = min(all - first, most);
  return {lists.request.row + i, lists.seen(i), begin + first, begin + first + count, count};
}

// True if some column of these tiles names a key. All threads of the block call it.
template <typename Work>
__device__ __forceinline__ bool sync_names_a_key(const int32_t* list, uint32_t count, const ListRun& run) {
  bool names = false;
#pragma unroll 4
  for (uint32_t tile = run.begin; tile < run.end; ++tile) names |= listed_key<Work>(list, count, run.seen, tile, threadIdx.x) != kUnlisted;
  return __syncthreads_or(names);
}

// Stores -inf in the columns of these tiles.
template <typename Work>
__device__ __forceinline__ void store_unlisted(float* to, uint32_t count, const ListRun& run) {
  constexpr uint32_t kPer = Work::kTokens / Work::kBlock;
  for (uint32_t tile = run.begin; tile < run.end; ++tile)
    if (tile * kPer + threadIdx.x / Work::kBlock < count) in_global(to)[(uint64_t)tile * Work::kTokens + threadIdx.x] = -infinity();
}

// True if some row of the call belongs to no request.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ bool has_nobodys(const Cache& cache, const Index* row_offsets, uint32_t num_rows) {
  if (row_offsets == nullptr) return (uint64_t)cache.batch * Work::kRequestRows < num_rows;
  return load_index(row_offsets, 0) > 0 || load_index(row_offsets, cache.batch) < num_rows;
}
