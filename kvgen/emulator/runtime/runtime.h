// runtime.h - state shared by the runtime's own files: fibers, warps, barriers, the fault record, and the checker's hooks.
#pragma once
#include "device.h"
#include <stddef.h>

constexpr u32 MAX_THREADS = 1024, MAX_WARPS = 32, BARRIERS = 16;

enum State : u8 { RUNNING, AT_WARP_OP, AT_BARRIER, EXITED };
typedef void (*WarpOp)(void** arguments, u32 lanes);

struct CopyOp {  // one cp.async of a thread, not yet performed
  u32 destination, bytes, source_bytes, site, group;
  u64 source;
};
struct CopyQueue {
  CopyOp* ops;
  u32 count, capacity, first_group, next_group;
};
struct Fiber : Thread {
  void* stack_pointer;
  u8* stack;
  State state;
  u32 mask, site, barrier;
  bool orders_memory, aligned;
  WarpOp op;
  CopyQueue copies;
};
struct Warp {
  u32 born, alive, waiting;
  void* arguments[32];
};
struct Barrier {
  u32 arrived, expected, waiting, first_site;
  u32 lanes[MAX_WARPS];  // who arrived, waiting or not
  u32 sites[MAX_WARPS];
  bool aligned;
  u32 any, all, count;             // reduction in progress
  u32 out_any, out_all, out_count; // of the last completed phase
};
struct BufferInfo {
  const char* name;
  u64 address, bytes;
  u32 writable, padding;
};
struct BufferCount {
  u64 load_requests, load_bytes, load_sectors, store_requests, store_bytes, store_sectors, atomic_requests, atomic_bytes, atomic_sectors;
};
struct LaunchInfo {
  u32 kernel, grid[3], block[3], dynamic_shared;
  u32 schedule, buffer_count;  // schedule: 0 ascending, 1 descending, 2 seeded
  u64 seed;
  const u8* params;
  const BufferInfo* buffers;
  BufferCount* counts;
  u64 thread_instructions, warp_instructions, warp_operations, barriers, switches;
};
struct FaultRecord {
  u32 set, has_thread, block[3], thread[3];
  char kind[48], where[2048], op[160], buffer[256], detail[6144];
};

extern Fiber* fibers;
extern Warp warps[MAX_WARPS];
extern Barrier barriers[BARRIERS];
extern Fiber* current;
extern u32 thread_count, alive_count, block_index;
extern const KernelInfo* kernel;
extern LaunchInfo* launch;
extern u8* stacks;
extern size_t stack_stride, stack_bytes;

extern "C" {
extern const Site emu_sites[] __attribute__((visibility("hidden")));
extern const KernelInfo emu_kernels[] __attribute__((visibility("hidden")));
}
constexpr u32 NO_SITE = ~0u;
[[noreturn]] void fault(const char* kind, u32 site, const char* buffer, const char* format, ...) __attribute__((format(printf, 4, 5)));

inline u32 smaller_of(u32 a, u32 b) { return a < b ? a : b; }
inline int lowest(u32 mask) { return __builtin_ctz(mask); }

#if EMU_CHECK
void check_begin_launch();
void check_end_launch();
void check_begin_block();
void check_end_block();
void check_full_barrier();                  // every thread of the block has arrived
void check_warp_join(u32 warp, u32 lanes);  // these lanes order each other's memory
void check_barrier_arrive(u32 id);          // the current thread's past becomes the barrier's
void check_barrier_pass(u32 id, u32 thread);
void check_barrier_reset(u32 id);
void check_copy_issue(const CopyOp& op);
void check_copy_complete(const CopyOp& op);
#else
inline void check_begin_launch() {}
inline void check_end_launch() {}
inline void check_begin_block() {}
inline void check_end_block() {}
inline void check_full_barrier() {}
inline void check_warp_join(u32, u32) {}
inline void check_barrier_arrive(u32) {}
inline void check_barrier_pass(u32, u32) {}
inline void check_barrier_reset(u32) {}
inline void check_copy_issue(const CopyOp&) {}
inline void check_copy_complete(const CopyOp&) {}
#endif
