// elements.h - the element formats of matrix instructions as numbers, and the product of two matrices of them.
//
// Products of all formats but f64 are exact in double. They and the accumulator are added in double and the sum is
// rounded once, to nearest even. Tensor cores align the addends of a few products to the largest and cut off what lies
// below (about 2^-24 of it; on Hopper about 2^-13 for fp8), so a result may differ from a GPU's in its last bits.
#pragma once
#include "runtime.h"
#include <string.h>

#ifdef __AVX__
typedef double Wide __attribute__((vector_size(32), aligned(8)));
#else
typedef double Wide __attribute__((vector_size(16), aligned(8)));
#endif

constexpr u32 bits_of(Element e) {
  switch (e) {
    case ELEMENT_F64: return 64;
    case ELEMENT_F32: case ELEMENT_S32: case ELEMENT_TF32: return 32;
    case ELEMENT_F16: case ELEMENT_BF16: return 16;
    case ELEMENT_S4: case ELEMENT_U4: return 4;
    case ELEMENT_B1: return 1;
    default: return 8;
  }
}
struct Fp8Values {
  double of[2][256];
  Fp8Values() {
    for (u32 code = 0; code < 256; code++) of[0][code] = emu_decode(code, FORMAT_E4M3), of[1][code] = emu_decode(code, FORMAT_E5M2);
  }
};
static const Fp8Values fp8_values;

template <Element E> inline double number(u32 raw) {
  switch (E) {
    case ELEMENT_F16: {  // without the branches of half_value
      const u32 magnitude = (raw & 0x7fff) << 13, special = (raw & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
      return bits<float>(bits<u32>(bits<float>(magnitude) * 0x1p112f) | special | (raw & 0x8000) << 16);
    }
    case ELEMENT_BF16: return bfloat_value((u16)raw);
    case ELEMENT_TF32: return bits<float>(raw & 0xffffe000u);  // the low 13 bits are not looked at
    case ELEMENT_E4M3: return fp8_values.of[0][raw & 255];
    case ELEMENT_E5M2: return fp8_values.of[1][raw & 255];
    case ELEMENT_S8: return (s8)raw;
    case ELEMENT_U8: return (u8)raw;
    case ELEMENT_S4: return (s32)(raw << 28) >> 28;
    default: return raw & 15;
  }
}
template <Element E> void unpack(const void* from, u32 words, double* to) {
  constexpr u32 BITS = bits_of(E), COUNT = 32 / BITS;
  for (u32 i = 0; i < words; i++) {
    const u32 word = load<u32>((const u8*)from + 4 * i);
    for (u32 j = 0; j < COUNT; j++) to[i * COUNT + j] = number<E>(word >> j * BITS);
  }
}
typedef void (*Unpack)(const void* from, u32 words, double* to);
inline Unpack unpack_of(Element e) {
  switch (e) {
    case ELEMENT_F16: return unpack<ELEMENT_F16>;
    case ELEMENT_BF16: return unpack<ELEMENT_BF16>;
    case ELEMENT_TF32: return unpack<ELEMENT_TF32>;
    case ELEMENT_E4M3: return unpack<ELEMENT_E4M3>;
    case ELEMENT_E5M2: return unpack<ELEMENT_E5M2>;
    case ELEMENT_S8: return unpack<ELEMENT_S8>;
    case ELEMENT_U8: return unpack<ELEMENT_U8>;
    case ELEMENT_S4: return unpack<ELEMENT_S4>;
    default: return unpack<ELEMENT_U4>;
  }
}

// ---------------------------------------------------------------- accumulators
inline u32 round_to_half(double x) { return emu_encode(x, FORMAT_F16, ROUND_N, 0); }
inline u32 round_to_float(double x) { return bits<u32>(canonical((float)x)); }
inline u32 round_to_int(double x, bool saturate) {
  const s64 v = (s64)x;
  return saturate ? (u32)(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v) : (u32)v;
}
// The accumulators of 16 rows (8 where m is 8): per 8 columns a lane holds the pair at column 2 * (lane % 4) of row
// lane / 4, then of the row 8 below. `sums` is [rows][n].
inline void take_sums(const MatrixForm& form, u32 lane, const u32* d, double* sums) {
  const u32 n = form.n, below = form.m == 8 ? 0 : 8 * n;
  double* at = sums + (lane >> 2) * n + (lane & 3) * 2;
  for (double* p = at; p < at + n; p += 8)
    for (double* q = p; q <= p + below; q += 8 * n) {
      if (form.d == ELEMENT_F16) q[0] = half_value((u16)*d), q[1] = half_value((u16)(*d++ >> 16));
      else if (form.d == ELEMENT_F32) q[0] = bits<float>(*d++), q[1] = bits<float>(*d++);
      else q[0] = (s32)*d++, q[1] = (s32)*d++;
    }
}
inline void give_sums(const MatrixForm& form, u32 lane, const double* sums, u32* d) {
  const u32 n = form.n, below = form.m == 8 ? 0 : 8 * n;
  const double* at = sums + (lane >> 2) * n + (lane & 3) * 2;
  for (const double* p = at; p < at + n; p += 8)
    for (const double* q = p; q <= p + below; q += 8 * n) {
      if (form.d == ELEMENT_F16) *d++ = round_to_half(q[0]) | round_to_half(q[1]) << 16;
      else if (form.d == ELEMENT_F32) *d++ = round_to_float(q[0]), *d++ = round_to_float(q[1]);
      else *d++ = round_to_int(q[0], form.saturate), *d++ = round_to_int(q[1], form.saturate);
    }
}

// sums[r][c] += a[r][i] * b[i][c]; `rows` is a multiple of 4, `columns` of 8.
inline void multiply(u32 rows, u32 columns, u32 k, const double* a, const double* b, double* sums) {
  constexpr u32 ROWS = 4, LANES = sizeof(Wide) / 8, PIECES = 8 / LANES;
  for (u32 c = 0; c < columns; c += 8)
    for (u32 r = 0; r < rows; r += ROWS) {
      double* const at = sums + r * columns + c;
      const double* left = a + r * k;
      Wide s[ROWS][PIECES];
#pragma GCC unroll 4
      for (u32 i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (u32 j = 0; j < PIECES; j++) s[i][j] = *(const Wide*)(at + i * columns + j * LANES);
      for (const double* right = b + c; right < b + k * columns; right += columns, left++)
#pragma GCC unroll 4
        for (u32 i = 0; i < ROWS; i++)
#pragma GCC unroll 4
          for (u32 j = 0; j < PIECES; j++) s[i][j] += left[i * k] * *(const Wide*)(right + j * LANES);
#pragma GCC unroll 4
      for (u32 i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (u32 j = 0; j < PIECES; j++) *(Wide*)(at + i * columns + j * LANES) = s[i][j];
    }
}
