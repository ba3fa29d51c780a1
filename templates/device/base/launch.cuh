// Programmatic dependent launch: a kernel may start while the one before it still runs.
#pragma once

// Nothing that another kernel writes is read before this returns.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start when each block of this kernel has called it, or has ended. The next kernel's pdl_wait
// still waits for all writes of this kernel. But a kernel that does not wait, and kernels after it, may overwrite memory that
// this kernel still reads. So the call stands behind a barrier of the whole block after the block's last read of memory that
// kernels write: the first thread that calls it counts for the block.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
