// The kv chunks that attention kernels work on: from a list that a planner makes on the device, or one for each request.
//
// A request's tokens are cut into tiles; a chunk is a run of them. Results of a request's chunks: merge.cuh.
#pragma once

// A run of a request's tokens, [begin, end), for the query rows [row, row + rows). If it is faulty, `tokens` is the reported
// position.
struct alignas(16) KvChunk {
  uint32_t b, row, rows;
  uint32_t tokens, begin, end;
  uint32_t index, num_chunks;  // which of the request's chunks
  uint32_t slot;               // of the request's first partial result
  Fault fault;
  uint32_t stamp;              // stamp_at() of the plan and the chunk's place in the list
  uint32_t first;              // extend: the first of the request's columns that the chunk is for

  // One query row of no request: no tokens, one chunk.
  __device__ static KvChunk unclaimed(uint32_t row) { return {0, row, 1, 0, 0, 0, 0, 1, 0, Fault::none, 0, 0}; }
};

// The position of a score: the arguments of masks and scores.
struct At {
  uint32_t b, row, q_head;  // request, row of q, query head
  uint32_t i;               // the row among its request's
  uint32_t position;        // of the row in its request
  uint32_t token;           // of the key
  uint32_t tokens;          // of the request, this step's included
};

// Masks: the tokens that a row at `position` of a request of `tokens` can see, [first, last); neither end decreases with the
// position.
// kEarlyRowsSee: a row before the first token, of a request with more rows than tokens, sees the tokens of a row at the first
// token.

// A row sees the tokens up to its own position.
struct CausalMask {
  static constexpr bool kEarlyRowsSee = false;
  __device__ static uint32_t first(uint32_t) { return 0; }
  __device__ static uint32_t last(uint32_t position, uint32_t tokens) { return min(position + 1, tokens); }
};

// A row sees the newest kWindow tokens up to its position.
template <uint32_t kWindow>
struct WindowMask {
  static constexpr bool kEarlyRowsSee = false;
  __device__ static uint32_t first(uint32_t position) { return position < kWindow ? 0 : position - (kWindow - 1); }
  __device__ static uint32_t last(uint32_t position, uint32_t tokens) { return min(position + 1, tokens); }
};

// A request's tokens lie in chunks of kTokens; a row sees those of its own chunk, up to itself.
template <uint32_t kTokens>
struct ChunkMask {
  static constexpr bool kEarlyRowsSee = false;
  __device__ static uint32_t first(uint32_t position) { return position / kTokens * kTokens; }
  __device__ static uint32_t last(uint32_t position, uint32_t tokens) { return min(position + 1, tokens); }
};

// A row sees all tokens of its request.
struct FullMask {
  static constexpr bool kEarlyRowsSee = true;
  __device__ static uint32_t first(uint32_t) { return 0; }
  __device__ static uint32_t last(uint32_t, uint32_t tokens) { return tokens; }
};

// The claim on a row of a step.
enum class RowKind : uint8_t { claimed, empty, faulty, orphan };

// Rows of requests, by offsets, or kRows a request. A request is found from each of its rows, or it is faulty: offsets that
// contradict each other never give a row to two requests.
struct Claim {
  uint32_t b, begin, rows;
  RowKind kind;
};

template <uint32_t kRows, typename Index>
__device__ __forceinline__ Claim claim_of(const Index* row_offsets, uint32_t batch, uint32_t row, uint32_t num_rows) {
  if (row_offsets == nullptr) {
    const uint32_t b = row / kRows, begin = b * kRows;
    if (b >= batch) return {b, row, 1, RowKind::empty};
    return {b, begin, kRows, num_rows - begin < kRows ? RowKind::faulty : RowKind::claimed};
  }
  const RowRange range = range_of(row_offsets, batch, row, num_rows);
  if (range.padding) return {range.b, row, 1, bad_total(row_offsets, batch, num_rows) ? RowKind::orphan : RowKind::empty};
  const uint32_t rows = range.end - range.begin;
  // A request that reaches past the last offset does not own rows of no request.
  bool good = range.valid && rows <= kRows && (kRows == 1 || range.end <= load_index(row_offsets, batch));
  if constexpr (kRows > 1) {
#pragma unroll 1
    for (uint32_t i = 0; good && i < rows; ++i) {
      if (range.begin + i != row) good = request_of(row_offsets, batch, range.begin + i) == range.b;
    }
  }
  return {range.b, good ? range.begin : row, good ? rows : 1, good ? RowKind::claimed : RowKind::faulty};
}

// The tokens of request b, the `rows` that this step adds included; 2^32 - 1 if they cannot be counted.
template <bool kNewInLength, typename Cache>
__device__ __forceinline__ uint32_t tokens_with(const Cache& cache, uint32_t b, uint32_t rows) {
  const uint32_t tokens = cache.length(b);
  // The step's own tokens are in the cache by now.
  return kNewInLength ? tokens : tokens + min(rows, kU32Max - tokens);
}

// The whole of a request as one chunk. `Mask` says which tokens a row can see: first(position) and last(position, tokens).
template <bool kNewInLength, typename Mask, typename Cache>
__device__ __forceinline__ KvChunk whole_request(const Cache& cache, const Claim& claim, uint32_t most_tokens = kU32Max - 1) {
  KvChunk chunk = {claim.b, claim.begin, claim.rows, 0, 0, 0, 0, 1, 0, Fault::none, 0, 0};
  if (claim.kind != RowKind::claimed) {
    chunk.tokens = claim.begin;
    chunk.fault = Fault::row_offsets;
    return chunk;
  }
  const uint32_t tokens = tokens_with<kNewInLength>(cache, claim.b, claim.rows);
  const uint32_t held = Cache::first_token(tokens);
  chunk.tokens = tokens;
  if (tokens == kU32Max || most_tokens == kU32Max || (tokens > 0 && !cache.holds(claim.b, held, tokens))) {
    chunk.fault = Fault::length;
    return chunk;
  }
  // Rows stand at positions tokens - rows and on; rows before the first token see nothing.
  const uint32_t first = tokens > claim.rows ? tokens - claim.rows : 0;
  chunk.end = min(tokens == 0 ? 0 : Mask::last(tokens - 1, tokens), min(tokens, most_tokens));
  chunk.begin = min(max(held, Mask::first(first)), chunk.end);
  return chunk;
}

// The sizes of a plan. The GPU's blocks are `num_sm_parts` groups; the blocks of a group share a chunk, one block a kv head and
// tile of columns.
struct PlanSizes {
  uint32_t num_sm_parts, max_rows, max_chunks, max_slots;
};

// A hash of words.
template <uint32_t kCount>
__device__ __forceinline__ uint32_t hash_of(const uint32_t (&words)[kCount]) {
  uint32_t hash = 0;
  for (const uint32_t word : words) hash = (hash ^ word ^ hash >> 15) * 0x9e3779b1u;
  return hash;
}

// The head of a workspace: the call that it was planned for. Planner and kernel share `digest`, a constant of the operation and
// of all inputs of its plans.
struct alignas(16) PlanHeader {
  uint32_t magic, batch;
  uint64_t digest;
  uint32_t rows, num_sm_parts, max_rows, max_chunks;
  uint32_t max_slots, num_chunks;
  uint32_t nobodys, wrong_total;  // whether some rows are no request's (of extend: sum()), whether the last row offset is wrong
  uint32_t stamp;                 // of this plan: the sum of the requests' stamp_of
  uint32_t first_row, end_row;    // of extend: rows before and from here on are no request's
  uint32_t heads_together;        // of extend: kv heads whose blocks go one after the other

  static constexpr uint32_t kMagic = 0x6e6c706b;  // "kpln"

  __device__ __forceinline__ bool is_for(uint64_t operation, uint32_t requests, uint32_t num_rows, const PlanSizes& sizes) const {
    return magic == kMagic && digest == operation && batch == requests && rows == num_rows && num_sm_parts == sizes.num_sm_parts && max_rows == sizes.max_rows &&
           max_chunks == sizes.max_chunks && max_slots == sizes.max_slots && num_chunks <= max_chunks;
  }

  // Checksum of the planner's results, by which an overwritten word is found.
  __device__ __forceinline__ uint32_t sum() const { return hash_of({num_chunks, wrong_total, stamp, first_row, end_row, heads_together}); }
};

// The layout of a workspace; kvgen/runtime/workspace.py sizes it.
struct Plan {
  PlanHeader* header;
  uint32_t* starts;     // first chunk of each SM part, and the end, plus stamp_at() of plan and SM part; extend: asked_works()
  uint8_t* row_kinds;
  uint32_t* counters;   // of each slot, kv head and tile of columns: kIdle, plus how many of its group have finished
  KvChunk* chunks;
  float* partials;
};

__device__ __forceinline__ Plan plan_in(uint8_t* workspace, const PlanSizes& sizes, uint32_t counters_per_slot) {
  const auto after = [](uint64_t bytes) { return (bytes + 15) & ~15ull; };
  Plan plan;
  uint8_t* at = in_global(workspace);
  plan.header = (PlanHeader*)at;
  at += sizeof(PlanHeader);
  plan.starts = (uint32_t*)at;
  at += after(4 * ((uint64_t)sizes.num_sm_parts + 1));
  plan.row_kinds = at;
  at += after(sizes.max_rows);
  plan.counters = (uint32_t*)at;
  at += after(4 * (uint64_t)sizes.max_slots * counters_per_slot);
  plan.chunks = (KvChunk*)at;
  at += sizeof(KvChunk) * (uint64_t)sizes.max_chunks;
  plan.partials = (float*)at;
  return plan;
}

// A hash that identifies a request's work.
__device__ __forceinline__ uint32_t stamp_of(const KvChunk& whole) {
  return hash_of({whole.b, whole.row, whole.rows, whole.tokens, whole.begin, whole.end, (uint32_t)whole.fault});
}

// The stamp of entry `i` of a list, by which an entry that this plan did not write there is found: overwritten, stale or moved.
__device__ __forceinline__ uint32_t stamp_at(uint32_t stamp, uint32_t i) { return stamp + (i + 1) * 0x85ebca6bu; }

// The chunks [begin, end) of an SM part.
struct ChunkRange {
  uint32_t begin, end;
};

// The range of an SM part, under a header for this call; returns false if the range is not this plan's.
__device__ __forceinline__ bool read_range(ChunkRange& range, const Plan& plan, const PlanHeader& header, uint32_t sm_part) {
  range = {plan.starts[sm_part] - stamp_at(header.stamp, sm_part), plan.starts[sm_part + 1] - stamp_at(header.stamp, sm_part + 1)};
  return range.begin <= range.end && range.end <= header.num_chunks;
}

// extend: the count of works that blocks have taken from the list beyond their first ones. Both words have it, the upper one plus
// the plan's stamp, so that a counter of another plan is found. It stands in the place of `starts`.
constexpr unsigned long long kOneWork = (1ull << 32) + 1;
__device__ __forceinline__ unsigned long long idle_works(uint32_t stamp) { return (unsigned long long)stamp << 32; }
__device__ __forceinline__ unsigned long long* asked_works(const Plan& plan) { return (unsigned long long*)plan.starts; }

// Chunk `i` of a plan with this stamp, for a call of `batch` requests, `num_rows` rows and `max_slots` slots, which its header
// has too. A chunk that is not this plan's becomes Fault::plan, without rows, so its numbers never lead outside the call or the
// workspace.
template <uint32_t kRows>
__device__ __forceinline__ KvChunk read_chunk(const Plan& plan, uint32_t stamp, uint32_t i, uint32_t batch, uint32_t num_rows, uint32_t max_slots) {
  const KvChunk chunk = plan.chunks[i];
  const bool inside = chunk.b < batch && chunk.rows - 1 < kRows && chunk.row < num_rows && chunk.rows <= num_rows - chunk.row;
  const bool placed = chunk.index < chunk.num_chunks && (chunk.num_chunks == 1 || (chunk.slot < max_slots && chunk.num_chunks <= max_slots - chunk.slot));
  const bool sees = chunk.begin <= chunk.end && chunk.end <= chunk.tokens && chunk.fault <= Fault::row_offsets;
  if (chunk.stamp == stamp_at(stamp, i) && inside && placed && sees) return chunk;
  return {0, 0, 0, 0, 0, 0, 0, 1, 0, Fault::plan, 0, 0};
}

// A block's part of a plan: the chunks [begin, end) of its SM part; no chunks if the workspace holds no plan for this call.
struct PlannedPart {
  Plan plan;
  uint32_t stamp, begin, end;
  bool planned, has_unclaimed;  // has_unclaimed: some rows belong to no request

  // Without a plan for this call every row is an orphan.
  __device__ __forceinline__ RowKind kind_of(uint32_t row) const { return planned ? (RowKind)plan.row_kinds[row] : RowKind::orphan; }
};

// The part of SM part `sm_part`. A workspace that was planned for another call, or overwritten, is Fault::plan.
template <uint32_t kColumnBlocks>
__device__ __forceinline__ PlannedPart read_plan(uint8_t* workspace, const PlanSizes& sizes, uint64_t digest, uint32_t batch, uint32_t num_rows,
                                                 uint32_t sm_part, uint64_t* errors) {
  const Plan plan = plan_in(workspace, sizes, kColumnBlocks);
  const PlanHeader header = *plan.header;
  const bool planned = header.is_for(digest, batch, num_rows, sizes);
  ChunkRange mine;
  if (!read_range(mine, plan, header, sm_part) || !planned) {
    if (threadIdx.x == 0) report(errors, Fault::plan, 0, 0);
    mine.end = mine.begin;
  }
  if (planned && header.wrong_total && threadIdx.x == 0) report(errors, Fault::row_offsets, batch - 1, num_rows);
  return {plan, header.stamp, mine.begin, mine.end, planned, !planned || header.nobodys};
}
