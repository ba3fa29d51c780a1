// Asynchronous copies of 16 bytes, for architectures without tensor copies (sm_80 and newer).
// Includes nothing: a kernel includes types.cuh before it.
#pragma once

// 16 bytes past L1, both ends aligned to 16. Where not `valid`, 16 zeros, and `from` is not read.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid = true) {
  const uint32_t shared = (uint32_t)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(valid ? 16u : 0u) : "memory");
}
// What this thread has asked for since its last group becomes a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last N groups of this thread have landed; other threads need a barrier after it.
template <uint32_t N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
