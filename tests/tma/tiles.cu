// One tile through shared memory: a load written out element by element, or a ragged store. tests/tma/kernels.py adds the
// kernels, one for each form, element size, swizzle and tile.
#include "device/base/types.cuh"
#include "device/memory/mbarrier.cuh"
#include "device/tma/tma.cuh"
#include "device/tma/tma_tile.cuh"

extern __shared__ __align__(1024) unsigned char shared_tile[];

enum class Form { split, rope, page, paged, paged_fill, pages, pages_fill, folded, folded_page, row_major, paged_row_major, scale, index_scale, gather4 };

// Where the tile is: `row` is the token in the page where there is a page.
struct Place {
  int32_t row, page, head, depth;
  uint32_t valid;
};

template <Form kForm, typename T, uint32_t kSwizzle, uint32_t BN, uint32_t kIssue, uint32_t BK, uint32_t kGran>
__device__ __forceinline__ void load_tile(const TensorMap* map, T* out, const uint32_t* rows, Place at) {
  __shared__ alignas(8) uint64_t bar;
  __shared__ uint32_t start;
  T* tile = (T*)shared_tile;
  constexpr bool kPartial = kForm == Form::paged || kForm == Form::pages;
  const uint32_t present = kPartial ? at.valid * kIssue : BN;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(map);
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
    uint32_t bytes = tile_bytes<T>(present, BK), first = 0;
    if (kForm == Form::index_scale) bytes += 16;
    mbarrier_arrive_expect_tx(&bar, bytes);
    if constexpr (kForm == Form::split) tma_load_split_tile<BN, BK, kGran>(tile, map, &bar, at.row, at.head, at.depth, CacheHint::evict_first);
    if constexpr (kForm == Form::rope) tma_load_rope_tile<BN, BK, kGran>(tile, map, &bar, at.row, at.head);
    if constexpr (kForm == Form::page) tma_load_page_tile<BN, BK, kGran>(tile, map, &bar, at.row, at.page, at.head, at.depth);
    if constexpr (kForm == Form::paged) tma_load_paged_tile<BN, kIssue, BK, kGran>(tile, map, &bar, rows, at.valid, at.head, at.depth);
    if constexpr (kForm == Form::paged_fill) tma_load_paged_tile<BN, kIssue, BK, kGran, true>(tile, map, &bar, rows, at.valid, at.head, at.depth);
    if constexpr (kForm == Form::pages) tma_load_pages_tile<BN, kIssue, BK, kGran>(tile, map, &bar, rows, at.valid, at.head, at.depth);
    if constexpr (kForm == Form::pages_fill) tma_load_pages_tile<BN, kIssue, BK, kGran, true>(tile, map, &bar, rows, at.valid, at.head, at.depth);
    if constexpr (kForm == Form::folded) tma_load_folded_tile<kGran>(tile, map, &bar, at.row, at.head, at.depth, CacheHint::evict_last);
    if constexpr (kForm == Form::folded_page) tma_load_folded_page_tile<kGran>(tile, map, &bar, at.row, at.page, at.head, at.depth);
    if constexpr (kForm == Form::row_major) tma_load_row_major_tile<kGran>(tile, map, &bar, at.row, at.head, at.depth);
    if constexpr (kForm == Form::paged_row_major) tma_load_paged_row_major_tile<BN, kIssue, BK, kGran, true>(tile, map, &bar, rows, at.valid, at.head, at.depth);
    if constexpr (kForm == Form::scale) tma_load_scale_tile(tile, map, &bar, at.row);
    if constexpr (kForm == Form::index_scale) first = tma_load_index_scale_tile(tile, map, &bar, at.row);
#if __CUDA_ARCH__ >= 1000
    if constexpr (kForm == Form::gather4) tma_load_gather4_tile<BN, BK, kGran>(tile, map, &bar, (const int32_t*)rows, at.depth);
#endif
    start = first;
  }
  __syncthreads();
  mbarrier_wait(&bar, 0);
  constexpr bool kRowMajor = kForm == Form::row_major || kForm == Form::paged_row_major;
  for (uint32_t i = threadIdx.x; i < present * BK; i += blockDim.x) {
    const uint32_t r = i / BK, c = i % BK;
    const uint32_t byte = kForm == Form::scale || kForm == Form::index_scale ? (start + r) * (uint32_t)sizeof(T)
                          : kRowMajor                                        ? row_major_offset<T, kSwizzle, BK, kGran>(r, c)
                                                                             : tile_offset<T, kSwizzle, BN, kGran>(r, c);
    out[i] = *(const T*)(shared_tile + byte);
  }
}

// The tile [BM * kGroup][BK] at `in` to rows [row, row + valid) of a head.
template <bool kBlocks, typename T, uint32_t kSwizzle, uint32_t BM, uint32_t kGroup, uint32_t BK, uint32_t kGran>
__device__ __forceinline__ void store_ragged(const TensorMap* map, const T* in, int32_t heads, Place at) {
  for (uint32_t i = threadIdx.x; i < BM * kGroup * BK; i += blockDim.x)
    *(T*)(shared_tile + tile_offset<T, kSwizzle, BM * kGroup, kGran>(i / BK, i % BK)) = in[i];
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    const T* tile = (const T*)shared_tile;
    if constexpr (kBlocks) tma_store_ragged_blocks<BM, kGran, kGroup>(map, tile, at.row, (int32_t)at.valid, heads, at.head, at.depth);
    if constexpr (!kBlocks) tma_store_ragged_tile<BM, BK, kGran, kGroup>(map, tile, at.row, (int32_t)at.valid, heads, at.head, at.depth);
    tma_store_commit();
    tma_store_wait_read<0>();
    *(T*)shared_tile = T{};  // may be overwritten now
    tma_store_wait<0>();
  }
}

#if __CUDA_ARCH__ < 1000
// The first block of a cluster of two loads for both.
extern "C" __global__ void __cluster_dims__(2, 1, 1) multicast(const __grid_constant__ TensorMap map, uint32_t* out, int32_t x, int32_t y) {
  __shared__ alignas(8) uint64_t bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&bar, 512);
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) tma_load_multicast(shared_tile, &map, &bar, CacheHint::normal, 3, x, y);
  mbarrier_wait(&bar, 0);
  for (uint32_t i = threadIdx.x; i < 128; i += blockDim.x) out[blockIdx.x * 128 + i] = *(uint32_t*)(shared_tile + 4 * i);
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A box of each rank from one tensor to another, by a barrier that is used twice and given back.
template <uint32_t kRank>
__device__ __forceinline__ void copy_box(const TensorMap* from, const TensorMap* to, uint64_t* bar, uint32_t bytes, uint32_t turn) {
  mbarrier_arrive_expect_tx(bar, bytes);
  if constexpr (kRank == 1) tma_load(shared_tile, from, bar, CacheHint::normal, 1);
  if constexpr (kRank == 2) tma_load(shared_tile, from, bar, CacheHint::normal, 1, 2);
  if constexpr (kRank == 3) tma_load(shared_tile, from, bar, CacheHint::normal, 1, 2, -1);
  if constexpr (kRank == 4) tma_load(shared_tile, from, bar, CacheHint::normal, 1, 2, -1, 1);
  if constexpr (kRank == 5) tma_load(shared_tile, from, bar, CacheHint::normal, 1, 2, -1, 1, 0);
  mbarrier_wait(bar, turn % 2);
  if constexpr (kRank == 1) tma_store(to, shared_tile, CacheHint::normal, 1);
  if constexpr (kRank == 2) tma_store(to, shared_tile, CacheHint::evict_last, 1, 2);
  if constexpr (kRank == 3) tma_store(to, shared_tile, CacheHint::evict_first, 1, 2, -1);
  if constexpr (kRank == 4) tma_store(to, shared_tile, CacheHint::normal, 1, 2, -1, 1);
  if constexpr (kRank == 5) tma_store(to, shared_tile, CacheHint::normal, 1, 2, -1, 1, 0);
  tma_store_commit();
  tma_store_wait<0>();
}
extern "C" __global__ void copy_boxes(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, uint32_t rank, uint32_t bytes) {
  __shared__ alignas(8) uint64_t bar;
  mbarrier_init(&bar, 1);
  fence_mbarrier_init();
  for (uint32_t turn = 0; turn < 2; ++turn) {
    if (rank == 1) copy_box<1>(&from, &to, &bar, bytes, turn);
    if (rank == 2) copy_box<2>(&from, &to, &bar, bytes, turn);
    if (rank == 3) copy_box<3>(&from, &to, &bar, bytes, turn);
    if (rank == 4) copy_box<4>(&from, &to, &bar, bytes, turn);
    if (rank == 5) copy_box<5>(&from, &to, &bar, bytes, turn);
  }
  mbarrier_invalidate(&bar);
}

// `tiles` tiles of 8 rows through a ring of two stages: the sum of each column.
extern "C" __global__ void ring(const __grid_constant__ TensorMap map, uint32_t* sums, uint32_t tiles) {
  __shared__ alignas(8) uint64_t full[2], empty[2];
  uint32_t* stages = (uint32_t*)shared_tile;
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < 2; ++s) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 32);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    for (uint32_t i = 0; i < tiles; ++i) {
      const uint32_t s = i % 2;
      if (i >= 2) mbarrier_wait(&empty[s], (i / 2 + 1) % 2);
      mbarrier_arrive_expect_tx(&full[s], tile_bytes<uint32_t>(8, 32));
      tma_load_split_tile<8, 32, 32>(stages + s * 256, &map, &full[s], (int32_t)(8 * i), 0, 0);
    }
  } else if (threadIdx.x < 32) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < tiles; ++i) {
      mbarrier_wait(&full[i % 2], i / 2 % 2);
      for (uint32_t r = 0; r < 8; ++r) sum += *(uint32_t*)(shared_tile + i % 2 * 1024 + tile_offset<uint32_t, 128, 8, 32>(r, threadIdx.x));
      mbarrier_arrive(&empty[i % 2]);
    }
    sums[threadIdx.x] = sum;
  }
}

extern "C" __global__ void coordinates(const uint64_t* rows, int32_t* out, uint32_t pitch) {
  const KvTmaCoords at = kv_tma_coords(rows[threadIdx.x], pitch);
  out[2 * threadIdx.x] = at.row, out[2 * threadIdx.x + 1] = at.block;
}
#endif
