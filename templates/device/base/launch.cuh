// Programmatic dependent launch: a kernel may start while the one before it still runs.
#pragma once

// Nothing that another kernel writes is read before this returns.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start once each block of this one has called it or has ended, which is as good. That kernel's
// pdl_wait still waits for all of this one's writes; but one that does not wait, and what follows it, may overwrite what this one
// still reads. So it stands behind a barrier of the whole block that follows the block's last read of memory that kernels write:
// the first thread that calls it speaks for the block.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
