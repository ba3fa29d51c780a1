// The walk of kvgen's gather over Modular MAX's layout [pages, 2, layers, 16, 8, 128] of bf16, by hand: no accessor.
#include "cache.cuh"

constexpr uint32_t kThreads = 256, kRows = 4, kBatch = 2;

// Where a token's page begins in K and in V, in elements, -1: nowhere; and the token in it.
struct Row {
  int64_t page;
  uint32_t token;
  bool skip;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    by_hand(const __grid_constant__ Cache cache, const uint32_t* row_offsets, bf16* k_out, bf16* v_out, const uint32_t* starts,
            int64_t k_stride, int64_t v_stride, uint32_t num_rows) {
  pdl_wait();
  const uint32_t first = blockIdx.x * kRows;
  __shared__ Row places[kRows];
  if (threadIdx.x < kRows && first + threadIdx.x < num_rows) {
    const uint32_t row = first + threadIdx.x;
    uint32_t low = 0, high = cache.batch;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      if (row_offsets[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const uint32_t token = (starts == nullptr ? 0 : starts[low]) + row - row_offsets[low];
    int64_t page = -1;
    if (token / 16 < cache.table_pages) {
      const uint32_t id = cache.page_table[low * cache.table_stride + token / 16];
      if (id < cache.num_pages) page = id * cache.k_page_stride;
    }
    places[threadIdx.x] = {page, token % 16, row >= row_offsets[cache.batch]};
  }
  __syncthreads();
  const uint32_t rows = min(kRows, num_rows - first);

  for (uint32_t base = threadIdx.x; base < rows * 128; base += kThreads * kBatch) {
    Vec<bf16, 8> value[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = base + u * kThreads;
#pragma unroll
      for (uint32_t j = 0; j < 8; j += 2) *(uint32_t*)&value[u].e[j] = 0x7fff7fff;
      if (i >= rows * 128) continue;
      const Row& from = places[i / 128];
      if (from.page >= 0) value[u] = *(const Vec<bf16, 8>*)(cache.k + from.page + from.token * 1024 + i % 128 * 8);
    }
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = base + u * kThreads;
      if (i >= rows * 128 || places[i / 128].skip) continue;
      *(Vec<bf16, 8>*)(k_out + (first + i / 128) * k_stride + i % 128 * 8) = value[u];
    }
  }
  for (uint32_t base = threadIdx.x; base < rows * 128; base += kThreads * kBatch) {
    Vec<bf16, 8> value[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = base + u * kThreads;
#pragma unroll
      for (uint32_t j = 0; j < 8; j += 2) *(uint32_t*)&value[u].e[j] = 0x7fff7fff;
      if (i >= rows * 128) continue;
      const Row& from = places[i / 128];
      if (from.page >= 0) value[u] = *(const Vec<bf16, 8>*)(cache.v + from.page + from.token * 1024 + i % 128 * 8);
    }
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = base + u * kThreads;
      if (i >= rows * 128 || places[i / 128].skip) continue;
      *(Vec<bf16, 8>*)(v_out + (first + i / 128) * v_stride + i % 128 * 8) = value[u];
    }
  }
}
