// Asynchronous copies of 16 bytes, for architectures without tensor copies (sm_80 and newer).
// Includes nothing: a kernel includes types.cuh before it.
#pragma once

// 16 bytes past L1, both ends aligned to 16. Where not `valid`, 16 zeros, and `from` is not read.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid = true) {
  const uint32_t shared = (uint32_t)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(valid ? 16u : 0u) : "memory");
}
// kBytes = 4, 8 or 16 bytes, both ends aligned to them, to an address in shared memory; 16 bytes go past L1.
template <uint32_t kBytes>
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
}
// cp_async, or zeros if not `valid`; then `from` is not read.
template <uint32_t kBytes>
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16u : 0u) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(valid ? kBytes : 0u) : "memory");
  }
}
// This thread's copies since its last group become a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last N groups of this thread have landed; other threads need a barrier after it.
template <uint32_t N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// An arrival at the mbarrier, of those that it was initialised with, once this thread's copies so far have landed.
__device__ __forceinline__ void cp_async_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"((uint32_t)__cvta_generic_to_shared(bar)) : "memory");
}
