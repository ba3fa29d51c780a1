// plan_keys.cuh: rows that requests' keys take, where they begin, and what chunks of a buffer have of them.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/attention/plan/plan_keys.cuh"

// A request's table has room for 600 tokens.
struct Cache {
  const int32_t* lengths;
  uint32_t batch;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n <= 600; }
};
struct Padded {
  using Index = int32_t;
  static constexpr uint32_t kThreads = 32;
  static constexpr uint64_t kChunkRows = 256, kAlignment = 64;
  static constexpr uint32_t kChunks = 60;
};
struct Dense {
  using Index = int64_t;
  static constexpr uint32_t kThreads = 32;
  static constexpr uint64_t kChunkRows = 100, kAlignment = 1;
  static constexpr uint32_t kChunks = 150;
};

// A thread a request: rows, fault, the rows before it; of the chunk before the one where they begin, and of two more, its part;
// its error word, where the buffer has kChunks chunks.
template <typename Deal, typename... Index>
__device__ __forceinline__ void deal(const int32_t* lengths, uint32_t batch, uint32_t* out, uint64_t* errors, const Index*... offsets) {
  const Cache cache = {lengths, batch};
  const uint32_t b = blockIdx.x * Deal::kThreads + threadIdx.x;
  RequestKeys keys = {0, Fault::none};
  if (b < batch) keys = request_keys<Deal>(cache, b, offsets...);
  const uint64_t begin = sync_rows_before<Deal>(cache, keys.count, offsets...);
  report_keys<Deal>(keys, begin, Deal::kChunks, b, errors + b);
  uint32_t* to = out + 12 * b;
  to[0] = (uint32_t)keys.count, to[1] = (uint32_t)keys.fault, to[2] = (uint32_t)begin;
  for (uint32_t i = 0; i < 3; ++i) {
    const ChunkPart part = chunk_part<Deal>((uint32_t)(begin / Deal::kChunkRows) + i - (begin >= Deal::kChunkRows), begin, keys.count);
    to[3 + 3 * i] = part.row, to[4 + 3 * i] = (uint32_t)part.key, to[5 + 3 * i] = part.has_rows;
  }
}
extern "C" __global__ void plan_keys_padded(const int32_t* lengths, const int32_t* offsets, uint32_t* out, uint64_t* errors) {
  deal<Padded>(lengths, 90, out, errors, offsets);
}
extern "C" __global__ void plan_keys_dense(const int32_t* lengths, const int32_t* offsets, uint32_t* out, uint64_t* errors) {
  deal<Dense>(lengths, 90, out, errors);
}
