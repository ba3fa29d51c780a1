// Partial results of a request's chunks, and their merge.
//
// A block stores the partial result of its chunk in the workspace, in f32, and counts. The block that counts last among kFanIn
// neighbouring chunks merges them. If a request has several such groups, the last of the merging blocks merges the groups.
// Partial results lie in neighbouring slots, in token order, and are merged in that order, whichever block finishes last. So a
// request's bits do not depend on the order of blocks.
//
// `Out` names the numbers of a kernel's results: kThreads of a block; kTeams, the warp groups with results of their own; kCols
// columns; kDim dims of a column; kVec dims that a thread handles at once; kColumnBlocks blocks that share a chunk. If the block
// has more than kThreads threads, its first kThreads meet at named barrier kBarrier.
#pragma once

#include "columns.cuh"
#include "../plan/split_kv.cuh"

// The most partial results of one merge; more chunks are merged in groups of so many, then the groups.
constexpr uint32_t kFanIn = 32;

__device__ __forceinline__ float load_partial(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
template <uint32_t N>
__device__ __forceinline__ void load_partials(Vec<float, N>& x, const float* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (uint32_t i = 0; i < N; i += 4)
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.e[i]), "=f"(x.e[i + 1]), "=f"(x.e[i + 2]), "=f"(x.e[i + 3]) : "l"(p + i) : "memory");
  } else {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) x.e[i] = load_partial(p + i);
  }
}

// An idle counter: a value unlike zeros and small numbers that other data may have left there.
constexpr uint32_t kIdle = 0x72746e63;  // "cntr"

// Threads that meet: all of a block, or its first kThreads at a barrier of their own.
struct AllThreads {
  __device__ static __forceinline__ void sync() { __syncthreads(); }
  __device__ static __forceinline__ bool sync_or(bool x) { return __syncthreads_or(x); }
};
template <uint32_t kBarrier, uint32_t kThreads>
struct FirstThreads {
  __device__ static __forceinline__ void sync() { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory"); }
  __device__ static __forceinline__ bool sync_or(bool x) {
    uint32_t any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"((uint32_t)x), "n"(kBarrier), "n"(kThreads)
                 : "memory");
    return any != 0;
  }
};
template <typename Out, typename = const uint32_t>
struct OutThreads {
  using Type = AllThreads;
};
template <typename Out>
struct OutThreads<Out, decltype(Out::kBarrier)> {
  using Type = FirstThreads<Out::kBarrier, Out::kThreads>;
};
template <typename Out>
using ThreadsOf = typename OutThreads<Out>::Type;

// A block's rank among the blocks that share a counter.
enum class Finished : uint8_t { early, last, miscounted };

// Publishes this block's writes and counts it; the last block sets the counter back for the next layer. A counter above the
// number of blocks has been overwritten. All threads call it.
template <typename Threads = AllThreads>
__device__ __forceinline__ Finished sync_finish_among(uint32_t* counter, uint32_t blocks) {
  __threadfence();
  Threads::sync();
  uint32_t before = 0;
  if (threadIdx.x == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    before -= kIdle;
    if (before == blocks - 1) *counter = kIdle;
  }
  const bool ends = Threads::sync_or(threadIdx.x == 0 && before >= blocks - 1);
  __threadfence();
  if (!ends) return Finished::early;
  return Threads::sync_or(threadIdx.x == 0 && before >= blocks) ? Finished::miscounted : Finished::last;
}

// A partial result: row_max, row_sum and kDim sums of each of kCols columns, aligned to 16 bytes.
template <typename Out>
struct Partial {
  static constexpr uint32_t kHead = (2 * Out::kCols + 3) / 4 * 4;
  static constexpr uint32_t kFloats = (kHead + Out::kCols * Out::kDim + 3) / 4 * 4;
  __device__ static float* max(float* p) { return p; }
  __device__ static float* sum(float* p) { return p + Out::kCols; }
  __device__ static float* out(float* p, uint32_t col, uint32_t dim) { return p + kHead + col * Out::kDim + dim; }
};

// The partial results and counters of one of the kColumnBlocks blocks that share a chunk: `at(slot)`, kStride floats apart.
template <typename Out>
struct Partials {
  static constexpr uint64_t kStride = (uint64_t)Out::kColumnBlocks * Partial<Out>::kFloats;
  float* first;
  uint32_t* counters;

  __device__ __forceinline__ float* at(uint32_t slot) const { return first + slot * kStride; }
  __device__ __forceinline__ uint32_t* counter(uint32_t slot) const { return counters + (uint64_t)slot * Out::kColumnBlocks; }
};
template <typename Out>
__device__ __forceinline__ Partials<Out> partials_in(uint8_t* workspace, const PlanSizes& sizes, uint32_t column_block) {
  const Plan plan = plan_in(workspace, sizes, Out::kColumnBlocks);
  return {plan.partials + column_block * Partial<Out>::kFloats, plan.counters + column_block};
}

// Column `col`'s sums from `dim` on as the partial result at `to`; of a request that failed row_sum is NaN there.
template <typename Out>
__device__ __forceinline__ void store_partial(float* to, uint32_t col, uint32_t dim, const ColumnSums<Out::kVec>& sums) {
  if (dim == 0) Partial<Out>::max(to)[col] = sums.row_max;
  if (dim == 0) Partial<Out>::sum(to)[col] = sums.failed ? nan_f32() : sums.row_sum;
  *(Vec<float, Out::kVec>*)Partial<Out>::out(to, col, dim) = sums.out;
}

// The merged result of the block's kTeams teams, from shared memory, for column `col` and dims from `dim` on.
template <typename Out, typename Merged>
__device__ __forceinline__ ColumnSums<Out::kVec> merge_teams(const Merged& merged, uint32_t col, uint32_t dim, bool failed) {
  ColumnSums<Out::kVec> sums = no_sums<Out::kVec>(failed);
#pragma unroll
  for (uint32_t t = 0; t < Out::kTeams; ++t) sums.row_max = fmaxf(sums.row_max, merged.max[t][col]);
#pragma unroll
  for (uint32_t t = 0; t < Out::kTeams; ++t) {
    const float shrink = rescale(merged.max[t][col], sums.row_max);
    sums.row_sum += merged.sum[t][col] * shrink;
    const Vec<float, Out::kVec> theirs = *(const Vec<float, Out::kVec>*)&merged.out[t][col][dim];
#pragma unroll
    for (uint32_t n = 0; n < Out::kVec; ++n) sums.out.e[n] += theirs.e[n] * shrink;
  }
  return sums;
}

// Adds sums relative to `max` to the sums so far. The sum of a faulty chunk is NaN, and makes the result NaN.
struct Running {
  float row_max = -infinity(), row_sum = 0.0f;
  // Factors of the sums so far, and of the added sums.
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

// Weights of chunks in each column, a lane a chunk and a warp a column in turn: `here` partial results from `first` on, `step`
// floats apart. To shared memory: weights[kFanIn][kCols], then row_max and row_sum of each column.
template <typename Out>
__device__ __forceinline__ void weigh_partials(float* scratch, float* first, uint64_t step, uint32_t here, uint32_t cols) {
  const uint32_t lane = threadIdx.x % 32;
  float *maxima = scratch + kFanIn * Out::kCols, *sums = maxima + Out::kCols;
  for (uint32_t col = threadIdx.x / 32; col < cols; col += Out::kThreads / 32) {
    float* p = first + lane * step;
    const float max = lane < here ? load_partial(Partial<Out>::max(p) + col) : -infinity(), more = lane < here ? load_partial(Partial<Out>::sum(p) + col) : 0.0f;
    float row_max = max;
#pragma unroll
    for (uint32_t n = 16; n > 0; n /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, n));
    const float weight = rescale(max, row_max);
    float row_sum = more * weight;  // of a faulty chunk NaN
#pragma unroll
    for (uint32_t n = 16; n > 0; n /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, n);
    scratch[lane * Out::kCols + col] = weight;
    if (lane == 0) maxima[col] = row_max;
    if (lane == 0) sums[col] = row_sum;
  }
}

// Merges `count` partial results, `step` floats apart, in order: finish(chunk, col, dim, sums). All threads call it; it has
// barriers. First a warp computes the weights of a column's chunks, then every thread sums, eight loads at a time.
template <typename Out, typename Finish>
__device__ __forceinline__ void merge_partials(const KvChunk& chunk, float* first, uint64_t step, uint32_t count, uint32_t cols, float* scratch, const Finish& finish) {
  constexpr uint32_t kItems = 2, kVecs = Out::kDim / Out::kVec;  // items of a thread at once; vectors of a column
  const float *maxima = scratch + kFanIn * Out::kCols, *row_sums = maxima + Out::kCols;
  const uint32_t items = cols * kVecs;
#pragma unroll 1
  for (uint32_t base = 0; base < items; base += kItems * Out::kThreads) {
    Running running[kItems];
    Vec<float, Out::kVec> out[kItems] = {};
#pragma unroll 1
    for (uint32_t batch = 0; batch < count; batch += kFanIn) {
      const uint32_t here = min(kFanIn, count - batch);
      if (base == 0 || count > kFanIn) {
        ThreadsOf<Out>::sync();
        weigh_partials<Out>(scratch, first + batch * step, step, here, cols);
        ThreadsOf<Out>::sync();
      }
#pragma unroll
      for (uint32_t n = 0; n < kItems; ++n) {
        const uint32_t i = base + n * Out::kThreads + threadIdx.x;
        if (i >= items) break;
        const uint32_t col = i / kVecs, dim = i % kVecs * Out::kVec;
        const Vec<float, 2> scales = running[n].add(maxima[col], row_sums[col]);
        Vec<float, Out::kVec> sum = {};
#pragma unroll 8
        for (uint32_t s = 0; s < here; ++s) {
          Vec<float, Out::kVec> value;
          load_partials(value, Partial<Out>::out(first + (batch + s) * step, col, dim));
          const float weight = scratch[s * Out::kCols + col];
#pragma unroll
          for (uint32_t e = 0; e < Out::kVec; ++e) sum.e[e] += value.e[e] * weight;
        }
#pragma unroll
        for (uint32_t e = 0; e < Out::kVec; ++e) out[n].e[e] = out[n].e[e] * scales.e[0] + sum.e[e] * scales.e[1];
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kItems; ++n) {
      const uint32_t i = base + n * Out::kThreads + threadIdx.x;
      if (i < items) finish(chunk, i / kVecs, i % kVecs * Out::kVec, ColumnSums<Out::kVec>{running[n].row_max, running[n].row_sum, out[n], running[n].row_sum != running[n].row_sum});
    }
  }
}

// After a chunk's partial result is in its slot: the last block of the request calls finish(chunk, col, dim, sums) for all of
// it. `scratch` has kMergeFloats in shared memory. All threads call it; it has barriers. If a counter was overwritten, no
// block is known to be the last: Fault::plan; the blocks that see it divide the columns and finish them as failed.
template <typename Out, typename Finish>
__device__ __forceinline__ void merge_request(const KvChunk& chunk, const Partials<Out>& partials, uint32_t cols, float* scratch, uint64_t* errors,
                                              const Finish& finish) {
  float* first = partials.at(chunk.slot);
  const uint32_t group = chunk.index / kFanIn, groups = (chunk.num_chunks + kFanIn - 1) / kFanIn;
  // A group's counter is the counter of its first slot.
  const uint32_t in_group = min(kFanIn, chunk.num_chunks - group * kFanIn);
  uint32_t index = chunk.index % kFanIn, blocks = in_group;  // this block among those of the counter
  Finished finished = sync_finish_among<ThreadsOf<Out>>(partials.counter(chunk.slot + group * kFanIn), blocks);
  if (finished == Finished::last && groups > 1) {
    float* leader = first + (uint64_t)group * kFanIn * partials.kStride;
    if (in_group > 1) {
      // A thread overwrites only values that it alone has read. All threads have read the maxima and sums before the first write.
      merge_partials<Out>(chunk, leader, partials.kStride, in_group, cols, scratch,
                          [&](const KvChunk&, uint32_t col, uint32_t dim, const ColumnSums<Out::kVec>& sums) { store_partial<Out>(leader, col, dim, sums); });
    }
    index = group, blocks = groups;
    // Chunks 1 of a request of several groups always exist, and their counters are free.
    finished = sync_finish_among<ThreadsOf<Out>>(partials.counter(chunk.slot + 1), blocks);
  }
  if (finished == Finished::early) return;
  const bool known = finished == Finished::last;
  if (!known && threadIdx.x == 0) report(errors, Fault::plan, 0, 0);
  const uint64_t step = groups > 1 ? kFanIn * partials.kStride : partials.kStride;
  merge_partials<Out>(chunk, first, step, known ? blocks : 0, cols, scratch,
                      [&](const KvChunk&, uint32_t col, uint32_t dim, const ColumnSums<Out::kVec>& sums) {
                        if (known || (col * Out::kDim + dim) / Out::kVec % blocks == index)
                          finish(chunk, col, dim, ColumnSums<Out::kVec>{sums.row_max, sums.row_sum, sums.out, !known || sums.failed});
                      });
}
