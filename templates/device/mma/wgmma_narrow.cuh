// Products of a warpgroup with 8 or 16 columns, a in registers (sm_90a), and how registers get to the rows of 128 bytes that b is
// read of. Functions and layouts are those of wgmma.cuh.
#pragma once

#include "wgmma.cuh"

// One product: `n` columns, `sums` a thread, which are the operands `names`; i0 to i5 are the numbers of the operands behind
// them.
#define KVGEN_NARROW(T, type, n, sums, names, outs, i0, i1, i2, i3, i4, i5)                                                                            \
  template <>                                                                                                                                          \
  __device__ __forceinline__ void multiply_keys<T, sums>(float (&d)[sums], const uint32_t (&a)[4], uint64_t b, bool add) {                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names "}, {%" #i0 \
                 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, 0;\n}"                                                                           \
                 : outs                                                                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((uint32_t)add)                                                              \
                 : "memory");                                                                                                                          \
  }
#define KVGEN_OUTS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVGEN_NARROW_PRODUCTS(T, type)                                                                                     \
  KVGEN_NARROW(T, type, 8, 4, "%0, %1, %2, %3", KVGEN_OUTS(0), 4, 5, 6, 7, 8, 9)                                           \
  KVGEN_NARROW(T, type, 16, 8, "%0, %1, %2, %3, %4, %5, %6, %7", KVGEN_OUTS_OF_16, 8, 9, 10, 11, 12, 13)
#define KVGEN_OUTS_OF_16 KVGEN_OUTS(0), KVGEN_OUTS(4)
KVGEN_NARROW_PRODUCTS(bf16, "bf16")
KVGEN_NARROW_PRODUCTS(f16, "f16")

// N = 2 or 4 matrices of 8 x 8 elements of 16 bits to shared memory, transposed: a lane has elements (g, 2j) and (g, 2j + 1) of
// each, as load_matrices (mma.cuh) leaves them. Lane 8i + r gives the address of row r of what matrix i becomes, 16 bytes at a
// multiple of 16.
template <uint32_t N>
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&r)[N]) {
  static_assert(N == 2 || N == 4);
  if constexpr (N == 2) asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1]) : "memory");
  if constexpr (N == 4) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
}
