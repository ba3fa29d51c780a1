// e4m3 and e5m2, four in a word. Casting saturates, infinities too; a NaN becomes 0x7f whatever its sign.
#pragma once

#include "../base/bytes.cuh"

struct e4m3 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<e4m3, N> : Bytes<e4m3, N> {};
struct e5m2 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<e5m2, N> : Bytes<e5m2, N> {};

// cvt.f32.f16 of both halves.
__device__ __forceinline__ void widen_halves(float& low, float& high, uint32_t halves) {
  low = to_f32(f16{(uint16_t)halves});
  high = to_f32(f16{(uint16_t)(halves >> 16)});
}

#if __CUDA_ARCH__ >= 890

__device__ __forceinline__ uint32_t encode(e4m3, const float (&x)[4]) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return low | (uint32_t)high << 16;
}
__device__ __forceinline__ uint32_t encode(e5m2, const float (&x)[4]) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return low | (uint32_t)high << 16;
}
__device__ __forceinline__ void decode(e4m3, float (&out)[4], uint32_t word) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)(word >> 16 * i)));
    widen_halves(out[2 * i], out[2 * i + 1], halves);
  }
}

#else

// Codes 0 to 0x7e, or 0xfe for NaN, in `codes`; the signs are those of x.
__device__ __forceinline__ uint32_t with_signs(uint32_t codes, const float (&x)[4]) {
  const uint32_t signs = gather_bytes<3>(
      __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  const uint32_t kept = signs & ~codes & kByteSigns, nan = codes & kByteSigns;
  return ((codes + (nan >> 7)) & ~kByteSigns) | kept;
}

__device__ __forceinline__ uint32_t encode(e4m3, const float (&x)[4]) {
  uint32_t code[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) code[i] = magnitude_code<3, -6>(min_nan(fabsf(x[i]), 448.0f));
  return with_signs(gather_bytes<0>(code[0], code[1], code[2], code[3]), x);
}
__device__ __forceinline__ uint32_t encode(e5m2, const float (&x)[4]) {
  uint32_t code[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) code[i] = magnitude_code<2, -14>(min_nan(fabsf(x[i]), 57344.0f));
  return with_signs(gather_bytes<0>(code[0], code[1], code[2], code[3]), x);
}

// Sign, exponent and mantissa put where f16 has them are the number times 2^-8, subnormal or not. The bit between sign and
// exponent is set for NaN, whose exponent is all ones already.
__device__ __forceinline__ void decode(e4m3, float (&out)[4], uint32_t word) {
  const uint32_t magnitudes = word & ~kByteSigns;
  const uint32_t flagged = blend(kByteSigns, magnitudes + 0x01010101u, word);
  const uint32_t upper = blend(kByteSigns, word, flagged >> 1), lower = (word << 7) & kByteSigns;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    uint32_t halves;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(permute(lower, upper, i == 0 ? 0x5140 : 0x7362)), "r"(0x5c005c00u));
    widen_halves(out[2 * i], out[2 * i + 1], halves);  // 0x5c00 is 2^8
  }
}

#endif

// Each is the upper byte of an f16; no conversion is shorter.
__device__ __forceinline__ void decode(e5m2, float (&out)[4], uint32_t word) {
  widen_halves(out[0], out[1], permute(word, 0, 0x1404));
  widen_halves(out[2], out[3], permute(word, 0, 0x3424));
}
