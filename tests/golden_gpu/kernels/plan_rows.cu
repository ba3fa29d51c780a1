// plan_rows.cuh: the rows of requests, their tiles of columns, and where the keys of these are cut.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/attention/plan/plan_rows.cuh"

// Tables of 400 tokens.
struct Cache {
  const int32_t* lengths;
  uint32_t batch;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ static uint32_t first_token(uint32_t n) { return 0; }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n <= 400; }
};

struct Balanced {
  using Mask = WindowMask<150>;
  static constexpr uint32_t kThreads = 64, kCols = 16, kGroup = 3, kMostRows = 40, kTile = 16, kChunkTiles = 0, kNarrowCols = 8, kOverhead = 2, kLeastTiles = 2;
  static constexpr bool kNewInLength = true;
};
struct Fixed {
  using Mask = FullMask;
  static constexpr uint32_t kThreads = 32, kCols = 32, kGroup = 4, kMostRows = 24, kTile = 16, kChunkTiles = 3, kNarrowCols = 0, kOverhead = 1, kLeastTiles = 1;
  static constexpr bool kNewInLength = false;
};

// What is told of a tile: its keys and of what kind it is, the pieces that it is cut into, those that it would be, their first slot, their bucket, where they begin.
constexpr uint32_t kTold = 16, kMostPieces = kTold - 6;

// One block, more requests than threads, and more tiles of these than threads: all tiles in order; the row behind the last request's, how many
// tiles there are, and the slots in use.
template <typename Split, typename Rows>
__device__ __forceinline__ void plan(const Cache& cache, const Rows& rows, uint32_t first_row, const Cuts<Split>& cuts, KvChunk* chunks, uint32_t* told, uint32_t* end) {
  __shared__ HeldRequests<Split> held;
  uint32_t before = 0;
  Cuts<Split> placed = cuts;
  const uint32_t end_row = sync_for_each_tile<Split>(held, cache, rows, first_row, [&](const PlannedTile& tile, bool live) {
    uint32_t here;
    const uint32_t n = before + sync_scan<Split::kThreads>(live ? 1u : 0u, here);
    before += here;
    const Pieces pieces = placed.sync_pieces(tile, live);
    if (!live) return;
    chunks[n] = tile.chunk;
    uint32_t* to = told + n * kTold;
    to[0] = tile.keys | tile.narrow << 30 | tile.alone << 31, to[1] = pieces.count, to[2] = cuts.wanted(tile), to[3] = pieces.slot, to[4] = bucket_of(tile.cost<Split>(tile.keys / pieces.count));
    for (uint32_t i = 0; i <= pieces.count && i < kMostPieces; ++i) to[5 + i] = Cuts<Split>::begin(tile, pieces.count, i);
  });
  if (threadIdx.x == 0) end[0] = end_row, end[1] = before, end[2] = placed.slots;
}
extern "C" __global__ void rows_balanced(const int32_t* lengths, const int32_t* valid, const int32_t* offsets, KvChunk* chunks, uint32_t* told, uint32_t* end,
                                         uint32_t batch, uint32_t num_rows, uint32_t share, uint32_t max_slots) {
  plan<Balanced>({lengths, batch}, step_rows(offsets, num_rows, valid), load_index(offsets, 0), {share, max_slots, 0}, chunks, told, end);
}
extern "C" __global__ void rows_fixed(const int32_t* lengths, KvChunk* chunks, uint32_t* told, uint32_t* end, uint32_t batch, uint32_t num_rows, uint32_t share,
                                      uint32_t max_slots) {
  plan<Fixed>({lengths, batch}, step_rows((const int32_t*)nullptr, num_rows), 0, {share, max_slots, 5}, chunks, told, end);
}

// A block a list of offsets, in rounds of as many requests as threads: the rows of each, and the largest offset so far.
extern "C" __global__ void rows_claims(const int64_t* offsets, Vec<uint32_t, 4>* claims, uint32_t* largest, uint32_t* each, uint32_t batch, uint32_t num_rows) {
  const int64_t* own = offsets + blockIdx.x * (batch + 1);
  const auto rows = step_rows(own, num_rows);
  uint32_t all = load_index(own, 0);
  for (uint32_t base = 0; base < batch; base += Balanced::kThreads) {
    const uint32_t b = base + threadIdx.x;
    const Claim claim = sync_claim<Balanced>(rows, batch, b, all);
    const Claim even = sync_claim<Balanced>(step_rows((const int32_t*)nullptr, num_rows + blockIdx.x * 1000), batch, b, all);
    if (b >= batch) continue;
    claims[blockIdx.x * batch + b] = {claim.b, claim.begin, claim.rows, (uint32_t)claim.kind};
    largest[blockIdx.x * batch + b] = all;
    each[2 * (blockIdx.x * batch + b)] = even.begin << 8 | even.rows, each[2 * (blockIdx.x * batch + b) + 1] = (uint32_t)even.kind;
  }
}

// A thread a number: the largest before it and of all, twice; its bucket. And a tile of one request, the last of which has fewer columns.
extern "C" __global__ void rows_numbers(const uint32_t* in, uint32_t* before, uint32_t* buckets, KvChunk* tiles, uint32_t* keys) {
  const uint32_t i = threadIdx.x;
  uint32_t all = 5;
  before[4 * i] = sync_scan_max<64>(in[i], all), before[4 * i + 1] = all;
  before[4 * i + 2] = sync_scan_max<64>(in[64 + i], all), before[4 * i + 3] = all;
  buckets[i] = bucket_of(in[i]), buckets[64 + i] = bucket_cost(4 * i);
  const KvChunk whole = {3, 7, 101, 290, 17, 290, 0, 1, 0, i % 8 == 7 ? Fault::length : Fault::none, 0, 0};
  const PlannedTile tile = tile_at<Balanced>(whole, i % 19);
  tiles[i] = tile.chunk, keys[i] = tile.keys;
}

// One block: entries of each kind and bucket, and the place of each of them in the list.
extern "C" __global__ void rows_order(const uint32_t* counts, uint32_t* places, float* times, uint32_t* others, uint32_t cost, uint32_t blocks) {
  __shared__ ListOrder order;
  const uint32_t bucket = threadIdx.x;
  for (uint32_t kind = 0; kind < 2; ++kind) order.next[kind][bucket] = counts[kind * kBuckets + bucket];
  __syncthreads();
  sync_order<kBuckets>(order, cost, (float)blocks);
  for (uint32_t kind = 0; kind < 2; ++kind)
    for (uint32_t n = 0; n < counts[kind * kBuckets + bucket]; ++n) {
      const uint32_t i = (kind == 0 ? 0 : order.count[0]) + order.first[kind][bucket] + n;
      places[i] = order.place(kind, bucket, n);
      times[i] = order.time(kind, bucket, n);
      others[i] = order.before(1 - kind, times[i], (float)order.cost[kind], false);
    }
}

// One block: a whole list, of requests without offsets that are wrong. Sums, the count of entries in each bucket, the entries in their order.
struct Listed : Balanced {
  static constexpr uint32_t kThreads = kBuckets, kHeads = 4, kTokenBytes = 64;
  static constexpr uint64_t kTogetherBytes = 100000;
};
extern "C" __global__ void rows_listed(const int32_t* lengths, const int32_t* offsets, uint32_t* sums, uint32_t* counts, KvChunk* chunks, uint32_t batch, uint32_t num_rows,
                                       uint32_t blocks, uint32_t max_chunks) {
  __shared__ HeldRequests<Listed> held;
  __shared__ TileSums all;
  __shared__ ListOrder order;
  const Cache cache = {lengths, batch};
  const auto rows = step_rows(offsets, num_rows);
  if (threadIdx.x == 0) all = {};
  for (uint32_t kind = 0; kind < 2; ++kind) order.next[kind][threadIdx.x] = 0;
  __syncthreads();
  const RowSpan requests = sync_store_sums(all, held, cache, rows);
  const uint32_t share = share_of<Listed>(all, blocks), heads = heads_in_cache<Listed>(all);
  const Cuts<Listed> cuts = {share, 30, 0};
  sync_store_counts(order, held, cache, rows, requests.begin, cuts);
  for (uint32_t kind = 0; kind < 2; ++kind) counts[kind * kBuckets + threadIdx.x] = order.next[kind][threadIdx.x];
  sync_order<Listed::kThreads>(order, all.cost, (float)blocks / (float)heads);
  Plan plan;
  plan.chunks = chunks;
  sync_store_entries(plan, order, held, cache, rows, requests.begin, cuts, all.stamp, max_chunks);
  if (threadIdx.x > 0) return;
  sums[0] = requests.begin, sums[1] = requests.end, sums[2] = (uint32_t)all.cost, sums[3] = (uint32_t)all.tokens, sums[4] = all.stamp, sums[5] = share, sums[6] = heads;
}
