// atomics.h - read, combine and write in one step, as templates; operations.cpp exports what kernels call.
#pragma once

template <class T> EMU_INLINE T combine(int op, T o, T b) {
  switch (op) {
    case T_ADD: return T(typename Unsigned<T>::type(o) + typename Unsigned<T>::type(b));
    case T_MIN: return smaller(o, b);
    case T_MAX: return larger(o, b);
    case T_AND: return o & b;
    case T_OR: return o | b;
    case T_XOR: return o ^ b;
    case T_EXCH: return b;
    case T_INC: return o >= b ? T(0) : T(o + 1);
    default: return o == 0 || o > b ? b : T(o - 1);
  }
}
template <class T> EMU_INLINE T atomic_write(u8* p, T old_value, T new_value) {
  if (__builtin_memcmp(&old_value, &new_value, sizeof(T))) emu_spins = 0;
  store<T>(p, new_value);
  return old_value;
}
template <class T> EMU_INLINE T atomic_float_add(u8* p, T b, bool flush) {
  T o = load<T>(p);
  return atomic_write(p, o, flush ? (T)ftz(ftz((float)o) + ftz((float)b)) : o + b);
}
template <class T> EMU_INLINE T atomic_swap_if(u8* p, T expected, T desired) { T o = load<T>(p); return atomic_write(p, o, o == expected ? desired : o); }
