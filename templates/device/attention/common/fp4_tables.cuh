// e2m1 codes whose value is e4m3(code * scale), Modular MAX's nvfp4. For a scale that is a table of eight bytes, the products of
// the eight magnitudes: three bits of a code select one, and its sign is added to what they select.
#pragma once

#include "fragments.cuh"

struct alignas(8) E4m3Table {
  uint32_t low, high;  // the products of 0, 0.5, 1, 1.5; of 2, 3, 4, 6
};

struct Fp4Tables {
  // The tables of a word's four scales.
  __device__ static __forceinline__ void make_tables(E4m3Table (&out)[4], uint32_t scales) {
#if __CUDA_ARCH__ >= 890
    uint32_t pairs[2];
    widen<true>(e4m3{}, pairs, scales);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint16_t each[2];
      asm("mov.b32 {%0, %1}, %2;" : "=h"(each[0]), "=h"(each[1]) : "r"(pairs[i / 2]));
      out[i] = {rounded(each[i % 2], 0x38000000u, 0x3e003c00u), rounded(each[i % 2], 0x42004000u, 0x46004400u)};
    }
#else
    float s[4];
    decode(e4m3{}, s, scales);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float low[4] = {0.0f * s[i], 0.5f * s[i], s[i], 1.5f * s[i]}, high[4] = {2.0f * s[i], 3.0f * s[i], 4.0f * s[i], 6.0f * s[i]};
      out[i] = {encode(e4m3{}, low), encode(e4m3{}, high)};
    }
#endif
  }

  // The values of a word's eight codes as e4m3, four a word: neighbours side by side, all of one scale.
  __device__ static __forceinline__ void products_of_codes(uint32_t (&out)[2], uint32_t word, const E4m3Table& table) {
    const uint32_t magnitudes = word & ~kNibbleSigns;
    out[0] = with_signs<0x5140>(permute(table.low, table.high, magnitudes), word);
    out[1] = with_signs<0x7362>(permute(table.low, table.high, magnitudes >> 16), word);
  }
  // products_of_codes if the lower four codes and the upper four have a scale each: code i and code i + 4 side by side.
  __device__ static __forceinline__ void products_of_codes(uint32_t (&out)[2], uint32_t word, const E4m3Table& lower, const E4m3Table& upper) {
    const uint32_t magnitudes = word & ~kNibbleSigns;
    const uint32_t low = permute(lower.low, lower.high, magnitudes), high = permute(upper.low, upper.high, magnitudes >> 16);
    out[0] = with_signs<0x6420>(permute(low, high, 0x5140), word);
    out[1] = with_signs<0x7531>(permute(low, high, 0x7362), word);
  }

 private:
#if __CUDA_ARCH__ >= 890
  // Four magnitudes, f16, times a scale. Products have 6 significant bits and are multiples of 2^-10 up to 2688: exact in f16, so
  // that they are rounded once.
  __device__ static __forceinline__ uint32_t rounded(uint16_t scale, uint32_t lower, uint32_t upper) {
    uint32_t out;
    asm("{ .reg .b16 a, b;\n"
        ".reg .b32 x, y;\n"
        "mov.b32 x, {%1, %1};\n"
        "mul.f16x2 y, x, %3;\n"
        "mul.f16x2 x, x, %2;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 a, x;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 b, y;\n"
        "mov.b32 %0, {a, b}; }"
        : "=r"(out)
        : "h"(scale), "r"(lower), "r"(upper));
    return out;
  }
#endif
  // With the signs of the word's codes: bytes of it have those of odd codes where they belong, moved up by 4 those of even ones.
  template <uint32_t kSelector>
  __device__ static __forceinline__ uint32_t with_signs(uint32_t products, uint32_t word) {
    return products ^ (permute(word << 4, word, kSelector) & kByteSigns);
  }
};
