// numbers.cpp - the conversions and roundings that are too rare or too long to inline into every kernel.
// Compiled with -frounding-math: some functions change the rounding mode of the host for one operation.
#include "device.h"
#include <fenv.h>
#include <math.h>

// `x` rounded to a binary format with the given exponent and mantissa bits; overflow gives infinity or, when rounding
// towards zero, the largest finite value. NaN gives the all-ones pattern without sign.
u32 emu_narrow(double x, u32 exponent_bits, u32 mantissa_bits, int rounding) {
  const int bias = (1 << (exponent_bits - 1)) - 1, lowest_exponent = 1 - bias;
  const u32 sign = (u32)(bits<u64>(x) >> 63) << (exponent_bits + mantissa_bits);
  const u32 infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (x != x) return infinity | ((1u << mantissa_bits) - 1);
  const double a = fabs(x);
  if (a == 0) return sign;
  const bool away = rounding == ROUND_P ? !sign : rounding == ROUND_M ? sign != 0 : false;
  const bool to_infinity = rounding == ROUND_N || rounding == ROUND_NA || away;
  if (isinf(a)) return sign | infinity;
  int exponent;
  frexp(a, &exponent);
  exponent -= 1;
  int quantum = (exponent > lowest_exponent ? exponent : lowest_exponent) - (int)mantissa_bits;
  const double scaled = ldexp(a, -quantum), whole = floor(scaled), rest = scaled - whole;
  u64 k = (u64)whole;
  if (rounding == ROUND_N ? rest > 0.5 || (rest == 0.5 && (k & 1)) : rounding == ROUND_NA ? rest >= 0.5 : away && rest > 0) k++;
  if (k >> (mantissa_bits + 1)) k >>= 1, quantum++;
  if (k == 0) return sign;
  if (!(k >> mantissa_bits)) return sign | (u32)k;  // subnormal
  const int field = quantum + (int)mantissa_bits + bias;
  if (field >= (1 << exponent_bits) - 1) return sign | (to_infinity ? infinity : infinity - 1);
  return sign | (u32)field << mantissa_bits | ((u32)k & ((1u << mantissa_bits) - 1));
}
// fp8, always saturating to the largest finite value, as cvt.satfinite does.
u32 emu_to_fp8(float x, u32 is_e4m3) {
  const u32 sign = bits<u32>(x) >> 31 << 7;
  if (x != x) return 0x7f;
  if (!is_e4m3) {
    u32 r = emu_narrow(x, 5, 2, ROUND_N);
    return (r & 0x7f) >= 0x7c ? sign | 0x7b : r;
  }
  if (fabsf(x) >= 448) return sign | 0x7e;
  // e4m3 has no infinities: its top exponent holds finite values, so round as if there were one exponent bit more.
  const double a = fabs((double)x);
  if (a == 0) return sign;
  int exponent;
  frexp(a, &exponent);
  exponent -= 1;
  const int quantum = (exponent > -6 ? exponent : -6) - 3;
  const double k = nearbyint(ldexp(a, -quantum));
  const double v = ldexp(k, quantum);
  if (v == 0) return sign;
  if (v < 0x1p-6) return sign | (u32)ldexp(v, 9);
  frexp(v, &exponent);
  exponent -= 1;
  return sign | (u32)(exponent + 7) << 3 | ((u32)ldexp(v, 3 - exponent) & 7);
}
float emu_from_fp8(u8 x, u32 is_e4m3) {
  if (!is_e4m3) return half_value((u16)(x << 8));
  const u32 e = x >> 3 & 15, m = x & 7;
  if (e == 15 && m == 7) return bits<float>(0x7fffffffu);
  const float v = e ? ldexpf((float)(8 + m), (int)e - 10) : ldexpf((float)m, -9);
  return x & 0x80 ? -v : v;
}

namespace {
struct Rounding {
  int saved;
  explicit Rounding(int mode) : saved(fegetround()) {
    fesetround(mode == ROUND_Z ? FE_TOWARDZERO : mode == ROUND_M ? FE_DOWNWARD : mode == ROUND_P ? FE_UPWARD : FE_TONEAREST);
  }
  ~Rounding() { fesetround(saved); }
};
template <class F> F rounded(char op, int rounding, F a, F b, F c) {
  Rounding scope(rounding);
  volatile F x = a, y = b, z = c, r;
  switch (op) {
    case '+': r = x + y; break;
    case '-': r = x - y; break;
    case '*': r = x * y; break;
    case '/': r = x / y; break;
    case 'f': r = sizeof(F) == 4 ? (F)fmaf((float)x, (float)y, (float)z) : (F)fma((double)x, (double)y, (double)z); break;
    default: r = sizeof(F) == 4 ? (F)sqrtf((float)x) : (F)sqrt((double)x); break;
  }
  return r;
}
}  // namespace
float emu_round_f32(char op, int rounding, float a, float b, float c) { return rounded<float>(op, rounding, a, b, c); }
double emu_round_f64(char op, int rounding, double a, double b, double c) { return rounded<double>(op, rounding, a, b, c); }
float emu_int_to_f32(u64 value, u32 is_signed, int rounding) {
  Rounding scope(rounding);
  volatile u64 v = value;
  volatile float r = is_signed ? (float)(s64)v : (float)v;
  return r;
}
double emu_int_to_f64(u64 value, u32 is_signed, int rounding) {
  Rounding scope(rounding);
  volatile u64 v = value;
  volatile double r = is_signed ? (double)(s64)v : (double)v;
  return r;
}
// An integer as a double whose last bit says whether anything was cut off: rounding it again is rounding once.
double emu_odd_from_int(u64 value, u32 is_signed) {
  const bool negative = is_signed && (s64)value < 0;
  u64 v = negative ? 0 - value : value;
  if (v >> 53) v = (v & ~0xfffull) | (v & 0xfff ? 0x1000 : 0);
  return negative ? -(double)v : (double)v;
}
// a * b + c for 16-bit operands, in the same sense: the product is exact, the sum is rounded to odd.
double emu_fma_odd(double a, double b, double c) {
  const double p = a * b;
  volatile double s = p + c;
  if (!isfinite(s)) return s;
  volatile double t = s - p;
  volatile double rest_p = s - t, rest_c = c - t;
  const double error = (p - rest_p) + rest_c;
  if (error == 0 || (bits<u64>((double)s) & 1)) return s;
  return nextafter((double)s, error > 0 ? INFINITY : -INFINITY);
}
