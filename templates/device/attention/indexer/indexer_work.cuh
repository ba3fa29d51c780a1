// The division of a step among the blocks of indexer_scores: pairs of rows of q and keys.
//
// kRows rows of a request are a group, which sees the keys up to its last row's own key. Keys come in tiles of kTokens. Every
// block gets the same number of pairs of group and tile, neighbours in the order of requests, groups and tiles. So one long
// request fills the GPU, and blocks without work read no more than the lengths. There is no planner. Tiles are counted in 32
// bits: a tile has 512 bytes of scores for each row.
//
// `Work` names kThreads, kRows, kRequestRows (rows of a request where the call brings no offsets), kTokens (keys of a tile),
// kRate (tokens that a key stands for; the key exists when its last token does), and kNewInLength: lengths count this step's
// tokens.
#pragma once

#include "../plan/split_kv.cuh"
#include "../../base/scan.cuh"

// A request: its rows of q, its tokens, this step's included, and the fault if it cannot be scored. Its last row stands at its
// last token.
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

  // Tiles of the groups before group i; where kRows does not divide a tile's tokens, a few more than there are. The last row of
  // group n of those that see keys stands behind first + n * kRows tokens, so it has (e + n) / kPer tiles, with kPer groups to a
  // tile: a closed form.
  template <typename Work>
  __device__ __forceinline__ uint32_t tiles_before(uint32_t i) const {
    constexpr uint32_t kTile = Work::kTokens * Work::kRate, kPer = kTile / Work::kRows, kUp = kTile % Work::kRows != 0 ? Work::kRows - 1 : 0;
    const uint32_t blind = rows > tokens ? (rows - tokens) / Work::kRows : 0;  // groups that see nothing
    if (fault != Fault::none || i <= blind) return 0;
    const uint64_t first = (uint64_t)tokens + (uint64_t)(blind + 1) * Work::kRows - rows;  // tokens to the next group's last row
    const uint64_t e = (first + kTile - Work::kRate + kUp) / Work::kRows;
    const auto sum = [](uint64_t x) { return kPer * (x / kPer * (x / kPer - 1) / 2) + x / kPer * (x % kPer); };  // y < x
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

// Request b of a call with `num_rows` rows of q and room for `num_keys` keys a row. Rows that the call lacks, and offsets that
// decrease, are Fault::row_offsets, with 0 `rows`. With Fault::length, `tokens` is the reported position.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ ScoredRequest scored_request(const Cache& cache, const Index* row_offsets, uint32_t b, uint32_t num_rows, uint32_t num_keys) {
  const uint32_t length = cache.length(b);
  uint64_t row = (uint64_t)b * Work::kRequestRows;
  Counted found = {Work::kRequestRows, Fault::none};
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

// The first item of part `part`, of `all` items in `parts` parts: the first parts have one item more than the others.
__device__ __forceinline__ uint32_t part_begin(uint32_t all, uint32_t part, uint32_t parts) { return part * (all / parts) + min(part, all % parts); }

// This block's share of all requests' tiles, tiles_of(b, wrong): the tiles of request b, none past the batch; it sets `wrong`
// if the request is wrong. All threads call it, with a barrier before the next call; a thread reads one request of kThreads.
template <uint32_t kThreads, typename TilesOf>
__device__ __forceinline__ TileShare sync_share_of(uint32_t batch, bool wrong, const TilesOf& tiles_of) {
  __shared__ uint32_t found_b, found_at;
  if (threadIdx.x == 0) found_b = found_at = 0;  // where the share is empty
  uint32_t mine = tiles_of(threadIdx.x, wrong), sum = mine, total;
  for (uint32_t b = kThreads + threadIdx.x; b < batch; b += kThreads) sum += tiles_of(b, wrong);
  uint32_t before = sync_scan<kThreads>(sum, total);
  const uint32_t begin = part_begin(total, blockIdx.x, gridDim.x), count = part_begin(total, blockIdx.x + 1, gridDim.x) - begin;
  uint32_t earlier = 0, these = total;
  for (uint32_t first = 0; count > 0 && first < batch && earlier <= begin; first += kThreads) {
    if (batch > kThreads) {
      mine = tiles_of(first + threadIdx.x, wrong);
      before = sync_scan<kThreads>(mine, these);
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

// The share of this block in the scores of all keys.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ TileShare sync_share(const Cache& cache, const Index* row_offsets, uint32_t num_rows, uint32_t num_keys) {
  const bool wrong = row_offsets != nullptr && bad_total(row_offsets, cache.batch, num_rows);
  return sync_share_of<Work::kThreads>(cache.batch, wrong, [&](uint32_t b, bool& bad) {
    if (b >= cache.batch) return 0u;
    const ScoredRequest request = scored_request<Work>(cache, row_offsets, b, num_rows, num_keys);
    bad |= request.fault != Fault::none;
    return request.tiles_before<Work>(request.groups<Work>());
  });
}

// A group's tiles [begin, end) that a block takes, of `counted` in its share: its rows of q are [row, row + rows), its first one
// row `i` of the request's, and none of them sees more than `seen` keys.
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

// Bits of the rows [row, row + rows) that belong to request b by the offsets around them. Offsets that contradict each other
// never give a row to two requests.
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

// The keys that a row does not see, from `from` on, and their value. `scored`: the keys that the row sees are known.
struct Unseen {
  uint32_t from;
  float value;
  bool scored;
};

// Rows of no request see nothing; rows that cannot be scored are NaN throughout, which is reported.
template <typename Work, typename Cache, typename Index>
__device__ __forceinline__ Unseen unseen_of(const Cache& cache, const Index* row_offsets, uint32_t row, uint32_t num_rows, uint32_t num_keys, uint64_t* errors) {
  const bool first_lane = threadIdx.x % 32 == 0;
  uint32_t b = row / Work::kRequestRows;
  if (row_offsets != nullptr) {
    const RowRange range = range_of(row_offsets, cache.batch, row, num_rows);
    if (range.padding) return {0, bad_total(row_offsets, cache.batch, num_rows) ? nan_f32() : -infinity(), false};
    b = range.b;
  } else if (b >= cache.batch) {
    return {0, -infinity(), false};
  }
  const ScoredRequest request = scored_request<Work>(cache, row_offsets, b, num_rows, num_keys);
  if (request.fault == Fault::none) return {request.seen_by<Work>(row - request.row), -infinity(), true};
  if (first_lane) report(errors, request.fault, b, request.fault == Fault::length ? request.tokens : row);
  return {0, nan_f32(), false};
}

// The destination of scores: `count` rows of `columns` elements, `stride` apart.
struct ScoreRows {
  float* rows;
  int64_t stride;
  uint32_t count, columns;
};

// The keys that logits and maxima of blocks of kBlock keys have room for.
template <uint32_t kBlock>
__device__ __forceinline__ uint32_t room_of(uint32_t num_keys, uint32_t num_blocks) {
  return (uint32_t)min((uint64_t)num_keys, (uint64_t)num_blocks * kBlock);
}

// The rows that store_unseen fills: rows that cannot be scored; all rows; all rows without scores.
enum class Fill : uint32_t { faulty, unseen, unscored };

// Stores the value of columns of kPer keys of which a row sees none. A warp takes runs of kRun columns, and reads a row once.
// `room`: the keys that a row may have.
template <typename Work, Fill kFill, uint32_t kPer, typename Cache, typename Index>
__device__ __forceinline__ void store_unseen(const Cache& cache, const Index* row_offsets, const ScoreRows& to, uint32_t room, uint64_t* errors) {
  constexpr uint32_t kRun = 1024;
  const uint32_t runs = to.columns / kRun + (to.columns % kRun != 0), warps = Work::kThreads / 32;
  const uint32_t all = to.count * runs, parts = gridDim.x * warps, part = blockIdx.x * warps + threadIdx.x / 32;
  const uint32_t last = part_begin(all, part + 1, parts);
  uint32_t known = kU32Max;
  Unseen unseen = {};
  if (blockIdx.x == 0 && threadIdx.x == 0 && row_offsets != nullptr) report_bad_total(row_offsets, cache.batch, to.count, errors);
#pragma unroll 1
  for (uint32_t n = part_begin(all, part, parts); n < last; ++n) {
    const uint32_t row = n / runs, begin = n % runs * kRun;
    if (row != known) unseen = unseen_of<Work>(cache, row_offsets, row, to.count, room, errors);
    known = row;
    if (kFill == Fill::faulty && unseen.value == -infinity()) continue;
    if (kFill == Fill::unscored && unseen.scored) continue;
    const uint32_t end = min(begin + kRun, to.columns), from = unseen.from / kPer + (unseen.from % kPer != 0);
    for (uint32_t column = max(begin, from) + threadIdx.x % 32; column < end; column += 32) in_global(to.rows)[row * to.stride + column] = unseen.value;
  }
}
