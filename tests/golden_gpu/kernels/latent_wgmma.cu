// latent_wgmma.cuh: attention of two warpgroups over chunks of latent rows of 16 bits, tile by tile; and whose columns and rows are whose.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"
#include "../../../templates/device/base/scan.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/latent_wgmma.cuh"

constexpr uint32_t kThreads = 256, kMost = 128, kCols = 64, kT = 32, kRowBytes = 1152;  // tokens of a chunk at most, and of a tile
constexpr uint32_t kGroup = kCols / 4, kHeld = 5, kStageBytes = 9 * kT * 128;            // of 4 query rows; steps of Q in registers
struct Tile {
  using Element = bf16;
  static constexpr uint32_t kCols = 64, kTokens = kT, kPanels = 9, kMine = 4, kRopePanels = 1, kPanelBytes = kT * 128, kQueryPanelBytes = kCols * 128;
  static constexpr float kSlack = 8.0f;
};
struct Merged {
  float max[1][kCols], sum[1][kCols], out[1][kCols][512 + 8];
};
struct Shared {
  union {
    struct {
      uint8_t ring[2][kStageBytes];
      uint8_t query[9 * Tile::kQueryPanelBytes];
    };
    Merged merged;
  };
  uint8_t weights[kCols * 128];
  float row_max[2][kCols];
};
static_assert(sizeof(Shared) == 2 * kStageBytes + 73728 + 8192 + 512);

// A block's chunk; its token n is row places[n] of the pool, of no row where that is negative. Tiles u and u + 1 are there together.
extern "C" __global__ void __launch_bounds__(kThreads, 1) latent_wgmma_attend(const uint8_t* pool, const float*, const int32_t* places, const KvChunk* chunks, const bf16* q, float* max,
                                                                             float* sum, float* out) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *(Shared*)dynamic;
  const KvChunk chunk = chunks[blockIdx.x];
  const uint32_t thread = threadIdx.x, group = thread / 128, count = chunk.end - chunk.begin, tiles = (count + kT - 1) / kT;
  const uint32_t ring = matrix_address(shared.ring);
  const uint64_t query = swizzled_tile(matrix_address(shared.query)), weights = swizzled_tile(matrix_address(shared.weights));
  for (uint32_t col = thread / 8; col < kCols; col += 32)
    copy_query_async<Tile>(shared.query, col, q + ((chunk.row + min(col / kGroup, chunk.rows - 1)) * kGroup + col % kGroup) * 576, col / kGroup < chunk.rows);
  cp_async_commit();
  cp_async_wait<0>();
  const uint32_t seen[2] = {tokens_seen(chunk, min(thread_column(0) / kGroup, chunk.rows - 1)), tokens_seen(chunk, min(thread_column(1) / kGroup, chunk.rows - 1))};
  PairSoftmax sums;
  float out_sums[128] = {}, s[16], shrink[2];
  const auto add = [&](uint32_t odd) {
    wgmma_fence();
    begin_pv<Tile>(out_sums, weights + odd * 4, swizzled_tile(ring + odd * kStageBytes + group * 4 * Tile::kPanelBytes, Tile::kPanelBytes));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(out_sums);
  };
  const auto weigh = [&](uint32_t tile) {
    scale_and_hide_pair(s, 0.25f, tile * kT, seen);
    store_raised_max<Tile>(shared.row_max[group], sums, shrink, s);
    store_weights<Tile>(shared.weights, group, s, sums);
    multiply_columns(out_sums, shrink);
  };
  const auto follow = [&](uint32_t odd) {
    follow_max(shrink, sums, shared.row_max[odd]);
    multiply_columns(out_sums, shrink);
  };
#pragma unroll 1
  for (uint32_t u = 0; u < tiles; u += 2) {
    for (uint32_t odd = 0; odd < 2; ++odd) {
      const uint32_t token = (u + odd) * kT + known_token();
      const int32_t place = token < count ? places[blockIdx.x * kMost + token] : -1;
      const uint8_t* row = place < 0 ? nullptr : pool + place * kRowBytes;
      copy_part_async<Tile>(ring + odd * kStageBytes, group, row, place < 0 ? nullptr : row + 1024);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
    __syncthreads();
    uint32_t held[kHeld][4];
    load_query<Tile>(held, shared.query);
    wgmma_fence();
    begin_qk<Tile>(s, held, query, swizzled_tile(ring + group * kStageBytes));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(s);
    __syncthreads();
    const uint32_t first = (u + group) * kT, from = ::max(first, count - min(count, chunk.rows - 1)), until = min(count, first + kT);
    if (from < until) clear_special_panels<Tile>(shared.ring[group], from - first, until - first);

    if (group == 0) weigh(u);
    fence_async_shared();
    __syncthreads();
    if (group == 1) follow(0);
    add(0);
    if (group == 1) weigh(u + 1);
    fence_async_shared();
    __syncthreads();
    if (group == 0) follow(1);
    add(1);
    __syncthreads();
  }
  __syncthreads();  // Q has landed where there is no tile, too
  store_half<Tile>(shared.merged, group, out_sums);
  if (group == 1) store_row_sums(shared.merged, sums);
  __syncthreads();
  if (group == 0) store_both_sums(shared.merged, sums);
  __syncthreads();
  if (thread < kCols) max[blockIdx.x * kCols + thread] = shared.merged.max[0][thread], sum[blockIdx.x * kCols + thread] = shared.merged.sum[0][thread];
  for (uint32_t i = thread; i < kCols * 512; i += kThreads) out[blockIdx.x * kCols * 512 + i] = shared.merged.out[0][i / 512][i % 512];
}

// A thread's columns, the token whose row it knows, and a sum over the threads of a column.
extern "C" __global__ void latent_wgmma_places(uint32_t* out) {
  const uint32_t i = threadIdx.x;
  out[4 * i] = thread_column(0);
  out[4 * i + 1] = thread_column(1);
  out[4 * i + 2] = known_token();
  out[4 * i + 3] = (uint32_t)sum_of_four((float)(i * i));
}
