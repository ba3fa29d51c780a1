#include "cache.cuh"
#include "../device/memory/mbarrier.cuh"
#include "../device/tma/tma.cuh"
#include "../device/tma/tma_tile.cuh"

// K's tile of 64 tokens of one head, four pages of 16, by the map that get_key_cache(layer).create_tma_tile(64, 64) makes
// and the rows that populate() finds.
extern "C" __global__ void tiles(const __grid_constant__ Cache cache, const __grid_constant__ TensorMap map, bf16* out, uint32_t head) {
  pdl_wait();
  __shared__ alignas(1024) uint8_t tile[64 * 64 * 2];
  __shared__ alignas(8) uint64_t bar;
  const KVCacheMHAOperand<KeyCache> k{get_key_cache(cache)};
  const uint32_t b = blockIdx.x, base = blockIdx.y * 64;
  if (threadIdx.x == 0) {
    const auto rows = k.populate<64, 64>(b, base);
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&bar, tile_bytes<bf16>(64, 64));
    tma_load_paged_tile<64, 16, 64, 64>((bf16*)tile, &map, &bar, rows.rows, 4, (int32_t)head, 0);
  }
  __syncthreads();
  mbarrier_wait(&bar, 0);
  for (uint32_t i = threadIdx.x; i < 64 * 64; i += 32)
    out[(b * gridDim.y + blockIdx.y) * 64 * 64 + i] = *(const bf16*)(tile + tile_offset<bf16, 128, 64, 64>(i / 64, i % 64));
}
