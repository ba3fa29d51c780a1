// scan.cuh: sums over a batch, and what lengths and offsets say of each of its requests.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/base/scan.cuh"

// Pages of 8 tokens; a request's table has so many, or its slice of a list.
struct Cache {
  const int32_t* lengths;
  const int32_t* page_indptr;
  uint32_t batch, num_indices, page_tokens, table_pages;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n <= table_pages * page_tokens; }
};

// Sums of the threads before, on top of all that a block has seen earlier.
template <uint32_t kThreads>
__device__ __forceinline__ void sums(const uint64_t* earlier, const uint64_t* in, uint64_t* out) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = sync_sum_before<kThreads>(earlier[i], in[i]);
}
extern "C" __global__ void scan_sums_32(const uint64_t* earlier, const uint64_t* in, uint64_t* out) { sums<32>(earlier, in, out); }
extern "C" __global__ void scan_sums_1024(const uint64_t* earlier, const uint64_t* in, uint64_t* out) { sums<1024>(earlier, in, out); }

// Where rows are in a batch whose offsets fit shared memory, and in one whose do not; the first of them as well.
extern "C" __global__ void scan_offsets(const int32_t* offsets, const int32_t* many, uint32_t* out) {
  const uint32_t i = threadIdx.x;
  sync_with_offsets<64>(offsets, 1023, [&](const auto* held) { out[i] = request_of(held, 1023, i * 16) << 1 | ((const void*)held != offsets); });
  sync_with_offsets<64>(many, 1024, [&](const auto* held) { out[64 + i] = request_of(held, 1024, i * 16) << 1 | ((const void*)held != many); });
}

// A thread a request: what it is counted as, and why not.
template <bool kBefore>
__device__ __forceinline__ void counts(const Cache& cache, const int32_t* offsets, uint32_t b, uint32_t* out) {
  const Counted rows = new_rows_of(offsets, cache.batch, b), tokens = tokens_of<kBefore>(cache, offsets, b);
  const Pages pages = pages_of_tokens<kBefore>(cache, offsets, b);
  out[0] = rows.count, out[1] = (uint32_t)rows.fault;
  out[2] = tokens.count, out[3] = (uint32_t)tokens.fault;
  out[4] = pages.count, out[5] = (uint32_t)pages.fault, out[6] = pages.last;
}
struct Ids {
  uint32_t id;
  Fault fault;
};
extern "C" __global__ void scan_counts(const int32_t* offsets, const int32_t* lengths, const int32_t* indptr, uint32_t* before, uint32_t* after,
                                       uint32_t* none, uint32_t* slices) {
  const uint32_t b = threadIdx.x;
  const Cache cache = {lengths, indptr, 32, 70, 8, 5};
  counts<true>(cache, offsets, b, before + 7 * b);
  counts<false>(cache, offsets, b, after + 7 * b);
  counts<true>(cache, (const int32_t*)nullptr, b, none + 7 * b);
  const Counted slice = pages_of_slice(cache, b);
  const Counted one = counted(b == 3 ? kU32Max : b);
  uint32_t* to = slices + 8 * b;
  to[0] = slice.count, to[1] = (uint32_t)slice.fault;
  to[2] = one.count, to[3] = (uint32_t)one.fault;
  to[4] = (uint32_t)fault_of(Ids{b, b % 2 ? Fault::position : Fault::none});
  to[5] = token_at(b << 24, 16 + b);
  to[6] = (uint32_t)(largest_index(int32_t{}) >> b);
  to[7] = (uint32_t)((largest_index(uint32_t{}) + largest_index(int64_t{})) >> b);
}

// Entries as they are compared with each other, and which of them are indices: signed ones, unsigned ones, of 64 bits.
template <typename Index>
__device__ __forceinline__ void entries(const Index* in, uint32_t* out) {
  const uint32_t x = load_unsigned(in, threadIdx.x);
  out[2 * threadIdx.x] = x, out[2 * threadIdx.x + 1] = is_index<Index>(x);
}
extern "C" __global__ void scan_entries(const int32_t* in, const uint32_t* large, const int64_t* wide, uint32_t* out) {
  entries(in, out);
  entries(large, out + 64);
  entries(wide, out + 128);
}
