// Behind tests/tma/tiles.cu, which calls most of mbarrier.cuh, tma.cuh and tma_tile.cuh: what is left of them.

// A tensor that this block has written itself, then read by a copy.
extern "C" __global__ void written_tile(const __grid_constant__ TensorMap map, uint32_t* tensor, uint32_t* out) {
  __shared__ alignas(8) uint64_t bar;
  const uint32_t i = threadIdx.x, n = blockDim.x;
  tensor[i] = 0x9e3779b9u * (i + 1);
  fence_async();
  if (i == 0) mbarrier_init(&bar, n), fence_mbarrier_init();
  __syncthreads();
  if (i == 0) {
    mbarrier_arrive_expect_tx(&bar, 4 * n);
    tma_load(shared_tile, &map, &bar, CacheHint::evict_first, 0);
  } else {
    mbarrier_arrive(&bar);
  }
  mbarrier_wait(&bar, 0);
  const bool ended = mbarrier_try_wait(&bar, 0);
  out[i] = *(const uint32_t*)(shared_tile + 4 * i);
  out[n + i] = (uint32_t)ended << 16 | (shared_address(shared_tile + 4 * i) - shared_address(shared_tile));
}

// Each block of a cluster of two asks for a half and gives it to both.
extern "C" __global__ void __cluster_dims__(2, 1, 1) multicast_boxes(const __grid_constant__ TensorMap map, uint32_t* out, uint32_t rank, uint32_t bytes) {
  __shared__ alignas(8) uint64_t bar;
  const uint32_t step = (bytes + 127) / 128 * 128;
  unsigned char* to = shared_tile + blockIdx.x * step;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&bar, 2 * bytes);
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0) {
    const int32_t x = (int32_t)blockIdx.x;
    if (rank == 1) tma_load_multicast(to, &map, &bar, CacheHint::normal, 3, x);
    if (rank == 2) tma_load_multicast(to, &map, &bar, CacheHint::evict_last, 3, x, 2);
    if (rank == 3) tma_load_multicast(to, &map, &bar, CacheHint::evict_first, 3, x, 2, -1);
    if (rank == 4) tma_load_multicast(to, &map, &bar, CacheHint::normal, 3, x, 2, -1, 1);
    if (rank == 5) tma_load_multicast(to, &map, &bar, CacheHint::normal, 3, x, 2, -1, 1, 0);
  }
  mbarrier_wait(&bar, 0);
  for (uint32_t i = threadIdx.x; i < 2 * bytes / 4; i += blockDim.x) {
    const uint32_t half = i / (bytes / 4);
    out[blockIdx.x * 2 * bytes / 4 + i] = *(const uint32_t*)(shared_tile + half * step + (4 * i - half * bytes));
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Where elements lie, and which rows are nowhere: [function, i].
extern "C" __global__ void tile_places(const uint32_t* in, uint32_t* out) {
  const uint32_t i = threadIdx.x, n = blockDim.x, word = in[i], row = word % 24, column = word / 24 % 64;
  const uint32_t values[] = {swizzle<0>(word),
                             swizzle<32>(word),
                             swizzle<64>(word),
                             swizzle<128>(word),
                             (uint32_t)tma_row(word),
                             tile_offset<uint16_t, 128, 24, 64>(row, column),
                             tile_offset<uint32_t, 0, 24, 4>(row, column),
                             row_major_offset<uint8_t, 64, 64, 32>(row, column),
                             tile_bytes<uint64_t>(row, column)};
#pragma unroll
  for (uint32_t k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

// Groups of 8 rows of a page, as they lie in shared memory, which had no zeros before.
extern "C" __global__ void groups_of_rows(const __grid_constant__ TensorMap map, uint32_t* out, uint32_t chunk, uint32_t group, uint32_t page, uint32_t bytes) {
  __shared__ alignas(8) uint64_t bar;
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) *(uint32_t*)(shared_tile + 4 * i) = 0xffffffffu;
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&bar, bytes);
    tma_load_groups(shared_tile, &map, &bar, chunk, group, page);
  }
  __syncthreads();
  mbarrier_wait(&bar, 0);
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = *(const uint32_t*)(shared_tile + 4 * i);
}
