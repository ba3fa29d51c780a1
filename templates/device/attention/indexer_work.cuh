// How the blocks of indexer_scores divide a step: which rows of q meet which keys.
//
// A request's rows are taken kRows at a time: a group, which sees the keys up to its last row's own. Keys come in tiles of kTokens. A block
// gets as many pairs of group and tile as every other one, neighbours in the order of requests, groups and tiles: so that one long request
// fills the GPU, and blocks that have nothing to do ask no more than what the lengths are. No plan is made before. Tiles are counted in 32
// bits: a tile has 512 bytes of scores for each row.
//
// `Work` names kThreads, kRows, kTokens (keys of a tile), kRate (tokens that a key stands for; it is there once the last of them is), and
// kNewInLength: whether lengths count this step's tokens.
#pragma once

#include "split_kv.cuh"
#include "../base/scan.cuh"

// A request: its rows of q, its tokens, this step's included, and why it cannot be scored. Its last row stands at its last token.
struct ScoredRequest {
  uint32_t row, rows, tokens;
  Fault fault;

  // Keys that row i sees, from the first one on: those up to its own. Rows before the first token see none.
  template <typename Work>
  __device__ __forceinline__ uint32_t seen_by(uint32_t i) const {
    return rows - i > tokens ? 0 : (tokens - (rows - i) + 1) / Work::kRate;
  }

  template <typename Work>
  __device__ __forceinline__ uint32_t groups() const {
    return rows / Work::kRows + (rows % Work::kRows != 0);
  }

  // Tiles of the groups before group i; where kRows does not divide a tile's tokens, a few more than there are. The last row of group n of
  // those that see keys stands behind first + n * kRows tokens, so it has (e + n) / kPer tiles, with kPer groups to a tile: a closed form.
  template <typename Work>
  __device__ __forceinline__ uint32_t tiles_before(uint32_t i) const {
    constexpr uint32_t kTile = Work::kTokens * Work::kRate, kPer = kTile / Work::kRows, kUp = kTile % Work::kRows != 0 ? Work::kRows - 1 : 0;
    const uint32_t blind = rows > tokens ? (rows - tokens) / Work::kRows : 0;  // groups that see nothing
    if (fault != Fault::none || i <= blind) return 0;
    const uint64_t first = (uint64_t)tokens + (uint64_t)(blind + 1) * Work::kRows - rows;  // tokens up to the last row of the first of the others
    const uint64_t e = (first + kTile - Work::kRate + kUp) / Work::kRows;
    const auto sum = [](uint64_t x) { return kPer * (x / kPer * (x / kPer - 1) / 2) + x / kPer * (x % kPer); };  // of y / kPer, y < x
    return (uint32_t)(sum(e + (i - blind)) - sum(e));
  }

  // The group that has tile `at` of the request's.
  template <typename Work>
  __device__ __forceinline__ uint32_t group_with(uint32_t at) const {
    uint32_t low = 0, high = groups<Work>();
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      if (tiles_before<Work>(middle) <= at) low = middle;
      else high = middle;
    }
    return low;
  }
};

// Request b of a call with `num_rows` rows of q and room for `num_keys` keys a row. Rows that the call lacks, and offsets that decrease, are
// Fault::row_offsets: then `rows` is 0. `tokens` of Fault::length is what to report.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ ScoredRequest scored_request(const Cache& cache, const Index* row_offsets, uint32_t b, uint32_t num_rows, uint32_t num_keys) {
  const uint32_t length = cache.length(b);
  uint64_t row = (uint64_t)b * Work::kRows;
  Counted found = {Work::kRows, Fault::none};
  if (row_offsets != nullptr) {
    row = load_index(row_offsets, b);
    found = new_rows_of(row_offsets, cache.batch, b);
  }
  if (found.fault != Fault::none || row + found.count > num_rows) return {(uint32_t)row, 0, 0, Fault::row_offsets};
  if (found.count == 0) return {(uint32_t)row, 0, 0, Fault::none};
  const uint32_t tokens = Work::kNewInLength ? length : length + min(found.count, kU32Max - length);
  const bool bad = tokens == kU32Max || tokens / Work::kRate > num_keys || (tokens > 0 && !cache.holds(b, 0, tokens));
  return {(uint32_t)row, found.count, tokens, bad ? Fault::length : Fault::none};
}

// A block's share: `count` tiles from tile `at` of request b's on. `wrong`: some row of the call cannot be scored.
struct TileShare {
  uint32_t b, at, count;
  bool wrong;
};

// The first of `all` that part `part` of `parts` has: the first parts have one more than others.
__device__ __forceinline__ uint32_t part_begin(uint32_t all, uint32_t part, uint32_t parts) { return part * (all / parts) + min(part, all % parts); }

// The share of this block. All threads call it, once; a thread asks for one request of kThreads.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ TileShare sync_share(const Cache& cache, const Index* row_offsets, uint32_t num_rows, uint32_t num_keys) {
  __shared__ uint32_t found_b, found_at;
  if (threadIdx.x == 0) found_b = found_at = 0;  // where the share is empty
  const auto tiles_of = [&](uint32_t b, bool& wrong) {
    if (b >= cache.batch) return 0u;
    const ScoredRequest request = scored_request<Work>(cache, row_offsets, b, num_rows, num_keys);
    wrong |= request.fault != Fault::none;
    return request.tiles_before<Work>(request.groups<Work>());
  };
  bool wrong = row_offsets != nullptr && bad_total(row_offsets, cache.batch, num_rows);
  uint32_t mine = tiles_of(threadIdx.x, wrong), sum = mine, total;
  for (uint32_t b = Work::kThreads + threadIdx.x; b < cache.batch; b += Work::kThreads) sum += tiles_of(b, wrong);
  uint32_t before = sync_scan<Work::kThreads>(sum, total);
  const uint32_t begin = part_begin(total, blockIdx.x, gridDim.x), count = part_begin(total, blockIdx.x + 1, gridDim.x) - begin;
  uint32_t earlier = 0, these = total;
  for (uint32_t first = 0; count > 0 && first < cache.batch && earlier <= begin; first += Work::kThreads) {
    if (cache.batch > Work::kThreads) {
      mine = tiles_of(first + threadIdx.x, wrong);
      before = sync_scan<Work::kThreads>(mine, these);
    }
    if (begin - earlier >= before && begin - earlier - before < mine) {
      found_b = first + threadIdx.x;
      found_at = begin - earlier - before;
    }
    earlier += these;
  }
  wrong = __syncthreads_or(wrong);
  return {found_b, found_at, count, wrong};
}

// A group's tiles [begin, end) that a block takes, of `counted` in its share: its rows of q are [row, row + rows), its first one row `i` of the
// request's, and none of them sees more than `seen` keys.
struct GroupTiles {
  uint32_t row, rows, i, seen, begin, end, counted;
};

// Group g, from tile `first` on, at most `most` tiles.
template <typename Work>
__device__ __forceinline__ GroupTiles group_tiles(const ScoredRequest& request, uint32_t g, uint32_t first, uint32_t most) {
  const uint32_t i = g * Work::kRows, rows = min(Work::kRows, request.rows - i), seen = request.seen_by<Work>(i + rows - 1);
  const uint32_t counted = min(request.tiles_before<Work>(g + 1) - request.tiles_before<Work>(g) - first, most);
  const uint32_t tiles = seen / Work::kTokens + (seen % Work::kTokens != 0);
  return {request.row + i, rows, i, seen, first, min(first + counted, tiles), counted};
}

// Of the rows [row, row + rows), those that are request b's by the offsets around them, as bits: offsets that contradict each other never give
// a row to two.
template <typename Index>
__device__ __forceinline__ uint32_t rows_owned(const Index* row_offsets, uint32_t batch, uint32_t b, uint32_t row, uint32_t rows, uint32_t num_rows) {
  if (row_offsets == nullptr) return ~0u;
  uint32_t owned = 0;
#pragma unroll 1
  for (uint32_t n = 0; n < rows; ++n) {
    const RowRange range = range_of(row_offsets, batch, row + n, num_rows);
    owned |= (uint32_t)(range.valid && !range.padding && range.b == b) << n;
  }
  return owned;
}

// The keys of a row that no key tile gives a score: those from `from` on get `value`.
struct Unseen {
  uint32_t from;
  float value;
};

// Rows of no request see nothing; rows that cannot be scored are NaN throughout, which is reported.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ Unseen unseen_of(const Cache& cache, const Index* row_offsets, uint32_t row, uint32_t num_rows, uint32_t num_keys, uint64_t* errors) {
  const bool first_lane = threadIdx.x % 32 == 0;
  uint32_t b = row / Work::kRows;
  if (row_offsets != nullptr) {
    const RowRange range = range_of(row_offsets, cache.batch, row, num_rows);
    if (range.padding) return {0, bad_total(row_offsets, cache.batch, num_rows) ? nan_f32() : -infinity()};
    b = range.b;
  } else if (b >= cache.batch) {
    return {0, -infinity()};
  }
  const ScoredRequest request = scored_request<Work>(cache, row_offsets, b, num_rows, num_keys);
  if (request.fault == Fault::none) return {request.seen_by<Work>(row - request.row), -infinity()};
  if (first_lane) report(errors, request.fault, b, request.fault == Fault::length ? request.tokens : row);
  return {0, nan_f32()};
}

// Where scores go: rows of `stride` elements, of which `keys` are the call's.
struct ScoreRows {
  float* rows;
  int64_t stride;
  uint32_t count, keys;
};

// Stores what rows have where they see no key, all of them or (kFill = false) those of rows that cannot be scored. A warp takes runs of kRun
// keys, and asks for a row once.
template <typename Work, bool kFill, typename Cache, typename Index>
__device__ __forceinline__ void store_unseen(const Cache& cache, const Index* row_offsets, const ScoreRows& to, uint64_t* errors) {
  constexpr uint32_t kRun = 1024;
  const uint32_t runs = to.keys / kRun + (to.keys % kRun != 0), warps = Work::kThreads / 32;
  const uint32_t all = to.count * runs, parts = gridDim.x * warps, part = blockIdx.x * warps + threadIdx.x / 32;
  const uint32_t last = part_begin(all, part + 1, parts);
  uint32_t known = kU32Max;
  Unseen unseen = {0, 0.0f};
  if (blockIdx.x == 0 && threadIdx.x == 0 && row_offsets != nullptr) report_bad_total(row_offsets, cache.batch, to.count, errors);
#pragma unroll 1
  for (uint32_t n = part_begin(all, part, parts); n < last; ++n) {
    const uint32_t row = n / runs, begin = n % runs * kRun;
    if (row != known) unseen = unseen_of<Work>(cache, row_offsets, row, to.count, to.keys, errors);
    known = row;
    if (!kFill && unseen.value == -infinity()) continue;
    const uint32_t end = min(begin + kRun, to.keys);
    for (uint32_t key = max(begin, unseen.from) + threadIdx.x % 32; key < end; key += 32) in_global(to.rows)[row * to.stride + key] = unseen.value;
  }
}
