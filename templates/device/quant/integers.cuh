// Integer codes of 8 bits, four in a word, and of 4 bits, eight in a word. Casting saturates to [-127, 127] and [-7, 7],
// unsigned ones to [0, 255] and [0, 15]; a NaN becomes 0.
//
// No conversion instructions, which run at a fraction of the rate of others: an f32 from 2^23 on has an integer in its lowest
// bits, so adding 2^23 rounds and subtracting it converts back.
#pragma once

#include "../base/bytes.cuh"

template <uint32_t N>
struct Vec<int8_t, N> : Bytes<int8_t, N> {};
template <uint32_t N>
struct Vec<uint8_t, N> : Bytes<uint8_t, N> {};
// Pairs: the first one in the low nibble.
struct i4x2 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<i4x2, N> : Bytes<i4x2, N> {};
struct u4x2 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<u4x2, N> : Bytes<u4x2, N> {};

// x + `Largest` + 1 rounded, in the lowest byte, and zero in the second one; a NaN has 0xff there.
template <int Largest>
__device__ __forceinline__ uint32_t biased_code(float x) {
  constexpr float kLimit = (float)Largest;
  return __float_as_uint(max_nan(min_nan(x, kLimit), -kLimit) + (12582912.0f + (float)(Largest + 1)));
}
// x rounded, clean but for the exponent in the uppermost byte.
template <int Largest>
__device__ __forceinline__ uint32_t unsigned_code(float x) {
  return __float_as_uint(fminf(fmaxf(x, 0.0f), (float)Largest) + 8388608.0f);  // fmaxf: 0 where x is NaN
}

__device__ __forceinline__ uint32_t encode(int8_t, const float (&x)[4]) {
  const BytePlanes codes =
      gather_planes(biased_code<127>(x[0]), biased_code<127>(x[1]), biased_code<127>(x[2]), biased_code<127>(x[3]));
  return (codes.first ^ kByteSigns) & ~codes.second;
}
__device__ __forceinline__ uint32_t encode(uint8_t, const float (&x)[4]) {
  return gather_bytes<0>(unsigned_code<255>(x[0]), unsigned_code<255>(x[1]), unsigned_code<255>(x[2]), unsigned_code<255>(x[3]));
}
__device__ __forceinline__ uint32_t encode(i4x2, const float (&x)[8]) {
  const BytePlanes evens = gather_planes(biased_code<7>(x[0]), biased_code<7>(x[2]), biased_code<7>(x[4]), biased_code<7>(x[6]));
  const BytePlanes odds = gather_planes(biased_code<7>(x[1]), biased_code<7>(x[3]), biased_code<7>(x[5]), biased_code<7>(x[7]));
  const uint32_t low = (evens.first ^ 0x08080808u) & ~evens.second, high = (odds.first ^ 0x08080808u) & ~odds.second;
  return low + (high << 4);
}
__device__ __forceinline__ uint32_t encode(u4x2, const float (&x)[8]) {
  uint32_t pair[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) pair[i] = unsigned_code<15>(x[2 * i]) + (unsigned_code<15>(x[2 * i + 1]) << 4);
  return gather_bytes<0>(pair[0], pair[1], pair[2], pair[3]);
}

// 2^23 plus each byte, then less 2^23 and `Bias`.
template <int Bias>
__device__ __forceinline__ void decode_bytes(float (&out)[4], uint32_t word) {
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    out[i] = __uint_as_float(permute(word, 0x4b000000u, 0x7650 + i)) - (8388608.0f + (float)Bias);
  }
}
__device__ __forceinline__ void decode(int8_t, float (&out)[4], uint32_t word) { decode_bytes<128>(out, word ^ kByteSigns); }
__device__ __forceinline__ void decode(uint8_t, float (&out)[4], uint32_t word) { decode_bytes<0>(out, word); }

// 2^23 plus each nibble where it stands, 16^place times too large: an exact multiply-add puts both right.
template <uint32_t Place, uint32_t Bias>
__device__ __forceinline__ float decode_nibble(uint32_t half) {
  constexpr uint32_t kMask = 15u << 4 * Place, kMagic = 0x4b000000u | Bias << 4 * Place;
  constexpr float kDown = power_of_two(-4 * (int)Place);
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(half), "r"(kMask), "r"(kMagic));  // (half & kMask) ^ kMagic
  return __fmaf_rn(__uint_as_float(bits), kDown, -(8388608.0f * kDown + (float)Bias));
}
template <uint32_t Bias>
__device__ __forceinline__ void decode_nibbles(float (&out)[8], uint32_t word) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t half = word >> 16 * i;
    out[4 * i] = decode_nibble<0, Bias>(half);
    out[4 * i + 1] = decode_nibble<1, Bias>(half);
    out[4 * i + 2] = decode_nibble<2, Bias>(half);
    out[4 * i + 3] = decode_nibble<3, Bias>(half);
  }
}
__device__ __forceinline__ void decode(i4x2, float (&out)[8], uint32_t word) { decode_nibbles<8>(out, word); }
__device__ __forceinline__ void decode(u4x2, float (&out)[8], uint32_t word) { decode_nibbles<0>(out, word); }
