// device.h - what a translated kernel sees: the thread it runs as, memory access, and one helper per PTX operation.
// Every kernel's translation unit includes this, so it pulls in no library header but <stdint.h>.
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef unsigned __int128 u128;
typedef __int128 s128;

#define EMU_INLINE static inline __attribute__((always_inline))

// ---------------------------------------------------------------- shared with the runtime
struct Thread {
  u32 tid[3], ctaid[3], ntid[3], nctaid[3];
  u32 linear, lane, warp;
  const u8* params;
  u32* blocks;  // executions of each basic block by this thread
};
struct Site {           // one instruction that can fault or meet other threads
  const char* where;    // "file:line|inlined-at file:line|..."
  const char* op;       // opcode with its modifiers; equal text is an equal pointer
  u32 block;            // its basic block
};
struct GlobalVariable {
  const char* name;
  void* address;
  u64 bytes;
  bool writable;
  const void* initial;  // nullptr: zeros
  u64 initial_bytes;
};
struct SharedVariable {
  const char* name;
  u32 offset, bytes;
};
struct KernelInfo {
  const char* name;
  void (*entry)(Thread*);
  u32 param_bytes, static_shared, dynamic_offset, frame_bytes;  // frame: registers and local memory
  const SharedVariable* shared;
  u32 shared_count;
  const u32* block_sizes;  // instructions of each basic block
  u32 block_count;
  const GlobalVariable* globals;
  u32 global_count;
};

enum : u32 { A_READ = 0, A_WRITE = 1, A_ATOMIC = 2, A_STRONG = 4, A_CTA = 8, A_ACQUIRE = 16, A_RELEASE = 32, A_GENERIC = 64 };
enum : u32 { RUNAWAY = 1u << 28 };  // executions of one basic block by one thread: minutes of emulation, or an endless loop
enum : int { ROUND_N, ROUND_Z, ROUND_M, ROUND_P, ROUND_NA };
enum : u32 { SHARED_ORIGIN = 0x400, SHARED_CAPACITY = 0x48000 };  // shared address 0 stays invalid, as on sm_90

extern "C" {
#pragma GCC visibility push(hidden)
extern u8 emu_shared_memory[];
extern u32 emu_spins, emu_dynamic_bytes, emu_static_bytes;
[[noreturn]] void emu_trap(u32 site);
[[noreturn]] void emu_runaway(u32 site);
[[noreturn]] void emu_arithmetic_fault(u32 site, const char* what);
void emu_yield();
u8* emu_check_shared(u32 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_global(u64 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_generic(u64 address, u32 bytes, u32 flags, u32 site);
void emu_fence(u32 cta_scope, u32 acquire_release, u32 site);
void emu_barrier(u32 id, u32 threads, u32 aligned, u32 site);
void emu_barrier_arrive(u32 id, u32 threads, u32 aligned, u32 site);
u32 emu_barrier_reduce(u32 id, u32 threads, u32 kind, u32 predicate, u32 aligned, u32 site);
void emu_warp_sync(u32 mask, u32 site);
u32 emu_shuffle(u32 mode, u32 value, u32 b, u32 c, u32 mask, bool* in_range, u32 site);
u32 emu_ballot(u32 mask, u32 predicate, u32 site);
u32 emu_match(u32 all, u64 value, u32 mask, bool* predicate, u32 site);
u32 emu_reduce(u32 kind, u32 is_signed, u32 value, u32 mask, u32 site);
u32 emu_elect(u32 mask, u32 site);
u32 emu_born();
void emu_ldmatrix(u32* out, u32 count, u32 transposed, u32 address, u32 site);
void emu_mma(float* c, const u32* a, const u32* b, u32 k, u32 is_bf16, u32 site);
void emu_cp_async(u32 destination, u64 source, u32 bytes, u32 source_bytes, u32 site);
void emu_cp_async_commit();
void emu_cp_async_wait(u32 keep);
u32 emu_narrow(double x, u32 exponent_bits, u32 mantissa_bits, int rounding);
u32 emu_to_fp8(float x, u32 is_e4m3);
float emu_from_fp8(u8 x, u32 is_e4m3);
float emu_round_f32(char op, int rounding, float a, float b, float c);
double emu_round_f64(char op, int rounding, double a, double b, double c);
float emu_int_to_f32(u64 value, u32 is_signed, int rounding);
double emu_int_to_f64(u64 value, u32 is_signed, int rounding);
double emu_odd_from_int(u64 value, u32 is_signed);
double emu_fma_odd(double a, double b, double c);
#pragma GCC visibility pop
}

// ---------------------------------------------------------------- bits
template <class T, class S> EMU_INLINE T bits(S s) {
  static_assert(sizeof(T) == sizeof(S), "bit casts keep the size");
  return __builtin_bit_cast(T, s);
}
template <class T> EMU_INLINE T load(const u8* p) { T v; __builtin_memcpy(&v, p, sizeof v); return v; }
template <class T> EMU_INLINE void store(u8* p, T v) { __builtin_memcpy(p, &v, sizeof v); }
template <class T> struct Unsigned { typedef T type; };
template <> struct Unsigned<s8> { typedef u8 type; };
template <> struct Unsigned<s16> { typedef u16 type; };
template <> struct Unsigned<s32> { typedef u32 type; };
template <> struct Unsigned<s64> { typedef u64 type; };
template <class T> struct IsSigned { enum { value = T(-1) < T(0) }; };

// ---------------------------------------------------------------- memory
#if EMU_CHECK
EMU_INLINE u8* at_shared(u32 a, u32 n, u32 flags, u32 site) { return emu_check_shared(a, n, flags, site); }
EMU_INLINE u8* at_global(u64 a, u32 n, u32 flags, u32 site) { return emu_check_global(a, n, flags, site); }
EMU_INLINE u8* at_generic(u64 a, u32 n, u32 flags, u32 site) { return emu_check_generic(a, n, flags, site); }
extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void emu_local_fault(u64 address, u32 bytes, const void* base, u64 size, u32 site);
EMU_INLINE u8* at_local(u64 a, u32 n, const u8* base, u64 size, u32 site) {
  u64 o = a - (u64)base;
  if (o > size || o + n > size || a % n) emu_local_fault(a, n, base, size, site);
  return (u8*)a;
}
#else
EMU_INLINE u8* at_shared(u32 a, u32, u32, u32) { return emu_shared_memory + (a - SHARED_ORIGIN); }
EMU_INLINE u8* at_global(u64 a, u32, u32, u32) { return (u8*)a; }
EMU_INLINE u8* at_generic(u64 a, u32, u32, u32) { return (u8*)a; }
EMU_INLINE u8* at_local(u64 a, u32, const u8*, u64, u32) { return (u8*)a; }
#endif
EMU_INLINE u64 generic_from_shared(u64 a) { return (u64)emu_shared_memory + ((u32)a - SHARED_ORIGIN); }
EMU_INLINE u64 shared_from_generic(u64 a) { return (u32)(a - (u64)emu_shared_memory + SHARED_ORIGIN); }
EMU_INLINE bool is_shared(u64 a) { return a - (u64)emu_shared_memory < SHARED_CAPACITY; }
EMU_INLINE bool within(u64 a, const void* base, u64 size) { return a - (u64)base < size; }

// ---------------------------------------------------------------- integers
template <class T> EMU_INLINE T shift_left(T a, u32 n) { return n >= sizeof(T) * 8 ? T(0) : T(a << n); }
template <class T> EMU_INLINE T shift_right(T a, u32 n) {
  if (n >= sizeof(T) * 8) return a < T(0) ? T(-1) : T(0);
  return T(a >> n);
}
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
EMU_INLINE s32 clamp_s32(s64 v) { return v > 2147483647 ? 2147483647 : v < -2147483647 - 1 ? (s32)(-2147483647 - 1) : (s32)v; }
template <class D, class S> EMU_INLINE D saturate(S v) {  // integer to integer, clamped to D
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
EMU_INLINE u32 permute(u32 a, u32 b, u32 selector) {
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
template <bool SA, bool SB> EMU_INLINE u32 dot4(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; i++) {
    s32 x = SA ? (s8)(a >> 8 * i) : (u8)(a >> 8 * i), y = SB ? (s8)(b >> 8 * i) : (u8)(b >> 8 * i);
    c += (u32)(x * y);
  }
  return c;
}
template <bool SA, bool SB> EMU_INLINE u32 dot2(u32 a, u32 b, u32 c, u32 high) {
  for (int i = 0; i < 2; i++) {
    s32 x = SA ? (s16)(a >> 16 * i) : (u16)(a >> 16 * i);
    u32 byte = 8 * (i + 2 * high);
    s32 y = SB ? (s8)(b >> byte) : (u8)(b >> byte);
    c += (u32)(x * y);
  }
  return c;
}

// ---------------------------------------------------------------- floats
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
  return (u16)emu_narrow((double)x, 5, 10, ROUND_N);
}
EMU_INLINE u16 to_bfloat(float x) {
  u32 u = bits<u32>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
struct Half {
  EMU_INLINE float value(u16 h) { return half_value(h); }
  EMU_INLINE u16 from(float x) { return to_half(x); }
  EMU_INLINE u16 from_wide(double x) { return (u16)emu_narrow(x, 5, 10, ROUND_N); }
  enum : u32 { nan = 0x7fff, top = 0x7bff, sign = 0x8000 };
  EMU_INLINE u16 flush(u16 h) { return h & 0x7c00 ? h : (u16)(h & 0x8000); }
};
struct Bfloat {
  EMU_INLINE float value(u16 h) { return bfloat_value(h); }
  EMU_INLINE u16 from(float x) { return to_bfloat(x); }
  EMU_INLINE u16 from_wide(double x) { return (u16)emu_narrow(x, 8, 7, ROUND_N); }
  enum : u32 { nan = 0x7fff, top = 0x7f7f, sign = 0x8000 };
  EMU_INLINE u16 flush(u16 h) { return h & 0x7f80 ? h : (u16)(h & 0x8000); }
};
// One 16-bit operation: fp32 is wide enough that its second rounding changes nothing for + - * (24 >= 2 * 11 + 2).
enum : int { H_ADD, H_SUB, H_MUL, H_FMA, H_MIN, H_MAX, H_MIN_NAN, H_MAX_NAN, H_EX2, H_TANH };
enum : u32 { H_FTZ = 1, H_SAT = 2, H_RELU = 4 };
template <class F, int OP, u32 FLAGS> EMU_INLINE u16 half_op(u16 a, u16 b, u16 c) {
  if (FLAGS & H_FTZ) a = F::flush(a), b = F::flush(b), c = F::flush(c);
  float x = F::value(a), y = F::value(b);
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
  if (FLAGS & H_SAT) r = F::from(clamp01(out));
  if (FLAGS & H_RELU) r = out != out ? (u16)F::nan : out > 0 ? r : (u16)0;
  return r;
}
template <class F, int OP, u32 FLAGS> EMU_INLINE u32 half_op2(u32 a, u32 b, u32 c) {
  return half_op<F, OP, FLAGS>((u16)a, (u16)b, (u16)c) | (u32)half_op<F, OP, FLAGS>((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
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
template <class F> EMU_INLINE u16 narrow16(double x, int rounding, u32 flags, bool finite) {
  u16 r = F::nan == 0x7fff && F::top == 0x7bff ? (u16)emu_narrow(x, 5, 10, rounding) : (u16)emu_narrow(x, 8, 7, rounding);
  if (flags & H_RELU) r = x != x ? (u16)F::nan : x > 0 ? r : (u16)0;
  if (flags & H_SAT) r = F::from(clamp01(F::value(r)));
  if (finite && x == x && (r & 0x7fff) > F::top) r = (u16)((r & F::sign) | F::top);
  return r;
}
// ---------------------------------------------------------------- atomics: read, combine, write in one step
enum : int { T_ADD, T_MIN, T_MAX, T_AND, T_OR, T_XOR, T_EXCH, T_INC, T_DEC };
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
template <int OP, class T> EMU_INLINE T atomic_integer(u8* p, T b) { T o = load<T>(p); return atomic_write(p, o, combine<T>(OP, o, b)); }
template <class T> EMU_INLINE T atomic_float_add(u8* p, T b, bool flush) {
  T o = load<T>(p);
  return atomic_write(p, o, flush ? (T)ftz(ftz((float)o) + ftz((float)b)) : o + b);
}
template <class T> EMU_INLINE T atomic_swap_if(u8* p, T expected, T desired) { T o = load<T>(p); return atomic_write(p, o, o == expected ? desired : o); }
template <class F, int OP> EMU_INLINE u16 atomic_half(u8* p, u16 b) { u16 o = load<u16>(p); return atomic_write(p, o, half_op<F, OP, 0>(o, b, 0)); }
template <class F, int OP> EMU_INLINE u32 atomic_half2(u8* p, u32 b) { u32 o = load<u32>(p); return atomic_write(p, o, half_op2<F, OP, 0>(o, b, 0)); }
