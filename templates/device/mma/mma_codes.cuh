// Products of e4m3 codes by a warp: 16 x 32 by 32 x 8, summed in f32 (sm_89 and newer). Four codes are in a register where
// mma.cuh has two elements, so that load_matrices brings both operands.
#pragma once

#include "mma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kCodeProducts = true;

// c += a b.
__device__ __forceinline__ void multiply_add_codes(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
constexpr bool kCodeProducts = false;
#endif
