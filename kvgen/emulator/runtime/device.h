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

// At any address.
typedef u8 u8_at;
typedef u16 u16_at __attribute__((aligned(1)));
typedef u32 u32_at __attribute__((aligned(1)));
typedef u64 u64_at __attribute__((aligned(1)));
typedef u128 u128_at __attribute__((aligned(1)));

#define EMU_INLINE static inline __attribute__((always_inline))
// Arithmetic with control flow of its own: a kernel has one copy, for of many the compiler's time is mostly theirs.
#ifdef EMU_RUNTIME
#define EMU_ONCE EMU_INLINE
#else
#define EMU_ONCE static __attribute__((noinline, optimize("O2")))
#endif
// A kernel or device function. In check mode its own code is compiled without optimization, in little more than half the
// time: most of what it does when it runs are calls of the runtime.
#if EMU_CHECK
#define EMU_BODY static __attribute__((noinline, optimize("O0")))
#else
#define EMU_BODY static __attribute__((noinline))
#endif

// ---------------------------------------------------------------- shared with the runtime
struct Thread {
  u32 tid[3], ctaid[3], ntid[3], nctaid[3];
  u32 cluster_ctaid[3], cluster_nctaid[3];
  u32 linear, lane, warp;
  u32 rank;     // of its block in the cluster
  const u8* params;
  u32* blocks;  // executions of each basic block by this thread
  u8* shared;   // the window of its own block
  u8* windows;  // of the whole cluster: WINDOW_STRIDE apart, by rank
  u32 window_bytes;
  u64 local_offset;                 // from an address in local memory to the generic one
  u32 dynamic_shared;               // address of dynamic shared memory; an entry that calls functions sets it
  const struct LocalArray* locals;  // calls.h
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
  u32 block_count;  // basic blocks
  const GlobalVariable* globals;
  u32 global_count;
};

struct Program {  // what one build exports to the runtime
  const Site* sites;
  const KernelInfo* const* kernels;
};

enum : u32 { A_READ = 0, A_WRITE = 1, A_ATOMIC = 2, A_STRONG = 4, A_CTA = 8, A_ACQUIRE = 16, A_RELEASE = 32, A_GENERIC = 64, A_VOLATILE = 128, A_CLUSTER = 256, A_CONSTANT = 512 };
enum : u32 { FENCE_ACQUIRE = 1, FENCE_RELEASE = 2 };
enum : u32 { RUNAWAY = 1u << 28 };  // executions of one basic block by one thread: minutes of emulation, or an endless loop
// Shared address 0 stays invalid, as on sm_90. The address of another block of the cluster has its rank + 1 in bits 24 up.
enum : u32 { SHARED_ORIGIN = 0x400, SHARED_CAPACITY = 0x48000, WINDOW_STRIDE = 0x80000, RANK_SHIFT = 24, WINDOW_MASK = (1u << RANK_SHIFT) - 1 };

// Addresses in .param, .local and .const lie below 4 GiB, as on a GPU, so that 32 bits may hold them until cvta makes them
// generic. They keep the generic ones' alignment. A function's own parameters are on the thread's stack, as local memory is.
enum : u32 { PARAM_ORIGIN = 0x400, LOCAL_ORIGIN = 0x1000000, CONST_ORIGIN = 0x80000000 };
enum : u64 { NEAR_ALIGN = 0x10000 };

extern "C" {
extern const u8 emu_constants __attribute__((visibility("hidden")));  // among the constants of a build
#pragma GCC visibility push(default)
extern u32 emu_dynamic_bytes, emu_static_bytes;
extern __thread u32 emu_spins __attribute__((tls_model("initial-exec")));  // yields since something last changed
[[noreturn]] void emu_trap(u32 site);
[[noreturn]] void emu_runaway(u32 site);
[[noreturn]] void emu_arithmetic_fault(u32 site, const char* what);
void emu_yield();
u64 emu_clock();
bool emu_is_constant(u64 address);
bool emu_is_parameter(u64 address);
[[noreturn]] void emu_exit();
void emu_await_turn();  // until every earlier block has ended
u8* emu_check_shared(u32 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_cluster(u32 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_global(u64 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_generic(u64 address, u32 bytes, u32 flags, u32 site);
void emu_grid_wait();
void emu_grid_trigger(u32 site);
void emu_fence(u32 scope, u32 what, u32 site);  // scope: 1 block, 2 cluster, 0 wider
void emu_barrier(u32 id, u32 threads, u32 aligned, u32 site);
void emu_barrier_arrive(u32 id, u32 threads, u32 aligned, u32 site);
u32 emu_barrier_reduce(u32 id, u32 threads, u32 kind, u32 predicate, u32 aligned, u32 site);
void emu_cluster_arrive(u32 release, u32 aligned, u32 site);
void emu_cluster_wait(u32 aligned, u32 site);
u64 emu_map_rank(u64 address, u32 rank, u32 generic, u32 site);
u32 emu_rank_of(u64 address, u32 generic, u32 site);
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
EMU_INLINE bool is_shared(const Thread* self, u64 a) { return a - (u64)self->windows < self->window_bytes; }
EMU_INLINE u8* window_place(const Thread* self, u32 a) {  // of a shared::cluster address
  const u32 rank = a >> RANK_SHIFT;
  return (rank ? self->windows + (u64)(rank - 1) * WINDOW_STRIDE : self->shared) + ((a & WINDOW_MASK) - SHARED_ORIGIN);
}
EMU_INLINE u64 generic_from_shared(const Thread* self, u64 a) { return (u64)window_place(self, (u32)a); }
EMU_INLINE u64 shared_from_generic(const Thread* self, u64 a) {
  const u64 own = a - (u64)self->shared, any = a - (u64)self->windows;
  if (own < WINDOW_STRIDE || any >= self->window_bytes) return (u32)(own + SHARED_ORIGIN);
  return (any / WINDOW_STRIDE + 1) << RANK_SHIFT | (any % WINDOW_STRIDE + SHARED_ORIGIN);
}
EMU_INLINE u64 generic_from_local(const Thread* self, u64 a) { return a + self->local_offset; }
EMU_INLINE u64 local_from_generic(const Thread* self, u64 a) { return a - self->local_offset; }
EMU_INLINE u64 generic_from_const(const Thread*, u64 a) { return a - CONST_ORIGIN + ((u64)&emu_constants & -NEAR_ALIGN); }
EMU_INLINE u64 const_from_generic(u64 a) { return a + CONST_ORIGIN - ((u64)&emu_constants & -NEAR_ALIGN); }
EMU_INLINE u64 generic_from_param(const Thread* self, u64 a) { return a < LOCAL_ORIGIN ? a - PARAM_ORIGIN + (u64)self->params : generic_from_local(self, a); }
EMU_INLINE u64 param_from_generic(const Thread* self, u64 a) {
  const u64 o = a - (u64)self->params + PARAM_ORIGIN;
  return o < LOCAL_ORIGIN ? o : local_from_generic(self, a);
}
EMU_INLINE bool within(u64 a, const void* base, u64 size) { return a - (u64)base < size; }
#if EMU_CHECK
#define at_shared(self, address, ...) emu_check_shared(address, __VA_ARGS__)
#define at_cluster(self, address, ...) emu_check_cluster(address, __VA_ARGS__)
#define at_global(address, ...) emu_check_global(address, __VA_ARGS__)
#define at_generic(self, address, ...) emu_check_generic(address, __VA_ARGS__)
#else
EMU_INLINE u8* at_shared(const Thread* self, u32 a, u32, u32, u32) { return self->shared + (a - SHARED_ORIGIN); }
EMU_INLINE u8* at_cluster(const Thread* self, u32 a, u32, u32, u32) { return window_place(self, a); }
EMU_INLINE u8* at_global(u64 a, u32, u32 flags, u32) {
  if (flags & (A_ATOMIC | A_STRONG | A_VOLATILE)) emu_await_turn();
  return (u8*)a;
}
EMU_INLINE u8* at_generic(const Thread* self, u64 a, u32, u32 flags, u32) {
  if (flags & (A_ATOMIC | A_STRONG | A_VOLATILE) && !is_shared(self, a)) emu_await_turn();
  return (u8*)a;
}
#endif

#include "calls.h"
#include "warp.h"
#include "integers.h"
#include "floats.h"
#include "atomics.h"
#include "tensor.h"
#include "async.h"
