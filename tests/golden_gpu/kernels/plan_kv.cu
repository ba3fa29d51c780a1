// plan_kv.cuh: the requests of a step, their chunks, and the SM parts among these.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/attention/plan/plan_kv.cuh"

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
  static constexpr uint32_t kThreads = 64, kRows = 3, kTile = 16, kOverhead = 2, kLeastTiles = 2;
  static constexpr bool kNewInLength = false;
};
struct Fixed {
  using Mask = FullMask;
  static constexpr uint32_t kThreads = 64, kRows = 2, kTile = 16, kChunkTiles = 3;
  static constexpr bool kNewInLength = true;
};

// What a plan is besides its lists: sums over requests, what a part costs, and how many chunks there are.
__device__ __forceinline__ void tell(uint64_t* out, const PlanSums& all, uint64_t share, uint32_t chunks) {
  if (threadIdx.x > 0) return;
  out[0] = all.tiles, out[1] = all.requests, out[2] = all.longest, out[3] = all.stamp, out[4] = all.unclaimed, out[5] = share, out[6] = chunks;
}

// One block; more rows than threads.
extern "C" __global__ void plan_balanced(const int32_t* lengths, const int32_t* offsets, KvChunk* chunks, uint32_t* starts, uint8_t* kinds,
                                         uint32_t* counters, uint64_t* out, uint32_t batch, uint32_t num_rows, uint32_t num_sm_parts) {
  const Cache cache = {lengths, batch};
  const Plan plan = {nullptr, starts, kinds, counters, chunks, nullptr};
  const auto rows = step_rows(offsets, num_rows);
  const PlanSums all = sync_sums(store_row_kinds<Balanced>(plan, cache, rows));
  store_idle<64>(counters, 100);
  const uint64_t share = cost_share<Balanced>(all, num_sm_parts);
  tell(out, all, share, sync_store_balanced_chunks<Balanced>(plan, cache, rows, all.stamp, share, num_sm_parts));
}
extern "C" __global__ void plan_fixed(const int32_t* lengths, const int32_t* valid, KvChunk* chunks, uint32_t* starts, uint8_t* kinds, uint64_t* out,
                                      uint32_t batch, uint32_t num_rows, uint32_t num_sm_parts) {
  const Cache cache = {lengths, batch};
  const Plan plan = {nullptr, starts, kinds, nullptr, chunks, nullptr};
  const auto rows = step_rows((const int32_t*)nullptr, num_rows, valid);
  const PlanSums all = sync_sums(store_row_kinds<Fixed>(plan, cache, rows));
  tell(out, all, 0, sync_store_fixed_chunks<Fixed>(plan, cache, rows, all.stamp, 6, num_sm_parts));
}

// A thread a position: what each mask shows. Then a thread a row: its request, and places of i % 4 chunks each, twice.
extern "C" __global__ void plan_pieces(const int32_t* lengths, const uint32_t* positions, uint32_t* masks, uint32_t* tiles, uint32_t* places, KvChunk* chunks) {
  const uint32_t i = threadIdx.x, position = positions[i], tokens = position + i % 3;
  uint32_t* seen = masks + 6 * i;
  seen[0] = CausalMask::first(position), seen[1] = CausalMask::last(position, tokens);
  seen[2] = WindowMask<9>::first(position), seen[3] = WindowMask<9>::last(position, tokens);
  seen[4] = FullMask::first(position), seen[5] = FullMask::last(position, tokens);
  const Cache cache = {lengths, 32};
  const auto rows = step_rows((const int32_t*)nullptr, 61);
  const PlannedRequest request = request_at<Fixed>(cache, rows, i);
  tiles[3 * i] = request.tiles, tiles[3 * i + 1] = (uint32_t)request.kind, tiles[3 * i + 2] = rows.most_tokens(i);
  ChunkPlace next = {};
  sync_place<64>(i % 4, next);
  const ChunkPlace place = sync_place<64>(i % 4, next);
  places[4 * i] = place.index, places[4 * i + 1] = place.slot, places[4 * i + 2] = next.index, places[4 * i + 3] = next.slot;
  const Plan plan = {nullptr, nullptr, nullptr, nullptr, chunks, nullptr};
  const KvChunk whole = {i, i, 1, 400, 5 + 16 * (i % 2), 150, 0, 1, 0, Fault::none, 0, 0};
  store_chunks<Fixed>(plan, whole, {3 * i, 3, 7 * i}, 77, [](uint32_t n) { return 2 * n + 1; });
}
