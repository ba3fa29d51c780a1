// What attention kernels work on: chunks of requests, in a list that a planner makes on the device or one a request, and
// partial results that the last block of a request merges.
//
// A request's tokens are cut into tiles; a chunk is a run of them. Partial results of a request lie in neighbouring slots, in
// token order, and are merged in that order whoever finishes last, so a request's bits do not depend on the order of blocks.
#pragma once

// A run of a request's tokens, [begin, end), for the query rows [row, row + rows). Faulty: `tokens` is what to report.
struct alignas(16) KvChunk {
  uint32_t b, row, rows;
  uint32_t tokens, begin, end;
  uint32_t index, num_chunks;  // which of the request's chunks
  uint32_t slot;               // of the request's first partial result
  Fault fault;
  uint32_t stamp;              // stamp_at() of the plan and the chunk's place in the list
  uint32_t unused;
};

// Where a score stands: what masks and scores are functions of.
struct At {
  uint32_t b, row, q_head;  // request, row of q, query head
  uint32_t i;               // the row among its request's
  uint32_t position;        // of the row in its request
  uint32_t token;           // of the key
  uint32_t tokens;          // of the request, this step's included
};

// How the rows of a step are claimed.
enum class RowKind : uint8_t { claimed, empty, faulty, orphan };

// Rows of requests, with offsets or kRows each. A request is found from each of its rows, or it is faulty: offsets that
// contradict each other never give a row to two.
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
  // Rows of no request are not its own either, where it reaches past the last offset.
  bool good = range.valid && rows <= kRows && (kRows == 1 || range.end <= load_index(row_offsets, batch));
  if constexpr (kRows > 1) {
#pragma unroll 1
    for (uint32_t i = 0; good && i < rows; ++i) {
      if (range.begin + i != row) good = request_of(row_offsets, batch, range.begin + i) == range.b;
    }
  }
  return {range.b, good ? range.begin : row, good ? rows : 1, good ? RowKind::claimed : RowKind::faulty};
}

// The tokens of request b, the `rows` that this step adds included; 2^32 - 1 where they cannot be counted.
template <bool kNewInLength, typename Cache>
__device__ __forceinline__ uint32_t tokens_with(const Cache& cache, uint32_t b, uint32_t rows) {
  const uint32_t tokens = cache.length(b);
  // The step's own tokens are in the cache by now.
  return kNewInLength ? tokens : tokens + min(rows, kU32Max - tokens);
}

// The whole of a request as one chunk. `MaskRange` says which tokens a row can see: first(position) and last(position, tokens).
template <bool kNewInLength, typename MaskRange, typename Cache>
__device__ __forceinline__ KvChunk whole_request(const Cache& cache, const Claim& claim, uint32_t most_tokens) {
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
  // Rows stand at tokens - rows and on; those before the first token see nothing.
  const uint32_t first = tokens > claim.rows ? tokens - claim.rows : 0;
  chunk.end = min(tokens == 0 ? 0 : MaskRange::last(tokens - 1, tokens), min(tokens, most_tokens));
  chunk.begin = min(max(held, MaskRange::first(first)), chunk.end);
  return chunk;
}

// What a plan is for. The GPU's blocks are `num_sm_parts` groups, each of as many as share a chunk: one a kv head and tile of
// columns.
struct PlanSizes {
  uint32_t num_sm_parts, max_rows, max_chunks, max_slots;
};

// What a workspace begins with: the call that it was planned for. Planner and kernel share `digest`, a constant of the
// operation and of all that its plans depend on.
struct alignas(16) PlanHeader {
  uint32_t magic, batch;
  uint64_t digest;
  uint32_t rows, num_sm_parts, max_rows, max_chunks;
  uint32_t max_slots, num_chunks;
  uint32_t nobodys, wrong_total;  // whether some rows are no request's, whether the last row offset is wrong
  uint32_t stamp;                 // of this plan: the sum of the requests' stamp_of
  uint32_t unused[3];

  static constexpr uint32_t kMagic = 0x6e6c706b;  // "kpln"

  __device__ __forceinline__ bool is_for(uint64_t operation, uint32_t requests, uint32_t num_rows, const PlanSizes& sizes) const {
    return magic == kMagic && digest == operation && batch == requests && rows == num_rows && num_sm_parts == sizes.num_sm_parts && max_rows == sizes.max_rows &&
           max_chunks == sizes.max_chunks && max_slots == sizes.max_slots && num_chunks <= max_chunks;
  }
};

// Where a workspace has what: see kvgen/runtime/workspace.py, which sizes it.
struct Plan {
  PlanHeader* header;
  uint32_t* starts;     // of each SM part's chunks, and their end, plus stamp_at() of the plan and the SM part
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

// What tells a request's work from another one's.
__device__ __forceinline__ uint32_t stamp_of(const KvChunk& whole) {
  const uint32_t words[] = {whole.b, whole.row, whole.rows, whole.tokens, whole.begin, whole.end, (uint32_t)whole.fault};
  uint32_t hash = 0;
  for (const uint32_t word : words) hash = (hash ^ word ^ hash >> 15) * 0x9e3779b1u;
  return hash;
}

// What entry `i` of a list carries, so that one which this plan did not write there is known: overwritten, stale or moved.
__device__ __forceinline__ uint32_t stamp_at(uint32_t stamp, uint32_t i) { return stamp + (i + 1) * 0x85ebca6bu; }

// The chunks [begin, end) of an SM part.
struct ChunkRange {
  uint32_t begin, end;
};

// The range of an SM part under a header that is for this call, false where it is not this plan's.
__device__ __forceinline__ bool read_range(ChunkRange& range, const Plan& plan, const PlanHeader& header, uint32_t sm_part) {
  range = {plan.starts[sm_part] - stamp_at(header.stamp, sm_part), plan.starts[sm_part + 1] - stamp_at(header.stamp, sm_part + 1)};
  return range.begin <= range.end && range.end <= header.num_chunks;
}

// Chunk `i` of a plan with this stamp, for a call of `batch` requests, `num_rows` rows and `max_slots` slots, which its header
// has too. One that is not this plan's becomes Fault::plan, without rows: nothing outside the call or the workspace follows
// from what lies there.
template <uint32_t kRows>
__device__ __forceinline__ KvChunk read_chunk(const Plan& plan, uint32_t stamp, uint32_t i, uint32_t batch, uint32_t num_rows, uint32_t max_slots) {
  const KvChunk chunk = plan.chunks[i];
  const bool inside = chunk.b < batch && chunk.rows - 1 < kRows && chunk.row < num_rows && chunk.rows <= num_rows - chunk.row;
  const bool placed = chunk.index < chunk.num_chunks && (chunk.num_chunks == 1 || (chunk.slot < max_slots && chunk.num_chunks <= max_slots - chunk.slot));
  const bool sees = chunk.begin <= chunk.end && chunk.end <= chunk.tokens && chunk.fault <= Fault::row_offsets;
  if (chunk.stamp == stamp_at(stamp, i) && inside && placed && sees) return chunk;
  return {0, 0, 0, 0, 0, 0, 0, 1, 0, Fault::plan, 0, 0};
}

// --- merging ---------------------------------------------------------------------------------------------------------------

// Partial results of more chunks than this are merged in groups of so many, and then the groups.
constexpr uint32_t kFanIn = 32;

__device__ __forceinline__ float load_partial(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
template <uint32_t N>
__device__ __forceinline__ void load_partials(Vec<float, N>& x, const float* p) {
  if constexpr (N == 4) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.e[0]), "=f"(x.e[1]), "=f"(x.e[2]), "=f"(x.e[3])
                 : "l"(p)
                 : "memory");
  } else {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) x.e[i] = load_partial(p + i);
  }
}

// A counter that nobody has counted on: neither zeros nor small numbers that something else left there.
constexpr uint32_t kIdle = 0x72746e63;  // "cntr"

// How a block stands among those that share a counter.
enum class Finished : uint8_t { early, last, miscounted };

// Publishes this block's writes and takes part in the count; who comes last sets the counter back for the next layer. A
// counter that counts more blocks than there are has been overwritten. All threads call it.
__device__ __forceinline__ Finished finish_among(uint32_t* counter, uint32_t blocks) {
  __threadfence();
  __syncthreads();
  uint32_t before = 0;
  if (threadIdx.x == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    before -= kIdle;
    if (before == blocks - 1) *counter = kIdle;
  }
  const bool ends = __syncthreads_or(threadIdx.x == 0 && before >= blocks - 1);
  __threadfence();
  if (!ends) return Finished::early;
  return __syncthreads_or(threadIdx.x == 0 && before >= blocks) ? Finished::miscounted : Finished::last;
}

// Factor that turns sums relative to `from` into sums relative to `to`; no tokens yet: 0.
__device__ __forceinline__ float rescale(float from, float to) { return from == -infinity() ? 0.0f : exp2_approx(from - to); }

// A partial result: for kCols columns the maximum (base 2), the sum, and kDim weighted sums; it begins at 16 bytes.
template <uint32_t kCols, uint32_t kDim>
struct Partial {
  static constexpr uint32_t kHead = (2 * kCols + 3) / 4 * 4;
  static constexpr uint32_t kFloats = (kHead + kCols * kDim + 3) / 4 * 4;
  __device__ static float* max(float* p) { return p; }
  __device__ static float* sum(float* p) { return p + kCols; }
  __device__ static float* out(float* p, uint32_t col, uint32_t dim) { return p + kHead + col * kDim + dim; }
};

// Adds what was summed relative to `max` to what is there. The sum of a faulty chunk is NaN, and so is what it is added to.
struct Running {
  float row_max = -infinity(), row_sum = 0.0f;
  // The factors of what was there, and of what is added.
  __device__ __forceinline__ Vec<float, 2> add(float max, float more) {
    const float higher = fmaxf(row_max, max), kept = rescale(row_max, higher), added = rescale(max, higher);
    row_max = higher;
    row_sum = row_sum * kept + more * added;
    return {kept, added};
  }
};

// Floats of shared memory that a merge needs: a weight a chunk, the maximum and the sum of each column.
template <uint32_t kCols>
constexpr uint32_t kMergeFloats = (kFanIn + 2) * kCols;

// Merges `count` partial results, `step` floats apart, in order: finish(col, dim, row_max, row_sum, kVec weighted sums). All
// threads call it. First a warp finds what a column's chunks weigh, a lane a chunk; then every thread sums, eight loads at a
// time.
template <uint32_t kThreads, uint32_t kCols, uint32_t kDim, uint32_t kVec, typename Finish>
__device__ __forceinline__ void merge_partials(float* first, uint64_t step, uint32_t count, uint32_t cols, float* scratch,
                                               const Finish& finish) {
  using P = Partial<kCols, kDim>;
  constexpr uint32_t kItems = 2;  // of a thread at once
  float *weights = scratch, *maxima = scratch + kFanIn * kCols, *sums = maxima + kCols;
  const uint32_t items = cols * (kDim / kVec), lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t base = 0; base < items; base += kItems * kThreads) {
    Running running[kItems];
    Vec<float, kVec> out[kItems] = {};
#pragma unroll 1
    for (uint32_t batch = 0; batch < count; batch += kFanIn) {
      const uint32_t here = min(kFanIn, count - batch);
      if (base == 0 || count > kFanIn) {
        __syncthreads();
        for (uint32_t col = threadIdx.x / 32; col < cols; col += kThreads / 32) {
          float* p = first + (batch + lane) * step;
          const float max = lane < here ? load_partial(P::max(p) + col) : -infinity(), more = lane < here ? load_partial(P::sum(p) + col) : 0.0f;
          float row_max = max;
#pragma unroll
          for (uint32_t n = 16; n > 0; n /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, n));
          const float weight = rescale(max, row_max);
          float row_sum = more * weight;  // of a faulty chunk NaN
#pragma unroll
          for (uint32_t n = 16; n > 0; n /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, n);
          weights[lane * kCols + col] = weight;
          if (lane == 0) maxima[col] = row_max;
          if (lane == 0) sums[col] = row_sum;
        }
        __syncthreads();
      }
#pragma unroll
      for (uint32_t n = 0; n < kItems; ++n) {
        const uint32_t i = base + n * kThreads + threadIdx.x;
        if (i >= items) break;
        const uint32_t col = i / (kDim / kVec), dim = i % (kDim / kVec) * kVec;
        const Vec<float, 2> scales = running[n].add(maxima[col], sums[col]);
        Vec<float, kVec> sum = {};
#pragma unroll 8
        for (uint32_t s = 0; s < here; ++s) {
          Vec<float, kVec> value;
          load_partials(value, P::out(first + (batch + s) * step, col, dim));
          const float weight = weights[s * kCols + col];
#pragma unroll
          for (uint32_t e = 0; e < kVec; ++e) sum.e[e] += value.e[e] * weight;
        }
#pragma unroll
        for (uint32_t e = 0; e < kVec; ++e) out[n].e[e] = out[n].e[e] * scales.e[0] + sum.e[e] * scales.e[1];
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kItems; ++n) {
      const uint32_t i = base + n * kThreads + threadIdx.x;
      if (i < items) finish(i / (kDim / kVec), i % (kDim / kVec) * kVec, running[n].row_max, running[n].row_sum, out[n]);
    }
  }
}

// After a chunk's partial result is in its slot: the last block of the request calls finish(col, dim, row_max, row_sum, sums)
// for all of it. `stride` is from one slot's result to the next, `counters` those of this kv head and tile, `each` apart;
// `scratch` has kMergeFloats in shared memory. Where a counter was overwritten nobody knows who is last: it is reported, and
// the blocks that see it share the results out and call finish with a sum of NaN.
template <uint32_t kThreads, uint32_t kCols, uint32_t kDim, uint32_t kVec, typename Finish>
__device__ __forceinline__ void merge_request(const KvChunk& chunk, float* partials, uint64_t stride, uint32_t* counters, uint32_t each,
                                              uint32_t cols, float* scratch, uint64_t* errors, const Finish& finish) {
  float* first = partials + chunk.slot * stride;
  const uint32_t group = chunk.index / kFanIn, groups = (chunk.num_chunks + kFanIn - 1) / kFanIn;
  // A group's counter is that of its first slot.
  const uint32_t in_group = min(kFanIn, chunk.num_chunks - group * kFanIn);
  uint32_t index = chunk.index % kFanIn, blocks = in_group;  // this block among those of the counter
  Finished finished = finish_among(counters + (uint64_t)(chunk.slot + group * kFanIn) * each, blocks);
  if (finished == Finished::last && groups > 1) {
    using P = Partial<kCols, kDim>;
    float* leader = first + (uint64_t)group * kFanIn * stride;
    if (in_group > 1) {
      // A thread writes where it alone has read; the maxima and sums have been read by all before the first of them.
      merge_partials<kThreads, kCols, kDim, kVec>(leader, stride, in_group, cols, scratch, [&](uint32_t col, uint32_t dim, float row_max, float row_sum, const Vec<float, kVec>& out) {
        *(Vec<float, kVec>*)P::out(leader, col, dim) = out;
        if (dim == 0) P::max(leader)[col] = row_max;
        if (dim == 0) P::sum(leader)[col] = row_sum;
      });
    }
    index = group, blocks = groups;
    // Chunks 1 of a request of several groups always exist, and their counters are free.
    finished = finish_among(counters + (uint64_t)(chunk.slot + 1) * each, blocks);
  }
  if (finished == Finished::early) return;
  const bool known = finished == Finished::last;
  if (!known && threadIdx.x == 0) report(errors, Fault::plan, 0, 0);
  const uint64_t step = groups > 1 ? kFanIn * stride : stride;
  merge_partials<kThreads, kCols, kDim, kVec>(first, step, known ? blocks : 0, cols, scratch, [&](uint32_t col, uint32_t dim, float row_max, float row_sum, const Vec<float, kVec>& out) {
    if (known || (col * kDim + dim) / kVec % blocks == index) finish(col, dim, row_max, known ? row_sum : nan_f32(), out);
  });
}
