// Tensor copies (TMA) of one box (sm_90a and newer); tma_tile.cuh makes tiles of them. One thread asks for a copy.
// A kernel includes types.cuh and mbarrier.cuh before it.
#pragma once

#include "tensor_map.cuh"

// L2 policies of lines: the policies that createpolicy would make, as every driver encodes them.
enum class CacheHint : uint64_t {
  normal = 0x1000000000000000,
  evict_first = 0x12f0000000000000,  // read once
  evict_last = 0x14f0000000000000,   // read by others soon
};

// Before the first copy, so that it does not wait for the map.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---------------------------------------------------------------- loads
// The box at coordinates c0 (fastest), c1, ... to `to` (a multiple of 128 bytes); its bytes count in `bar`, clipped or not.
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint, int32_t c0) {
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%4}], [%2], %3;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "l"((uint64_t)hint), "r"(c0)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint, int32_t c0,
    int32_t c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "l"((uint64_t)hint), "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint, int32_t c0,
    int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint, int32_t c0,
    int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint, int32_t c0,
    int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
// Loads a box to the same place in each block of the cluster whose bit is set, and signals the barrier there.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint,
    uint16_t blocks, int32_t c0) {
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
               " [%0], [%1, {%5}], [%2], %3, %4;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "h"(blocks), "l"((uint64_t)hint), "r"(c0)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint,
    uint16_t blocks, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
               " [%0], [%1, {%5, %6}], [%2], %3, %4;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "h"(blocks), "l"((uint64_t)hint), "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint,
    uint16_t blocks, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
               " [%0], [%1, {%5, %6, %7}], [%2], %3, %4;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "h"(blocks), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint,
    uint16_t blocks, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
               " [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "h"(blocks), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint,
    uint16_t blocks, int32_t c0, int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
               " [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "h"(blocks), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2),
                   "r"(c3), "r"(c4)
               : "memory");
}
#if __CUDA_ARCH__ >= 1000
// Four rows, each at a coordinate of its own, box columns from `column` on; a row outside of the tensor is filled.
__device__ __forceinline__ void tma_gather4(void* to, const TensorMap* map, uint64_t* bar, CacheHint hint,
    int32_t column, int32_t r0, int32_t r1, int32_t r2, int32_t r3) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(bar)), "l"((uint64_t)hint), "r"(column), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
#endif

// ---------------------------------------------------------------- stores
// The box at `from` (a multiple of 128 bytes) to its coordinates; what lies outside of the tensor is dropped. Whoever wrote
// `from` has called fence_async_shared() before the barrier that this thread waited at.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, CacheHint hint, int32_t c0) {
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%3}], [%1], %2;"
      ::"l"(map), "r"(shared_address(from)), "l"((uint64_t)hint), "r"(c0) : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, CacheHint hint, int32_t c0,
    int32_t c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%3, %4}], [%1], %2;" ::"l"(map),
               "r"(shared_address(from)), "l"((uint64_t)hint), "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, CacheHint hint, int32_t c0,
    int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%3, %4, %5}], [%1], %2;" ::"l"(map),
               "r"(shared_address(from)), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, CacheHint hint, int32_t c0,
    int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%3, %4, %5, %6}], [%1], %2;" ::"l"(map),
               "r"(shared_address(from)), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, CacheHint hint, int32_t c0,
    int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%3, %4, %5, %6, %7}], [%1], %2;" ::"l"(map),
               "r"(shared_address(from)), "l"((uint64_t)hint), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
// This thread's stores since its last group become a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the last N groups have been read, so that their shared memory may be overwritten; needed before the block exits.
template <uint32_t N>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// All but the last N groups are in global memory.
template <uint32_t N>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
