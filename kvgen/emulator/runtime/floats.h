// floats.h - float, half and bfloat operations and conversions as templates, for the runtime and operations.cpp; the long ones are
// in numbers.cpp.
#pragma once

EMU_INLINE float ftz(float x) { return bits<u32>(x) & 0x7f800000u ? x : bits<float>(bits<u32>(x) & 0x80000000u); }
template <class F> EMU_INLINE bool is_nan(F x) { return x != x; }
EMU_INLINE float canonical(float x) { return x != x ? bits<float>(0x7fffffffu) : x; }
EMU_INLINE double canonical(double x) { return x != x ? bits<double>(0x7ff8000000000000ull) : x; }
template <class F> EMU_INLINE F clamp01(F x) { return x > F(0) ? (x < F(1) ? x : F(1)) : F(0); }  // NaN becomes 0
EMU_INLINE bool sign_of(float x) { return bits<u32>(x) >> 31; }
EMU_INLINE bool sign_of(double x) { return bits<u64>(x) >> 63; }
template <class F> EMU_INLINE F float_min(F a, F b) {  // the operand that is no NaN; -0 below +0
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a < b || (a == b && sign_of(a)) ? a : b;
}
template <class F> EMU_INLINE F float_max(F a, F b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a > b || (a == b && !sign_of(a)) ? a : b;
}
template <class F> EMU_INLINE F float_min_nan(F a, F b) { return a != a || b != b ? canonical(a + b) : float_min(a, b); }
template <class F> EMU_INLINE F float_max_nan(F a, F b) { return a != a || b != b ? canonical(a + b) : float_max(a, b); }
EMU_INLINE float float_abs(float a) { return bits<float>(bits<u32>(a) & 0x7fffffffu); }
EMU_INLINE double float_abs(double a) { return bits<double>(bits<u64>(a) & ~(1ull << 63)); }
EMU_INLINE float float_neg(float a) { return bits<float>(bits<u32>(a) ^ 0x80000000u); }
EMU_INLINE double float_neg(double a) { return bits<double>(bits<u64>(a) ^ 1ull << 63); }
EMU_INLINE float copy_sign(float sign, float value) { return bits<float>((bits<u32>(value) & 0x7fffffffu) | (bits<u32>(sign) & 0x80000000u)); }
EMU_INLINE float xor_sign(float value, float a, float b) { return value != value ? value : copy_sign(bits<float>(bits<u32>(a) ^ bits<u32>(b)), value); }
EMU_INLINE float divide_approximately(float a, float b) { return float_abs(b) > 0x1p126f ? a * copy_sign(b, 0.0f) : a / b; }
EMU_INLINE double copy_sign(double sign, double value) { return bits<double>((bits<u64>(value) & ~(1ull << 63)) | (bits<u64>(sign) & 1ull << 63)); }

EMU_INLINE float half_value(u16 h) {
  u32 s = (u32)(h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return bits<float>(s | 0x7f800000u | m << 13);
  if (e == 0) return bits<float>(bits<u32>((float)m * 0x1p-24f) | s);
  return bits<float>(s | (e + 112) << 23 | m << 13);
}
EMU_INLINE float bfloat_value(u16 b) { return bits<float>((u32)b << 16); }
EMU_INLINE u16 to_half(float x) {
  u32 u = bits<u32>(x), a = u & 0x7fffffffu;
  if (a >= 0x38800000u && a <= 0x477fefffu) return (u16)((u >> 16 & 0x8000u) | (a + 0xfffu + (a >> 13 & 1) - 0x38000000u) >> 13);
  return (u16)emu_encode(x, FORMAT_F16, ROUND_N, 0);
}
EMU_INLINE u16 to_bfloat(float x) {
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
template <class F> EMU_INLINE u16 half_op(int op, u32 flags, u16 a, u16 b, u16 c) {
  if (flags & H_FTZ) a = F::flush(a), b = F::flush(b), c = F::flush(c);
  float x = F::value(a), y = F::value(b);
  if (flags & H_XORSIGN) x = float_abs(x), y = float_abs(y);
  u16 r;
  switch (op) {
    case H_FMA: r = F::from_wide(emu_fma_odd(x, y, F::value(c))); break;
    case H_ADD: r = F::from(x + y); break;
    case H_SUB: r = F::from(x - y); break;
    case H_MUL: r = F::from(x * y); break;
    case H_MIN: r = F::from(float_min(x, y)); break;
    case H_MAX: r = F::from(float_max(x, y)); break;
    case H_MIN_NAN: r = F::from(float_min_nan(x, y)); break;
    case H_MAX_NAN: r = F::from(float_max_nan(x, y)); break;
    case H_EX2: r = F::from(__builtin_exp2f(x)); break;
    default: r = F::from(__builtin_tanhf(x)); break;
  }
  if (flags & H_FTZ) r = F::flush(r);
  const float out = F::value(r);
  if (flags & H_XORSIGN && out == out) r ^= (a ^ b) & 0x8000;
  if (flags & H_SAT) r = F::from(clamp01(out));
  if (flags & H_RELU) r = out != out ? (u16)F::nan : out > 0 ? r : (u16)0;
  return r;
}
// ---------------------------------------------------------------- conversions
template <class D> EMU_INLINE D float_to_int(double x, int rounding, bool wide) {  // wide: .f64 source or 64-bit destination
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
