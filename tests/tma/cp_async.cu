// Rows of 16 bytes through shared memory by plain copies, in two groups; rows that are not `valid` are zeros.
#include "device/base/types.cuh"
#include "device/memory/cp_async.cuh"

extern "C" __global__ void rows16(const unsigned char* in, unsigned char* out, const int32_t* rows, uint32_t n) {
  __shared__ alignas(16) unsigned char tile[2][32][16];
  for (uint32_t g = 0; g < 2; ++g) {
    const uint32_t i = g * 32 + threadIdx.x;
    const int32_t row = i < n ? rows[i] : -1;
    cp_async16(tile[g][threadIdx.x], row < 0 ? in : in + 16ll * row, row >= 0);
    cp_async_commit();
  }
  for (uint32_t g = 0; g < 2; ++g) {
    if (g == 0) cp_async_wait<1>();
    if (g == 1) cp_async_wait<0>();
    __syncthreads();
    for (uint32_t b = 0; b < 16; ++b) out[(g * 32 + (threadIdx.x + 1) % 32) * 16 + b] = tile[g][(threadIdx.x + 1) % 32][b];
  }
}
