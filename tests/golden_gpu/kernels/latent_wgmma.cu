// latent_wgmma.cuh: attention of two warpgroups over chunks of latent rows of 16 bits, in tiles of 32 tokens and of 64; and whose columns and
// rows are whose.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"
#include "../../../templates/device/base/scan.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/latent_wgmma.cuh"

constexpr uint32_t kThreads = 256, kCols = 64, kRowBytes = 1152;
constexpr uint32_t kGroup = kCols / 4, kHeld = 5;  // columns of each of 4 query rows; steps of Q in registers
template <uint32_t kT>
struct TileOf {
  using Element = bf16;
  static constexpr uint32_t kCols = 64, kTokens = kT, kPanels = 9, kMine = 4, kRopePanels = 1, kPanelBytes = kT * 128, kQueryPanelBytes = kCols * 128;
  static constexpr uint32_t kStageBytes = kPanels * kPanelBytes, kMost = 4 * kT;  // tokens of a chunk at most
  static constexpr float kSlack = 8.0f;
};
struct Merged {
  float max[1][kCols], sum[1][kCols], out[1][kCols][512 + 8];
};
template <typename Tile>
struct Shared {
  union {
    struct {
      uint8_t ring[2][Tile::kStageBytes];
      uint8_t query[9 * Tile::kQueryPanelBytes];
    };
    Merged merged;
  };
  uint8_t weights[kCols * 128];
  float row_max[2][kCols];
};
static_assert(sizeof(Shared<TileOf<32>>) == 2 * 36864 + 73728 + 8192 + 512 && sizeof(Shared<TileOf<64>>) == 2 * 73728 + 73728 + 8192 + 512);

// Starts the copies of Q of a chunk: of rows that it has not, zeros.
template <typename Tile>
__device__ __forceinline__ void copy_queries(uint8_t* query, const bf16* q, const KvChunk& chunk) {
  for (uint32_t col = threadIdx.x / 8; col < kCols; col += 32)
    copy_query_async<Tile>(query, col, q + ((chunk.row + min(col / kGroup, chunk.rows - 1)) * kGroup + col % kGroup) * 576, col / kGroup < chunk.rows);
}

// Turns what is no number into zeros, in V of those of a tile's tokens that not all rows of the chunk see.
template <typename Tile>
__device__ __forceinline__ void clear_late_tokens(uint8_t* stage, const KvChunk& chunk, uint32_t tile) {
  const uint32_t first = tile * Tile::kTokens, count = chunk.end - chunk.begin;
  const uint32_t from = ::max(first, count - min(count, chunk.rows - 1)), until = min(count, first + Tile::kTokens);
  if (from < until) clear_special_panels<Tile>(stage, from - first, until - first);
}

// The sums of both warpgroups, together, to a chunk's place in memory.
template <typename Tile>
__device__ __forceinline__ void store_chunk(Merged& merged, uint32_t group, const float (&out_sums)[128], const PairSoftmax& sums, float* max, float* sum, float* out) {
  __syncthreads();  // Q has landed where there is no tile, too
  store_half<Tile>(merged, group, out_sums);
  if (group == 1) store_row_sums(merged, sums);
  __syncthreads();
  if (group == 0) store_both_sums(merged, sums);
  __syncthreads();
  const uint32_t thread = threadIdx.x;
  if (thread < kCols) max[blockIdx.x * kCols + thread] = merged.max[0][thread], sum[blockIdx.x * kCols + thread] = merged.sum[0][thread];
  for (uint32_t i = thread; i < kCols * 512; i += kThreads) out[blockIdx.x * kCols * 512 + i] = merged.out[0][i / 512][i % 512];
}

// A block's chunk; its token n is row places[n] of the pool, of no row where that is negative. Tiles u and u + 1 are there together.
extern "C" __global__ void __launch_bounds__(kThreads, 1) latent_wgmma_attend(const uint8_t* pool, const float*, const int32_t* places, const KvChunk* chunks, const bf16* q, float* max,
                                                                             float* sum, float* out) {
  using Tile = TileOf<32>;
  constexpr uint32_t kT = Tile::kTokens, kStageBytes = Tile::kStageBytes;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<Tile>& shared = *(Shared<Tile>*)dynamic;
  const KvChunk chunk = chunks[blockIdx.x];
  const uint32_t group = threadIdx.x / 128, count = chunk.end - chunk.begin, tiles = (count + kT - 1) / kT;
  const uint32_t ring = matrix_address(shared.ring);
  const uint64_t query = swizzled_tile(matrix_address(shared.query)), weights = swizzled_tile(matrix_address(shared.weights));
  copy_queries<Tile>(shared.query, q, chunk);
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
      const int32_t place = token < count ? places[blockIdx.x * Tile::kMost + token] : -1;
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
    clear_late_tokens<Tile>(shared.ring[group], chunk, u + group);

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
  store_chunk<Tile>(shared.merged, group, out_sums, sums, max, sum, out);
}

// The same in tiles of 64: a token without a row is none that anybody sees. A warp's columns are one query row's. Weights are a warpgroup's own
// in registers, and the other one's in shared memory.
extern "C" __global__ void __launch_bounds__(kThreads, 1) latent_wgmma_attend_64(const uint8_t* pool, const float*, const int32_t* places, const KvChunk* chunks, const bf16* q,
                                                                                float* max, float* sum, float* out) {
  using Tile = TileOf<64>;
  constexpr uint32_t kT = Tile::kTokens, kStageBytes = Tile::kStageBytes;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<Tile>& shared = *(Shared<Tile>*)dynamic;
  const KvChunk chunk = chunks[blockIdx.x];
  const uint32_t thread = threadIdx.x, group = thread / 128, count = chunk.end - chunk.begin, tiles = (count + kT - 1) / kT;
  const uint64_t query = swizzled_tile(matrix_address(shared.query)), keys = swizzled_tile(matrix_address(shared.ring[group]));
  const uint64_t values = swizzled_tile(matrix_address(shared.ring) + group * Tile::kMine * Tile::kPanelBytes, Tile::kPanelBytes);
  const uint64_t weights = swizzled_tile(matrix_address(shared.weights));
  copy_queries<Tile>(shared.query, q, chunk);
  cp_async_commit();
  cp_async_wait<0>();
  const uint32_t seen = tokens_seen(chunk, min(thread / 32 % 4, chunk.rows - 1));
  const auto row_of = [&](uint32_t token) {
    const int32_t place = token < count ? places[blockIdx.x * Tile::kMost + token] : -1;
    return place < 0 ? nullptr : pool + place * kRowBytes;
  };
  PairSoftmax sums;
  float out_sums[2][64] = {}, s[32], shrink[2];
  uint32_t own[4][4];
  const auto weigh = [&](uint32_t tile) {
    const auto sees = [&](uint32_t token) { return token < seen && row_of(token) != nullptr; };
    const uint32_t token = tile * kT + thread % 32;
    const uint32_t low = __ballot_sync(~0u, sees(token)), high = __ballot_sync(~0u, sees(token + 32));
    hide_pair(s, (uint64_t)high << 32 | low);
    store_raised_max<Tile>(shared.row_max[group], sums, shrink, s, 0.25f);
    exponentiate_pair<Tile>(own, s, sums, 0.25f);
    store_weights<Tile>(shared.weights, own);
    multiply_columns(out_sums, shrink);
  };
  // The tile in stage `odd`, whose weights are warpgroup `odd`'s.
  const auto add = [&](uint32_t odd) {
    if (group != odd) {
      follow_max(shrink, sums, shared.row_max[odd]);
      multiply_columns(out_sums, shrink);
    }
    wgmma_fence();
    if (group == odd) begin_pv<Tile>(out_sums, own, tile_at(values, odd * (kStageBytes / 16)));
    else begin_pv<Tile>(out_sums, weights, tile_at(values, odd * (kStageBytes / 16)));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(out_sums[0]);
    wgmma_done(out_sums[1]);
  };
#pragma unroll 1
  for (uint32_t u = 0; u < tiles; u += 2) {
    // Panels of rows are as large as those of Q.
    for (uint32_t n = thread / 8; n < 2 * kT; n += 32) {
      const uint8_t* row = row_of(u * kT + n);
      copy_query_async<Tile>(shared.ring[n / kT], n % kT, (const bf16*)row, row != nullptr);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
    __syncthreads();
    wgmma_fence();
    begin_qk_panels<Tile, 0, Tile::kMine>(s, query, keys);
    begin_qk_panels<Tile, Tile::kMine, Tile::kPanels>(s, query, keys);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(s);
    __syncthreads();
    clear_late_tokens<Tile>(shared.ring[group], chunk, u + group);
#pragma unroll 1
    for (uint32_t odd = 0; odd < 2; ++odd) {
      if (group == odd) weigh(u + odd);
      fence_async_shared();
      __syncthreads();
      add(odd);
      __syncthreads();
    }
  }
  store_chunk<Tile>(shared.merged, group, *(const float(*)[128])out_sums, sums, max, sum, out);
}

// A thread's columns, the token whose row it knows, and a sum over the threads of a column.
extern "C" __global__ void latent_wgmma_places(uint32_t* out) {
  const uint32_t i = threadIdx.x;
  out[4 * i] = thread_column(0);
  out[4 * i + 1] = thread_column(1);
  out[4 * i + 2] = known_token();
  out[4 * i + 3] = (uint32_t)sum_of_four((float)(i * i));
}
