// device.h - what translated kernels and the runtime share: the thread a kernel runs as, tables that a build exports, flags, and
// the functions of the runtime that instructions call. Kernels are C, the runtime is C++. A kernel's translation unit includes
// kernel.h, which includes this; it pulls in no library header, so that a kernel needs a compiler and nothing else.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long s64;
#ifndef __TINYC__  // what needs 128 bits is left to other compilers
typedef unsigned __int128 u128;
typedef __int128 s128;
typedef u128 u128_at __attribute__((aligned(1)));
#endif

// At any address.
typedef u8 u8_at;
typedef u16 u16_at __attribute__((aligned(1)));
typedef u32 u32_at __attribute__((aligned(1)));
typedef u64 u64_at __attribute__((aligned(1)));
typedef float float_at __attribute__((aligned(1)));
typedef double double_at __attribute__((aligned(1)));

#ifdef __cplusplus
#define EMU_INLINE static inline __attribute__((always_inline))
#define EMU_ENUM(T) enum : T
#define EMU_BEGIN extern "C" {
#define EMU_END }
#else
#define EMU_INLINE static inline
#define EMU_ENUM(T) enum
#define EMU_BEGIN
#define EMU_END
#define nullptr ((void*)0)
#define bool _Bool
#define true 1
#define false 0
#endif
#define EMU_NORETURN __attribute__((noreturn))

// ---------------------------------------------------------------- tables of a build
typedef struct Thread {
  u32 tid[3], ctaid[3], ntid[3], nctaid[3];
  u32 cluster_ctaid[3], cluster_nctaid[3];
  u32 linear, lane, warp;
  u32 rank;     // of its block in the cluster
  const u8* params;
  u32* blocks;  // executions of each basic block by this thread
  u8* shared;   // the window of its own block
  u8* windows;  // of the whole cluster: WINDOW_STRIDE apart, by rank
  u32 window_bytes;
  u32 dynamic_shared;               // address of dynamic shared memory; an entry that calls functions sets it
  u64 local_offset;                 // from an address in local memory to the generic one
  const struct LocalArray* locals;  // calls.h
  u32* spins;                       // emu_spins of the worker: yields since something last changed
} Thread;
typedef struct Site {   // one instruction that can fault or meet other threads
  const char* where;    // "file:line|inlined-at file:line|..."
  const char* op;       // opcode with its modifiers; equal text is an equal pointer
  u32 block;            // its basic block
} Site;
typedef struct GlobalVariable {
  const char* name;
  void* address;
  u64 bytes;
  bool writable;
  const void* initial;  // nullptr: zeros
  u64 initial_bytes;
} GlobalVariable;
typedef struct SharedVariable {
  const char* name;
  u32 offset, bytes;
} SharedVariable;
typedef struct KernelInfo {
  const char* name;
  void (*entry)(Thread*);
  u32 param_bytes, static_shared, dynamic_offset, frame_bytes;  // frame: registers and local memory
  const SharedVariable* shared;
  u32 shared_count;
  u32 block_count;  // basic blocks
  const GlobalVariable* globals;
  u32 global_count;
} KernelInfo;

typedef struct Program {  // what one build exports to the runtime
  const Site* sites;
  const KernelInfo* const* kernels;
  void (*initialize)(void);  // fills in the addresses that initial values hold; called once a library is loaded
} Program;

EMU_ENUM(u32) { A_READ = 0, A_WRITE = 1, A_ATOMIC = 2, A_STRONG = 4, A_CTA = 8, A_ACQUIRE = 16, A_RELEASE = 32, A_GENERIC = 64, A_VOLATILE = 128, A_CLUSTER = 256, A_CONSTANT = 512 };
EMU_ENUM(u32) { FENCE_ACQUIRE = 1, FENCE_RELEASE = 2 };
EMU_ENUM(u32) { RUNAWAY = 1u << 28 };  // executions of one basic block by one thread: minutes of emulation, or an endless loop
// Shared address 0 stays invalid, as on sm_90. The address of another block of the cluster has its rank + 1 in bits 24 up.
EMU_ENUM(u32) { SHARED_ORIGIN = 0x400, SHARED_CAPACITY = 0x48000, WINDOW_STRIDE = 0x80000, RANK_SHIFT = 24, WINDOW_MASK = (1u << RANK_SHIFT) - 1 };

// Addresses in .param, .local and .const lie below 4 GiB, as on a GPU, so that 32 bits may hold them until cvta makes them
// generic. They keep the generic ones' alignment. A function's own parameters are on the thread's stack, as local memory is.
EMU_ENUM(u32) { PARAM_ORIGIN = 0x400, LOCAL_ORIGIN = 0x1000000 };
#define CONST_ORIGIN 0x80000000u
#define NEAR_ALIGN 0x10000ul

#pragma GCC visibility push(default)
EMU_BEGIN
extern u32 emu_dynamic_bytes, emu_static_bytes;
EMU_NORETURN void emu_trap(u32 site);
EMU_NORETURN void emu_runaway(u32 site);
EMU_NORETURN void emu_arithmetic_fault(u32 site, const char* what);
void emu_yield(void);
u64 emu_clock(void);
bool emu_is_constant(u64 address);
bool emu_is_parameter(u64 address);
EMU_NORETURN void emu_exit(void);
void emu_await_turn(void);  // until every earlier block has ended
u8* emu_check_shared(u32 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_cluster(u32 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_global(u64 address, u32 bytes, u32 flags, u32 site);
u8* emu_check_generic(u64 address, u32 bytes, u32 flags, u32 site);
void emu_grid_wait(void);
void emu_grid_trigger(u32 site);
void emu_fence(u32 scope, u32 what, u32 site);  // scope: 1 block, 2 cluster, 0 wider
void emu_barrier(u32 id, u32 threads, u32 aligned, u32 site);
void emu_barrier_arrive(u32 id, u32 threads, u32 aligned, u32 site);
u32 emu_barrier_reduce(u32 id, u32 threads, u32 kind, u32 predicate, u32 aligned, u32 site);
void emu_cluster_arrive(u32 release, u32 aligned, u32 site);
void emu_cluster_wait(u32 aligned, u32 site);
u64 emu_map_rank(u64 address, u32 rank, u32 generic, u32 site);
u32 emu_rank_of(u64 address, u32 generic, u32 site);
EMU_END
#pragma GCC visibility pop

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
EMU_INLINE u8* at_shared(const Thread* self, u32 a, u32 bytes, u32 flags, u32 site) { return self->shared + (a - SHARED_ORIGIN); }
EMU_INLINE u8* at_cluster(const Thread* self, u32 a, u32 bytes, u32 flags, u32 site) { return window_place(self, a); }
EMU_INLINE u8* at_global(u64 a, u32 bytes, u32 flags, u32 site) {
  if (flags & (A_ATOMIC | A_STRONG | A_VOLATILE)) emu_await_turn();
  return (u8*)a;
}
EMU_INLINE u8* at_generic(const Thread* self, u64 a, u32 bytes, u32 flags, u32 site) {
  if (flags & (A_ATOMIC | A_STRONG | A_VOLATILE) && !is_shared(self, a)) emu_await_turn();
  return (u8*)a;
}
#endif

#include "calls.h"
#include "warp.h"
#include "tensor.h"
#include "async.h"
#include "operations.h"
