// Products of a warpgroup with operands in shared memory (sm_90a): 64 rows of A by N columns of B, 16 deep, summed in f32. They
// are asynchronous: sums may not be touched between a product and the wait for its group, operands not overwritten.
// Includes nothing: a kernel includes types.cuh before it, and mbarrier.cuh for the fence between its writes and products.
//
// Thread 32w + 4g + j of a warpgroup has sums (16w + g, 8n + 2j), (.., 8n + 2j + 1), then those of row 16w + g + 8, of every n.
#pragma once

// A tile of 16-bit elements as rows of 128 bytes, whose 16-byte chunks stand at chunk ^ row % 8: `address` is a multiple of 1024,
// plus 32 a step of 16 elements along a row. `panel` bytes lie between neighbouring tiles; of rows along the sum (V) only.
// `group` bytes lie between 8 rows and the next 8: 1024, or more where other panels lie between them (tma_load_groups_tile).
__device__ __forceinline__ uint64_t swizzled_tile(uint32_t address, uint32_t panel = 16, uint32_t group = 1024) {
  return (uint64_t)(address >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(group >> 4) << 32 | (uint64_t)1 << 62;
}

// Returns the same tile, opaque to the compiler, which otherwise keeps a pair of registers for each step's sum.
__device__ __forceinline__ uint64_t fresh_tile(uint64_t tile) {
  asm volatile("" : "+l"(tile));
  return tile;
}

// fresh_tile for the half that holds the address: the other half stays a constant.
__device__ __forceinline__ uint64_t fresh_address(uint64_t tile) {
  uint32_t low = (uint32_t)tile;
  asm volatile("" : "+r"(low));
  return tile >> 32 << 32 | low;
}
// The tile `n` times 16 bytes further on. Addresses do not grow into the bits above theirs.
__device__ __forceinline__ uint64_t tile_at(uint64_t tile, uint32_t n) { return tile >> 32 << 32 | (uint32_t)tile + n; }

// Before the first product, and wherever registers of one have been written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products since the last group become a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last N groups are done.
template <uint32_t N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from reading sums before the wait in front of it.
template <uint32_t N>
__device__ __forceinline__ void wgmma_done(float (&d)[N]) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A barrier of `threads` threads of the block; 0 is that of __syncthreads().
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// True if x is true for one of a warpgroup's threads, which meet at barrier `id`.
__device__ __forceinline__ bool any_of_group(uint32_t id, bool x) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}" : "=r"(any) : "r"((uint32_t)x), "r"(id) : "memory");
  return any != 0;
}

// Gives registers away, or takes what others gave: so many for each thread of the warpgroup from here on.
template <uint32_t N>
__device__ __forceinline__ void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <uint32_t N>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// each(dim, h, sums) for 8 neighbouring dims of the thread's column h at a time, of 4 tiles of 8 dims from `first` on: the four
// threads of a column exchange what they have.
template <typename Each>
__device__ __forceinline__ void for_each_eight(const float (&out)[4][4], uint32_t first, const Each& each) {
  const uint32_t j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    Vec<float, 8> x;  // pairs: of dims 8 (first + i) + 2 j, then of 8 (first + j) + 2 i
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x.e[i] = out[i / 2][2 * h + i % 2];
#pragma unroll
    for (uint32_t step = 1; step < 4; step *= 2)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        if (i & step) continue;
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          float &low = x.e[2 * i + e], &high = x.e[2 * (i + step) + e];
          const float theirs = __shfl_xor_sync(~0u, j & step ? low : high, step);
          if (j & step) low = theirs;
          else high = theirs;
        }
      }
    each(8 * (first + j), h, x);
  }
}
// ---- Products d = a b, or d + a b if `add`; T is what a and b hold. A thread has half as many sums as there are columns.
//
//   multiply_keys    columns are rows of b, which are along the sum: tokens of K
//   multiply_values  columns lie along the rows of b, 64 in each of its panels: dims of V
//
// Rows of a are along the sum, in shared memory; or a is in registers, that of mma.sync for the 16 rows of each warp.
template <typename T, uint32_t N>
__device__ __forceinline__ void multiply_keys(float (&d)[N], uint64_t a, uint64_t b, bool add);
template <typename T, uint32_t N>
__device__ __forceinline__ void multiply_keys(float (&d)[N], const uint32_t (&a)[4], uint64_t b, bool add);
template <typename T, uint32_t N>
__device__ __forceinline__ void multiply_values(float (&d)[N], uint64_t a, uint64_t b, bool add);
template <typename T, uint32_t N>
__device__ __forceinline__ void multiply_values(float (&d)[N], const uint32_t (&a)[4], uint64_t b, bool add);

// Lists of operands by tens: %t0 to %t9, and the sums d[t0] to d[t9].
#define KVGEN_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"
#define KVGEN_NAMES_2(t) ", %" #t "0, %" #t "1"
#define KVGEN_NAMES_4(t) KVGEN_NAMES_2(t) ", %" #t "2, %" #t "3"
#define KVGEN_NAMES_6(t) KVGEN_NAMES_4(t) ", %" #t "4, %" #t "5"
#define KVGEN_NAMES_8(t) KVGEN_NAMES_6(t) ", %" #t "6, %" #t "7"
#define KVGEN_NAMES_10(t) KVGEN_NAMES_8(t) ", %" #t "8, %" #t "9"
#define KVGEN_SUMS_2(t) "+f"(d[t##0]), "+f"(d[t##1])
#define KVGEN_SUMS_4(t) KVGEN_SUMS_2(t), "+f"(d[t##2]), "+f"(d[t##3])
#define KVGEN_SUMS_6(t) KVGEN_SUMS_4(t), "+f"(d[t##4]), "+f"(d[t##5])
#define KVGEN_SUMS_8(t) KVGEN_SUMS_6(t), "+f"(d[t##6]), "+f"(d[t##7])
#define KVGEN_SUMS_10(t) KVGEN_SUMS_8(t), "+f"(d[t##8]), "+f"(d[t##9])

// One product: `n` columns, `sums` a thread; `add` is operand %`flag`, `more` ends the instruction.
#define KVGEN_PRODUCT(function, T, type, n, sums, kind, operands, flag, more, ...)                                                          \
  template <>                                                                                                                               \
  __device__ __forceinline__ void function<T, sums>(float (&d)[sums], kind, uint64_t b, bool add) {                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {"     \
                 KVGEN_NAMES_##n "}, " operands ", p, 1, 1, " more ";\n}"                                                                   \
                 : KVGEN_SUMS_##n                                                                                                           \
                 : __VA_ARGS__, "l"(b), "r"((uint32_t)add)                                                                                  \
                 : "memory");                                                                                                               \
  }
// All products of `n` columns; i0 to i5 are the numbers of the operands behind the sums.
#define KVGEN_PRODUCTS_OF(T, type, n, sums, i0, i1, i2, i3, i4, i5)                                                                          \
  KVGEN_PRODUCT(multiply_keys, T, type, n, sums, uint64_t a, "%" #i0 ", %" #i1, i2, "0, 0", "l"(a))                                          \
  KVGEN_PRODUCT(multiply_values, T, type, n, sums, uint64_t a, "%" #i0 ", %" #i1, i2, "0, 1", "l"(a))                                        \
  KVGEN_PRODUCT(multiply_keys, T, type, n, sums, const uint32_t (&a)[4], "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4, i5, "0",          \
                "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))                                                                                 \
  KVGEN_PRODUCT(multiply_values, T, type, n, sums, const uint32_t (&a)[4], "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4, i5, "1",        \
                "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
#define KVGEN_PRODUCTS(n, sums, i0, i1, i2, i3, i4, i5)                      \
  KVGEN_PRODUCTS_OF(bf16, "bf16", n, sums, i0, i1, i2, i3, i4, i5)           \
  KVGEN_PRODUCTS_OF(f16, "f16", n, sums, i0, i1, i2, i3, i4, i5)

#define KVGEN_NAMES_32 KVGEN_NAMES_0 KVGEN_NAMES_6(1)
#define KVGEN_SUMS_32 KVGEN_SUMS_10(), KVGEN_SUMS_6(1)
KVGEN_PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21)
#define KVGEN_NAMES_64 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_2(3)
#define KVGEN_SUMS_64 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_2(3)
KVGEN_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
#define KVGEN_NAMES_80 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3)
#define KVGEN_SUMS_80 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3)
KVGEN_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45)
#define KVGEN_NAMES_96 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3) KVGEN_NAMES_8(4)
#define KVGEN_SUMS_96 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3), KVGEN_SUMS_8(4)
KVGEN_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53)
#define KVGEN_NAMES_112 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3) KVGEN_NAMES_10(4) KVGEN_NAMES_6(5)
#define KVGEN_SUMS_112 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3), KVGEN_SUMS_10(4), KVGEN_SUMS_6(5)
KVGEN_PRODUCTS(112, 56, 56, 57, 58, 59, 60, 61)
#define KVGEN_NAMES_128 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3) KVGEN_NAMES_10(4) KVGEN_NAMES_10(5) KVGEN_NAMES_4(6)
#define KVGEN_SUMS_128 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3), KVGEN_SUMS_10(4), KVGEN_SUMS_10(5), KVGEN_SUMS_4(6)
KVGEN_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)
#define KVGEN_NAMES_176 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3) KVGEN_NAMES_10(4) KVGEN_NAMES_10(5) KVGEN_NAMES_10(6) KVGEN_NAMES_10(7) KVGEN_NAMES_8(8)
#define KVGEN_SUMS_176 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3), KVGEN_SUMS_10(4), KVGEN_SUMS_10(5), KVGEN_SUMS_10(6), KVGEN_SUMS_10(7), KVGEN_SUMS_8(8)
KVGEN_PRODUCTS(176, 88, 88, 89, 90, 91, 92, 93)
#define KVGEN_NAMES_192 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3) KVGEN_NAMES_10(4) KVGEN_NAMES_10(5) KVGEN_NAMES_10(6) KVGEN_NAMES_10(7) KVGEN_NAMES_10(8) KVGEN_NAMES_6(9)
#define KVGEN_SUMS_192 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3), KVGEN_SUMS_10(4), KVGEN_SUMS_10(5), KVGEN_SUMS_10(6), KVGEN_SUMS_10(7), KVGEN_SUMS_10(8), KVGEN_SUMS_6(9)
KVGEN_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101)
#define KVGEN_NAMES_256 KVGEN_NAMES_0 KVGEN_NAMES_10(1) KVGEN_NAMES_10(2) KVGEN_NAMES_10(3) KVGEN_NAMES_10(4) KVGEN_NAMES_10(5) KVGEN_NAMES_10(6) KVGEN_NAMES_10(7) KVGEN_NAMES_10(8) KVGEN_NAMES_10(9) KVGEN_NAMES_10(10) KVGEN_NAMES_10(11) KVGEN_NAMES_8(12)
#define KVGEN_SUMS_256 KVGEN_SUMS_10(), KVGEN_SUMS_10(1), KVGEN_SUMS_10(2), KVGEN_SUMS_10(3), KVGEN_SUMS_10(4), KVGEN_SUMS_10(5), KVGEN_SUMS_10(6), KVGEN_SUMS_10(7), KVGEN_SUMS_10(8), KVGEN_SUMS_10(9), KVGEN_SUMS_10(10), KVGEN_SUMS_10(11), KVGEN_SUMS_8(12)
KVGEN_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133)
