// The planner of extend: it cuts the query rows of every request into tiles of columns, and the keys of a tile where tiles are
// too few, and lists them in the order in which blocks begin them.
//
// An entry has one of two limits. Tiles of a request with several tiles share its K and V, which come from L2; they wait for
// tensor cores. A request with one tile (decoding, verification) reads its keys alone, and waits for memory. Each kind has its
// longest entries first; the kinds are mixed so that both run all the time, and end together (ListOrder).
//
// A plan is described by a struct of the kernel:
//
//   struct Split {
//     using Mask = CausalMask;                       // the tokens [first(position), last(position, tokens)) that a row sees
//     static constexpr uint32_t kThreads = 256;      // of the planner's one block, and buckets of costs
//     static constexpr uint32_t kCols = 128, kGroup = 4;  // columns of a tile, heads of a kv head; column i * kGroup + h: row i
//     static constexpr uint32_t kMostRows = 32;      // query rows that a request can have
//     static constexpr bool kNewInLength = false;    // lengths count this step's tokens
//     static constexpr uint32_t kTile = 64;          // tokens of a tile of keys, which costs count
//     static constexpr uint32_t kNarrowCols = 64;    // an entry of no more columns takes half the time a tile of keys
//     static constexpr uint32_t kOverhead = 2, kLeastTiles = 8;  // tiles: an entry's fixed cost; the least keys of a piece
//     static constexpr uint32_t kChunkTiles = 0;     // tiles between cuts where these are fixed, else 0
//     static constexpr uint32_t kHeads = 8, kTokenBytes = 512;   // kv heads; bytes of K and V of a token and kv head
//     static constexpr uint64_t kTogetherBytes = 16 << 20;       // of K and V that stay in L2 while blocks read them
//   };
#pragma once

#include "plan_kv.cuh"

// The largest x of the threads before this one and of `all`; `all` becomes the largest of all threads. All threads call it.
template <uint32_t kThreads>
__device__ __forceinline__ uint32_t sync_scan_max(uint32_t x, uint32_t& all) {
  constexpr uint32_t kWarps = kThreads / 32;
  __shared__ uint32_t maxima[kWarps];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t high = x;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t lower = __shfl_up_sync(~0u, high, step);
    if (lane >= step) high = max(high, lower);
  }
  __syncthreads();
  if (lane == 31) maxima[warp] = high;
  __syncthreads();
  uint32_t before = __shfl_up_sync(~0u, high, 1);
  before = max(lane == 0 ? 0 : before, all);
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) {
    if (w < warp) before = max(before, maxima[w]);
    all = max(all, maxima[w]);
  }
  return before;
}

// The rows [begin, begin + rows) of request b. Offsets that decrease, or pass the rows, count as the largest offset up to them:
// so ranges follow one another for any offsets, and a range that differs from its offsets is faulty.
template <typename Split, typename Rows>
__device__ __forceinline__ Claim sync_claim(const Rows& rows, uint32_t batch, uint32_t b, uint32_t& largest) {
  if (rows.row_offsets == nullptr) {
    const uint32_t each = batch == 0 ? 0 : rows.num_rows / batch;
    const bool some = b < batch && each > 0;
    return {b, some ? b * each : 0, some ? each : 0, each <= Split::kMostRows ? RowKind::claimed : RowKind::faulty};
  }
  const bool is = b < batch;
  const uint32_t from = is ? load_index(rows.row_offsets, b) : 0, to = is ? load_index(rows.row_offsets, b + 1) : 0;
  const uint32_t before = sync_scan_max<Split::kThreads>(to, largest), after = max(before, to);
  const uint32_t begin = min(before, rows.num_rows), end = is ? min(after, rows.num_rows) : begin;
  const bool good = before == from && after == to && to <= rows.num_rows && end - begin <= Split::kMostRows;
  return {b, begin, end - begin, good ? RowKind::claimed : RowKind::faulty};
}

// A tile of columns, and the tiles of keys that they see: at least 1.
struct PlannedTile {
  KvChunk chunk;
  uint32_t keys;
  bool narrow;  // half the time
  bool alone;   // its request has no other

  // The cost of so many tiles of keys, in halves of a wide tile's time.
  template <typename Split>
  __device__ __forceinline__ uint32_t cost(uint32_t tiles) const {
    return (tiles + Split::kOverhead) << !narrow;
  }
};

// Tile `n` of the request `whole`.
template <typename Split>
__device__ __forceinline__ PlannedTile tile_at(const KvChunk& whole, uint32_t n) {
  const uint64_t cols = (uint64_t)whole.rows * Split::kGroup;
  PlannedTile tile = {whole, 1, false, cols <= Split::kCols};
  tile.chunk.first = n * Split::kCols;
  tile.narrow = cols - tile.chunk.first <= Split::kNarrowCols;
  const uint32_t last = min((tile.chunk.first + Split::kCols - 1) / Split::kGroup, whole.rows - 1);
  const RowPositions<typename Split::Mask> positions{whole};
  tile.chunk.begin = whole.fault == Fault::none ? positions.seen_by(tile.chunk.first / Split::kGroup).begin : 0;
  tile.chunk.end = whole.fault == Fault::none ? max(tile.chunk.begin, positions.seen_by(last).end) : 0;
  if (tile.chunk.end > tile.chunk.begin) tile.keys = (tile.chunk.end - 1) / Split::kTile - tile.chunk.begin / Split::kTile + 1;
  return tile;
}

// body(tile, live) for every tile of the step. All threads call it equally often; a thread that is not `live` has no tile. `held`
// is shared memory, `first_row` the first offset. Returns the row behind the last request's.
template <typename Split>
struct HeldRequests {
  KvChunk whole[Split::kThreads];
  uint32_t tiles_before[Split::kThreads];
};
template <typename Split, typename Cache, typename Rows, typename Body>
__device__ __forceinline__ uint32_t sync_for_each_tile(HeldRequests<Split>& held, const Cache& cache, const Rows& rows, uint32_t first_row, const Body& body) {
  uint32_t largest = first_row;
#pragma unroll 1
  for (uint32_t base = 0; base < cache.batch; base += Split::kThreads) {
    const uint32_t b = base + threadIdx.x;
    const Claim claim = sync_claim<Split>(rows, cache.batch, b, largest);
    uint32_t tiles = 0, all_tiles;
    if (claim.rows > 0) {
      held.whole[threadIdx.x] = whole_request<Split::kNewInLength, typename Split::Mask>(cache, claim, rows.most_tokens(b));
      tiles = (uint32_t)(((uint64_t)claim.rows * Split::kGroup + Split::kCols - 1) / Split::kCols);
    }
    const uint32_t before = sync_scan<Split::kThreads>(tiles, all_tiles);
    held.tiles_before[threadIdx.x] = before;
    __syncthreads();
#pragma unroll 1
    for (uint32_t first = 0; first < all_tiles; first += Split::kThreads) {
      const uint32_t n = first + threadIdx.x;
      uint32_t low = 0, high = Split::kThreads;  // the request is the last one with no more tiles before it
      while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (held.tiles_before[middle] <= n) low = middle; else high = middle;
      }
      const bool live = n < all_tiles;
      PlannedTile tile = {};
      if (live) tile = tile_at<Split>(held.whole[low], n - held.tiles_before[low]);
      body(tile, live);
    }
    __syncthreads();
  }
  if (rows.row_offsets == nullptr) return cache.batch == 0 ? 0 : rows.num_rows / cache.batch * cache.batch;
  return min(largest, rows.num_rows);
}

// Sums over the tiles: costs, tokens that several tiles share, and the plan's stamp.
struct TileSums {
  unsigned long long cost, tokens;
  uint32_t stamp;
};

// The rows [begin, end) that requests have.
struct RowSpan {
  uint32_t begin, end;
};

// Adds every tile to `all`, which is zero. Returns the rows of requests; `begin` is the first offset, as it was given.
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ RowSpan sync_store_sums(TileSums& all, HeldRequests<Split>& held, const Cache& cache,
                                                   const Rows& rows) {
  const uint32_t first_row = rows.row_offsets == nullptr ? 0 : cache.batch == 0 ? rows.num_rows : load_index(rows.row_offsets, 0);
  const uint32_t end_row = sync_for_each_tile<Split>(held, cache, rows, first_row, [&](const PlannedTile& tile, bool live) {
    if (!live) return;
    atomicAdd(&all.cost, (unsigned long long)tile.cost<Split>(tile.keys));
    if (tile.chunk.first == 0 && !tile.alone) atomicAdd(&all.tokens, (unsigned long long)tile.chunk.tokens);
    atomicAdd(&all.stamp, stamp_of(tile.chunk));
  });
  __syncthreads();
  return {first_row, end_row};
}

// The kv heads whose K and V stay in L2 together.
template <typename Split>
__device__ __forceinline__ uint32_t heads_in_cache(const TileSums& all) {
  uint32_t heads = Split::kHeads;
  while (heads % 2 == 0 && all.tokens * Split::kTokenBytes * heads > Split::kTogetherBytes) heads /= 2;
  return heads;
}

// The cost of a block's equal share of one kv head's tiles.
template <typename Split>
__device__ __forceinline__ uint32_t share_of(const TileSums& all, uint32_t blocks) {
  const uint32_t parts = max(1u, blocks / Split::kHeads);
  return (uint32_t)min((uint64_t)kU32Max, (all.cost + parts - 1) / parts);
}

// The pieces of a tile, and their first slot; a single piece has no slot.
struct Pieces {
  uint32_t count, slot;
};

// The cuts of tiles' keys: equal parts that cost at most `share`, or, with fixed cuts, all cuts of a tile that costs more; and
// the slots of the pieces.
template <typename Split>
struct Cuts {
  uint32_t share, max_slots, slots;  // slots: taken so far

  __device__ __forceinline__ uint32_t wanted(const PlannedTile& tile) const {
    const uint32_t most = max(Split::kLeastTiles, share >> !tile.narrow);
    if (tile.keys <= most) return 1;
    if constexpr (Split::kChunkTiles == 0) return (tile.keys + most - 1) / most;
    else return (tile.chunk.end - 1) / (Split::kTile * Split::kChunkTiles) - tile.chunk.begin / (Split::kTile * Split::kChunkTiles) + 1;
  }
  // All threads call it.
  __device__ __forceinline__ Pieces sync_pieces(const PlannedTile& tile, bool live) {
    const uint32_t count = live ? wanted(tile) : 0;
    uint32_t all;
    const uint32_t slot = slots + sync_scan<Split::kThreads>(count > 1 ? count : 0, all);
    slots += all;
    const bool fits = count <= 1 || (slot <= max_slots && count <= max_slots - slot);
    return {fits ? count : 1, count > 1 && fits ? slot : 0};
  }
  // The tokens where piece `i` begins.
  __device__ __forceinline__ static uint32_t begin(const PlannedTile& tile, uint32_t count, uint32_t i) {
    if (i == 0) return tile.chunk.begin;
    if (i == count) return tile.chunk.end;
    if constexpr (Split::kChunkTiles == 0) return (tile.chunk.begin / Split::kTile + (uint32_t)((uint64_t)tile.keys * i / count)) * Split::kTile;
    else return (tile.chunk.begin / (Split::kTile * Split::kChunkTiles) + i) * Split::kTile * Split::kChunkTiles;
  }
};

// The bucket of entries of that cost, the longest first: eight buckets from each power of two to the next.
constexpr uint32_t kBuckets = 256;
__device__ __forceinline__ uint32_t bucket_of(uint32_t cost) {
  const uint32_t exponent = 31 - __clz(max(cost, 1u));
  return kBuckets - 1 - (8 * exponent + (uint32_t)(((uint64_t)cost << 3 >> exponent) & 7));
}
// The least cost of a bucket.
__device__ __forceinline__ uint32_t bucket_cost(uint32_t bucket) {
  const uint32_t n = kBuckets - 1 - bucket;
  return (uint32_t)((uint64_t)(8 + n % 8) << n / 8 >> 3);
}

// The order of entries in the list, by the time at which each should begin. Entries of a kind are sorted by bucket; an entry
// begins where the entries before it end, as if its kind had a fixed part of the GPU. The last entry begins so early that it ends
// with all work, by the factor kEarly, because no block is free at exactly that time.
constexpr float kEarly = 0.85f;
struct ListOrder {
  uint32_t first[2][kBuckets];        // entries before a bucket, of its kind
  uint32_t cost_before[2][kBuckets];  // what they cost, in units of 2^shift
  uint32_t next[2][kBuckets];         // of the bucket's entries that are placed
  uint32_t count[2], cost[2];
  uint32_t shift;
  float end;  // of all work

  // Entry `n` of a bucket: it does not decrease from entry to entry, nor from bucket to bucket.
  __device__ __forceinline__ float time(uint32_t kind, uint32_t bucket, uint32_t n) const {
    const uint32_t each = bucket_cost(bucket) >> shift;
    return (float)(cost_before[kind][bucket] + n * each) * fmaxf(0.0f, end - (float)each);
  }
  // The entries of a kind that begin before `when`, as part of `part`, the cost of the kind of which it is a time.
  __device__ __forceinline__ uint32_t before(uint32_t kind, float when, float part, bool or_then) const {
    const auto is_before = [&](uint32_t bucket, uint32_t n) {
      const float mine = time(kind, bucket, n) * part, other = when * (float)cost[kind];
      return or_then ? mine <= other : mine < other;
    };
    uint32_t low = 0, high = kBuckets;
    while (high - low > 1) {  // the last bucket that begins before it
      const uint32_t middle = (low + high) / 2;
      if (is_before(middle, 0)) low = middle; else high = middle;
    }
    const uint32_t begin = first[kind][low], end_of = low + 1 < kBuckets ? first[kind][low + 1] : count[kind];
    uint32_t few = 0, many = end_of - begin + 1;
    while (many - few > 1) {  // so many of its entries do
      const uint32_t middle = (few + many) / 2;
      if (is_before(low, middle - 1)) few = middle; else many = middle;
    }
    return begin + few;
  }
  // The place of entry `n` of a bucket.
  __device__ __forceinline__ uint32_t place(uint32_t kind, uint32_t bucket, uint32_t n) const {
    const uint32_t own = first[kind][bucket] + n, other = 1 - kind;
    return own + (count[other] == 0 ? 0 : before(other, time(kind, bucket, n), (float)cost[kind], other == 0));
  }
};

// Turns the counts of `next` into places of entries. All threads, one a bucket, of which there are kThreads.
template <uint32_t kThreads>
__device__ __forceinline__ void sync_order(ListOrder& order, unsigned long long cost, float blocks) {
  static_assert(kThreads == kBuckets);
  const uint32_t bucket = threadIdx.x, shift = max(0, 33 - __clzll(cost | 1));
#pragma unroll 1
  for (uint32_t kind = 0; kind < 2; ++kind) {
    uint32_t entries, all;
    const uint32_t count = order.next[kind][bucket];
    order.first[kind][bucket] = sync_scan<kThreads>(count, entries);
    order.cost_before[kind][bucket] = sync_scan<kThreads>(count * (bucket_cost(bucket) >> shift), all);
    order.next[kind][bucket] = 0;
    if (threadIdx.x == 0) order.count[kind] = entries, order.cost[kind] = all;
  }
  if (threadIdx.x == 0) order.shift = shift, order.end = kEarly * ((float)(cost >> shift) / blocks);
  __syncthreads();
}

// Counts the entries of each bucket in `next`, which is zero.
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ void sync_store_counts(ListOrder& order, HeldRequests<Split>& held, const Cache& cache,
                                                  const Rows& rows, uint32_t first_row, Cuts<Split> cuts) {
  sync_for_each_tile<Split>(held, cache, rows, first_row, [&](const PlannedTile& tile, bool live) {
    const uint32_t pieces = cuts.sync_pieces(tile, live).count;
    if (pieces > 0) atomicAdd(&order.next[tile.alone][bucket_of(tile.cost<Split>(tile.keys / pieces))], pieces);
  });
  __syncthreads();
}

// Stores the entries in the order of the list, as far as the plan has room.
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ void sync_store_entries(const Plan& plan, ListOrder& order, HeldRequests<Split>& held,
                                                   const Cache& cache, const Rows& rows, uint32_t first_row, Cuts<Split> cuts,
                                                   uint32_t stamp, uint32_t max_chunks) {
  sync_for_each_tile<Split>(held, cache, rows, first_row, [&](const PlannedTile& tile, bool live) {
    const Pieces pieces = cuts.sync_pieces(tile, live);
    if (pieces.count == 0) return;
    const uint32_t bucket = bucket_of(tile.cost<Split>(tile.keys / pieces.count));
    const uint32_t placed_before = atomicAdd(&order.next[tile.alone][bucket], pieces.count);
    KvChunk chunk = tile.chunk;
    chunk.num_chunks = pieces.count;
    chunk.slot = pieces.slot;
#pragma unroll 1
    for (uint32_t i = 0; i < pieces.count; ++i) {
      const uint32_t place = order.place(tile.alone, bucket, placed_before + i);
      chunk.index = i;
      chunk.begin = Cuts<Split>::begin(tile, pieces.count, i);
      chunk.end = Cuts<Split>::begin(tile, pieces.count, i + 1);
      chunk.stamp = stamp_at(stamp, place);
      if (place < max_chunks) plan.chunks[place] = chunk;
    }
  });
}
