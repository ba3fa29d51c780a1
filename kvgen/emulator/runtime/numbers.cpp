// numbers.cpp - the conversions and roundings that are too rare or too long to inline into every kernel.
// Compiled with -frounding-math: some functions change the rounding mode of the host for one operation.
#include "runtime.h"
#include <fenv.h>
#include <math.h>

namespace {
struct Layout {
  u32 exponent_bits, mantissa_bits, top, nan;  // top: the largest finite code without sign
  bool infinite;                               // one past top is infinity
};
constexpr Layout layouts[] = {{8, 23, 0x7f7fffff, 0x7fffffff, true}, {8, 10, 0x3fbff, 0x3ffff, true}, {5, 10, 0x7bff, 0x7fff, true},
                              {8, 7, 0x7f7f, 0x7fff, true},           {4, 3, 0x7e, 0x7f, false},      {5, 2, 0x7b, 0x7f, true},
                              {2, 1, 0x7, 0x7, false},                {2, 3, 0x1f, 0x1f, false},      {3, 2, 0x1f, 0x1f, false}};
}  // namespace
// `x` rounded to a format. Too much gives infinity, or the largest finite value where the format or the rounding has no
// infinity or `finite` is set; NaN gives the canonical one, in the formats of 6 and 4 bits the largest finite value.
u32 emu_encode(double x, u32 format, int rounding, u32 finite) {
  const Layout& f = layouts[format];
  if (x != x) return f.nan;
  const u64 raw = bits<u64>(x), field = raw >> 52 & 2047, m = f.mantissa_bits;
  const bool negative = raw >> 63;
  const u32 sign = (u32)negative << (f.exponent_bits + m);
  const u64 significand = (raw & ((1ull << 52) - 1)) | (field ? 1ull << 52 : 0);
  const bool away = rounding == ROUND_P ? !negative : rounding == ROUND_M && negative;
  const int exponent = (field ? (int)field : 1) - 1023, lowest = 2 - (1 << (f.exponent_bits - 1)), binade = exponent > lowest ? exponent : lowest;
  // Codes grow by one per quantum through every binade, so a carry out of the mantissa is simply the next code.
  const int dropped = 52 - (int)m + binade - exponent;
  u64 code = (u64)(binade - lowest) << m;
  if (dropped > 60) code += away && significand;
  else {
    const u64 half = 1ull << (dropped - 1), rest = significand & (2 * half - 1);
    code += significand >> dropped;
    code += rounding == ROUND_N ? rest > half || (rest == half && (code & 1)) : rounding == ROUND_NA ? rest >= half : away && rest;
  }
  if (code <= f.top) return sign | (u32)code;
  const bool to_infinity = f.infinite && !finite && (field == 2047 || rounding == ROUND_N || rounding == ROUND_NA || away);
  return sign | (f.top + to_infinity);
}
float emu_decode(u32 code, u32 format) {
  const Layout& f = layouts[format];
  const u32 m = f.mantissa_bits, magnitude = code & ((1u << (f.exponent_bits + m)) - 1), e = magnitude >> m;
  const float sign = code >> (f.exponent_bits + m) & 1 ? -1.0f : 1.0f;
  if (magnitude > f.top) return f.infinite && magnitude == f.top + 1 ? sign * INFINITY : bits<float>(0x7fffffffu);
  const int lowest = 2 - (1 << (f.exponent_bits - 1));
  return sign * ldexpf((float)(e ? magnitude - ((e - 1) << m) : magnitude), lowest - (int)m + (e ? (int)e - 1 : 0));
}
// ue8m0: the exponent of |x|, downwards or upwards to a power of two.
u32 emu_encode_scale(float x, u32 upwards, u32 finite) {
  const u32 magnitude = bits<u32>(x) & 0x7fffffffu, exponent = magnitude >> 23;
  if (x != x) return 255;
  if (exponent == 255) return finite ? 254 : 255;
  const u32 code = exponent + (upwards && (magnitude & 0x7fffff) && magnitude > 0x400000);  // 0x400000 is 2**-127, code 0
  return finite && code == 255 ? 254 : code;
}
// rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64: the lower 32 bits of the operand are ignored, those of the result are 0.
static double upper_half(double x) {
  const u64 raw = bits<u64>(x) & 0xffffffff00000000ull;
  return bits<double>(raw >> 52 & 2047 ? raw : raw & 1ull << 63);
}
static double rounded_upper_half(double x) {
  if (x != x) return bits<double>(0x7fffffff00000000ull);
  if (isinf(x)) return x;
  return upper_half(bits<double>(bits<u64>(x) + 0x80000000ull));
}
double emu_upper_half_rcp(double x) { return rounded_upper_half(1 / upper_half(x)); }
double emu_upper_half_rsqrt(double x) {
  const double a = upper_half(x);
  return rounded_upper_half(a == 0 ? 1 / a : 1 / sqrt(a));
}
// vadd2, vadd4 and their like. `selectors`: four bits a lane say which piece of b:a it takes, those of the first operand
// lowest; `flags`: signs of the result and the operands, saturate, add to c; lanes outside `mask` stay as in c.
u32 emu_simd_video(u32 lanes, u32 operation, u32 flags, u32 selectors, u32 mask, u32 a, u32 b, u32 c) {
  const u32 width = 32 / lanes, ones = (1u << width) - 1;
  const u64 both = (u64)b << 32 | a;
  auto piece = [&](u32 lane, u32 is_signed) {
    const s32 raw = (s32)(both >> width * (selectors >> 4 * lane & 15) & ones);
    return is_signed && raw >> (width - 1) ? raw - (s32)ones - 1 : raw;
  };
  const s32 bottom = flags & 1 ? -(s32)(ones >> 1) - 1 : 0, top = (s32)(flags & 1 ? ones >> 1 : ones);
  u32 out = c;
  for (u32 i = 0; i < lanes; i++) {
    if (!(mask >> i & 1)) continue;
    const s32 x = piece(i, flags & 2), y = piece(lanes + i, flags & 4), difference = x - y;
    s32 t;
    switch (operation) {
      case 0: t = x + y; break;
      case 1: t = difference; break;
      case 2: t = (x + y + (x + y >= 0)) >> 1; break;
      case 3: t = difference < 0 ? -difference : difference; break;
      case 4: t = smaller(x, y); break;
      case 5: t = larger(x, y); break;
      case 6: t = x == y; break;
      case 7: t = x != y; break;
      case 8: t = x < y; break;
      case 9: t = x <= y; break;
      case 10: t = x > y; break;
      default: t = x >= y; break;
    }
    if (flags & 8) t = smaller(larger(t, bottom), top);
    out = flags & 16 ? out + (u32)t : (out & ~(ones << width * i)) | ((u32)t & ones) << width * i;
  }
  return out;
}
u32 emu_find_nth_set(u32 mask, u32 base, s32 offset) {
  u32 left = offset < 0 ? 0u - (u32)offset : (u32)offset;
  for (u32 at = base; at < 32; at += offset < 0 ? -1u : 1u) {
    if (mask >> at & 1 && left-- <= 1) return at;
    if (offset == 0) break;
  }
  return ~0u;
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
