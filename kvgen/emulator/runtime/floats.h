// floats.h - float, half and bfloat operations and conversions. Included by device.h; the long ones are in numbers.cpp.
#pragma once

enum : int { ROUND_N, ROUND_Z, ROUND_M, ROUND_P, ROUND_NA };
enum : u32 { FORMAT_F32, FORMAT_TF32, FORMAT_F16, FORMAT_BF16, FORMAT_E4M3, FORMAT_E5M2, FORMAT_E2M1, FORMAT_E2M3, FORMAT_E3M2 };
extern "C" {
#pragma GCC visibility push(default)
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
#pragma GCC visibility pop
}

EMU_INLINE float ftz(float x) { return bits<u32>(x) & 0x7f800000u ? x : bits<float>(bits<u32>(x) & 0x80000000u); }
template <class F> EMU_INLINE bool is_nan(F x) { return x != x; }
EMU_INLINE float canonical(float x) { return x != x ? bits<float>(0x7fffffffu) : x; }
EMU_INLINE double canonical(double x) { return x != x ? bits<double>(0x7ff8000000000000ull) : x; }
template <class F> EMU_INLINE F clamp01(F x) { return x > F(0) ? (x < F(1) ? x : F(1)) : F(0); }  // NaN becomes 0
EMU_INLINE bool sign_of(float x) { return bits<u32>(x) >> 31; }
EMU_INLINE bool sign_of(double x) { return bits<u64>(x) >> 63; }
template <class F> EMU_ONCE F float_min(F a, F b) {  // the operand that is no NaN; -0 below +0
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a < b || (a == b && sign_of(a)) ? a : b;
}
template <class F> EMU_ONCE F float_max(F a, F b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a > b || (a == b && !sign_of(a)) ? a : b;
}
template <class F> EMU_ONCE F float_min_nan(F a, F b) { return a != a || b != b ? canonical(a + b) : float_min(a, b); }
template <class F> EMU_ONCE F float_max_nan(F a, F b) { return a != a || b != b ? canonical(a + b) : float_max(a, b); }
EMU_INLINE float float_abs(float a) { return bits<float>(bits<u32>(a) & 0x7fffffffu); }
EMU_INLINE double float_abs(double a) { return bits<double>(bits<u64>(a) & ~(1ull << 63)); }
EMU_INLINE float float_neg(float a) { return bits<float>(bits<u32>(a) ^ 0x80000000u); }
EMU_INLINE double float_neg(double a) { return bits<double>(bits<u64>(a) ^ 1ull << 63); }
EMU_INLINE float copy_sign(float sign, float value) { return bits<float>((bits<u32>(value) & 0x7fffffffu) | (bits<u32>(sign) & 0x80000000u)); }
EMU_INLINE float xor_sign(float value, float a, float b) { return value != value ? value : copy_sign(bits<float>(bits<u32>(a) ^ bits<u32>(b)), value); }
EMU_ONCE float divide_approximately(float a, float b) { return float_abs(b) > 0x1p126f ? a * copy_sign(b, 0.0f) : a / b; }
EMU_INLINE double copy_sign(double sign, double value) { return bits<double>((bits<u64>(value) & ~(1ull << 63)) | (bits<u64>(sign) & 1ull << 63)); }

EMU_ONCE float half_value(u16 h) {
  u32 s = (u32)(h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return bits<float>(s | 0x7f800000u | m << 13);
  if (e == 0) return bits<float>(bits<u32>((float)m * 0x1p-24f) | s);
  return bits<float>(s | (e + 112) << 23 | m << 13);
}
EMU_INLINE float bfloat_value(u16 b) { return bits<float>((u32)b << 16); }
EMU_ONCE u16 to_half(float x) {
  u32 u = bits<u32>(x), a = u & 0x7fffffffu;
  if (a >= 0x38800000u && a <= 0x477fefffu) return (u16)((u >> 16 & 0x8000u) | (a + 0xfffu + (a >> 13 & 1) - 0x38000000u) >> 13);
  return (u16)emu_encode(x, FORMAT_F16, ROUND_N, 0);
}
EMU_ONCE u16 to_bfloat(float x) {
  u32 u = bits<u32>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
struct Half {
  EMU_INLINE float value(u16 h) { return half_value(h); }
  EMU_INLINE u16 from(float x) { return to_half(x); }
  EMU_INLINE u16 from_wide(double x) { return (u16)emu_encode(x, FORMAT_F16, ROUND_N, 0); }
  enum : u32 { nan = 0x7fff };
  EMU_INLINE u16 flush(u16 h) { return h & 0x7c00 ? h : (u16)(h & 0x8000); }
};
struct Bfloat {
  EMU_INLINE float value(u16 h) { return bfloat_value(h); }
  EMU_INLINE u16 from(float x) { return to_bfloat(x); }
  EMU_INLINE u16 from_wide(double x) { return (u16)emu_encode(x, FORMAT_BF16, ROUND_N, 0); }
  enum : u32 { nan = 0x7fff };
  EMU_INLINE u16 flush(u16 h) { return h & 0x7f80 ? h : (u16)(h & 0x8000); }
};
// One 16-bit operation: fp32 is wide enough that its second rounding changes nothing for + - * (24 >= 2 * 11 + 2).
enum : int { H_ADD, H_SUB, H_MUL, H_FMA, H_MIN, H_MAX, H_MIN_NAN, H_MAX_NAN, H_EX2, H_TANH };
enum : u32 { H_FTZ = 1, H_SAT = 2, H_RELU = 4, H_XORSIGN = 8 };
template <class F, int OP, u32 FLAGS> EMU_ONCE u16 half_op(u16 a, u16 b, u16 c) {
  if (FLAGS & H_FTZ) a = F::flush(a), b = F::flush(b), c = F::flush(c);
  float x = F::value(a), y = F::value(b);
  if (FLAGS & H_XORSIGN) x = float_abs(x), y = float_abs(y);
  u16 r;
  if (OP == H_FMA) {
    double wide = emu_fma_odd(x, y, F::value(c));
    r = F::from_wide(wide);
  } else {
    float v = OP == H_ADD ? x + y : OP == H_SUB ? x - y : OP == H_MUL ? x * y : OP == H_MIN ? float_min(x, y)
            : OP == H_MAX ? float_max(x, y) : OP == H_MIN_NAN ? float_min_nan(x, y) : OP == H_MAX_NAN ? float_max_nan(x, y)
            : OP == H_EX2 ? __builtin_exp2f(x) : __builtin_tanhf(x);
    r = F::from(v);
  }
  if (FLAGS & H_FTZ) r = F::flush(r);
  float out = F::value(r);
  if (FLAGS & H_XORSIGN && out == out) r ^= (a ^ b) & 0x8000;
  if (FLAGS & H_SAT) r = F::from(clamp01(out));
  if (FLAGS & H_RELU) r = out != out ? (u16)F::nan : out > 0 ? r : (u16)0;
  return r;
}
template <class F, int OP, u32 FLAGS> EMU_INLINE u32 half_op2(u32 a, u32 b, u32 c) {
  return half_op<F, OP, FLAGS>((u16)a, (u16)b, (u16)c) | (u32)half_op<F, OP, FLAGS>((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}
// ---------------------------------------------------------------- conversions
template <class D> EMU_ONCE D float_to_int(double x, int rounding, bool wide) {  // wide: .f64 source or 64-bit destination
  const double limit = IsSigned<D>::value ? (double)(1ull << (sizeof(D) * 8 - 1)) : 2.0 * (double)(1ull << (sizeof(D) * 8 - 1));
  if (x != x) return wide ? D(typename Unsigned<D>::type(1) << (sizeof(D) * 8 - 1)) : D(0);
  double r = rounding == ROUND_N ? __builtin_rint(x) : rounding == ROUND_Z ? __builtin_trunc(x) : rounding == ROUND_M ? __builtin_floor(x) : __builtin_ceil(x);
  const D top = IsSigned<D>::value ? D(typename Unsigned<D>::type(~typename Unsigned<D>::type(0)) >> 1) : D(~D(0));
  if (r >= limit) return top;
  const double bottom = IsSigned<D>::value ? -limit : 0.0;
  if (r <= bottom) return IsSigned<D>::value ? D(~top) : D(0);
  return D(r);
}
template <class F> EMU_INLINE F float_to_integral(F x, int rounding) {
  return rounding == ROUND_N ? (F)__builtin_rint(x) : rounding == ROUND_Z ? (F)__builtin_trunc(x) : rounding == ROUND_M ? (F)__builtin_floor(x) : (F)__builtin_ceil(x);
}
EMU_INLINE u16 bfloat_from_scale(u8 x) { return x == 255 ? 0x7fff : x ? (u16)(x << 7) : 0x40; }  // ue8m0: 2**(x - 127)
// Stochastic: the 16 bits that bf16 drops carry into it when `random` is added to them.
EMU_INLINE u16 bfloat_from_random(float x, u32 random) { return x != x ? (u16)0x7fff : (u16)((bits<u32>(x) + (random & 0xffff)) >> 16); }
