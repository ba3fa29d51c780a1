// The planner of a prefill over latent rows: where the keys of a batch lie behind each other, and in the chunks of a buffer.
//
// `Deal` names kThreads of a block, kChunkRows of a chunk, kAlignment to which each request's keys are padded, and the Index of
// offsets. Row offsets are given where lengths do not count this step's tokens.
#pragma once

#include "../../base/scan.cuh"

// Rows that a request's keys take; none where they cannot be counted or its table has no place for them.
struct RequestKeys {
  uint64_t count;
  Fault fault;
};
template <typename Deal, typename Cache, typename... Index>
__device__ __forceinline__ RequestKeys request_keys(const Cache& cache, uint32_t b, const Index*... row_offsets) {
  Counted tokens;
  if constexpr (sizeof...(Index) == 0) tokens = counted(cache.length(b));
  else tokens = tokens_of<true>(cache, row_offsets..., b);
  if (tokens.count == 0) return {0, tokens.fault};
  const uint64_t count = (tokens.count + Deal::kAlignment - 1) / Deal::kAlignment * Deal::kAlignment;
  if (!cache.holds(b, 0, tokens.count) || count > largest_index(typename Deal::Index{})) return {0, Fault::length};
  return {count, Fault::none};
}

// The rows of all requests before this thread's, of which there are kThreads a block. All threads call it.
template <typename Deal, typename Cache, typename... Index>
__device__ __forceinline__ uint64_t sync_rows_before(const Cache& cache, uint64_t count, const Index*... row_offsets) {
  uint64_t earlier = 0;
#pragma unroll 4
  for (uint32_t b = threadIdx.x; b < blockIdx.x * Deal::kThreads; b += Deal::kThreads) earlier += request_keys<Deal>(cache, b, row_offsets...).count;
  return sync_sum_before<Deal::kThreads>(earlier, count);
}

// A chunk's part of `count` rows of a request that begin at `begin`: the row of its buffer where they begin or would begin, the
// request's key in that row, and true if rows of the chunk are before them.
struct ChunkPart {
  uint32_t row;
  uint64_t key;
  bool has_rows;
};
template <typename Deal>
__device__ __forceinline__ ChunkPart chunk_part(uint32_t chunk, uint64_t begin, uint64_t count) {
  const uint64_t here = chunk * Deal::kChunkRows;
  const uint64_t ahead = begin > here ? begin - here : 0, behind = here > begin ? here - begin : 0;
  return {(uint32_t)(ahead < Deal::kChunkRows ? ahead : Deal::kChunkRows), behind < count ? behind : count, ahead > 0};
}

// Reports what is wrong with request b's keys, and those of its keys, which begin at row `begin`, that are past the last chunk.
template <typename Deal>
__device__ __forceinline__ void report_keys(const RequestKeys& keys, uint64_t begin, uint32_t num_chunks, uint32_t b, uint64_t* errors) {
  const uint64_t room = num_chunks * Deal::kChunkRows, fitting = room > begin ? room - begin : 0;
  if (keys.fault != Fault::none) report(errors, keys.fault, b, 0);
  if (keys.count > fitting) report(errors, Fault::position, b, (uint32_t)fitting);
}
