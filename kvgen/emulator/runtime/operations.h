// operations.h - operations of PTX that are functions of the runtime, one copy for all kernels; operations.cpp and numbers.cpp
// define them. What is a few instructions of the host is in kernel.h instead. Names end in the type that they take.
#pragma once

EMU_ENUM(int) { ROUND_N, ROUND_Z, ROUND_M, ROUND_P, ROUND_NA };
EMU_ENUM(u32) { FORMAT_F32, FORMAT_TF32, FORMAT_F16, FORMAT_BF16, FORMAT_E4M3, FORMAT_E5M2, FORMAT_E2M1, FORMAT_E2M3, FORMAT_E3M2 };
EMU_ENUM(int) { T_ADD, T_MIN, T_MAX, T_AND, T_OR, T_XOR, T_EXCH, T_INC, T_DEC };
EMU_ENUM(int) { H_ADD, H_SUB, H_MUL, H_FMA, H_MIN, H_MAX, H_MIN_NAN, H_MAX_NAN, H_EX2, H_TANH };
EMU_ENUM(u32) { H_FTZ = 1, H_SAT = 2, H_RELU = 4, H_XORSIGN = 8 };

#define EMU_EACH_8(X) X(u8) X(s8)
#define EMU_EACH_16(X) X(u16) X(s16)
#define EMU_EACH_32_64(X) X(u32) X(s32) X(u64) X(s64)
#define EMU_EACH_INTEGER(X) EMU_EACH_16(X) EMU_EACH_32_64(X)

#pragma GCC visibility push(default)
EMU_BEGIN
// ---------------------------------------------------------------- integers
#define EMU_DECLARE(T) T emu_divide_##T(T a, T b, u32 site); T emu_remainder_##T(T a, T b, u32 site);
EMU_EACH_INTEGER(EMU_DECLARE)
#undef EMU_DECLARE
#define EMU_DECLARE(T) T emu_extract_##T(T a, u32 position, u32 length); u32 emu_find_leading_##T(T a, bool as_shift);
EMU_EACH_32_64(EMU_DECLARE)
#undef EMU_DECLARE
u32 emu_insert_u32(u32 a, u32 b, u32 position, u32 length);
u64 emu_insert_u64(u64 a, u64 b, u32 position, u32 length);
u32 emu_leading_zeros_u32(u32 a);
u32 emu_leading_zeros_u64(u64 a);
u32 emu_reverse_u32(u32 a);
u64 emu_reverse_u64(u64 a);
u32 emu_popcount(u64 a);
u64 emu_multiply_high_u64(u64 a, u64 b);
s64 emu_multiply_high_s64(s64 a, s64 b);
u64 emu_saturate(u64 a, bool from_signed, bool to_signed, u32 width);  // a number, to `width` bits
u32 emu_permute(u32 a, u32 b, u32 selector);
u32 emu_permute_mode(u32 a, u32 b, u32 c, u32 mode);  // f4e b4e rc8 ecl ecr rc16
u32 emu_dot4(bool a_signed, bool b_signed, u32 a, u32 b, u32 c);
u32 emu_dot2(bool a_signed, bool b_signed, u32 a, u32 b, u32 c, u32 high);
u32 emu_find_nth_set(u32 mask, u32 base, s32 offset);
u32 emu_simd_video(u32 lanes, u32 operation, u32 flags, u32 selectors, u32 mask, u32 a, u32 b, u32 c);

// ---------------------------------------------------------------- floats
#define EMU_DECLARE(F, T) \
  T emu_fma_##F(T a, T b, T c); \
  T emu_sqrt_##F(T a); \
  T emu_min_##F(T a, T b); T emu_max_##F(T a, T b); T emu_min_nan_##F(T a, T b); T emu_max_nan_##F(T a, T b); \
  T emu_integral_##F(T a, int rounding);
EMU_DECLARE(f32, float)
EMU_DECLARE(f64, double)
#undef EMU_DECLARE
float emu_ex2(float a);
float emu_lg2(float a);
float emu_sin(float a);
float emu_cos(float a);
float emu_tanh(float a);
u32 emu_encode(double x, u32 format, int rounding, u32 finite);
float emu_decode(u32 code, u32 format);
u32 emu_encode_scale(float x, u32 upwards, u32 finite);
double emu_upper_half_rcp(double x);
double emu_upper_half_rsqrt(double x);
float emu_round_f32(char op, int rounding, float a, float b, float c);
double emu_round_f64(char op, int rounding, double a, double b, double c);
float emu_int_to_f32(u64 value, u32 is_signed, int rounding);
double emu_int_to_f64(u64 value, u32 is_signed, int rounding);
double emu_odd_from_int(u64 value, u32 is_signed);
double emu_fma_odd(double a, double b, double c);
#define EMU_DECLARE(T) T emu_float_to_##T(double x, int rounding, bool wide);  // wide: .f64 source or 64-bit destination
EMU_EACH_8(EMU_DECLARE)
EMU_EACH_INTEGER(EMU_DECLARE)
#undef EMU_DECLARE
float emu_half_value(u16 h);
u16 emu_to_half(float x);
u16 emu_to_bfloat(float x);
u16 emu_half(u32 bfloat, int operation, u32 flags, u16 a, u16 b, u16 c);
u32 emu_half2(u32 bfloat, int operation, u32 flags, u32 a, u32 b, u32 c);

// ---------------------------------------------------------------- atomics: the old value
#define EMU_DECLARE(T) T emu_atomic_##T(u8* p, int operation, T b);
EMU_EACH_32_64(EMU_DECLARE)
#undef EMU_DECLARE
u16 emu_atomic_swap_if_u16(u8* p, u16 expected, u16 desired);
u32 emu_atomic_swap_if_u32(u8* p, u32 expected, u32 desired);
u64 emu_atomic_swap_if_u64(u8* p, u64 expected, u64 desired);
float emu_atomic_add_f32(u8* p, float b, bool flush);
double emu_atomic_add_f64(u8* p, double b, bool flush);
u16 emu_atomic_half(u32 bfloat, int operation, u8* p, u16 b);
u32 emu_atomic_half2(u32 bfloat, int operation, u8* p, u32 b);
#ifndef __TINYC__
u128 emu_atomic_u128(u8* p, int operation, u128 b);
u128 emu_atomic_swap_if_u128(u8* p, u128 expected, u128 desired);
#endif
EMU_END
#pragma GCC visibility pop
