// extend_tiles.cuh: what of a workspace is a plan's, and blocks' sums as partial results, one at a time and together. Its copies: row_tile.cu.
#include "tiles.cuh"
#include "../../../templates/device/attention/extend/extend_tiles.cuh"

// A block a workspace of `bytes`, a thread an entry: the plan, and the entry with the plan's stamp.
extern "C" __global__ void extend_plans(uint8_t* workspaces, uint32_t* plans, KvChunk* entries, uint64_t* errors, uint32_t bytes, uint32_t batch, uint32_t num_rows) {
  const PlanSizes sizes = {3, 16, 4, 2};
  uint8_t* workspace = workspaces + blockIdx.x * bytes;
  const RowPlan plan = read_row_plan<4>(workspace, sizes, 0x0123456789abcdefull, batch, num_rows, errors + blockIdx.x);
  if (threadIdx.x == 0) {
    uint32_t* to = plans + 6 * blockIdx.x;
    to[0] = plan.stamp, to[1] = plan.count, to[2] = plan.heads_together, to[3] = plan.first_row, to[4] = plan.end_row, to[5] = plan.orphans;
  }
  entries[blockIdx.x * 4 + threadIdx.x] = read_row_tile<3>(plan_in(workspace, sizes, 4), 77, threadIdx.x, batch, num_rows, 2);
}

// A block a number of heads together, a thread a work: its entry, its kv head.
extern "C" __global__ void extend_works(uint32_t* places) {
  const RowPlan plan = {0, 3, 1u << blockIdx.x, 0, 0, false};
  const HeadOfEntry place = plan.head_of(threadIdx.x);
  uint32_t* to = places + 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  to[0] = place.entry, to[1] = place.head;
}

using Wide = TileOf<PlainK<bf16>, PlainV<bf16>, 32, 8, 2, 2>;  // 6 tiles of 8 dims
using Narrow = TileOf<PlainK<e4m3>, PlainV<e4m3>, 32, 8, 4>;   // 8 of them, 32 columns of a warp

// A block a head: its threads' sums, [result][thread][maxima, sums, sums of V], where head 1's second result is a failed one. All of them
// together, and the last one with the two before it, one at a time; where head 1 has its slots and counters.
template <typename Tile>
__device__ __forceinline__ void partials(const float* in, float* slots, float* max, float* sum, float* out, float* one_by_one, uint64_t* places) {
  constexpr uint32_t kThreads = 32 * Tile::kTeamWarps, kCols = 8 * Tile::kN * Tile::kTeamWarps, kM = RowShape<Tile>::kM, kOut = 4 * RowShape<Tile>::kDimTiles;
  constexpr uint32_t kEach = kM * (4 + kOut), kResults = 3;
  struct Merged {
    float max[1][kCols], sum[1][kCols], out[1][kCols][kDims];
  };
  __shared__ Merged merged;
  const uint32_t thread = threadIdx.x, head = blockIdx.x;
  Plan plan = {};
  plan.partials = slots;
  const auto own = RowSlots<Tile, 2>(plan, head);
  const auto sums_of = [&](uint32_t result) {
    const float* from = in + ((head * kResults + result) * kThreads + thread) * kEach;
    RowSums<Tile> sums;
#pragma unroll
    for (uint32_t m = 0; m < kM; ++m)
#pragma unroll
      for (uint32_t i = 0; i < 4 + kOut; ++i) {
        const float x = from[m * (4 + kOut) + i];
        if (i < 2) sums.row_max[m][i] = x;
        else if (i < 4) sums.row_sum[m][i - 2] = x;
        else sums.out[m][i / 4 - 1][i % 4] = x;
      }
    return sums;
  };
#pragma unroll 1
  for (uint32_t i = 0; i < kResults; ++i) RowPartial<Tile>::store(own.at(i), sums_of(i), head == 1 && i == 1);
  RowPartial<Tile>::merge(merged, thread / 32 * 16 * kM, own.at(0), own.kStep, kResults, [](uint32_t dim) { return dim < 8 ? 0.5f : 1.0f; });
  __syncthreads();
  for (uint32_t i = thread; i < kCols; i += kThreads) max[head * kCols + i] = merged.max[0][i], sum[head * kCols + i] = merged.sum[0][i];
  for (uint32_t i = thread; i < kCols * kDims; i += kThreads) out[head * kCols * kDims + i] = merged.out[0][i / kDims][i % kDims];

  RowSums<Tile> sums = sums_of(kResults - 1);
  for (uint32_t i = kResults - 1; i-- > 0;) RowPartial<Tile>::merge_before(sums, own.at(i));
  float* to = one_by_one + (head * kThreads + thread) * kEach;
#pragma unroll
  for (uint32_t m = 0; m < kM; ++m)
#pragma unroll
    for (uint32_t i = 0; i < 4 + kOut; ++i)
      to[m * (4 + kOut) + i] = i < 2 ? sums.row_max[m][i % 2] : i < 4 ? sums.row_sum[m][i % 2] : sums.out[m][i < 4 ? 0 : i / 4 - 1][i % 4];
  if (thread == 0) places[2 * head] = own.at(5) - slots, places[2 * head + 1] = own.counter(5) - plan.counters;
}
#define PARTIALS(name, Tile)                                                                                                                     \
  extern "C" __global__ void name(const float* in, float* slots, float* max, float* sum, float* out, float* one_by_one, uint64_t* places) {      \
    partials<Tile>(in, slots, max, sum, out, one_by_one, places);                                                                                \
  }
PARTIALS(extend_partials_wide, Wide)
PARTIALS(extend_partials_narrow, Narrow)

// A thread two maxima of each of two columns, and numbers of the earlier result and of the later one: the larger maxima, and both numbers joined.
extern "C" __global__ void extend_factors(const Vec<float, 4>* maxima, const Vec<float, 4>* numbers, Vec<float, 4>* out) {
  const Vec<float, 4> x = maxima[threadIdx.x], y = numbers[threadIdx.x];
  float max[2];
  const auto factors = RowPartial<Wide>::Factors({x.e[0], x.e[1]}, {x.e[2], x.e[3]}, max);
  out[threadIdx.x] = {max[0], max[1], factors.join(y.e[0], y.e[2], 0), factors.join(y.e[1], y.e[3], 1)};
}
