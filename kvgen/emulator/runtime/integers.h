// integers.h - one helper per integer PTX operation. Included by device.h.
#pragma once

extern "C" {
#pragma GCC visibility push(default)
u32 emu_find_nth_set(u32 mask, u32 base, s32 offset);
u32 emu_simd_video(u32 lanes, u32 operation, u32 flags, u32 selectors, u32 mask, u32 a, u32 b, u32 c);
#pragma GCC visibility pop
}

template <class T> EMU_INLINE T shift_left(T a, u32 n) { return n >= sizeof(T) * 8 ? T(0) : T(a << n); }
template <class T> EMU_INLINE T shift_right(T a, u32 n) {
  if (n >= sizeof(T) * 8) return a < T(0) ? T(-1) : T(0);
  return T(a >> n);
}
template <class T> EMU_ONCE T divide(T a, T b, u32 site) {
  if (b == 0) emu_arithmetic_fault(site, "integer division by zero");
  if (IsSigned<T>::value && b == T(-1)) return T(typename Unsigned<T>::type(0) - typename Unsigned<T>::type(a));
  return T(a / b);
}
template <class T> EMU_ONCE T remainder_of(T a, T b, u32 site) {
  if (b == 0) emu_arithmetic_fault(site, "integer remainder by zero");
  if (IsSigned<T>::value && b == T(-1)) return T(0);
  return T(a % b);
}
template <class T> EMU_INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T> EMU_INLINE T larger(T a, T b) { return a > b ? a : b; }
EMU_INLINE s32 clamp_s32(s64 v) { return v > 2147483647 ? 2147483647 : v < -2147483647 - 1 ? (s32)(-2147483647 - 1) : (s32)v; }
template <class D, class S> EMU_ONCE D saturate(S v) {  // integer to integer, clamped to D
  const s128 bottom = IsSigned<D>::value ? -((s128)1 << (sizeof(D) * 8 - 1)) : 0;
  const s128 top = IsSigned<D>::value ? ((s128)1 << (sizeof(D) * 8 - 1)) - 1 : ((s128)1 << (sizeof(D) * 8)) - 1;
  s128 x = v;
  return D(x < bottom ? bottom : x > top ? top : x);
}
EMU_INLINE u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  if (table & 1) r |= ~a & ~b & ~c;
  if (table & 2) r |= ~a & ~b & c;
  if (table & 4) r |= ~a & b & ~c;
  if (table & 8) r |= ~a & b & c;
  if (table & 16) r |= a & ~b & ~c;
  if (table & 32) r |= a & ~b & c;
  if (table & 64) r |= a & b & ~c;
  if (table & 128) r |= a & b & c;
  return r;
}
EMU_ONCE u32 permute(u32 a, u32 b, u32 selector) {
  u64 v = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 s = selector >> (4 * i) & 15, x = (u32)(v >> (8 * (s & 7))) & 255;
    if (s & 8) x = x & 128 ? 255 : 0;
    r |= x << (8 * i);
  }
  return r;
}
EMU_INLINE u32 permute_mode(u32 a, u32 b, u32 c, u32 mode) {  // f4e b4e rc8 ecl ecr rc16
  static const u16 table[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                  {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                  {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  return permute(a, b, table[mode][c & 3]);
}
EMU_INLINE u32 funnel_left(u32 a, u32 b, u32 n) { return (u32)(((u64)b << 32 | a) << n >> 32); }
EMU_INLINE u32 funnel_right(u32 a, u32 b, u32 n) { return (u32)(((u64)b << 32 | a) >> n); }
template <class T> EMU_ONCE T extract_bits(T a, u32 position, u32 length) {
  const u32 width = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (length == 0) return T(0);
  if (position >= width) return IsSigned<T>::value && a < T(0) ? T(-1) : T(0);
  if (length > width - position) length = width - position;
  typedef typename Unsigned<T>::type U;
  return T(T(U(a) << (width - position - length)) >> (width - length));
}
template <class T> EMU_ONCE T insert_bits(T a, T b, u32 position, u32 length) {
  const u32 width = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (length == 0 || position >= width) return b;
  T mask = T((length >= width ? ~T(0) : T((T(1) << length) - 1)) << position);
  return T((b & ~mask) | (T(a << position) & mask));
}
EMU_INLINE u32 leading_zeros(u32 x) { return x ? (u32)__builtin_clz(x) : 32; }
EMU_INLINE u32 leading_zeros(u64 x) { return x ? (u32)__builtin_clzll(x) : 64; }
EMU_INLINE u32 reverse_bits(u32 x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
EMU_INLINE u64 reverse_bits(u64 x) { return (u64)reverse_bits((u32)x) << 32 | reverse_bits((u32)(x >> 32)); }
template <class T> EMU_ONCE u32 find_leading(T a, bool as_shift) {
  typedef typename Unsigned<T>::type U;
  U x = a < T(0) ? U(~U(a)) : U(a);
  if (!x) return ~0u;
  u32 z = leading_zeros(x);
  return as_shift ? z : (u32)sizeof(T) * 8 - 1 - z;
}
template <bool SA, bool SB> EMU_ONCE u32 dot4(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; i++) {
    s32 x = SA ? (s8)(a >> 8 * i) : (u8)(a >> 8 * i), y = SB ? (s8)(b >> 8 * i) : (u8)(b >> 8 * i);
    c += (u32)(x * y);
  }
  return c;
}
template <bool SA, bool SB> EMU_ONCE u32 dot2(u32 a, u32 b, u32 c, u32 high) {
  for (int i = 0; i < 2; i++) {
    s32 x = SA ? (s16)(a >> 16 * i) : (u16)(a >> 16 * i);
    u32 byte = 8 * (i + 2 * high);
    s32 y = SB ? (s8)(b >> byte) : (u8)(b >> byte);
    c += (u32)(x * y);
  }
  return c;
}
