// grid.cpp - a launch: clusters of blocks in order of their number, spread over OS threads, results as if one by one.
//
// A worker takes the next cluster (mostly of one block) and runs it alone. What a kernel computes may depend on another
// block only through memory that somebody writes, so a block waits for its turn - until every earlier block has ended -
// before its first atomic, volatile or strong access of global memory; in check mode before its first access of anything
// writable, which also makes reports the same for any number of workers. No thread outlives the launch, so that a process
// may fork between launches.
#include "runtime.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

u32 emu_dynamic_bytes, emu_static_bytes;
u32 thread_count, cluster_size;
const Site* emu_sites;
const KernelInfo* kernel;
LaunchInfo* launch;

namespace {
constexpr u64 NONE = ~0ull;
FaultRecord final_record, final_suspicion;
struct Grid {
  pthread_mutex_t lock;
  pthread_cond_t ended, over;
  u64 next, total, failed;   // tickets; failed: the first cluster with a fault
  u64 suspected;             // the first cluster with a suspicion
  u64 running[MAX_WORKERS];  // ticket of each worker
  bool is_over;              // the first worker has found no more to do
  bool no_memory;
  pthread_t helpers[MAX_WORKERS];
  u32 helper_count;
} grid;

struct Locked {
  Locked() { pthread_mutex_lock(&grid.lock); }
  ~Locked() { pthread_mutex_unlock(&grid.lock); }
};
bool take_ticket(Worker& w) {
  Locked lock;
  if (grid.next >= grid.total || grid.failed != NONE) return false;
  grid.running[w.number] = w.ticket = grid.next++;
  w.has_turn = false;
  return true;
}
void end_ticket(Worker& w, bool failed) {
  Locked lock;
  grid.running[w.number] = NONE;
  if (failed && w.ticket < grid.failed) {
    grid.failed = w.ticket;
    final_record = w.record;
  }
  if (w.suspicion.set && w.ticket < grid.suspected) {
    grid.suspected = w.ticket;
    final_suspicion = w.suspicion;
  }
  pthread_cond_broadcast(&grid.ended);
}

// ---------------------------------------------------------------- one cluster
constexpr u8 FILLS[] = {0xFF, 0, 0x3C};  // NaN in every float format, so that a missing write shows; then those of probes
u32 warp_slots() { return (thread_count + 31) & ~31u; }
void begin_block(Worker& w, Block& b, u32 rank, const u32* position) {
  const u32* size = launch->block;
  b.rank = rank;
  b.index = 1 + position[0] + launch->grid[0] * (position[1] + launch->grid[1] * position[2]);
  b.alive = thread_count;
  b.shared = w.windows + (size_t)rank * WINDOW_STRIDE;
  b.fibers = w.fibers + rank * warp_slots();
  memset(b.warps, 0, sizeof b.warps);
  memset(b.barriers, 0, sizeof b.barriers);
  begin_warpgroups(b);
  b.free_registers = 0;
  const u32 extent = emu_static_bytes > kernel->dynamic_offset + emu_dynamic_bytes ? emu_static_bytes : kernel->dynamic_offset + emu_dynamic_bytes;
  memset(b.shared, FILLS[launch->probe], extent);
  for (u32 t = 0; t < thread_count; t++) {
    Fiber& f = b.fibers[t];
    f.tid[0] = t % size[0], f.tid[1] = t / size[0] % size[1], f.tid[2] = t / (size[0] * size[1]);
    for (int i = 0; i < 3; i++) f.ctaid[i] = position[i], f.ntid[i] = size[i], f.nctaid[i] = launch->grid[i], f.cluster_ctaid[i] = position[i] % launch->cluster[i], f.cluster_nctaid[i] = launch->cluster[i];
    f.linear = t, f.lane = t & 31, f.warp = t >> 5, f.rank = rank;
    f.params = launch->params;
    f.slot = (u32)(&f - w.fibers);
    f.block = &b, f.own_warp = &b.warps[f.warp];
    f.blocks = w.block_counts + (size_t)f.slot * kernel->block_count;
    f.shared = b.shared, f.windows = w.windows, f.window_bytes = cluster_size * WINDOW_STRIDE, f.spins = &emu_spins;
    f.stack = w.stacks + stack_stride * f.slot;
    f.local_offset = ((u64)f.stack & -NEAR_ALIGN) - LOCAL_ORIGIN;
    f.site = NO_SITE;
    f.cluster_arrived = false;
    f.copies.count = f.copies.next_group = f.bulk_group = 0;
    b.warps[f.warp].born |= 1u << f.lane;
    b.warps[f.warp].alive |= 1u << f.lane;
    fiber_wake(f);
    prepare_stack(f);
  }
  async_begin_block(b);
  check_begin_block(b);
}
void begin_cluster(Worker& w) {
  memset(w.block_counts, 0, (size_t)w.fiber_count * kernel->block_count * 4);
  w.alive = thread_count * cluster_size;
  w.cluster_arrived = w.cluster_phase = 0;
  emu_spins = 0;
  w.suspicion.set = 0;
  w.random_state = (launch->seed * 0x9E3779B97F4A7C15ull + 0x632BE59BD9B4E019ull) ^ w.ticket * 0xD1B54A32D192ED03ull;
  if (!w.random_state) w.random_state = 1;
  const u32 *g = launch->grid, *c = launch->cluster;
  const u64 across = g[0] / c[0], rows = g[1] / c[1];
  const u32 first[3] = {(u32)(w.ticket % across) * c[0], (u32)(w.ticket / across % rows) * c[1], (u32)(w.ticket / (across * rows)) * c[2]};
  for (u32 r = 0; r < cluster_size; r++) {
    const u32 position[3] = {first[0] + r % c[0], first[1] + r / c[0] % c[1], first[2] + r / (c[0] * c[1])};
    begin_block(w, w.blocks[r], r, position);
  }
}
void end_cluster(Worker& w) {
  for (u32 r = 0; r < cluster_size; r++) check_end_block(w.blocks[r]);
  const u32 blocks = kernel->block_count;
  for (u32 b = 0; b < blocks; b++) {
    u64 threads_total = 0, warps_total = 0;
    for (u32 r = 0; r < cluster_size; r++)
      for (u32 first = 0; first < thread_count; first += 32) {  // a warp issues a block as often as its busiest lane runs it
        u32 most = 0;
        for (u32 t = first; t < thread_count && t < first + 32; t++) {
          u32 n = w.blocks[r].fibers[t].blocks[b];
          threads_total += n;
          most = n > most ? n : most;
        }
        warps_total += most;
      }
    w.executed[b] += threads_total, w.executed[blocks + b] += warps_total;
  }
}

// ---------------------------------------------------------------- workers
struct Mapping {
  u8* at;
  size_t bytes;
  u8* of(size_t wanted) {
    if (bytes < wanted) {
      release();
      at = (u8*)map_zeros(wanted), bytes = at ? wanted : 0;
    }
    return at;
  }
  void release() {
    if (at) munmap(at, bytes);
    at = nullptr, bytes = 0;
  }
};
// The first worker's stacks and windows stay for the next launch: to touch fresh pages takes most of a small one.
Mapping kept_stacks, kept_windows;
void* allocate(size_t bytes) {  // zeroed, aligned to cache lines
  void* p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  return p ? memset(p, 0, bytes) : p;
}
void* work(void* number);
bool start_helper(void* (*code)(void*)) {
  const u32 i = grid.helper_count++;
  if (!pthread_create(&grid.helpers[i], nullptr, code, (void*)(uintptr_t)(i + 1))) return true;
  grid.helper_count--;
  return false;
}
// The second worker, which starts the others. Only a launch that takes a while is worth the memory they touch.
void* first_helper(void* number) {
  constexpr long PATIENCE = 2000000;  // nanoseconds
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += PATIENCE;
  if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
  u64 left;
  {
    Locked lock;
    while (!grid.is_over && !pthread_cond_timedwait(&grid.over, &grid.lock, &until)) {}
    left = grid.is_over ? 0 : grid.total - grid.next;
  }
  if (!left) return nullptr;
  while (grid.helper_count + 1 < launch->workers && grid.helper_count < left && start_helper(work)) {}
  return work(number);
}
void join_helpers() {
  {
    Locked lock;
    grid.is_over = true;
    pthread_cond_signal(&grid.over);
  }
  pthread_join(grid.helpers[0], nullptr);  // who adds to helper_count
  for (u32 i = 1; i < grid.helper_count; i++) pthread_join(grid.helpers[i], nullptr);
}
void run_clusters(Worker& w) {
  while (take_ticket(w)) {
    begin_cluster(w);
    w.current = nullptr;
    switch_to(nullptr, first_fiber());
    w.current = nullptr;
    if (!w.record.set && !w.abandoned) end_cluster(w);
    end_ticket(w, w.record.set);
    if (w.record.set || w.abandoned) break;
  }
}
void* work(void* number) {
  Worker w{};
  worker = &w;
  w.number = (u32)(uintptr_t)number;
  w.level = HARDWARE;
  w.fiber_count = warp_slots() * cluster_size;
  w.warp_count = w.fiber_count / 32;
  w.step = launch->schedule == 0 ? 1 : launch->schedule == 1 ? -1 : 0;
  Mapping own_stacks{}, own_windows{};
  w.stacks = (w.number ? own_stacks : kept_stacks).of(stack_stride * w.fiber_count);
  w.windows = (w.number ? own_windows : kept_windows).of((size_t)WINDOW_STRIDE * cluster_size);
  w.fibers = (Fiber*)allocate(w.fiber_count * sizeof(Fiber));
  w.blocks = (Block*)calloc(cluster_size, sizeof(Block));
  w.runnable = (u32*)calloc(w.warp_count, 4);
  w.block_counts = (u32*)calloc((size_t)w.fiber_count * kernel->block_count + 1, 4);
  w.executed = (u64*)calloc((size_t)kernel->block_count * 2 + 1, 8);
  if (w.stacks && w.windows && w.fibers && w.blocks && w.runnable && w.block_counts && w.executed) {
    check_begin_worker();
    run_clusters(w);
    check_end_worker();
  } else if (!w.number) {  // fewer workers are no fault
    grid.no_memory = true;
  }
  {
    Locked lock;
    for (u32 i = 0; w.executed && i < kernel->block_count * 2; i++) launch->executed[i] += w.executed[i];
    launch->warp_operations += w.warp_operations, launch->barriers += w.barriers, launch->switches += w.switches;
  }
  if (w.fibers)
    for (u32 t = 0; t < w.fiber_count; t++) free(w.fibers[t].copies.ops);
  for (u32 r = 0; w.blocks && r < cluster_size; r++) async_end_worker(w.blocks[r]), end_warpgroups(w.blocks[r]);
  free(w.fibers), free(w.blocks), free(w.runnable), free(w.block_counts), free(w.executed);
  own_stacks.release(), own_windows.release();
  worker = nullptr;
  return nullptr;
}
}  // namespace

void* map_zeros(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
void emu_await_turn() {
  Worker& w = *worker;
  if (w.has_turn) return;
  pthread_mutex_lock(&grid.lock);
  for (;;) {
    u64 first = w.ticket;
    for (u32 i = 0; i < launch->workers; i++) first = grid.running[i] < first ? grid.running[i] : first;
    w.abandoned = grid.failed < w.ticket;
    if (first == w.ticket || w.abandoned) break;
    pthread_cond_wait(&grid.ended, &grid.lock);
  }
  pthread_mutex_unlock(&grid.lock);
  if (w.abandoned) switch_to(w.current, nullptr);
  w.has_turn = true;
}

extern "C" __attribute__((visibility("default"))) const FaultRecord* emu_fault_record() { return &final_record; }
extern "C" __attribute__((visibility("default"))) const FaultRecord* emu_suspicion() { return &final_suspicion; }

// 0: done; 1: fault, see emu_fault_record(); 2: no memory for the fibers
extern "C" __attribute__((visibility("default"))) int emu_launch(LaunchInfo* info) {
  launch = info;
  if (info->program->initialize) info->program->initialize();
  emu_sites = info->program->sites;
  kernel = info->program->kernels[info->kernel];
  thread_count = info->block[0] * info->block[1] * info->block[2];
  cluster_size = info->cluster[0] * info->cluster[1] * info->cluster[2];
  emu_dynamic_bytes = info->dynamic_shared;
  emu_static_bytes = kernel->static_shared;
  // Small stacks share page-table lines; the odd stride keeps equal frames of different fibers out of one cache set.
  stack_bytes = (32u << 10) + ((2 * (size_t)kernel->frame_bytes + 4095u) & ~(size_t)4095u);
  stack_stride = stack_bytes + 64 * 17;
  for (u32 i = 0; i < kernel->global_count; i++) {
    const GlobalVariable& g = kernel->globals[i];
    if (!g.writable) continue;
    memset(g.address, 0, g.bytes);
    if (g.initial_bytes) memcpy(g.address, g.initial, g.initial_bytes);
  }
  final_record.set = final_suspicion.set = 0;
  grid = {};
  pthread_mutex_init(&grid.lock, nullptr);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&grid.ended, nullptr);
  pthread_cond_init(&grid.over, &monotonic);
  grid.failed = grid.suspected = NONE;
  grid.total = (u64)info->grid[0] * info->grid[1] * info->grid[2] / cluster_size;
  for (u64& t : grid.running) t = NONE;
  check_begin_launch();
  print_begin_launch();
  const bool helped = grid.total > 1 && info->workers > 1 && start_helper(first_helper);
  work(nullptr);
  if (helped) join_helpers();
  check_end_launch();
  print_end_launch(grid.failed);
  return grid.no_memory ? 2 : final_record.set ? 1 : 0;
}
