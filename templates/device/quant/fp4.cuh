// e2m1, eight in a word: +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}. Casting saturates, infinities too; a NaN becomes +6; a value that rounds
// to zero becomes +0.
#pragma once

#include "../base/bytes.cuh"

// A pair: the first one in the low nibble.
struct e2m1x2 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<e2m1x2, N> : Bytes<e2m1x2, N> {};

// Conversions of e2m1 belong to a family of architectures, not to all later ones: __CUDA_ARCH__ alone does not decide.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#define KVGEN_HAS_E2M1 (__CUDA_ARCH__ >= 1000)
#else
#define KVGEN_HAS_E2M1 0
#endif

#if KVGEN_HAS_E2M1

__device__ __forceinline__ uint32_t encode(e2m1x2, const float (&x)[8]) {
  uint32_t word;
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(word)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  // A nibble's sign stays where adding 7 to its magnitude reaches the sign.
  return word & (((word & ~kNibbleSigns) + ~kNibbleSigns) | ~kNibbleSigns);
}
__device__ __forceinline__ void decode(e2m1x2, float (&out)[8], uint32_t word) {
  uint32_t halves[4];
  asm("{ .reg .b8 a, b, c, d;\n"
      "mov.b32 {a, b, c, d}, %4;\n"
      "cvt.rn.f16x2.e2m1x2 %0, a;\n"
      "cvt.rn.f16x2.e2m1x2 %1, b;\n"
      "cvt.rn.f16x2.e2m1x2 %2, c;\n"
      "cvt.rn.f16x2.e2m1x2 %3, d; }"
      : "=r"(halves[0]), "=r"(halves[1]), "=r"(halves[2]), "=r"(halves[3])
      : "r"(word));
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    out[2 * i] = to_f32(f16{(uint16_t)halves[i]});
    out[2 * i + 1] = to_f32(f16{(uint16_t)(halves[i] >> 16)});
  }
}

#else

__device__ __forceinline__ uint32_t encode(e2m1x2, const float (&x)[8]) {
  uint32_t code[8], top[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const float bounded = fminf(x[i], 6.0f);  // +6 where x is NaN
    code[i] = magnitude_code<1, 0>(fminf(fabsf(bounded), 6.0f));
    top[i] = __float_as_uint(bounded);
  }
  const uint32_t evens = gather_bytes<0>(code[0], code[2], code[4], code[6]);
  const uint32_t odds = gather_bytes<0>(code[1], code[3], code[5], code[7]);
  const uint32_t even_signs = gather_bytes<3>(top[0], top[2], top[4], top[6]);
  const uint32_t odd_signs = gather_bytes<3>(top[1], top[3], top[5], top[7]);
  const uint32_t codes = evens + (odds << 4);
  const uint32_t signs = ((even_signs >> 4) & 0x08080808u) | (odd_signs & 0x80808080u);
  return codes | (signs & (codes + ~kNibbleSigns));  // a sign stays where adding 7 to the magnitude reaches it
}

// A magnitude selects the upper byte of its f16 among eight; the lower one is zero.
__device__ __forceinline__ void decode(e2m1x2, float (&out)[8], uint32_t word) {
  const uint32_t magnitudes = word & ~kNibbleSigns;
  const uint32_t low = permute(0x3e3c3800u, 0x46444240u, magnitudes);
  const uint32_t high = permute(0x3e3c3800u, 0x46444240u, magnitudes >> 16);
  const uint32_t evens = permute(low, high, 0x6420) | ((word << 4) & kByteSigns);
  const uint32_t odds = permute(low, high, 0x7531) | (word & kByteSigns);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t selector = i == 0 ? 0x1404 : 0x3424;
    const uint32_t even = permute(evens, 0, selector), odd = permute(odds, 0, selector);
    out[4 * i] = to_f32(f16{(uint16_t)even});
    out[4 * i + 1] = to_f32(f16{(uint16_t)odd});
    out[4 * i + 2] = to_f32(f16{(uint16_t)(even >> 16)});
    out[4 * i + 3] = to_f32(f16{(uint16_t)(odd >> 16)});
  }
}

#endif
