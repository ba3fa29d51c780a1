// Prefix sums over the requests of a batch, and what a step's offsets say about one of them.
#pragma once

// Offsets that a block keeps in shared memory, where a binary search makes no trips to global memory.
constexpr uint32_t kHeldOffsets = 1024;

// The largest sum that an index array can hold: below kU32Max, which load_index returns for an invalid index.
__device__ constexpr uint64_t largest_index(uint32_t) { return kU32Max - 1; }
__device__ constexpr uint64_t largest_index(int32_t) { return 0x7fffffffu; }
__device__ constexpr uint64_t largest_index(int64_t) { return kU32Max - 1; }

// The sum of every thread's `earlier`, and of `x` of the threads before this one. All threads call it, once a kernel.
template <uint32_t kThreads>
__device__ __forceinline__ uint64_t sync_sum_before(uint64_t earlier, uint64_t x) {
  constexpr uint32_t kWarps = kThreads / 32;
  __shared__ uint64_t earlier_of[kWarps], sum_of[kWarps];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint64_t sum = x;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint64_t lower = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += lower;
    earlier += __shfl_xor_sync(~0u, earlier, step);
  }
  if (lane == 31) {
    earlier_of[warp] = earlier;
    sum_of[warp] = sum;
  }
  __syncthreads();
  uint64_t others = 0;
  if (lane < kWarps) others = earlier_of[lane] + (lane < warp ? sum_of[lane] : 0);
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) others += __shfl_xor_sync(~0u, others, step);
  return others + sum - x;
}

// The sum of `x` of the threads before this one, and of all. All threads call it, as often as they like.
template <uint32_t kThreads, typename T>
__device__ __forceinline__ T sync_scan(T x, T& total) {
  constexpr uint32_t kWarps = kThreads / 32;
  __shared__ T sums[kWarps];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T sum = x;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += lower;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  T before = lane < kWarps ? sums[lane] : 0;
  total = before;
  if (lane >= warp) before = 0;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    before += __shfl_xor_sync(~0u, before, step);
    total += __shfl_xor_sync(~0u, total, step);
  }
  return before + sum - x;
}

// body(offsets), with them in shared memory where they fit, as load_index gives them. All threads of the block call it.
template <uint32_t kThreads, typename Index, typename Body>
__device__ __forceinline__ void sync_with_offsets(const Index* offsets, uint32_t batch, const Body& body) {
  __shared__ uint32_t held[kHeldOffsets];
  if (batch < kHeldOffsets) {
    for (uint32_t i = threadIdx.x; i <= batch; i += kThreads) held[i] = load_index(offsets, i);
    __syncthreads();
    body((const uint32_t*)held);
  } else {
    body(offsets);
  }
}

// Something counted for a request; 0 where lengths or offsets contradict each other.
struct Counted {
  uint32_t count;
  Fault fault;
};

// A count as an index array has it.
__device__ __forceinline__ Counted counted(uint32_t count) {
  return {count == kU32Max ? 0 : count, count == kU32Max ? Fault::length : Fault::none};
}

// Entry i where entries are compared with each other: a negative one is above every index, which is_index tells of the largest.
__device__ __forceinline__ uint32_t load_unsigned(const uint32_t* p, uint64_t i) { return p[i]; }
__device__ __forceinline__ uint32_t load_unsigned(const int32_t* p, uint64_t i) { return (uint32_t)p[i]; }
__device__ __forceinline__ uint32_t load_unsigned(const int64_t* p, uint64_t i) { return load_index(p, i); }
template <typename Index>
__device__ __forceinline__ bool is_index(uint32_t x) {
  return sizeof(Index) == 4 && (Index)-1 < (Index)0 ? (int32_t)x >= 0 : x != kU32Max;
}

// New rows of request b by its offsets, none without offsets. They count if those around them do not decrease, as for range_of.
template <typename Index>
__device__ __forceinline__ Counted new_rows_of(const Index* offsets, uint32_t batch, uint32_t b) {
  if (offsets == nullptr) return {0, Fault::none};
  const uint32_t begin = load_unsigned(offsets, b), end = load_unsigned(offsets, b + 1);
  const uint32_t before = b > 0 ? load_unsigned(offsets, b - 1) : begin;
  const uint32_t after = b + 2 <= batch ? load_unsigned(offsets, b + 2) : end;
  const bool valid = before <= begin && begin <= end && end <= after && is_index<Index>(end);
  return {valid ? end - begin : 0, valid ? Fault::none : Fault::row_offsets};
}

// Tokens of request b, this step's included; kBefore: lengths do not count those.
template <bool kBefore, typename Cache, typename Index>
__device__ __forceinline__ Counted tokens_of(const Cache& cache, const Index* offsets, uint32_t b) {
  const uint32_t length = cache.length(b);
  const Counted rows = new_rows_of(offsets, cache.batch, b);
  if (rows.fault != Fault::none) return rows;
  if (bad_length<!kBefore>(length, rows.count)) return {0, Fault::length};
  return {kBefore ? length + rows.count : length, Fault::none};
}

// Pages of a request, and how many tokens its last one has.
struct Pages {
  uint32_t count;
  Fault fault;
  uint32_t last;
};

// The pages of a request's tokens, this step's included.
template <bool kBefore, typename Cache, typename Index>
__device__ __forceinline__ Pages pages_of_tokens(const Cache& cache, const Index* offsets, uint32_t b) {
  const Counted tokens = tokens_of<kBefore>(cache, offsets, b);
  if (tokens.count == 0) return {0, tokens.fault, 0};
  if (!cache.holds(b, 0, tokens.count)) return {0, Fault::length, 0};
  return {(tokens.count - 1) / cache.page_tokens + 1, Fault::none, (tokens.count - 1) % cache.page_tokens + 1};
}

// The pages of a request's slice of a list.
template <typename Cache>
__device__ __forceinline__ Counted pages_of_slice(const Cache& cache, uint32_t b) {
  const uint32_t begin = load_index(cache.page_indptr, b), end = load_index(cache.page_indptr, b + 1);
  if (end < begin || end > cache.num_indices) return {0, Fault::table};
  return {end - begin, Fault::none};
}

// The fault of a page whose id is outside the pool.
template <typename PageIds>
__device__ __forceinline__ Fault fault_of(const PageIds& ids) {
  return ids.fault != Fault::none ? ids.fault : Fault::page_id;
}

// The first token of page i, as far as error words count.
__device__ __forceinline__ uint32_t token_at(uint32_t i, uint32_t page_tokens) {
  const uint64_t token = (uint64_t)i * page_tokens;
  return token < kU32Max ? (uint32_t)token : kU32Max;
}
