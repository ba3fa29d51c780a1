// integers.h - one template an integer operation, for the runtime's own use and for operations.cpp, which exports what kernels call.
#pragma once

template <class T> struct Unsigned { typedef T type; };
template <> struct Unsigned<s8> { typedef u8 type; };
template <> struct Unsigned<s16> { typedef u16 type; };
template <> struct Unsigned<s32> { typedef u32 type; };
template <> struct Unsigned<s64> { typedef u64 type; };
template <class T> struct IsSigned { enum { value = T(-1) < T(0) }; };

template <class T> EMU_INLINE T divide(T a, T b, u32 site) {
  if (b == 0) emu_arithmetic_fault(site, "integer division by zero");
  if (IsSigned<T>::value && b == T(-1)) return T(typename Unsigned<T>::type(0) - typename Unsigned<T>::type(a));
  return T(a / b);
}
template <class T> EMU_INLINE T remainder_of(T a, T b, u32 site) {
  if (b == 0) emu_arithmetic_fault(site, "integer remainder by zero");
  if (IsSigned<T>::value && b == T(-1)) return T(0);
  return T(a % b);
}
template <class T> EMU_INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T> EMU_INLINE T larger(T a, T b) { return a > b ? a : b; }
template <class T> EMU_INLINE T extract_bits(T a, u32 position, u32 length) {
  const u32 width = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (length == 0) return T(0);
  if (position >= width) return IsSigned<T>::value && a < T(0) ? T(-1) : T(0);
  if (length > width - position) length = width - position;
  typedef typename Unsigned<T>::type U;
  return T(T(U(a) << (width - position - length)) >> (width - length));
}
template <class T> EMU_INLINE T insert_bits(T a, T b, u32 position, u32 length) {
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
template <class T> EMU_INLINE u32 find_leading(T a, bool as_shift) {
  typedef typename Unsigned<T>::type U;
  U x = a < T(0) ? U(~U(a)) : U(a);
  if (!x) return ~0u;
  u32 z = leading_zeros(x);
  return as_shift ? z : (u32)sizeof(T) * 8 - 1 - z;
}
