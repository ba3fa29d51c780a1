// Vector access: the widest one first, then as many narrower ones as the memory's runs ask for.
#pragma once

// Says that a pointer kept in shared memory points to global memory: the access is then no generic one. Compilers before 13.2
// stop over the assumption ("Broken function found"); without it accesses are generic, and right.
template <typename T>
__device__ __forceinline__ T* in_global(T* p) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1302
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// W neighbouring values of which every N lie together; one access each.
template <uint32_t N, uint32_t W, typename T>
__device__ __forceinline__ void load(Vec<T, W>& out, const T* p) {
#pragma unroll
  for (uint32_t i = 0; i < W; i += N) *(Vec<T, N>*)&out.e[i] = *(const Vec<T, N>*)(p + i);
}
template <uint32_t N, uint32_t W, typename T>
__device__ __forceinline__ void store(T* p, const Vec<T, W>& in) {
#pragma unroll
  for (uint32_t i = 0; i < W; i += N) *(Vec<T, N>*)(p + i) = *(const Vec<T, N>*)&in.e[i];
}
// kBytes = 1, 2, 4, 8 or 16 bytes where `live`; else `to` stays what it was, and `from` is not read. asm: the compiler waits for
// what it loads behind a condition.
template <uint32_t kBytes>
__device__ __forceinline__ void load_live(uint32_t* to, const void* from, bool live) {
  if constexpr (kBytes == 16) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                 : "l"(from), "r"((uint32_t)live));
  } else if constexpr (kBytes == 8) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2]; }" : "+r"(to[0]), "+r"(to[1]) : "l"(from), "r"((uint32_t)live));
  } else if constexpr (kBytes == 4) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }" : "+r"(to[0]) : "l"(from), "r"((uint32_t)live));
  } else if constexpr (kBytes == 2) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }" : "+r"(to[0]) : "l"(from), "r"((uint32_t)live));
  } else {
    static_assert(kBytes == 1);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }" : "+r"(to[0]) : "l"(from), "r"((uint32_t)live));
  }
}

template <uint32_t W, typename T>
__device__ __forceinline__ void fill(Vec<T, W>& out, T value) {
  if constexpr (sizeof(T) == 2 && W % 2 == 0) {  // as words: where halves meet a load, each would be put together on its own
    const uint32_t both = value.bits * 0x10001u;
#pragma unroll
    for (uint32_t i = 0; i < W; i += 2) *(uint32_t*)&out.e[i] = both;
  } else {
#pragma unroll
    for (uint32_t i = 0; i < W; ++i) out.e[i] = value;
  }
}
