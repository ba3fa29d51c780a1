// Programmatic dependent launch: a kernel may start while the one before it still runs.
#pragma once

// Nothing that another kernel writes is read before this returns.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start; its own pdl_wait still waits for all of this kernel's writes.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
