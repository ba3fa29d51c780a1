// Products of e4m3 codes by a warpgroup (sm_90a): 64 rows of A by N columns of B, 32 deep, both in shared memory as rows of 128
// bytes (swizzled_tile of wgmma.cuh; a step of 32 codes is 32 bytes of a row, as one of 16 elements is there), summed in f32.
#pragma once

#include "wgmma.cuh"

// d = a b, or d + a b if `add`. A thread has half as many sums as there are columns.
template <uint32_t N>
__device__ __forceinline__ void multiply_codes(float (&d)[N], uint64_t a, uint64_t b, bool add);

#define KVGEN_CODES(n, sums, i0, i1, i2)                                                                                            \
  template <>                                                                                                                       \
  __device__ __forceinline__ void multiply_codes<sums>(float (&d)[sums], uint64_t a, uint64_t b, bool add) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {"        \
                 KVGEN_NAMES_##n "}, %" #i0 ", %" #i1 ", p, 1, 1;\n}"                                                               \
                 : KVGEN_SUMS_##n                                                                                                   \
                 : "l"(a), "l"(b), "r"((uint32_t)add)                                                                               \
                 : "memory");                                                                                                       \
  }
KVGEN_CODES(32, 16, 16, 17, 18)
KVGEN_CODES(64, 32, 32, 33, 34)
KVGEN_CODES(128, 64, 64, 65, 66)
