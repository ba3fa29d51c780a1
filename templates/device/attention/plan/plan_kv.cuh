// The planner of a decode step: it cuts the kv tokens of every request into chunks and divides these among the SM parts.
//
// A plan is described by a struct of the kernel:
//
//   struct Split {
//     using Mask = CausalMask;                       // the tokens [first(position), last(position, tokens)) that a row sees
//     static constexpr uint32_t kThreads = 256;      // of the planner's one block; thread i has rows i, i + 256, ...
//     static constexpr uint32_t kRows = 1;           // query rows that a request can have
//     static constexpr bool kNewInLength = false;    // lengths count this step's tokens
//     static constexpr uint32_t kTile = 64;          // tokens of a tile, which costs count
//     static constexpr uint32_t kOverhead = 2, kLeastTiles = 2;  // tiles: a chunk's fixed cost, the least of an SM part besides
//   };
//
// or, where chunks have a fixed number of tokens, `kChunkTiles` in the place of the last two.
#pragma once

#include "../../base/scan.cuh"
#include "../common/merge.cuh"

// The query rows of a step; null offsets: every request has Split::kRows. All tokens of a request count.
template <typename Index>
struct StepRows {
  const Index* row_offsets;
  uint32_t num_rows;
  __device__ static constexpr uint32_t most_tokens(uint32_t) { return kU32Max - 1; }
};
template <typename Index>
__device__ __forceinline__ StepRows<Index> step_rows(const Index* row_offsets, uint32_t num_rows) {
  return {row_offsets, num_rows};
}

// Rows of a step in which only the first valid_tokens[b] tokens of request b count.
template <typename Index, typename Valid>
struct PaddedStepRows {
  const Index* row_offsets;
  uint32_t num_rows;
  const Valid* valid_tokens;
  __device__ __forceinline__ uint32_t most_tokens(uint32_t b) const { return load_index(valid_tokens, b); }
};
template <typename Index, typename Valid>
__device__ __forceinline__ PaddedStepRows<Index, Valid> step_rows(const Index* row_offsets, uint32_t num_rows, const Valid* valid_tokens) {
  return {row_offsets, num_rows, valid_tokens};
}

constexpr uint32_t kMostListed = 1u << 26;  // entries of a list

// Rows of q that attend to lists: a row's lists follow each other, each in whole tiles. Such a row counts as a request.
template <typename Index, uint32_t kLists>
struct ListedRows {
  const Index* lengths[kLists];
  uint32_t num_rows;
};
template <typename Index, typename... More>
__device__ __forceinline__ ListedRows<Index, 1 + sizeof...(More)> listed_rows(uint32_t num_rows, const Index* lengths, const More*... more) {
  return {{lengths, more...}, num_rows};
}

// The request whose first row is `row`: one chunk of all tokens that its rows see, and the count of their tiles, at least 1. Any
// other row, and a row of no request, has 0 tiles. A request with wrong offsets or a wrong length is one faulty chunk of 1 tile.
struct PlannedRequest {
  KvChunk chunk;
  RowKind kind;
  uint32_t tiles;
};
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ PlannedRequest request_at(const Cache& cache, const Rows& rows, uint32_t row) {
  PlannedRequest request;
  request.kind = RowKind::claimed;
  request.tiles = 0;
  if (row >= rows.num_rows) return request;
  const Claim claim = claim_of<Split::kRows>(rows.row_offsets, cache.batch, row, rows.num_rows);
  request.kind = claim.kind;
  if (claim.kind == RowKind::empty || claim.kind == RowKind::orphan || claim.begin != row) return request;
  KvChunk& chunk = request.chunk;
  chunk = whole_request<Split::kNewInLength, typename Split::Mask>(cache, claim, rows.most_tokens(claim.b));
  chunk.rows = min(chunk.rows, rows.num_rows - row);  // a last request whose rows are not all there
  const uint32_t tiles = chunk.end / Split::kTile + (chunk.end % Split::kTile != 0) - chunk.begin / Split::kTile;
  request.tiles = chunk.end > chunk.begin ? tiles : 1;
  return request;
}

// request_at for rows that attend to lists. A row with a list of an impossible length is faulty.
template <typename Split, typename Cache, typename Index, uint32_t kLists>
__device__ __forceinline__ PlannedRequest request_at(const Cache&, const ListedRows<Index, kLists>& rows, uint32_t row) {
  PlannedRequest request;
  request.kind = RowKind::claimed;
  request.tiles = 0;
  if (row >= rows.num_rows) return request;
  KvChunk& chunk = request.chunk;
  chunk = KvChunk::unclaimed(row);
  chunk.b = row;
#pragma unroll
  for (uint32_t n = 0; n < kLists; ++n) {
    const uint32_t length = load_index(rows.lengths[n], row);
    if (length > kMostListed) {
      chunk.fault = Fault::length;
      chunk.tokens = length;
    }
    if (chunk.fault == Fault::none) chunk.end += (length + Split::kListTile - 1) / Split::kListTile * Split::kListTile;
  }
  if (chunk.fault == Fault::none) chunk.tokens = chunk.end;
  else chunk.end = 0;
  request.tiles = max(1, chunk.end / Split::kTile + (chunk.end % Split::kTile != 0));
  return request;
}

// Sums over requests: tiles, requests, tiles of the longest one, the stamp of the plan, and a flag: some rows belong to no
// request.
struct PlanSums {
  uint64_t tiles;
  uint32_t requests, longest, stamp, unclaimed;
};

// Stores the kind of every row, and sums up the requests of the rows that this thread has.
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ PlanSums store_row_kinds(const Plan& plan, const Cache& cache, const Rows& rows) {
  PlanSums own = {};
#pragma unroll 1
  for (uint32_t row = threadIdx.x; row < rows.num_rows; row += Split::kThreads) {
    const PlannedRequest request = request_at<Split>(cache, rows, row);
    const bool unclaimed = request.kind == RowKind::empty || request.kind == RowKind::orphan;
    plan.row_kinds[row] = (uint8_t)(unclaimed ? request.kind : RowKind::claimed);
    own.unclaimed |= unclaimed;
    if (request.tiles == 0) continue;
    own.tiles += request.tiles;
    own.requests += 1;
    own.longest = max(own.longest, request.tiles);
    own.stamp += stamp_of(request.chunk);
  }
  return own;
}

// The sums of all threads. All of them call it, once a kernel.
__device__ __forceinline__ PlanSums sync_sums(const PlanSums& own) {
  __shared__ PlanSums all;
  if (threadIdx.x == 0) all = {};
  __syncthreads();
  atomicAdd((unsigned long long*)&all.tiles, (unsigned long long)own.tiles);
  atomicAdd(&all.requests, own.requests);
  atomicMax(&all.longest, own.longest);
  atomicAdd(&all.stamp, own.stamp);
  atomicOr(&all.unclaimed, own.unclaimed);
  __syncthreads();
  return all;
}

// Stores kIdle in `count` counters.
template <uint32_t kThreads>
__device__ __forceinline__ void store_idle(uint32_t* counters, uint64_t count) {
#pragma unroll 1
  for (uint64_t i = threadIdx.x; i < count; i += kThreads) counters[i] = kIdle;
}

// The cost of one SM part: an equal share of all costs, but at least the cost that is worth a block. If that cuts the longest
// request into slightly more chunks than one merge takes (kFanIn), the share is a little larger. A request alone begins with an
// SM part, its fixed cost first; a request among others begins anywhere, and so has one chunk more than its cost has shares.
template <typename Split>
__device__ __forceinline__ uint64_t cost_share(const PlanSums& all, uint32_t num_sm_parts) {
  const uint64_t total = all.tiles + (uint64_t)all.requests * Split::kOverhead;
  const uint64_t share = max((uint64_t)(Split::kOverhead + Split::kLeastTiles), (total + num_sm_parts - 1) / num_sm_parts);
  if (num_sm_parts > kFanIn + kFanIn / 4) return share;
  if (all.requests == 1) return max(share, (total + kFanIn - 1) / kFanIn);
  return max(share, ((uint64_t)all.longest + kFanIn - 2) / (kFanIn - 1));
}

// The places of a request's chunks: `count` chunks from number `index` on. If there are several, they have slots from `slot` on.
struct ChunkPlace {
  uint32_t index, count, slot;
};

// The place of this thread's `count` chunks behind those of the threads before, and `next` behind those of all. All threads call
// it.
template <uint32_t kThreads>
__device__ __forceinline__ ChunkPlace sync_place(uint32_t count, ChunkPlace& next) {
  uint32_t all_slots, all_chunks;
  const uint32_t slot = next.slot + sync_scan<kThreads>(count > 1 ? count : 0, all_slots);
  const uint32_t index = next.index + sync_scan<kThreads>(count, all_chunks);
  next.slot += all_slots;
  next.index += all_chunks;
  return {index, count, slot};
}

// Stores the chunks of a request: chunk i has the tiles from cut(i) on, counted from the request's first one.
template <typename Split, typename Cut>
__device__ __forceinline__ void store_chunks(const Plan& plan, KvChunk chunk, const ChunkPlace& place, uint32_t stamp, const Cut& cut) {
  const uint32_t first_tile = chunk.begin / Split::kTile, begin = chunk.begin, end = chunk.end;
  chunk.num_chunks = place.count;
  chunk.slot = place.slot;
#pragma unroll 1
  for (uint32_t i = 0; i < place.count; ++i) {
    chunk.index = i;
    chunk.begin = i == 0 ? begin : (first_tile + cut(i)) * Split::kTile;
    chunk.end = i == place.count - 1 ? end : (first_tile + cut(i + 1)) * Split::kTile;
    chunk.stamp = stamp_at(stamp, place.index + i);
    plan.chunks[place.index + i] = chunk;
  }
}

// Stores the chunk list and the first chunk of every SM part, and returns the number of chunks. SM part p has the costs
// [p * share, (p + 1) * share); a request costs kOverhead, then 1 for each tile. Last tiles of a request that are fewer than
// kOverhead, and so not worth a chunk, stay with the chunk before. All threads call it.
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ uint32_t sync_store_balanced_chunks(const Plan& plan, const Cache& cache, const Rows& rows, uint32_t stamp, uint64_t share,
                                                               uint32_t num_sm_parts) {
  uint64_t cost_before = 0;
  ChunkPlace next = {};
#pragma unroll 1
  for (uint32_t base = 0; base < rows.num_rows; base += Split::kThreads) {
    const PlannedRequest request = request_at<Split>(cache, rows, base + threadIdx.x);
    uint64_t costs;
    const uint64_t begin = cost_before + sync_scan<Split::kThreads>((uint64_t)(request.tiles > 0 ? request.tiles + Split::kOverhead : 0), costs);
    cost_before += costs;
    const uint64_t first_part = (begin + Split::kOverhead) / share, last_part = (begin + Split::kOverhead - 1 + request.tiles) / share;
    const uint64_t last_tiles = begin + Split::kOverhead + request.tiles - last_part * share;
    const uint32_t more_chunks = (uint32_t)(last_part - first_part) - (last_part > first_part && last_tiles < Split::kOverhead);
    const ChunkPlace place = sync_place<Split::kThreads>(request.tiles > 0 ? more_chunks + 1 : 0, next);
    if (request.tiles == 0) continue;
    store_chunks<Split>(plan, request.chunk, place, stamp, [&](uint32_t i) { return (uint32_t)((first_part + i) * share - begin - Split::kOverhead); });
    // SM parts that begin in this request, or between it and the one before.
    for (uint64_t p = begin == 0 ? 0 : (begin - 1) / share + 1; p <= last_part; ++p)
      plan.starts[p] = place.index + (p <= first_part ? 0 : (uint32_t)(p - first_part)) + stamp_at(stamp, (uint32_t)p);
  }
  const uint32_t used = cost_before == 0 ? 0 : (uint32_t)((cost_before - 1) / share) + 1;
  for (uint32_t p = used + threadIdx.x; p <= num_sm_parts; p += Split::kThreads) plan.starts[p] = next.index + stamp_at(stamp, p);
  return next.index;
}

// Stores chunks of kChunkTiles tiles, the same number for every SM part. A request of more than `most_chunks` is one faulty
// chunk: it loses its own result, and the others keep their place. All threads call it.
template <typename Split, typename Cache, typename Rows>
__device__ __forceinline__ uint32_t sync_store_fixed_chunks(const Plan& plan, const Cache& cache, const Rows& rows, uint32_t stamp, uint32_t most_chunks,
                                                            uint32_t num_sm_parts) {
  ChunkPlace next = {};
#pragma unroll 1
  for (uint32_t base = 0; base < rows.num_rows; base += Split::kThreads) {
    PlannedRequest request = request_at<Split>(cache, rows, base + threadIdx.x);
    uint32_t count = request.tiles > 0 ? (request.tiles - 1) / Split::kChunkTiles + 1 : 0;
    if (count > most_chunks) {
      request.chunk.fault = Fault::length;
      count = 1;
    }
    const ChunkPlace place = sync_place<Split::kThreads>(count, next);
    if (count > 0) store_chunks<Split>(plan, request.chunk, place, stamp, [](uint32_t i) { return i * Split::kChunkTiles; });
  }
  for (uint32_t p = threadIdx.x; p <= num_sm_parts; p += Split::kThreads)
    plan.starts[p] = (uint32_t)((uint64_t)next.index * p / num_sm_parts) + stamp_at(stamp, p);
  return next.index;
}
