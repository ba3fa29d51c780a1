// runtime.h - state shared by the runtime's own files: workers, blocks, fibers, the fault record, the checker's hooks.
#pragma once
#include "device.h"
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

template <class T, class S> EMU_INLINE T bits(S s) {
  static_assert(sizeof(T) == sizeof(S), "bit casts keep the size");
  return __builtin_bit_cast(T, s);
}
template <class T> EMU_INLINE T load(const u8* p) { T v; __builtin_memcpy(&v, p, sizeof v); return v; }
template <class T> EMU_INLINE void store(u8* p, T v) { __builtin_memcpy(p, &v, sizeof v); }
extern __thread u32 emu_spins __attribute__((tls_model("initial-exec")));  // yields since something last changed
#include "integers.h"
#include "floats.h"
#include "atomics.h"

constexpr u32 MAX_THREADS = 1024, MAX_WARPS = 32, BARRIERS = 16, MAX_CLUSTER = 16, MAX_WORKERS = 64;

enum State : u8 { RUNNING, AT_WARP_OP, AT_BARRIER, AT_CLUSTER, AT_MBARRIER, EXITED };

struct Block;
struct CopyOp {  // one cp.async of a thread, not yet performed, or an arrival once those before it are
  u32 destination, bytes, source_bytes, site, group;
  u64 source, serial;
  Block* arrives_in;  // whose mbarrier at offset `destination`; a copy: nullptr
};
struct CopyQueue {
  CopyOp* ops;
  u32 count, capacity, next_group;
  u64 issued;
};
struct Reduced { bool any, all; u32 count; };  // of the predicates at a barrier
struct alignas(64) Fiber : Thread {
  void* stack_pointer;
  Block* block;
  struct Warp* own_warp;
  u32 slot;     // among the fibers of the worker; a warp's are a multiple of 32 and up
  State state;  // of a fiber that cannot run: what it waits for
  u32 mask, site, barrier;
  u8* stack;
  bool cluster_arrived;
  u32 cluster_phase;  // of its last arrival
  Reduced reduced;    // by the last barrier it waited at
  CopyQueue copies;
  u32 bulk_group;  // that its next bulk store belongs to
  u8 disturbed[16];  // what a probe lets its last read find
};
struct Warp {
  u32 born, alive, waiting;
  u32 mask, site;  // of the first lane that waits
  bool mixed;      // lanes wait with other masks or at other sites
  u32 operations;
  void* arguments[32];
  u32 gathered, gathered_site, gathered_barrier, predicates;  // lanes that have come to an aligned barrier; not all yet
};
struct Barrier {
  u32 arrived, expected, waiting, first_site;
  u32 lanes[MAX_WARPS];  // who waits
  Reduced reduced;       // so far
};
struct BlockChecker;
struct BlockAsync;
struct Warpgroup;
struct Block {  // one running block
  u8* shared;
  Fiber* fibers;
  u32 index;  // in the grid, from 1
  u32 rank;   // in its cluster
  u32 alive;
  Warp warps[MAX_WARPS];
  Barrier barriers[BARRIERS];
  BlockAsync* async;
  BlockChecker* checker;
  Warpgroup* warpgroups;  // made by the first instruction that needs them
  u32 free_registers;     // given away by setmaxnreg
};
struct BufferInfo {
  const char* name;
  u64 address, bytes;
  u32 writable, settled;  // settled: no kernel before or behind this one writes it
};
struct SiteCount {  // what one instruction asked of one buffer
  const char* where;
  u32 site, buffer, kind, padding;           // kind: 0 load, 1 store, 2 atomic
  u64 requests, bytes, units, ideal, worst;  // units: sectors, in shared memory wavefronts; ideal: the fewest there can be
};
struct LaunchInfo {
  const Program* program;
  u32 kernel, grid[3], block[3], cluster[3], dynamic_shared;
  u32 schedule, buffer_count;  // schedule: 0 ascending, 1 descending, 2 seeded
  u32 workers;                 // most OS threads
  u32 programmatic;            // may start before the kernel ahead of it in the stream has ended
  u32 level;                   // CHECK or HARDWARE
  u32 probe;                   // padding.cpp: which bytes stand in for undetermined ones; 0: what is there
  u32 registers;               // of a thread at the start; 0: not known
  u64 seed;
  const u8* params;
  const BufferInfo* buffers;
  u64* executed;  // how often threads ran each basic block, then how often warps did
  const SiteCount* sites;
  u64 site_count, peak_in_flight, warp_operations, barriers, switches;
};
enum : u32 { CHECK, HARDWARE };  // levels: every rule, or what hardware can get wrong
struct FaultRecord {
  u32 set, level, has_thread, block[3], thread[3];
  char kind[48], where[2048], op[160], buffer[256], detail[6144];
};
struct WorkerCounters;
struct ClusterOrder;
struct Worker {  // one OS thread and the cluster of blocks it is running
  u32 number;
  Fiber* current;
  Fiber* fibers;
  u32 fiber_count, warp_count, alive;
  Block* blocks;
  u32* runnable;  // lanes of each warp
  int step;       // from a lane to the one that is next in order; 0: drawn
  u64 random_state;
  void* main_stack_pointer;
  u8* stacks;
  u8* windows;
  u32 cluster_arrived, cluster_phase;  // the cluster's barrier
  u32* block_counts;  // executions of each basic block by each fiber
  u64* executed;      // as in LaunchInfo
  u64 ticket;         // number of its cluster in launch order
  bool has_turn, abandoned;
  FaultRecord record, suspicion;  // suspicion: the first undetermined read, which may be of padding
  u32 level;                      // of the fault that is about to be found
  bool raced;                     // the read under way races
  char states[5600];  // of every warp, for reports
  u32 last_range;
  u64 warp_operations, barriers, switches;
  WorkerCounters* counters;
  ClusterOrder* cluster_order;
};

extern __thread Worker* worker __attribute__((tls_model("initial-exec")));
// One launch at a time; these do not change while it runs.
extern const Site* emu_sites;
extern const KernelInfo* kernel;
extern LaunchInfo* launch;
extern u32 thread_count, cluster_size;  // threads of a block, blocks of a cluster
extern size_t stack_stride, stack_bytes;

constexpr u32 NO_SITE = ~0u;

// faults.cpp
[[noreturn]] void fault(const char* kind, u32 site, const char* buffer, const char* format, ...) __attribute__((format(printf, 4, 5)));
void suspect(const char* kind, u32 site, const char* buffer, const char* format, ...) __attribute__((format(printf, 4, 5)));  // goes on
[[noreturn]] void fault_with_states(const char* kind, u32 site, const char* why);
[[noreturn]] void deadlock(const char* why);
const char* shared_place(u32 o, u32* offset);  // the variable at offset `o` of shared memory
// fibers.cpp
void switch_to(Fiber* from, Fiber* to);  // nullptr: the worker itself
void prepare_stack(Fiber& f);
void fiber_wake(Fiber& f);
void lanes_wake(const Fiber& one, u32 lanes);  // of its warp
void fiber_wait();  // the caller has set current->state; returns when somebody woke this fiber
void fiber_yield();  // all others that can run come first
Fiber* first_fiber();
u32 draw(u32 n);  // below n; 0 in a schedule that is not seeded
// grid.cpp
void* map_zeros(size_t bytes);  // takes memory only where it is touched; nullptr: there is none
// print.cpp
void print_begin_launch();
void print_end_launch(u64 last_ticket);  // joins what the launch printed
// sync.cpp
const char* op_text(u32 site);
void warp_operation(u32 mask, WarpOp op, void* argument, u32 site, bool orders_memory, bool aligned) asm("emu_warp_operation_body");
void thread_exits();
// wgmma.cpp
void warpgroup_exit(const Fiber& f);
void begin_warpgroups(Block& block);
void end_warpgroups(Block& block);
// registers.cpp
u32 awaited_registers(const Block& block, u32 warp);  // how many more its warpgroup waits for
// cluster.cpp
void cluster_exit(Fiber& f);
// mbarrier.cpp, copies.cpp, bulk.cpp
void async_begin_block(Block& b);
void async_thread_exits(Fiber& f);
void async_end_worker(Block& b);
size_t describe_mbarrier(char* out, size_t size, Block& b, u32 offset);

inline u32 smaller_of(u32 a, u32 b) { return a < b ? a : b; }
inline int lowest(u32 mask) { return __builtin_ctz(mask); }
inline int highest(u32 mask) { return 31 - __builtin_clz(mask); }
inline bool can_run(const Fiber& f) { return worker->runnable[f.slot >> 5] >> (f.slot & 31) & 1; }
inline bool hardware_level() { return launch->level == HARDWARE; }
inline u8* shared_at(u32 address) { return worker->current->shared + (address - SHARED_ORIGIN); }

#if EMU_CHECK
void check_begin_launch();
void check_end_launch();
void check_begin_worker();
void check_end_worker();
void check_begin_block(Block& b);
void check_end_block(Block& b);
void check_full_barrier();                  // every thread of the current block has arrived
void check_warp_join(u32 warp, u32 lanes);  // these lanes order each other's memory
void check_aligned(u32 warp, u32 lanes);    // they meet in an aligned instruction, which does so on hardware
void check_barrier_arrive(u32 id, u32 thread);  // the thread's past becomes the barrier's
void check_barrier_pass(u32 id, u32 thread);
void check_barrier_reset(u32 id);
void check_cluster_arrive(u32 release);
void check_cluster_complete();
void check_cluster_pass();
void check_leave();                         // the current thread stops for a while
void check_block_exit(Block& b);            // its last thread has ended
void check_copy_issue(const CopyOp& op);
// Agents: pseudo-threads for what the hardware does on its own. Below WARPGROUP_AGENT one for each mbarrier, then one for
// each warpgroup's wgmma unit.
constexpr u32 AGENTS = 64, WARPGROUP_AGENT = 56;
// `thread` is about to have these bytes read through the async proxy; no reader is remembered.
void check_async_read(Block& b, u32 thread, u32 address, u32 bytes, u32 site);
void check_hold(Block& b, u32 address, u32 bytes, u32 site);  // nobody may write them until they are released; nests
void check_release(Block& b, u32 address, u32 bytes);
u32 check_agent_tick(Block& b, u32 agent);  // a new clock value of the agent
void check_agent_read(Block& b, u32 agent, u32 clock, u32 address, u32 bytes, u32 site);
void check_agent_learn(Block& b, u32 thread, u32 agent, u32 clock);  // the thread has observed the agent up to `clock`
#else
inline void check_begin_launch() {}
inline void check_end_launch() {}
inline void check_begin_worker() {}
inline void check_end_worker() {}
inline void check_begin_block(Block&) {}
inline void check_end_block(Block&) {}
inline void check_full_barrier() {}
inline void check_warp_join(u32, u32) {}
inline void check_aligned(u32, u32) {}
inline void check_barrier_arrive(u32, u32) {}
inline void check_barrier_pass(u32, u32) {}
inline void check_barrier_reset(u32) {}
inline void check_cluster_arrive(u32) {}
inline void check_cluster_complete() {}
inline void check_cluster_pass() {}
inline void check_leave() {}
inline void check_block_exit(Block&) {}
inline void check_copy_issue(const CopyOp&) {}
inline void check_async_read(Block&, u32, u32, u32, u32) {}
inline void check_hold(Block&, u32, u32, u32) {}
inline void check_release(Block&, u32, u32) {}
inline u32 check_agent_tick(Block&, u32) { return 0; }
inline void check_agent_read(Block&, u32, u32, u32, u32, u32) {}
inline void check_agent_learn(Block&, u32, u32, u32) {}
#endif
