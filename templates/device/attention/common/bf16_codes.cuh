// Codes of floats as bf16, exactly, and e8m0 scales, which bf16 has too: a code times its scale is rounded nowhere but where bf16
// ends.
#pragma once

#include "fragments.cuh"

// E, widened to bf16 where E itself is widened to f16. kBelow: to what takes fewest instructions, the number divided by
// kBelowBf16<E>.
template <typename E, bool kBelow = false>
struct InBf16 {
  uint8_t bits;
};
template <typename E, bool kBelow>
constexpr uint32_t kPerElement<InBf16<E, kBelow>> = kPerElement<E>;
template <typename E, bool kBelow>
constexpr bool kNeighbours<InBf16<E, kBelow>> = true;
template <typename E, bool kBelow>
struct FragmentOf<InBf16<E, kBelow>> {
  using type = bf16;
};
template <typename E>
constexpr float kBelowBf16 = 1.0f;
template <>
constexpr float kBelowBf16<e2m1x2> = 0x1p126f;
template <typename E>
constexpr float kFragmentFactor<InBf16<E, true>> = kBelowBf16<E>;

// Products of pairs. If a product is exact, adding -0 keeps the sign of a zero.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
  return out;
}

// By way of f16 and f32; fractions of 2^8, as f16 has them without conversions of fp8, are multiplied by it.
template <bool Together, typename E, bool kBelow>
__device__ __forceinline__ void widen(InBf16<E, kBelow>, uint32_t (&out)[2], uint32_t word) {
  uint32_t halves[2];
  float x[4];
  widen<true>(E{}, halves, word);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    if constexpr (kFragmentFactor<E> != 1.0f) {
      static_assert(kFragmentFactor<E> == 256.0f);
      halves[i] = multiply_halves(halves[i], 0x5c005c00u);
    }
    widen_halves(x[2 * i], x[2 * i + 1], halves[i]);
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) pack_pair((bf16*)&out[i], x[Together ? 2 * i : i], x[Together ? 2 * i + 1 : i + 2]);
}
template <bool Together, bool kBelow>
__device__ __forceinline__ void widen(InBf16<e2m1x2, kBelow>, uint32_t (&out)[4], uint32_t word) {
  if constexpr (Together) {
    static_assert(!kBelow);
    // A magnitude selects the upper and the lower byte of its bf16: 0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0.
    const uint32_t magnitudes = word & ~kNibbleSigns, raised = word << 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t upper = permute(0x3f3f3f00u, 0x40404040u, magnitudes >> 16 * i) | (permute(raised, word, i == 0 ? 0x5140 : 0x7362) & kByteSigns);
      const uint32_t lower = permute(0xc0800000u, 0xc0804000u, magnitudes >> 16 * i);
      out[2 * i] = permute(lower, upper, 0x5140);
      out[2 * i + 1] = permute(lower, upper, 0x7362);
    }
  } else {
    // Sign, exponent and mantissa put where bf16 has them are the number times 2^-126, subnormal or not: two copies of each
    // nibble, one with its sign in place and one with the others, by a multiplication.
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t nibbles = word >> i / 2 * 8 & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
      out[i] = nibbles * (i % 2 == 0 ? (1u << 12) + (1u << 6) : (1u << 8) + (1u << 2)) & 0x81c081c0u;
      if constexpr (!kBelow) out[i] = multiply_bf16(out[i], 0x7e807e80u);
    }
  }
}

// Two e8m0, a byte in each half of `bytes`.
__device__ __forceinline__ uint32_t bf16_powers(uint32_t bytes) {
  uint32_t out = bytes << 7;
  asm("max.bf16x2 %0, %0, %1;" : "+r"(out) : "r"(0x00400040u));  // 2^-127 in place of 0
  asm("fma.rn.bf16x2 %0, %0, %1, %0;" : "+r"(out) : "r"(0u));    // infinity times 0 is NaN
  return out;
}
