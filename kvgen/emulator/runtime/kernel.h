// kernel.h - what a translated kernel includes: the thread it runs as, memory, and operations that are a few instructions of the
// host. It is C, for any compiler: a small one takes milliseconds for a kernel.
#pragma once
#include "device.h"

#define EMU_BODY static __attribute__((noinline))
#define EMU_ALIGNED __attribute__((aligned(16)))

static const u8 emu_constants = 0;  // among the constants of a build
EMU_INLINE u64 generic_from_const(const Thread* self, u64 a) { return a - CONST_ORIGIN + ((u64)&emu_constants & -NEAR_ALIGN); }
EMU_INLINE u64 const_from_generic(u64 a) { return a + CONST_ORIGIN - ((u64)&emu_constants & -NEAR_ALIGN); }

// ---------------------------------------------------------------- bits
EMU_INLINE float f32_of(u32 word) { union { u32 word; float number; } x; x.word = word; return x.number; }
EMU_INLINE u32 bits_f32(float number) { union { u32 word; float number; } x; x.number = number; return x.word; }
EMU_INLINE double f64_of(u64 word) { union { u64 word; double number; } x; x.word = word; return x.number; }
EMU_INLINE u64 bits_f64(double number) { union { u64 word; double number; } x; x.number = number; return x.word; }

// ---------------------------------------------------------------- integers
#define EMU_DEFINE(T) \
  EMU_INLINE T smaller_##T(T a, T b) { return a < b ? a : b; } \
  EMU_INLINE T larger_##T(T a, T b) { return a > b ? a : b; } \
  EMU_INLINE T shift_right_##T(T a, u32 n) { return n >= sizeof(T) * 8 ? (T)(a < (T)0 ? -1 : 0) : (T)(a >> n); }
EMU_EACH_INTEGER(EMU_DEFINE)
#undef EMU_DEFINE
#define EMU_DEFINE(T) EMU_INLINE T shift_left_##T(T a, u32 n) { return n >= sizeof(T) * 8 ? (T)0 : (T)(a << n); }
EMU_DEFINE(u16) EMU_DEFINE(u32) EMU_DEFINE(u64)
#undef EMU_DEFINE
// a + b + carry, a - b - carry; `carry` becomes that of the result, of a difference the borrow.
#define EMU_DEFINE(T) \
  EMU_INLINE T add_carry_##T(T a, T b, u32* carry) { const T sum = (T)(a + b), all = (T)(sum + *carry); *carry = (u32)(sum < a) | (u32)(all < sum); return all; } \
  EMU_INLINE T subtract_carry_##T(T a, T b, u32* carry) { const T rest = (T)(a - b), all = (T)(rest - *carry); *carry = (u32)(a < b) | (u32)(rest < all); return all; }
EMU_DEFINE(u32) EMU_DEFINE(u64)
#undef EMU_DEFINE
EMU_INLINE s32 clamp_s32(s64 v) { return v > 2147483647 ? 2147483647 : v < -2147483647 - 1 ? (s32)(-2147483647 - 1) : (s32)v; }
EMU_INLINE u32 funnel_left(u32 a, u32 b, u32 n) { return (u32)(((u64)b << 32 | a) << n >> 32); }
EMU_INLINE u32 funnel_right(u32 a, u32 b, u32 n) { return (u32)(((u64)b << 32 | a) >> n); }

// ---------------------------------------------------------------- floats
EMU_INLINE float ftz(float x) { return bits_f32(x) & 0x7f800000u ? x : f32_of(bits_f32(x) & 0x80000000u); }
EMU_INLINE bool is_nan_f32(float x) { return x != x; }
EMU_INLINE bool is_nan_f64(double x) { return x != x; }
EMU_INLINE float canonical_f32(float x) { return x != x ? f32_of(0x7fffffffu) : x; }
EMU_INLINE double canonical_f64(double x) { return x != x ? f64_of(0x7ff8000000000000ul) : x; }
EMU_INLINE float clamp01_f32(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }  // NaN becomes 0
EMU_INLINE double clamp01_f64(double x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
EMU_INLINE float abs_f32(float a) { return f32_of(bits_f32(a) & 0x7fffffffu); }
EMU_INLINE double abs_f64(double a) { return f64_of(bits_f64(a) & ~(1ul << 63)); }
EMU_INLINE float neg_f32(float a) { return f32_of(bits_f32(a) ^ 0x80000000u); }
EMU_INLINE double neg_f64(double a) { return f64_of(bits_f64(a) ^ 1ul << 63); }
EMU_INLINE float copysign_f32(float sign, float value) { return f32_of((bits_f32(value) & 0x7fffffffu) | (bits_f32(sign) & 0x80000000u)); }
EMU_INLINE double copysign_f64(double sign, double value) { return f64_of((bits_f64(value) & ~(1ul << 63)) | (bits_f64(sign) & 1ul << 63)); }
EMU_INLINE float xor_sign(float value, float a, float b) { return value != value ? value : copysign_f32(f32_of(bits_f32(a) ^ bits_f32(b)), value); }
EMU_INLINE float divide_approximately(float a, float b) { return abs_f32(b) > f32_of(0x7e800000u) ? a * copysign_f32(b, 0.0f) : a / b; }  // 2**126
EMU_INLINE bool is_finite_f32(float x) { return (bits_f32(x) & 0x7f800000u) != 0x7f800000u; }
EMU_INLINE bool is_finite_f64(double x) { return (bits_f64(x) >> 52 & 2047) != 2047; }
EMU_INLINE bool is_subnormal_f32(float x) { return !(bits_f32(x) & 0x7f800000u) && x != 0; }
EMU_INLINE bool is_subnormal_f64(double x) { return !(bits_f64(x) >> 52 & 2047) && x != 0; }
EMU_INLINE float half_value(u16 h) { return emu_half_value(h); }
EMU_INLINE float bfloat_value(u16 b) { return f32_of((u32)b << 16); }
EMU_INLINE u16 half_flush(u16 h) { return h & 0x7c00 ? h : (u16)(h & 0x8000); }
EMU_INLINE u16 bfloat_flush(u16 h) { return h & 0x7f80 ? h : (u16)(h & 0x8000); }
EMU_INLINE u16 bfloat_from_scale(u8 x) { return x == 255 ? 0x7fff : x ? (u16)(x << 7) : 0x40; }  // ue8m0: 2**(x - 127)
// Stochastic: the 16 bits that bf16 drops carry into it when `random` is added to them.
EMU_INLINE u16 bfloat_from_random(float x, u32 random) { return x != x ? (u16)0x7fff : (u16)((bits_f32(x) + (random & 0xffff)) >> 16); }
