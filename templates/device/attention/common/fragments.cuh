// Operands of the tensor cores out of tiles of K and V in shared memory, which hold them as the cache does: a token a row,
// codes of 16, 8 or 4 bits. Codes below 16 bits are widened to f16 between shared memory and product, exactly.
//
// KeyFragments: a = 16 tokens x 16 dims, for S^T = K Q^T. ValueFragments: a = 16 dims x 16 tokens, for O^T = V^T P^T. Both
// read 16 rows of 32 bytes at once (`load`) or of 16 bytes (`load_half`), each lane from its `offset` on. The order
// of dims depends on the element type, as is cheapest: Q's fragments follow key_dim, the rows of O value_dim.
//
// Rows begin at multiples of 16 bytes, an odd number of 16 bytes apart: then 8 of them lie in different banks. The bytes
// of a row past its dims are read as well. They must be zeros in K, because 0 * NaN is NaN; in V they reach only rows of O that
// are not stored.
#pragma once

#include "../../quant/elements.cuh"
#include "../../mma/mma.cuh"

// ---- Widening. Fragments hold codes divided by a power of two, kFragmentFactor; the scaling of sums multiplies by it.
//
// Together: a register gets codes 2i and 2i + 1 of a word. Else it gets codes i and i + half of all, which are one dim of two
// tokens after a transposing ldmatrix.

template <typename E>
constexpr float kFragmentFactor = 1.0f;

#if __CUDA_ARCH__ >= 890
template <bool Together>
__device__ __forceinline__ void widen(e4m3, uint32_t (&out)[2], uint32_t word) {
  if constexpr (!Together) word = permute(word, 0, 0x3120);
  asm("{ .reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(out[0]), "=r"(out[1])
      : "r"(word));
}
#else
template <>
constexpr float kFragmentFactor<e4m3> = 256.0f;
// As decode(e4m3) does it. The bit that leaves a code at its lower end is found one byte below, that of byte 0 in byte 3.
template <bool Together>
__device__ __forceinline__ void widen(e4m3, uint32_t (&out)[2], uint32_t word) {
  const uint32_t flagged = blend(kByteSigns, (word & ~kByteSigns) + 0x01010101u, word);  // set where NaN
  const uint32_t turned = __funnelshift_r(flagged, flagged, 1);
  const uint32_t upper = blend(kByteSigns, word, turned), lower = turned & kByteSigns;
  out[0] = permute(lower, upper, Together ? 0x5043 : 0x6143);
  out[1] = permute(lower, upper, Together ? 0x7261 : 0x7250);
}
#endif

// The upper byte of an f16 each.
template <bool Together>
__device__ __forceinline__ void widen(e5m2, uint32_t (&out)[2], uint32_t word) {
  out[0] = permute(word, 0, Together ? 0x1404 : 0x2404);
  out[1] = permute(word, 0, Together ? 0x3424 : 0x3414);
}

__device__ __forceinline__ uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("add.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Both times half kHalf of b.
template <uint32_t kHalf>
__device__ __forceinline__ uint32_t multiply_by_half(uint32_t a, uint32_t b) {
  uint32_t out;
  if constexpr (kHalf == 0) asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.f16x2 %0, %1, t; }" : "=r"(out) : "r"(a), "r"(b));
  else asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.f16x2 %0, %1, t; }" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// 2^10 plus each byte, then less 2^10 and what the byte has been moved up by; `less` is the negative of both.
template <bool Together>
__device__ __forceinline__ void widen_bytes(uint32_t (&out)[2], uint32_t word, uint32_t less) {
  out[0] = add_halves(permute(word, 0x64646464u, Together ? 0x4140 : 0x4240), less);
  out[1] = add_halves(permute(word, 0x64646464u, Together ? 0x4342 : 0x4341), less);
}
template <bool Together>
__device__ __forceinline__ void widen(int8_t, uint32_t (&out)[2], uint32_t word) {
  widen_bytes<Together>(out, word ^ kByteSigns, 0xe480e480u);
}
template <bool Together>
__device__ __forceinline__ void widen(uint8_t, uint32_t (&out)[2], uint32_t word) {
  widen_bytes<Together>(out, word, 0xe400e400u);
}

// 2^10 plus each nibble, or plus 16 times a nibble, which a multiply-add puts right. `flip` turns signed into moved up by 8;
// `less` and `less16` are the negatives of 2^10 and 2^6, and of that.
__device__ __forceinline__ void widen_nibbles(uint32_t (&out)[4], uint32_t word, uint32_t flip, uint32_t less, uint32_t less16) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t pair = word >> 8 * i;
    uint32_t low, high;  // (pair & mask) ^ magic
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(low) : "r"(pair), "r"(0x000f000fu), "r"(0x64006400u ^ flip));
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(high) : "r"(pair), "r"(0x00f000f0u), "r"(0x64006400u ^ flip << 4));
    out[2 * i] = add_halves(low, less);
    out[2 * i + 1] = multiply_add_halves(high, 0x2c002c00u, less16);  // 0x2c00 is 1 / 16
  }
}
template <bool Together>
__device__ __forceinline__ void widen(i4x2, uint32_t (&out)[4], uint32_t word) {
  static_assert(!Together);
  widen_nibbles(out, word, 0x00080008u, 0xe408e408u, 0xd480d480u);
}
template <bool Together>
__device__ __forceinline__ void widen(u4x2, uint32_t (&out)[4], uint32_t word) {
  static_assert(!Together);
  widen_nibbles(out, word, 0, 0xe400e400u, 0xd400d400u);
}

#if KVGEN_HAS_E2M1
template <bool Together>
__device__ __forceinline__ void widen(e2m1x2, uint32_t (&out)[4], uint32_t word) {
  uint32_t pairs[4];
  asm("{ .reg .b8 a, b, c, d;\n"
      "mov.b32 {a, b, c, d}, %4;\n"
      "cvt.rn.f16x2.e2m1x2 %0, a;\n"
      "cvt.rn.f16x2.e2m1x2 %1, b;\n"
      "cvt.rn.f16x2.e2m1x2 %2, c;\n"
      "cvt.rn.f16x2.e2m1x2 %3, d; }"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(word));
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) out[i] = Together ? pairs[i] : permute(pairs[i / 2], pairs[2 + i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
}
#else
template <>
constexpr float kFragmentFactor<e2m1x2> = 16384.0f;
// Sign, exponent and mantissa put where f16 has them are the number times 2^-14, subnormal or not: in bytes first, which
// then become the upper ones.
template <bool Together>
__device__ __forceinline__ void widen(e2m1x2, uint32_t (&out)[4], uint32_t word) {
  static_assert(!Together);
  const uint32_t evens = ((word << 4) & kByteSigns) | ((word << 1) & 0x0e0e0e0eu);
  const uint32_t odds = (word & kByteSigns) | ((word >> 3) & 0x0e0e0e0eu);
  out[0] = permute(evens, 0, 0x2404);
  out[1] = permute(odds, 0, 0x2404);
  out[2] = permute(evens, 0, 0x3414);
  out[3] = permute(odds, 0, 0x3414);
}
#endif

// Pairs of e2m1 that a table of their scale turns into e4m3 (tile_tables.cuh).
struct e2m1x2_products {};
template <>
constexpr uint32_t kPerElement<e2m1x2_products> = 2;
template <>
constexpr float kFragmentFactor<e2m1x2_products> = kFragmentFactor<e4m3>;
// Integer codes moved up to begin at zero, as the multiples of 2^-24 that f16 has them for without an instruction: an f16 below
// 2^-13 is its bits times 2^-24. The second one of a pair of 4-bit codes is 16 times as much. Sums of products are to be moved
// back.
template <typename E>
struct FromZero {
  uint8_t bits;
};
template <typename E>
constexpr uint32_t kPerElement<FromZero<E>> = kPerElement<E>;
template <typename E>
constexpr float kFragmentFactor<FromZero<E>> = 16777216.0f / (kPerElement<E> == 2 ? 16.0f : 1.0f);
template <typename E>
constexpr bool kBeginsAtZero = false;
template <typename E>
constexpr bool kBeginsAtZero<FromZero<E>> = true;
// By how much codes are moved up.
template <typename E>
constexpr float kMovedUp = 0.0f;
template <>
constexpr float kMovedUp<FromZero<int8_t>> = 128.0f;
template <>
constexpr float kMovedUp<FromZero<i4x2>> = 8.0f;
// The factor of code `dim` of a row that gives all codes kFragmentFactor.
template <typename E>
__device__ __forceinline__ constexpr float even_out(uint32_t dim) {
  return kBeginsAtZero<E> && kPerElement<E> == 2 && dim % 2 == 0 ? 16.0f : 1.0f;
}

// (bits & mask) ^ flip
__device__ __forceinline__ uint32_t flipped(uint32_t bits, uint32_t mask, uint32_t flip) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(bits), "r"(mask), "r"(flip));
  return out;
}
template <bool Together, typename E>
__device__ __forceinline__ void widen(FromZero<E>, uint32_t (&out)[2 * kPerElement<E>], uint32_t word) {
  static_assert(!Together);
  if constexpr (kPerElement<E> == 1) {
    constexpr uint32_t kFlip = kMovedUp<FromZero<E>> > 0.0f ? 0x00800080u : 0;
    out[0] = flipped(word, 0x00ff00ffu, kFlip);
    out[1] = permute(word, 0, 0x4341) ^ kFlip;
  } else {
    constexpr uint32_t kFlip = kMovedUp<FromZero<E>> > 0.0f ? 0x00080008u : 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      out[2 * i] = flipped(word >> 8 * i, 0x000f000fu, kFlip);
      out[2 * i + 1] = flipped(word >> 8 * i, 0x00f000f0u, kFlip << 4);
    }
  }
}

// Where neighbours are cheaper to have together, or as cheap: a lane's elements of Q lie together then.
template <typename E>
constexpr bool kNeighbours = !kPlain<E> && kPerElement<E> == 1;
template <>
constexpr bool kNeighbours<e2m1x2> = KVGEN_HAS_E2M1;
template <>
constexpr bool kNeighbours<e2m1x2_products> = true;
template <typename E>
constexpr bool kNeighbours<FromZero<E>> = false;

// ---- Fragments

// The element type of products.
template <typename E>
struct FragmentOf {
  using type = f16;
};
template <>
struct FragmentOf<bf16> {
  using type = bf16;
};

template <typename E>
struct KeyFragments {
  using Operand = typename FragmentOf<E>::type;
  static constexpr float kFactor = kFragmentFactor<E>;
  static constexpr uint32_t kInWord = kPlain<E> ? 2 : 4 * kPerElement<E>;
  // Steps of 16 dims out of 32 bytes, and out of 16 bytes: for 16-bit elements, a step whose upper half is zero.
  static constexpr uint32_t kSteps = kInWord / 2, kHalfSteps = (kSteps + 1) / 2, kDims = 8 * kInWord, kHalfDims = kDims / 2;

  // Where a lane's row of a tile begins, in bytes: lanes 0-15 have the 16 rows, lanes 16-31 the same 16 bytes on.
  __device__ static __forceinline__ uint32_t offset(uint32_t lane, uint32_t pitch) { return lane % 16 * pitch + lane / 16 * 16; }
  __device__ static __forceinline__ void load(uint32_t (&a)[kSteps][4], uint32_t address) {
    uint32_t r[4];
    load_matrices(r, address);
    if constexpr (kPlain<E>) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) a[0][i] = r[i];
    } else {
      spread<0>(a, r[0], r[1]);
      spread<kHalfSteps>(a, r[2], r[3]);
    }
  }
  __device__ static __forceinline__ void load_half(uint32_t (&a)[kHalfSteps][4], uint32_t address) {
    uint32_t r[2];
    load_matrices(r, address);
    if constexpr (kPlain<E>) {
      a[0][0] = r[0];
      a[0][1] = r[1];
      a[0][2] = a[0][3] = 0;
    } else {
      spread<0>(a, r[0], r[1]);
    }
  }

  // The dim, in its block of kDims, of element 0 or 1 of register b[half] in lane 4g + j.
  __device__ static constexpr uint32_t key_dim(uint32_t step, uint32_t j, uint32_t half, uint32_t element) {
    if constexpr (kPlain<E>) return 8 * half + 2 * j + element;
    const uint32_t i = 2 * (step % kHalfSteps) + half;
    return step / kHalfSteps * kHalfDims + kInWord * j + (kNeighbours<E> ? 2 * i + element : i + kSteps * element);
  }

 private:
  template <uint32_t First, uint32_t N>
  __device__ static __forceinline__ void spread(uint32_t (&a)[N][4], uint32_t upper_rows, uint32_t lower_rows) {
    uint32_t upper[kSteps], lower[kSteps];
    widen<kNeighbours<E>>(E{}, upper, upper_rows);
    widen<kNeighbours<E>>(E{}, lower, lower_rows);
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      a[First + i / 2][i % 2 * 2] = upper[i];
      a[First + i / 2][i % 2 * 2 + 1] = lower[i];
    }
  }
};

// b for each step of a block: read(dim) is Q's element of column lane / 4, as the products take it; past the last dim, zero.
template <typename E, uint32_t N, typename Read>
__device__ __forceinline__ void query_fragments(uint32_t (&b)[N][2], uint32_t lane, const Read& read) {
  using Key = KeyFragments<E>;
#pragma unroll
  for (uint32_t step = 0; step < N; ++step) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t first = read(Key::key_dim(step, lane % 4, half, 0)).bits, second = read(Key::key_dim(step, lane % 4, half, 1)).bits;
      b[step][half] = first | second << 16;
    }
  }
}

template <typename E>
struct ValueFragments {
  using Operand = typename FragmentOf<E>::type;
  static constexpr float kFactor = kFragmentFactor<E>;
  static constexpr uint32_t kInWord = kPlain<E> ? 2 : 4 * kPerElement<E>;
  // Tiles of 16 dims out of 32 bytes, and out of 16 bytes: for 16-bit elements, a tile whose lower half is zero.
  static constexpr uint32_t kTiles = kInWord / 2, kHalfTiles = (kTiles + 1) / 2, kDims = 8 * kInWord, kHalfDims = kDims / 2;

  // Where a lane's row of a tile begins, in bytes. 16-bit elements have their matrices in the order in which a product takes
  // them, so that no register is moved: both halves of the first 8 tokens first.
  __device__ static __forceinline__ uint32_t offset(uint32_t lane, uint32_t pitch) {
    if constexpr (kPlain<E>) return (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
    return KeyFragments<E>::offset(lane, pitch);
  }
  __device__ static __forceinline__ void load(uint32_t (&a)[kTiles][4], uint32_t address) {
    uint32_t r[4];
    load_transposed(r, address);
    if constexpr (kPlain<E>) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) a[0][i] = r[i];
    } else {
      spread<0>(a, r[0], r[1]);
      spread<kHalfTiles>(a, r[2], r[3]);
    }
  }
  __device__ static __forceinline__ void load_half(uint32_t (&a)[kHalfTiles][4], uint32_t address) {
    if constexpr (kPlain<E>) {  // the last 8 tokens are those of lanes 16-23
      uint32_t lane;
      asm("mov.u32 %0, %%laneid;" : "=r"(lane));
      address = __shfl_sync(~0u, address, (int)(lane % 8 + lane / 8 % 2 * 16));
    }
    uint32_t r[2];
    load_transposed(r, address);
    if constexpr (kPlain<E>) {
      a[0][0] = r[0];
      a[0][2] = r[1];
      a[0][1] = a[0][3] = 0;
    } else {
      spread<0>(a, r[0], r[1]);
    }
  }

  // The dim, in its block of kDims, of a row of a tile. Lane 4g + j has rows g and g + 8: of codes of 8 bits two neighbours,
  // of codes of 4 bits, with the next tile's, four.
  __device__ static constexpr uint32_t value_dim(uint32_t tile, uint32_t row) {
    if constexpr (kPlain<E>) return row;
    return tile / kHalfTiles * kHalfDims + row % 8 * kTiles + tile % kHalfTiles * 2 + row / 8;
  }

 private:
  template <uint32_t First, uint32_t N>
  __device__ static __forceinline__ void spread(uint32_t (&a)[N][4], uint32_t early_tokens, uint32_t late_tokens) {
    uint32_t early[kTiles], late[kTiles];
    widen<false>(E{}, early, early_tokens);
    widen<false>(E{}, late, late_tokens);
#pragma unroll
    for (uint32_t i = 0; i < kTiles; ++i) {
      a[First + i / 2][i % 2] = early[i];
      a[First + i / 2][i % 2 + 2] = late[i];
    }
  }
};

// has_special: one of two elements is infinite or NaN, that is, its exponent bits kExponent are all ones.
template <typename T>
constexpr uint32_t kExponent = 0x7f80;
template <>
constexpr uint32_t kExponent<f16> = 0x7c00;
template <typename T>
__device__ __forceinline__ bool has_special(uint32_t pair) {
  return (pair & kExponent<T>) == kExponent<T> || (pair >> 16 & kExponent<T>) == kExponent<T>;
}
