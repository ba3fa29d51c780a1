// split_kv.cuh and merge.cuh: whose rows are whose, what a request's chunk is, what masks show, where a workspace has what, what of it is
// a plan's, and partial results merged.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/base/scan.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/attention/plan/split_kv.cuh"
#include "../../../templates/device/attention/common/merge.cuh"

// A thread a row, a block a list of offsets.
template <uint32_t kRows, typename Index>
__device__ __forceinline__ void claim(const Index* offsets, uint32_t batch, uint32_t num_rows, Vec<uint32_t, 4>* out) {
  const Claim found = claim_of<kRows>(offsets, batch, threadIdx.x, num_rows);
  out[threadIdx.x] = {found.b, found.begin, found.rows, (uint32_t)found.kind};
}
extern "C" __global__ void split_claims(const int32_t* offsets, const int64_t* wide, const uint32_t* counts, Vec<uint32_t, 4>* one, Vec<uint32_t, 4>* four,
                                       Vec<uint32_t, 4>* wide_four, Vec<uint32_t, 4>* none, uint32_t stride, uint32_t num_rows) {
  const uint32_t first = blockIdx.x * num_rows, batch = counts[blockIdx.x];
  claim<1>(offsets + blockIdx.x * stride, batch, num_rows, one + first);
  claim<4>(offsets + blockIdx.x * stride, batch, num_rows, four + first);
  claim<4>(wide + blockIdx.x * stride, batch, num_rows, wide_four + first);
  claim<3>((const int32_t*)nullptr, batch, num_rows, none + first);
}

// Tables of 40 tokens; those of a ring hold the last 6.
template <uint32_t kLast>
struct Cache {
  const int32_t* lengths;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ static uint32_t first_token(uint32_t n) { return n > kLast ? n - kLast : 0; }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n - first <= 40; }
};
struct Causal {
  __device__ static uint32_t first(uint32_t position) { return 0; }
  __device__ static uint32_t last(uint32_t position, uint32_t tokens) { return position + 1; }
};
struct Window {  // of 5 tokens, and what comes after
  __device__ static uint32_t first(uint32_t position) { return position < 4 ? 0 : position - 4; }
  __device__ static uint32_t last(uint32_t position, uint32_t tokens) { return tokens; }
};
// A thread a request, that has b % 4 rows more than one.
extern "C" __global__ void split_wholes(const int32_t* lengths, const uint32_t* kinds, const int32_t* most, KvChunk* after, KvChunk* before, KvChunk* window,
                                       KvChunk* ring) {
  const uint32_t b = threadIdx.x, n = load_index(most, b);
  const Claim claim = {b, 3 * b, b % 4 + 1, (RowKind)kinds[b]};
  after[b] = whole_request<true, Causal>(Cache<kU32Max>{lengths}, claim, n);
  before[b] = whole_request<false, Causal>(Cache<kU32Max>{lengths}, claim, n);
  window[b] = whole_request<true, Window>(Cache<kU32Max>{lengths}, claim, n);
  ring[b] = whole_request<false, Window>(Cache<6>{lengths}, claim, n);
}

// A thread a workspace: where what is in it begins, in bytes.
extern "C" __global__ void split_plans(uint8_t* workspace, const uint32_t* sizes, uint64_t* out) {
  const uint32_t* own = sizes + 5 * threadIdx.x;
  const Plan plan = plan_in(workspace, {own[0], own[1], own[2], own[3]}, own[4]);
  uint64_t* to = out + 6 * threadIdx.x;
  const uint64_t base = (uint64_t)workspace;
  to[0] = (uint64_t)plan.header - base, to[1] = (uint64_t)plan.starts - base, to[2] = (uint64_t)plan.row_kinds - base;
  to[3] = (uint64_t)plan.counters - base, to[4] = (uint64_t)plan.chunks - base, to[5] = (uint64_t)plan.partials - base;
}

// A thread a request: its tokens, the step's in its length or not.
extern "C" __global__ void split_tokens(const int32_t* lengths, const uint32_t* rows, uint32_t* after, uint32_t* before) {
  const uint32_t b = threadIdx.x;
  const Cache<kU32Max> cache = {lengths};
  after[b] = tokens_with<true>(cache, b, rows[b]);
  before[b] = tokens_with<false>(cache, b, rows[b]);
}

// A thread a header and the words of a call: whether the one is for the other, the header's sum, and a hash of the call.
extern "C" __global__ void split_headers(const PlanHeader* headers, const uint32_t* calls, uint32_t* out, uint32_t* sums, uint32_t* hashes) {
  const uint32_t* call = calls + 8 * threadIdx.x;
  const uint64_t digest = (uint64_t)call[1] << 32 | call[0];
  out[threadIdx.x] = headers[threadIdx.x].is_for(digest, call[2], call[3], {call[4], call[5], call[6], call[7]});
  sums[threadIdx.x] = headers[threadIdx.x].sum();
  hashes[threadIdx.x] = hash_of({call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7]});
}

extern "C" __global__ void split_stamps(const KvChunk* chunks, const uint32_t* places, uint32_t* of, uint32_t* at) {
  of[threadIdx.x] = stamp_of(chunks[threadIdx.x]);
  at[threadIdx.x] = stamp_at(of[threadIdx.x], places[threadIdx.x]);
}

// A block a list of starts, a thread an SM part: whether its range is the plan's, and the range if so.
extern "C" __global__ void split_ranges(uint32_t* starts, uint32_t* out, uint32_t stamp, uint32_t num_chunks) {
  Plan plan = {};
  plan.starts = starts + blockIdx.x * (blockDim.x + 1);
  PlanHeader header = {};
  header.stamp = stamp, header.num_chunks = num_chunks;
  ChunkRange range;
  const bool good = read_range(range, plan, header, threadIdx.x);
  uint32_t* to = out + 3 * (blockIdx.x * blockDim.x + threadIdx.x);
  to[0] = good, to[1] = good ? range.begin : 0, to[2] = good ? range.end : 0;
}

// A thread a chunk of up to 4 rows.
extern "C" __global__ void split_chunks(KvChunk* chunks, KvChunk* out, uint32_t stamp, uint32_t batch, uint32_t num_rows, uint32_t max_slots) {
  Plan plan = {};
  plan.chunks = chunks;
  out[threadIdx.x] = read_chunk<4>(plan, stamp, threadIdx.x, batch, num_rows, max_slots);
}

// [what][i]: the factor between maxima; a running maximum and sum, and its factors, of a thread's 8 chunks.
extern "C" __global__ void split_running(const float* maxima, const float* sums, float* factors, Vec<float, 4>* out) {
  const uint32_t i = threadIdx.x;
  factors[i] = rescale(maxima[i], maxima[i ^ 1]);
  Running running;
  for (uint32_t n = 0; n < 8; ++n) {
    const Vec<float, 2> by = running.add(maxima[n * 32 + i], sums[n * 32 + i]);
    out[n * 32 + i] = {running.row_max, running.row_sum, by.e[0], by.e[1]};
  }
}

extern "C" __global__ void split_loads(const float* in, float* out) {
  const uint32_t i = threadIdx.x;
  out[i] = load_partial(in + i);
  load_partials(*(Vec<float, 1>*)(out + 32 + i), in + i);
  load_partials(*(Vec<float, 2>*)(out + 64 + 2 * i), in + 2 * i);
  load_partials(*(Vec<float, 4>*)(out + 128 + 4 * i), in + 4 * i);
}

// Groups of 3 blocks, of `blocks` that share a counter: how often each thread came out how; the last adds what each has left.
extern "C" __global__ void split_last(uint32_t* counters, const uint32_t* blocks, uint32_t* cells, uint32_t* sums, uint32_t* times) {
  const uint32_t group = blockIdx.x / 3;
  if (threadIdx.x == 33) cells[blockIdx.x] = blockIdx.x * blockIdx.x + 7;
  const Finished finished = sync_finish_among(counters + 2 * group, blocks[group]);
  atomicAdd(&times[3 * group + (uint32_t)finished], 1);
  if (finished == Finished::last && threadIdx.x < 3) atomicAdd(&sums[group], ((volatile uint32_t*)cells)[3 * group + threadIdx.x]);
}

// What a block's 96 threads exchange and say, and what its first 64 do, beside whom the others go on: of each thread what the one opposite
// wrote, and whether anybody's flag is set.
extern "C" __global__ void __launch_bounds__(96) split_meetings(const uint32_t* flags, Vec<uint32_t, 4>* out) {
  using First = FirstThreads<3, 64>;
  __shared__ uint32_t all[96], first[64];
  const uint32_t i = threadIdx.x, flag = flags[blockIdx.x * 96 + i];
  all[i] = blockIdx.x * 1000 + i;
  AllThreads::sync();
  Vec<uint32_t, 4> found = {all[95 - i], AllThreads::sync_or(flag != 0), 0, 0};
  if (i < 64) {
    first[i] = blockIdx.x * 1000 + 500 + i;
    First::sync();
    found.e[2] = first[63 - i];
    found.e[3] = First::sync_or(flag != 0);
  }
  out[blockIdx.x * 96 + i] = found;
}

// Where the numbers of a partial result are: its maxima, sums and sums by weights, column by column.
template <typename Out>
__device__ __forceinline__ void put(float* to, const float* from) {
  using P = Partial<Out>;
  for (uint32_t col = threadIdx.x; col < Out::kCols; col += Out::kThreads) {
    *(P::max(to) + col) = from[col * (2 + Out::kDim)];
    *(P::sum(to) + col) = from[col * (2 + Out::kDim) + 1];
    for (uint32_t dim = 0; dim < Out::kDim; ++dim) *P::out(to, col, dim) = from[col * (2 + Out::kDim) + 2 + dim];
  }
}
// What a column comes to, [2 + dims]; a sum of NaN where its request failed.
template <typename Out>
__device__ __forceinline__ void put_column(float* to, uint32_t dim, const ColumnSums<Out::kVec>& sums) {
  if (dim == 0) to[0] = sums.row_max, to[1] = sums.failed ? nan_f32() : sums.row_sum;
  for (uint32_t n = 0; n < Out::kVec; ++n) to[2 + dim + n] = sums.out.e[n];
}

template <uint32_t kT, uint32_t kC, uint32_t kD, uint32_t kV, uint32_t kBlocks = 1, uint32_t kOfTeams = 1>
struct Results {
  static constexpr uint32_t kThreads = kT, kTeams = kOfTeams, kCols = kC, kDim = kD, kVec = kV, kColumnBlocks = kBlocks;
};

// One block: more numbers than its threads sum at once, of fewer chunks than a warp weighs at once, and of more. What a column comes to
// is [column][2 + dims].
template <typename Out>
__device__ __forceinline__ void merged(const float* in, float* partials, uint32_t count, uint32_t cols, float* out) {
  using P = Partial<Out>;
  __shared__ float scratch[kMergeFloats<Out::kCols>];
  for (uint32_t s = 0; s < count; ++s) put<Out>(partials + s * (P::kFloats + 4), in + s * Out::kCols * (2 + Out::kDim));
  __syncthreads();
  merge_partials<Out>(KvChunk::unclaimed(0), partials, P::kFloats + 4, count, cols, scratch,
                      [&](const KvChunk&, uint32_t col, uint32_t dim, const ColumnSums<Out::kVec>& sums) {
                        put_column<Out>(out + col * (2 + Out::kDim), dim, sums);
                      });
}
extern "C" __global__ void split_partials(const float* pairs, const float* fours, float* pair_partials, float* four_partials, float* pairs_to, float* fours_to) {
  merged<Results<64, 2, 140, 2>>(pairs, pair_partials, 7, 2, pairs_to);
  merged<Results<64, 3, 260, 4>>(fours, four_partials, 40, 2, fours_to);
}

// What chunks weigh, by one warp, in 2 of 3 columns: [chunk][column], then the columns' maxima and sums.
extern "C" __global__ void split_weights(const float* in, float* partials, float* out) {
  using Out = Results<32, 3, 4, 4>;
  __shared__ float scratch[kMergeFloats<3>];
  for (uint32_t i = threadIdx.x; i < kMergeFloats<3>; i += 32) scratch[i] = 77.0f;
  for (uint32_t s = 0; s < 11; ++s) put<Out>(partials + s * Partial<Out>::kFloats, in + s * 18);
  __syncthreads();
  weigh_partials<Out>(scratch, partials, Partial<Out>::kFloats, 11, 2);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kMergeFloats<3>; i += 32) out[i] = scratch[i];
}

// A block a chunk, of 3 columns of 4 dims of which 2 are used; the second of two kv heads.
template <typename Out>
__device__ __forceinline__ void requests(const float* in, const Vec<uint32_t, 4>* chunks, float* partials, uint32_t* counters, uint64_t* errors, float* out, uint32_t* times) {
  __shared__ float scratch[kMergeFloats<3>];
  const Vec<uint32_t, 4> own = chunks[blockIdx.x];
  KvChunk chunk = {};
  chunk.b = own.e[0], chunk.index = own.e[1], chunk.num_chunks = own.e[2], chunk.slot = own.e[3];
  const Partials<Out> mine = {partials + Partial<Out>::kFloats, counters + 1};
  put<Out>(mine.at(chunk.slot + chunk.index), in + blockIdx.x * 18);
  merge_request<Out>(chunk, mine, 2, scratch, errors, [&](const KvChunk& of, uint32_t col, uint32_t dim, const ColumnSums<4>& sums) {
    put_column<Out>(out + (of.b * 2 + col) * 6, dim, sums);
    atomicAdd(&times[of.b], 1);
  });
}
extern "C" __global__ void split_requests(const float* in, const Vec<uint32_t, 4>* chunks, float* partials, uint32_t* counters, uint64_t* errors, float* out,
                                         uint32_t* times) {
  requests<Results<32, 3, 4, 4, 2>>(in, chunks, partials, counters, errors, out, times);
}
// The same by the first 64 of 96 threads; the others wait for them meanwhile, at a barrier that all come to.
struct FirstResults : Results<64, 3, 4, 4, 2> {
  static constexpr uint32_t kBarrier = 3;
};
extern "C" __global__ void __launch_bounds__(96) split_first_requests(const float* in, const Vec<uint32_t, 4>* chunks, float* partials, uint32_t* counters, uint64_t* errors,
                                                                     float* out, uint32_t* times) {
  if (threadIdx.x < 64) requests<FirstResults>(in, chunks, partials, counters, errors, out, times);
  FirstThreads<4, 96>::sync();
}

// Three teams' sums, [block][team][column][2 + dims], together, to slot 1 + block of a workspace, where both blocks of a chunk have one;
// the last column's request failed. A number to the slot's counter.
extern "C" __global__ void split_teams(const float* in, uint8_t* workspace) {
  using Out = Results<64, 3, 8, 4, 2, 3>;
  struct Merged {
    float max[3][3], sum[3][3];
    alignas(16) float out[3][3][8 + 4];
  };
  __shared__ Merged held;
  for (uint32_t i = threadIdx.x; i < 90; i += 64) {
    const uint32_t team = i / 30, col = i / 10 % 3, at = i % 10;
    (at == 0 ? held.max[team][col] : at == 1 ? held.sum[team][col] : held.out[team][col][at - 2]) = in[blockIdx.x * 90 + i];
  }
  __syncthreads();
  const Partials<Out> partials = partials_in<Out>(workspace, {2, 5, 2, 3}, blockIdx.x);
  const uint32_t slot = 1 + blockIdx.x, i = threadIdx.x;
  if (i == 0) *partials.counter(slot) = 0x40400000u + blockIdx.x * 0x200000u;
  if (i < 6) store_partial<Out>(partials.at(slot), i / 2, i % 2 * 4, merge_teams<Out>(held, i / 2, i % 2 * 4, i / 2 == 2));
}

// A block an SM part of 7, of a workspace of 128 bytes: what it does of the plan, and the kind of each of 11 rows.
extern "C" __global__ void split_parts(uint8_t* workspaces, uint64_t* errors, uint32_t* out) {
  const uint32_t block = blockIdx.y * 7 + blockIdx.x;
  const PlannedPart part = read_plan<2>(workspaces + 128 * blockIdx.y, {7, 12, 40, 30}, 0x0123456789abcdefull, 5, 11, blockIdx.x, errors + block);
  uint32_t* to = out + 16 * block;
  to[threadIdx.x] = (uint32_t)part.kind_of(threadIdx.x);
  if (threadIdx.x != 0) return;
  to[11] = part.planned, to[12] = part.has_unclaimed, to[13] = part.begin < part.end ? part.begin : 0, to[14] = part.end - part.begin, to[15] = part.stamp;
}

// A thread a position and tokens: what each mask shows of them.
template <typename M>
__device__ __forceinline__ void mask(const Vec<uint32_t, 2>& in, uint32_t* to) {
  to[0] = M::first(in.e[0]), to[1] = M::last(in.e[0], in.e[1]), to[2] = M::kEarlyRowsSee;
}
extern "C" __global__ void split_masks(const Vec<uint32_t, 2>* in, uint32_t* out) {
  uint32_t* to = out + 12 * threadIdx.x;
  mask<CausalMask>(in[threadIdx.x], to);
  mask<WindowMask<5>>(in[threadIdx.x], to + 3);
  mask<FullMask>(in[threadIdx.x], to + 6);
  mask<ChunkMask<6>>(in[threadIdx.x], to + 9);
}

// Rounds of sums, of two types: [round][thread] before, then all.
template <uint32_t kThreads>
__device__ __forceinline__ void scans(const uint64_t* in, uint64_t* wide, uint32_t* narrow) {
  for (uint32_t round = 0; round < 3; ++round) {
    const uint32_t i = round * kThreads + threadIdx.x;
    uint64_t all;
    uint32_t narrow_all;
    wide[2 * i] = sync_scan<kThreads>(in[i], all);
    wide[2 * i + 1] = all;
    narrow[2 * i] = sync_scan<kThreads>((uint32_t)in[i], narrow_all);
    narrow[2 * i + 1] = narrow_all;
  }
}
extern "C" __global__ void split_scans_32(const uint64_t* in, uint64_t* wide, uint32_t* narrow) { scans<32>(in, wide, narrow); }
extern "C" __global__ void split_scans_512(const uint64_t* in, uint64_t* wide, uint32_t* narrow) { scans<512>(in, wide, narrow); }
