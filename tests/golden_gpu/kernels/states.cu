// states.cuh: ids of states, of which some are none and some wrong, and rows that are filled with a word.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/cache/pages.cuh"
#include "../../../templates/device/cache/states.cuh"

// A thread an id of a list of 8, in a pool of 5; a block a count, the first without one. Rows of `out`: state, counts, none, wrong.
constexpr uint32_t kIds = 8, kLives = 6, kStates = 5;
template <typename Index>
__device__ __forceinline__ void store_ids(const Index* ids, const Index* lives, uint64_t* out) {
  const Index* live = blockIdx.x == 0 ? nullptr : lives + blockIdx.x;
  const StateId id = load_state_id(ids, live, kIds, threadIdx.x, kStates);
  uint64_t* to = out + 4 * (blockIdx.x * kIds + threadIdx.x);
  to[0] = id.state, to[1] = id.counts, to[2] = id.none, to[3] = id.wrong;
}
extern "C" __global__ void states_ids(const int32_t* ids, const int32_t* lives, const uint32_t* unsigned_ids, const uint32_t* unsigned_lives,
                                      const int64_t* wide_ids, const int64_t* wide_lives, uint64_t* out) {
  constexpr uint32_t kOne = kLives * kIds * 4;
  store_ids(ids, lives, out);
  store_ids(unsigned_ids, unsigned_lives, out + kOne);
  store_ids(wide_ids, wide_lives, out + 2 * kOne);
}

template <uint64_t kSize, uint32_t kMultiple>
struct Bytes {
  static constexpr uint32_t kPointer = 0, kId = 0, kAlign = kMultiple;
  static constexpr uint64_t kBytes = kSize;
  static constexpr bool kOpen = false;
};

// Three rows of 44 bytes, the second one null, behind which comes one that is not of the tile: whole in block 0, their second piece
// in block 1. In block 2 the second tile of a large row.
extern "C" __global__ void __launch_bounds__(kCopyThreads) states_fill(const uint32_t* words, uint8_t* small, uint8_t* large) {
  __shared__ FilledRow rows[4];
  __shared__ FilledRow row[1];
  if (threadIdx.x < 4) rows[threadIdx.x] = {threadIdx.x == 1 ? nullptr : small + (blockIdx.x * 4 + threadIdx.x) * 60, words[threadIdx.x]};
  if (threadIdx.x == 0) row[0] = {large, kU32Max};
  __syncthreads();
  if (blockIdx.x == 0) return store_filled_tile<PageRuns<Bytes<44, 4>>, 44>(rows, 3, 0, 3);
  if (blockIdx.x == 1) return store_filled_tile<PageRuns<Bytes<44, 4>>, 44>(rows, 3, 1, 1);
  store_filled_tile<PageRuns<Bytes<24006, 2>>, 24006>(row, 1, 1024, 477);
}
