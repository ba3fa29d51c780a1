// e8m0: a power of two by its exponent alone, byte e + 127; 255 is NaN (OCP Microscaling Formats 1.0). For scales only.
#pragma once

#include "../base/bytes.cuh"

struct e8m0 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<e8m0, N> : Bytes<e8m0, N> {};

__device__ __forceinline__ float to_f32(e8m0 x) {
  const uint32_t power = x.bits == 0 ? 0x00400000u : (uint32_t)x.bits << 23;  // 2^-127 is subnormal
  return __uint_as_float(x.bits == 255 ? 0x7fffffffu : power);
}
// Conversion of a power of two, exactly; infinity becomes NaN.
template <>
__device__ __forceinline__ e8m0 from_f32<e8m0>(float x) {
  return {(uint8_t)(__float_as_uint(x) >> 23)};
}
