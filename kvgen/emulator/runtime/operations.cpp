// operations.cpp - operations.h's short functions, each a template of integers.h, floats.h or atomics.h under a name of C.
#include "runtime.h"
#include <math.h>

// ---------------------------------------------------------------- integers
#define DEFINE(T) \
  T emu_divide_##T(T a, T b, u32 site) { return divide<T>(a, b, site); } \
  T emu_remainder_##T(T a, T b, u32 site) { return remainder_of<T>(a, b, site); }
EMU_EACH_INTEGER(DEFINE)
#undef DEFINE
#define DEFINE(T) \
  T emu_extract_##T(T a, u32 position, u32 length) { return extract_bits<T>(a, position, length); } \
  u32 emu_find_leading_##T(T a, bool as_shift) { return find_leading<T>(a, as_shift); } \
  T emu_atomic_##T(u8* p, int operation, T b) { const T old = load<T>(p); return atomic_write<T>(p, old, combine<T>(operation, old, b)); }
EMU_EACH_32_64(DEFINE)
#undef DEFINE
u32 emu_insert_u32(u32 a, u32 b, u32 position, u32 length) { return insert_bits<u32>(a, b, position, length); }
u64 emu_insert_u64(u64 a, u64 b, u32 position, u32 length) { return insert_bits<u64>(a, b, position, length); }
u32 emu_leading_zeros_u32(u32 a) { return leading_zeros(a); }
u32 emu_leading_zeros_u64(u64 a) { return leading_zeros(a); }
u32 emu_reverse_u32(u32 a) { return reverse_bits(a); }
u64 emu_reverse_u64(u64 a) { return reverse_bits(a); }
u32 emu_popcount(u64 a) { return (u32)__builtin_popcountll(a); }
u64 emu_multiply_high_u64(u64 a, u64 b) { return (u64)((u128)a * b >> 64); }
s64 emu_multiply_high_s64(s64 a, s64 b) { return (s64)((s128)a * b >> 64); }
u64 emu_saturate(u64 a, bool from_signed, bool to_signed, u32 width) {
  const s128 x = from_signed ? (s128)(s64)a : (s128)a;
  const s128 bottom = to_signed ? -((s128)1 << (width - 1)) : 0, top = ((s128)1 << (to_signed ? width - 1 : width)) - 1;
  return (u64)(x < bottom ? bottom : x > top ? top : x);
}
u32 emu_permute(u32 a, u32 b, u32 selector) {
  const u64 v = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 s = selector >> (4 * i) & 15, x = (u32)(v >> (8 * (s & 7))) & 255;
    if (s & 8) x = x & 128 ? 255 : 0;
    r |= x << (8 * i);
  }
  return r;
}
u32 emu_permute_mode(u32 a, u32 b, u32 c, u32 mode) {
  static const u16 table[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                  {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                  {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  return emu_permute(a, b, table[mode][c & 3]);
}
u32 emu_dot4(bool a_signed, bool b_signed, u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; i++) {
    const s32 x = a_signed ? (s32)(s8)(a >> 8 * i) : (s32)(u8)(a >> 8 * i), y = b_signed ? (s32)(s8)(b >> 8 * i) : (s32)(u8)(b >> 8 * i);
    c += (u32)(x * y);
  }
  return c;
}
u32 emu_dot2(bool a_signed, bool b_signed, u32 a, u32 b, u32 c, u32 high) {
  for (int i = 0; i < 2; i++) {
    const u32 byte = 8 * ((u32)i + 2 * high);
    const s32 x = a_signed ? (s32)(s16)(a >> 16 * i) : (s32)(u16)(a >> 16 * i), y = b_signed ? (s32)(s8)(b >> byte) : (s32)(u8)(b >> byte);
    c += (u32)(x * y);
  }
  return c;
}

// ---------------------------------------------------------------- floats
#define DEFINE(F, T, ROOT, FMA) \
  T emu_fma_##F(T a, T b, T c) { return FMA(a, b, c); } \
  T emu_sqrt_##F(T a) { return ROOT(a); } \
  T emu_min_##F(T a, T b) { return float_min(a, b); } \
  T emu_max_##F(T a, T b) { return float_max(a, b); } \
  T emu_min_nan_##F(T a, T b) { return float_min_nan(a, b); } \
  T emu_max_nan_##F(T a, T b) { return float_max_nan(a, b); } \
  T emu_integral_##F(T a, int rounding) { return float_to_integral<T>(a, rounding); }
DEFINE(f32, float, __builtin_sqrtf, __builtin_fmaf)
DEFINE(f64, double, __builtin_sqrt, __builtin_fma)
#undef DEFINE
float emu_ex2(float a) { return exp2f(a); }
float emu_lg2(float a) { return log2f(a); }
float emu_sin(float a) { return sinf(a); }
float emu_cos(float a) { return cosf(a); }
float emu_tanh(float a) { return tanhf(a); }
#define DEFINE(T) T emu_float_to_##T(double x, int rounding, bool wide) { return float_to_int<T>(x, rounding, wide); }
EMU_EACH_8(DEFINE)
EMU_EACH_INTEGER(DEFINE)
#undef DEFINE
float emu_half_value(u16 h) { return half_value(h); }
u16 emu_to_half(float x) { return to_half(x); }
u16 emu_to_bfloat(float x) { return to_bfloat(x); }
u16 emu_half(u32 bfloat, int operation, u32 flags, u16 a, u16 b, u16 c) {
  return bfloat ? half_op<Bfloat>(operation, flags, a, b, c) : half_op<Half>(operation, flags, a, b, c);
}
u32 emu_half2(u32 bfloat, int operation, u32 flags, u32 a, u32 b, u32 c) {
  return emu_half(bfloat, operation, flags, (u16)a, (u16)b, (u16)c) | (u32)emu_half(bfloat, operation, flags, (u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}

// ---------------------------------------------------------------- atomics
u16 emu_atomic_swap_if_u16(u8* p, u16 expected, u16 desired) { return atomic_swap_if<u16>(p, expected, desired); }
u32 emu_atomic_swap_if_u32(u8* p, u32 expected, u32 desired) { return atomic_swap_if<u32>(p, expected, desired); }
u64 emu_atomic_swap_if_u64(u8* p, u64 expected, u64 desired) { return atomic_swap_if<u64>(p, expected, desired); }
u128 emu_atomic_swap_if_u128(u8* p, u128 expected, u128 desired) { return atomic_swap_if<u128>(p, expected, desired); }
u128 emu_atomic_u128(u8* p, int operation, u128 b) { const u128 old = load<u128>(p); return atomic_write<u128>(p, old, combine<u128>(operation, old, b)); }
float emu_atomic_add_f32(u8* p, float b, bool flush) { return atomic_float_add<float>(p, b, flush); }
double emu_atomic_add_f64(u8* p, double b, bool flush) { return atomic_float_add<double>(p, b, flush); }
u16 emu_atomic_half(u32 bfloat, int operation, u8* p, u16 b) { const u16 old = load<u16>(p); return atomic_write<u16>(p, old, emu_half(bfloat, operation, 0, old, b, 0)); }
u32 emu_atomic_half2(u32 bfloat, int operation, u8* p, u32 b) { const u32 old = load<u32>(p); return atomic_write<u32>(p, old, emu_half2(bfloat, operation, 0, old, b, 0)); }
