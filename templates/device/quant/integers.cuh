// Integer codes of 8 bits, four in a word, and of 4 bits, eight in a word. Casting saturates to [-127, 127] and [-7, 7],
// unsigned ones to [0, 255] and [0, 15]; a NaN becomes 0. Codes of 2 bits, sixteen in a word, and of 3 bits, eight in three
// bytes, are unsigned: [0, 3] and [0, 7].
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
// Four, the first one in the lowest bits.
struct u2x4 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<u2x4, N> : Bytes<u2x4, N> {};
// A byte of codes of 3 bits, from the lowest bit up: the third and the sixth of eight lie in two bytes each.
struct u3 {
  uint8_t bits;
};
template <uint32_t N>
struct Vec<u3, N> : Bytes<u3, N> {};

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
__device__ __forceinline__ uint32_t encode(u2x4, const float (&x)[16]) {
  uint32_t four[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    four[i] = 0;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) four[i] += unsigned_code<3>(x[4 * i + j]) << 2 * j;
  }
  return gather_bytes<0>(four[0], four[1], four[2], four[3]);
}
__device__ __forceinline__ uint32_t encode(u3, const float (&x)[8]) {
  uint32_t low = 0, high = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    low += unsigned_code<7>(x[i]) << 3 * i;
    high += unsigned_code<7>(x[4 + i]) << 3 * i;
  }
  return (low & 0xfffu) | (high & 0xfffu) << 12;
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

// 2^23 plus each code where it stands, from bit `At` on, 2^At times too large: an exact multiply-add puts both right.
template <uint32_t Bits, uint32_t At, uint32_t Bias>
__device__ __forceinline__ float decode_field(uint32_t half) {
  constexpr uint32_t kMask = ((1u << Bits) - 1) << At, kMagic = 0x4b000000u | Bias << At;
  constexpr float kDown = power_of_two(-(int)At);
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(half), "r"(kMask), "r"(kMagic));  // (half & kMask) ^ kMagic
  return __fmaf_rn(__uint_as_float(bits), kDown, -(8388608.0f * kDown + (float)Bias));
}
// Codes `First` to `First` + 3 of a group from bit `At` of a half on.
template <uint32_t Bits, uint32_t First, uint32_t At, uint32_t Bias, uint32_t N>
__device__ __forceinline__ void decode_fields(float (&out)[N], uint32_t half) {
  out[First] = decode_field<Bits, At, Bias>(half);
  out[First + 1] = decode_field<Bits, At + Bits, Bias>(half);
  out[First + 2] = decode_field<Bits, At + 2 * Bits, Bias>(half);
  out[First + 3] = decode_field<Bits, At + 3 * Bits, Bias>(half);
}
template <uint32_t Bias>
__device__ __forceinline__ void decode_nibbles(float (&out)[8], uint32_t word) {
  decode_fields<4, 0, 0, Bias>(out, word);
  decode_fields<4, 4, 0, Bias>(out, word >> 16);
}
__device__ __forceinline__ void decode(i4x2, float (&out)[8], uint32_t word) { decode_nibbles<8>(out, word); }
__device__ __forceinline__ void decode(u4x2, float (&out)[8], uint32_t word) { decode_nibbles<0>(out, word); }
__device__ __forceinline__ void decode(u2x4, float (&out)[16], uint32_t word) {
  decode_fields<2, 0, 0, 0>(out, word);
  decode_fields<2, 4, 8, 0>(out, word);
  decode_fields<2, 8, 0, 0>(out, word >> 16);
  decode_fields<2, 12, 8, 0>(out, word >> 16);
}
__device__ __forceinline__ void decode(u3, float (&out)[8], uint32_t bits) {
  decode_fields<3, 0, 0, 0>(out, bits);
  decode_fields<3, 4, 0, 0>(out, bits >> 12);
}
