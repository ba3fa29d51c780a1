// Tiles of 16 tokens through fragments.cuh: block b has tile b, a row of `pitch` bytes a token.
#include "../../templates/device/base/types.cuh"
#include "../../templates/device/attention/common/bf16_codes.cuh"

// This warp's tile, as memory has it, in shared memory; where this lane's row begins.
template <typename F>
__device__ __forceinline__ uint32_t staged(const uint32_t* tiles, uint32_t pitch) {
  extern __shared__ __align__(16) uint32_t tile[];
  for (uint32_t i = threadIdx.x; i < 4 * pitch; i += 32) tile[i] = tiles[blockIdx.x * 4 * pitch + i];
  __syncwarp();
  return matrix_address(tile) + F::offset(threadIdx.x, pitch);
}

// The a registers of a block, then those of its two halves, and the dims of their two elements.
template <typename F, uint32_t kWhole, uint32_t kHalf, typename DimOf>
__device__ __forceinline__ void dump(Vec<uint32_t, 4>* out, Vec<uint32_t, 8>* dims, const uint32_t* tiles, uint32_t pitch, const DimOf& dim_of) {
  const uint32_t address = staged<F>(tiles, pitch), first = blockIdx.x * (kWhole + 2 * kHalf) * 32 + threadIdx.x;
  uint32_t a[kWhole][4], halves[2][kHalf][4];
  F::load(a, address);
  F::load_half(halves[0], address);
  F::load_half(halves[1], address + 16);
#pragma unroll
  for (uint32_t s = 0; s < kWhole; ++s) out[first + s * 32] = {a[s][0], a[s][1], a[s][2], a[s][3]};
#pragma unroll
  for (uint32_t h = 0; h < 2 * kHalf; ++h) {
    const uint32_t* const own = halves[h / kHalf][h % kHalf];
    out[first + (kWhole + h) * 32] = {own[0], own[1], own[2], own[3]};
  }
  if (blockIdx.x != 0) return;
#pragma unroll 1
  for (uint32_t s = 0; s < kWhole + 2 * kHalf; ++s) {
    const uint32_t own = s < kWhole ? s : (s - kWhole) % kHalf, from = s < kWhole + kHalf ? 0 : F::kHalfDims;
#pragma unroll 1
    for (uint32_t i = 0; i < 8; ++i) dims[first + s * 32].e[i] = from + dim_of(own, i / 2, i % 2);
  }
}
template <typename E>
__device__ __forceinline__ void dump_keys(Vec<uint32_t, 4>* out, Vec<uint32_t, 8>* dims, const uint32_t* tiles, uint32_t pitch) {
  using Key = KeyFragments<E>;
  const auto dim_of = [](uint32_t step, uint32_t i, uint32_t element) { return Key::key_dim(step, threadIdx.x % 4, i / 2, element); };
  dump<Key, Key::kSteps, Key::kHalfSteps>(out, dims, tiles, pitch, dim_of);
}
template <typename E>
__device__ __forceinline__ void dump_values(Vec<uint32_t, 4>* out, Vec<uint32_t, 8>* dims, const uint32_t* tiles, uint32_t pitch) {
  using Value = ValueFragments<E>;
  const auto dim_of = [](uint32_t tile, uint32_t i, uint32_t) { return Value::value_dim(tile, threadIdx.x / 4 + i % 2 * 8); };
  dump<Value, Value::kTiles, Value::kHalfTiles>(out, dims, tiles, pitch, dim_of);
}

template <typename T>
__device__ __forceinline__ T element(const uint16_t* p, uint32_t i, bool exists) {
  return {exists ? p[i] : (uint16_t)0};
}

// scores[b, 16 tokens, 8 columns] = K Q^T, with q [8, dims].
template <typename E>
__device__ __forceinline__ void score(float* scores, const uint32_t* tiles, const uint16_t* q, uint32_t pitch, uint32_t dims) {
  using Key = KeyFragments<E>;
  using Operand = typename Key::Operand;
  uint32_t address = staged<Key>(tiles, pitch);
  const uint32_t lane = threadIdx.x;
  float c[4] = {};
  uint32_t from = 0;
  const auto read = [&](uint32_t dim) { return element<Operand>(q, lane / 4 * dims + from + dim, from + dim < dims); };
  for (; from + Key::kHalfDims < dims; from += Key::kDims, address += 32) {
    uint32_t a[Key::kSteps][4], b[Key::kSteps][2];
    Key::load(a, address);
    query_fragments<E>(b, lane, read);
    for (uint32_t step = 0; step < Key::kSteps; ++step) multiply_add<Operand>(c, a[step], b[step]);
  }
  if (from < dims) {
    uint32_t a[Key::kHalfSteps][4], b[Key::kHalfSteps][2];
    Key::load_half(a, address);
    query_fragments<E>(b, lane, read);
    for (uint32_t step = 0; step < Key::kHalfSteps; ++step) multiply_add<Operand>(c, a[step], b[step]);
  }
  for (uint32_t i = 0; i < 4; ++i)
    scores[blockIdx.x * 128 + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i] * Key::kFactor;
}

// sums[b, 8 columns, dims] = P V, with p [16 tokens, 8 columns] held as scores are.
template <typename E>
__device__ __forceinline__ void sum(float* sums, const uint32_t* tiles, const uint16_t* p, uint32_t pitch, uint32_t dims) {
  using Value = ValueFragments<E>;
  using Operand = typename Value::Operand;
  uint32_t address = staged<Value>(tiles, pitch);
  const uint32_t g = threadIdx.x / 4, j = threadIdx.x % 4;
  const uint32_t b[2] = {transposed(((const uint32_t*)p)[g * 4 + j]), transposed(((const uint32_t*)p)[(g + 8) * 4 + j])};
  const auto keep = [&](const float (&c)[4], uint32_t from, uint32_t tile) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t dim = from + Value::value_dim(tile, g + i / 2 * 8);
      if (dim < dims) sums[(blockIdx.x * 8 + 2 * j + i % 2) * dims + dim] = c[i] * Value::kFactor;
    }
  };
  uint32_t from = 0;
  for (; from + Value::kHalfDims < dims; from += Value::kDims, address += 32) {
    uint32_t a[Value::kTiles][4];
    Value::load(a, address);
    for (uint32_t tile = 0; tile < Value::kTiles; ++tile) {
      float c[4] = {};
      multiply_add<Operand>(c, a[tile], b);
      keep(c, from, tile);
    }
  }
  if (from < dims) {
    uint32_t a[Value::kHalfTiles][4];
    Value::load_half(a, address);
    for (uint32_t tile = 0; tile < Value::kHalfTiles; ++tile) {
      float c[4] = {};
      multiply_add<Operand>(c, a[tile], b);
      keep(c, from, tile);
    }
  }
}

#define KERNELS(NAME, E)                                                                                                          \
  extern "C" __global__ void dump_keys_##NAME(Vec<uint32_t, 4>* out, Vec<uint32_t, 8>* dims, const uint32_t* tiles, uint32_t pitch) { \
    dump_keys<E>(out, dims, tiles, pitch);                                                                                        \
  }                                                                                                                               \
  extern "C" __global__ void dump_values_##NAME(Vec<uint32_t, 4>* out, Vec<uint32_t, 8>* dims, const uint32_t* tiles, uint32_t pitch) { \
    dump_values<E>(out, dims, tiles, pitch);                                                                                      \
  }                                                                                                                               \
  extern "C" __global__ void score_##NAME(float* scores, const uint32_t* tiles, const uint16_t* q, uint32_t pitch, uint32_t dims) { \
    score<E>(scores, tiles, q, pitch, dims);                                                                                      \
  }                                                                                                                               \
  extern "C" __global__ void sum_##NAME(float* sums, const uint32_t* tiles, const uint16_t* p, uint32_t pitch, uint32_t dims) {   \
    sum<E>(sums, tiles, p, pitch, dims);                                                                                          \
  }
#ifndef TYPES
#define TYPES                                                                                                            \
  KERNELS(bf16, bf16) KERNELS(f16, f16) KERNELS(e4m3, e4m3) KERNELS(e5m2, e5m2) KERNELS(i8, int8_t) KERNELS(u8, uint8_t) \
  KERNELS(i4, i4x2) KERNELS(u4, u4x2) KERNELS(e2m1, e2m1x2) KERNELS(e4m3_bf16, InBf16<e4m3>)                              \
  KERNELS(e5m2_bf16, InBf16<e5m2>) KERNELS(e2m1_bf16, InBf16<e2m1x2>)
#endif
TYPES
