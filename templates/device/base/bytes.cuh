// Bytes of registers: what the element types without conversions of their own are made with.
#pragma once

#include "types.cuh"

// Members of a vector of N one-byte elements: words as wide as its alignment, the largest power of two that divides N. The
// compiler copies a struct member by member; an array of bytes would be taken apart and put together again, at three instructions
// an element.
template <uint32_t kAlign>
struct Word {
  using type = uint32_t;
};
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <typename T, uint32_t N>
struct alignas(N & -N) Bytes {
  union {
    typename Word<(N & -N)>::type words[N / sizeof(typename Word<(N & -N)>::type)];
    T e[N];
  };
};

// Word `i`, of kWord bits, of numbers of kBits bits that lie side by side, from the lowest bit up; and number `i` of such words.
template <uint32_t kBits, uint32_t kWord, uint32_t kNumbers>
__device__ __forceinline__ uint32_t joined_word(const uint32_t (&numbers)[kNumbers], uint32_t i) {
  uint32_t word = 0;
#pragma unroll
  for (uint32_t n = 0; n < kNumbers; ++n) {
    const int up = (int)(n * kBits) - (int)(i * kWord);
    if (up > -(int)kBits && up < (int)kWord) word |= up < 0 ? numbers[n] >> -up : numbers[n] << up;
  }
  return word;
}
template <uint32_t kBits, typename Word, uint32_t kWords>
__device__ __forceinline__ uint32_t number_in(const Word (&words)[kWords], uint32_t i) {
  constexpr int kWord = 8 * sizeof(Word);
  uint32_t number = 0;
#pragma unroll
  for (uint32_t n = 0; n < kWords; ++n) {
    const int up = (int)n * kWord - (int)(i * kBits);
    if (up > -kWord && up < (int)kBits) number |= up < 0 ? (uint32_t)words[n] >> -up : (uint32_t)words[n] << up;
  }
  return number & (kBits < 32 ? (1u << kBits % 32) - 1 : ~0u);
}

// Four of the eight bytes of `high`:`low`. A nibble of `selector` names one; its top bit asks for eight copies of that
// byte's sign instead. Unlike __byte_perm, no instruction is spent on ignoring that bit.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// The bits of `a` where `mask` has ones, those of `b` elsewhere: one instruction, where the compiler makes two of shifted words.
__device__ __forceinline__ uint32_t blend(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
  return out;
}

// Byte `Byte` of each of four registers, the first lowest.
template <uint32_t Byte>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kTwo = Byte | (Byte + 4) << 4;
  return permute(permute(a, b, kTwo), permute(c, d, kTwo), 0x5410);
}

// The lower two bytes of each of four registers: all lowest bytes, and all second ones.
struct BytePlanes {
  uint32_t first, second;
};
__device__ __forceinline__ BytePlanes gather_planes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t low = permute(a, b, 0x5410), high = permute(c, d, 0x5410);
  return {permute(low, high, 0x6420), permute(low, high, 0x7531)};
}

// Each byte, or each nibble, of a word at once.
constexpr uint32_t kByteSigns = 0x80808080u;
constexpr uint32_t kNibbleSigns = 0x88888888u;

// min and max that give NaN where an operand is NaN; the plain ones give the other operand.
__device__ __forceinline__ float min_nan(float a, float b) {
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

__device__ constexpr float power_of_two(int e) {
  return e < 0 ? power_of_two(e + 1) / 2 : e > 0 ? power_of_two(e - 1) * 2 : 1.0f;
}

// The code of a magnitude, at most the largest one, in a small float format of `Mantissa` bits whose smallest normal number
// is 2^Least; in the lowest byte. A NaN gives 0xfe, which is no finite code.
//
// One addition rounds: with E the power of two below x, at least 2^Least, the last bit of E * 2^(23 - Mantissa) + x is where
// the format has its last bit. The sum's last bits and its exponent, shifted down, add up to the code and a constant, which
// kOffset makes vanish. It is even, so that ties still go to even.
template <int Mantissa, int Least>
__device__ __forceinline__ uint32_t magnitude_code(float x) {
  constexpr int kOffset = -((Least + 150 - Mantissa) << Mantissa) & 255;
  constexpr float kLeast = power_of_two(Least), kAbove = power_of_two(23 - Mantissa) + kOffset * power_of_two(-Mantissa);
  const float power = __uint_as_float(__float_as_uint(fmaxf(x, kLeast)) & 0x7f800000u);
  const uint32_t sum = __float_as_uint(__fmaf_rn(power, kAbove, x));
  return sum + (sum >> (23 - Mantissa));
}
