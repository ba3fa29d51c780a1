// Tensor cores of sm_80 and newer: 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers, and
// products of 16 x 16 by 16 x 8. Includes nothing: a kernel includes types.cuh before it.
//
// Lane 4g + j has elements (g, 2j) and (g, 2j + 1) of an 8 x 8 matrix, the first in the lower half of its register. a: rows
// 0-7 and 8-15 of columns 0-7, then of columns 8-15; b, transposed: k 0-7, then 8-15; c: rows 0-7 (two f32), then 8-15.
#pragma once

// Where something lies in shared memory, as the functions below take it.
__device__ __forceinline__ uint32_t matrix_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// N = 1, 2 or 4 matrices; lane 8i + r gives the address of row r of matrix i, 16 bytes at a multiple of 16. All lanes of the
// warp take part; those from 8N on need not have an address.
template <uint32_t N>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[N], uint32_t address) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 1) asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
  }
  if constexpr (N == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}
// Loads matrices, each transposed: a lane has elements (2j, g) and (2j + 1, g).
template <uint32_t N>
__device__ __forceinline__ void load_transposed(uint32_t (&r)[N], uint32_t address) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 1) asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
  }
  if constexpr (N == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}
// A matrix in registers, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// c += a b, summed in f32; T is what a and b hold.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void multiply_add<bf16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void multiply_add<f16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
