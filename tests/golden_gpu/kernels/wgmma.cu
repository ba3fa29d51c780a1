// wgmma.cuh: products as attention over latent rows takes them, tiles' descriptors, and barriers of some threads. (What the
// instruction itself does is wgmma_probes.py's other unit.)
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"
#include "../../../templates/device/mma/wgmma.cuh"

constexpr uint32_t kTokens = 32, kDims = 64, kWide = 256;

using Chunk = Vec<uint32_t, 4>;

// Rows of 64 16-bit elements, `pitch` chunks apart, as a swizzled tile.
__device__ __forceinline__ void put(uint8_t* tile, const Chunk* in, uint32_t rows, uint32_t pitch) {
  for (uint32_t n = threadIdx.x; n < rows * 8; n += 128) {
    const uint32_t row = n / 8, chunk = n % 8;
    *(Chunk*)(tile + row * 128 + (chunk ^ row % 8) * 16) = in[row * pitch + chunk];
  }
}

// The place of sum i of this thread in a matrix [64][cols].
__device__ __forceinline__ uint32_t place(uint32_t i, uint32_t cols) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  return (16 * warp + g + i / 2 % 2 * 8) * cols + i / 4 * 8 + 2 * j + i % 2;
}

// Block b: 64 x 64 by 32 x 64, with a from shared memory and then, in a group of its own, from registers; odd ones add to c.
template <typename T>
__device__ __forceinline__ void keys(const uint32_t* a, const uint32_t* b, const float* c, float* shared, float* registers) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const bool add = blockIdx.x % 2 != 0;
  const uint32_t i = threadIdx.x, first = blockIdx.x * 64 * kTokens;
  const uint32_t* own = a + (blockIdx.x * 64 + i / 32 * 16 + i % 32 / 4) * (kDims / 2) + i % 4;
  put(memory, (const Chunk*)a + blockIdx.x * 64 * 8, 64, 8);
  put(memory + 8192, (const Chunk*)b + blockIdx.x * kTokens * 8, kTokens, 8);
  fence_async_shared();
  __syncthreads();
  const uint64_t tile_a = fresh_tile(swizzled_tile(shared_address(memory))), tile_b = swizzled_tile(shared_address(memory + 8192));
  float x[16], y[16];
  uint32_t held[4][4];
#pragma unroll
  for (uint32_t n = 0; n < 16; ++n) x[n] = y[n] = c[first + place(n, kTokens)];
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) held[k][n] = own[n % 2 * 8 * (kDims / 2) + k * 8 + n / 2 * 4];
  wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) multiply_keys<T>(x, tile_a + k * 2, tile_b + k * 2, k > 0 || add);
  wgmma_commit();
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) multiply_keys<T>(y, held[k], tile_b + k * 2, k > 0 || add);
  wgmma_commit();
  wgmma_wait<1>();
  wgmma_done(x);
#pragma unroll
  for (uint32_t n = 0; n < 16; ++n) shared[first + place(n, kTokens)] = x[n];
  wgmma_wait<0>();
  wgmma_done(y);
#pragma unroll
  for (uint32_t n = 0; n < 16; ++n) registers[first + place(n, kTokens)] = y[n];
}
extern "C" __global__ void __launch_bounds__(128) wgmma_keys_bf16(const uint32_t* a, const uint32_t* b, const float* c, float* shared, float* registers) {
  keys<bf16>(a, b, c, shared, registers);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_keys_f16(const uint32_t* a, const uint32_t* b, const float* c, float* shared, float* registers) {
  keys<f16>(a, b, c, shared, registers);
}

// Block b: one half of a's columns, 64 x 32, by 32 x 256; panels of b lie side by side or further apart, and odd blocks add to c.
template <typename T>
__device__ __forceinline__ void values(const uint32_t* a, const uint32_t* b, const float* c, float* out) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const bool add = blockIdx.x % 2 != 0;
  const uint32_t half = blockIdx.x / 2 % 2, panel = kTokens * 128 + half * 2048, first = blockIdx.x * 64 * kWide;
  put(memory, (const Chunk*)a + blockIdx.x * 64 * 8, 64, 8);
  for (uint32_t p = 0; p < 4; ++p) put(memory + 8192 + p * panel, (const Chunk*)b + blockIdx.x * kTokens * 32 + p * 8, kTokens, 32);
  fence_async_shared();
  __syncthreads();
  const uint64_t tile_a = swizzled_tile(shared_address(memory)) + half * 4, tile_b = swizzled_tile(shared_address(memory + 8192), panel);
  float d[128];
#pragma unroll
  for (uint32_t n = 0; n < 128; ++n) d[n] = c[first + place(n, kWide)];
  wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kTokens / 16; ++k) multiply_values<T>(d, tile_a + k * 2, tile_b + k * (16 * 128 / 16), k > 0 || add);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_done(d);
#pragma unroll
  for (uint32_t n = 0; n < 128; ++n) out[first + place(n, kWide)] = d[n];
}
extern "C" __global__ void __launch_bounds__(128) wgmma_values_bf16(const uint32_t* a, const uint32_t* b, const float* c, float* out) {
  values<bf16>(a, b, c, out);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_values_f16(const uint32_t* a, const uint32_t* b, const float* c, float* out) {
  values<f16>(a, b, c, out);
}

// [i]: a tile at an address, with panels so many bytes apart and with none; the former afresh, as a whole and by its address, and i times 16
// bytes further on.
extern "C" __global__ void wgmma_descriptors(const uint32_t* addresses, const uint32_t* panels, uint64_t* out) {
  const uint32_t i = threadIdx.x;
  out[5 * i] = swizzled_tile(addresses[i], panels[i]);
  out[5 * i + 1] = swizzled_tile(addresses[i]);
  out[5 * i + 2] = fresh_tile(swizzled_tile(addresses[i], panels[i]));
  out[5 * i + 3] = fresh_address(swizzled_tile(addresses[i], panels[i]));
  out[5 * i + 4] = tile_at(swizzled_tile(addresses[i], panels[i]), i);
}

// Groups of kSize threads, each with a barrier of its own from kFirst on, pass a number on, 2 rounds and one more for each group
// before: no two groups meet as often.
template <uint32_t kSize, uint32_t kFirst>
__device__ __forceinline__ uint32_t passed(uint32_t* cells, uint32_t x) {
  const uint32_t i = threadIdx.x, group = i / kSize;
  for (uint32_t round = 0; round < 2 + group; ++round) {
    cells[i] = x * 3 + round;
    named_barrier(kFirst + group, kSize);
    x = cells[group * kSize + (i + 37) % kSize];
    named_barrier(kFirst + group, kSize);
  }
  return x;
}
extern "C" __global__ void wgmma_barriers(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t cells[256];
  const uint32_t i = threadIdx.x;
  out[i] = passed<32, 1>(cells, in[i]);
  out[256 + i] = passed<64, 9>(cells, in[256 + i]);
  out[512 + i] = passed<128, 13>(cells, in[512 + i]);
  out[768 + i] = passed<256, 0>(cells, in[768 + i]);
}
