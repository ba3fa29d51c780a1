// fibers.cpp - one fiber per CUDA thread, all in one OS thread: context switch, scheduler, launch, faults.
//
// A fiber runs until it has to wait for others (warp operation, barrier, spin); blocks run one after another. The order
// in which waiting fibers resume is the schedule: ascending, descending, or drawn from a seed.
#include "runtime.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

alignas(1024) u8 emu_shared_memory[SHARED_CAPACITY];
u32 emu_spins, emu_dynamic_bytes, emu_static_bytes;
Fiber* fibers;
Warp warps[MAX_WARPS];
Barrier barriers[BARRIERS];
Fiber* current;
u32 thread_count, alive_count, block_index;
const KernelInfo* kernel;
LaunchInfo* launch;
u8* stacks;
size_t stack_stride, stack_bytes;

static FaultRecord record;
static void* main_stack_pointer;
static u64 runnable[MAX_THREADS / 64];
static u64 random_state;
static u32* block_counts;

// ---------------------------------------------------------------- context switch
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch_stacks
.hidden emu_switch_stacks
.type emu_switch_stacks,@function
emu_switch_stacks:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch_stacks,.-emu_switch_stacks
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch_stacks
.hidden emu_switch_stacks
emu_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulator switches stacks in assembly: x86-64 and aarch64 are supported"
#endif
extern "C" void emu_switch_stacks(void** save, void* load);

static void fiber_main();

static void prepare_stack(Fiber& f) {
#if defined(__x86_64__)
  void** sp = (void**)((uintptr_t)(f.stack + stack_bytes) & ~(uintptr_t)15);
  *--sp = nullptr;
  *--sp = (void*)fiber_main;
  for (int i = 0; i < 6; i++) *--sp = nullptr;
#else
  u64* sp = (u64*)((uintptr_t)(f.stack + stack_bytes) & ~(uintptr_t)15) - 20;
  memset(sp, 0, 160);
  sp[11] = (u64)fiber_main;
#endif
  f.stack_pointer = sp;
}
static inline void switch_to(Fiber* from, Fiber* to) {
  launch->switches++;
  void** save = from ? &from->stack_pointer : &main_stack_pointer;
  if (to) current = to;
  emu_switch_stacks(save, to ? to->stack_pointer : main_stack_pointer);
}

// ---------------------------------------------------------------- scheduler
static inline void set_runnable(u32 t, bool on) {
  u64 bit = 1ull << (t & 63);
  if (on) runnable[t >> 6] |= bit;
  else runnable[t >> 6] &= ~bit;
}
void fiber_wake(Fiber& f) {
  f.state = RUNNING;
  set_runnable(f.linear, true);
}
static Fiber* first_from(u32 start) {  // circular search upwards
  const u32 words = (thread_count + 63) / 64;
  u32 w = start >> 6;
  u64 m = runnable[w] & (~0ull << (start & 63));
  for (u32 i = 0; i <= words; i++) {
    if (m) return &fibers[w * 64 + __builtin_ctzll(m)];
    if (++w >= words) w = 0;
    m = runnable[w];
  }
  return nullptr;
}
static Fiber* last_to(u32 start) {  // circular search downwards
  const u32 words = (thread_count + 63) / 64;
  u32 w = start >> 6;
  u64 m = runnable[w] & (~0ull >> (63 - (start & 63)));
  for (u32 i = 0; i <= words; i++) {
    if (m) return &fibers[w * 64 + 63 - __builtin_clzll(m)];
    w = w ? w - 1 : words - 1;
    m = runnable[w];
  }
  return nullptr;
}
static Fiber* next_fiber(u32 after) {
  switch (launch->schedule) {
    case 0: return first_from(after + 1 >= thread_count ? 0 : after + 1);
    case 1: return last_to(after ? after - 1 : thread_count - 1);
    default:
      random_state ^= random_state << 13;
      random_state ^= random_state >> 7;
      random_state ^= random_state << 17;
      return first_from((u32)((random_state >> 11) % thread_count));
  }
}

// ---------------------------------------------------------------- faults
static void describe_waits(char* out, size_t size) {
  size_t n = 0;
  for (u32 w = 0; w * 32 < thread_count && n + 400 < size; w++) {
    n += (size_t)snprintf(out + n, size - n, "\n  warp %u:", w);
    u32 todo = warps[w].born;
    while (todo && n + 400 < size) {
      Fiber& f = fibers[w * 32 + lowest(todo)];
      u32 same = 0;
      for (u32 m = todo; m; m &= m - 1) {
        Fiber& o = fibers[w * 32 + lowest(m)];
        if (o.state == f.state && (f.state == EXITED || o.site == f.site) && (f.state != AT_WARP_OP || o.mask == f.mask)) same |= 1u << o.lane;
      }
      todo &= ~same;
      const char* op = f.site == NO_SITE ? "" : emu_sites[f.site].op;
      const char* where = f.site == NO_SITE ? "" : emu_sites[f.site].where;
      int first = (int)strcspn(where, "|");
      if (f.state == RUNNING) n += (size_t)snprintf(out + n, size - n, " lanes %08x running or spinning;", same);
      else if (f.state == EXITED) n += (size_t)snprintf(out + n, size - n, " lanes %08x exited;", same);
      else if (f.state == AT_WARP_OP) n += (size_t)snprintf(out + n, size - n, " lanes %08x wait in %s (mask %08x) at %.*s;", same, op, f.mask, first, where);
      else n += (size_t)snprintf(out + n, size - n, " lanes %08x wait at barrier %u (%u of %u arrived) in %s at %.*s;", same, f.barrier, barriers[f.barrier].arrived,
                                 barriers[f.barrier].expected, op, first, where);
    }
  }
}
void fault(const char* kind, u32 site, const char* buffer, const char* format, ...) {
  record.set = 1;
  record.has_thread = current != nullptr;
  for (int i = 0; i < 3 && current; i++) record.block[i] = current->ctaid[i], record.thread[i] = current->tid[i];
  snprintf(record.kind, sizeof record.kind, "%s", kind);
  snprintf(record.where, sizeof record.where, "%s", site == NO_SITE ? "" : emu_sites[site].where);
  snprintf(record.op, sizeof record.op, "%s", site == NO_SITE ? "" : emu_sites[site].op);
  snprintf(record.buffer, sizeof record.buffer, "%s", buffer ? buffer : "");
  va_list list;
  va_start(list, format);
  vsnprintf(record.detail, sizeof record.detail, format, list);
  va_end(list);
  switch_to(current, nullptr);
  abort();
}
static void deadlock(const char* why) {
  static char text[5600];
  text[0] = 0;
  describe_waits(text, sizeof text);
  fault("deadlock", current->state == EXITED ? NO_SITE : current->site, nullptr, "%s; state of every warp:%s", why, text);
}
void fault_with_states(const char* kind, u32 site, const char* why) {
  static char text[5600];
  text[0] = 0;
  describe_waits(text, sizeof text);
  fault(kind, site, nullptr, "%s; state of every warp:%s", why, text);
}
void fiber_wait() {  // the caller has set current->state; returns when somebody woke this fiber
  Fiber* me = current;
  set_runnable(me->linear, false);
  Fiber* next = next_fiber(me->linear);
  if (!next) deadlock("no thread can run");
  switch_to(me, next);
}
void emu_yield() {
  if (++emu_spins > 4000000u)
    deadlock("threads spin on memory that no thread of this block changes any more (blocks run one after another: a block cannot wait for a later one)");
  Fiber* me = current;
  Fiber* next = next_fiber(me->linear);
  if (next != me) switch_to(me, next);
}
void emu_trap(u32 site) { fault("trap", site, nullptr, "the kernel executed a trap instruction"); }
void emu_runaway(u32 site) { fault("runaway", site, nullptr, "the thread ran one basic block %u times: an endless loop", RUNAWAY); }
void emu_arithmetic_fault(u32 site, const char* what) { fault("arithmetic", site, nullptr, "%s", what); }

// ---------------------------------------------------------------- life of a fiber
void thread_exits();  // sync.cpp
static void finish() {
  Fiber* me = current;
  emu_spins = 0;
  me->state = EXITED;
  me->copies.count = 0;
  set_runnable(me->linear, false);
  alive_count--;
  warps[me->warp].alive &= ~(1u << me->lane);
  thread_exits();
  Fiber* next = alive_count ? next_fiber(me->linear) : nullptr;
  if (alive_count && !next) deadlock("no thread can run");
  switch_to(me, next);
  abort();
}
static void fiber_main() {
  kernel->entry(current);
  finish();
}
static void begin_block(u32 x, u32 y, u32 z) {
  const u32* b = launch->block;
  const u32 extent = emu_static_bytes > kernel->dynamic_offset + emu_dynamic_bytes ? emu_static_bytes : kernel->dynamic_offset + emu_dynamic_bytes;
  memset(emu_shared_memory, 0xFF, extent);  // NaN in every float format: a missing write shows
  memset(warps, 0, sizeof warps);
  memset(barriers, 0, sizeof barriers);
  memset(runnable, 0, sizeof runnable);
  memset(block_counts, 0, (size_t)thread_count * kernel->block_count * 4);
  alive_count = thread_count;
  emu_spins = 0;
  for (u32 t = 0; t < thread_count; t++) {
    Fiber& f = fibers[t];
    f.tid[0] = t % b[0], f.tid[1] = t / b[0] % b[1], f.tid[2] = t / (b[0] * b[1]);
    f.ctaid[0] = x, f.ctaid[1] = y, f.ctaid[2] = z;
    for (int i = 0; i < 3; i++) f.ntid[i] = b[i], f.nctaid[i] = launch->grid[i];
    f.linear = t, f.lane = t & 31, f.warp = t >> 5;
    f.params = launch->params;
    f.blocks = block_counts + (size_t)t * kernel->block_count;
    f.stack = stacks + stack_stride * t;
    f.site = NO_SITE;
    f.copies.count = f.copies.first_group = f.copies.next_group = 0;
    warps[f.warp].born |= 1u << f.lane;
    warps[f.warp].alive |= 1u << f.lane;
    fiber_wake(f);
    prepare_stack(f);
  }
  check_begin_block();
}
static void end_block() {
  check_end_block();
  const u32 blocks = kernel->block_count;
  for (u32 b = 0; b < blocks; b++) {
    u64 threads_total = 0, warps_total = 0;
    for (u32 w = 0; w * 32 < thread_count; w++) {  // a warp issues a block as often as its busiest lane runs it
      u32 most = 0;
      for (u32 t = w * 32; t < thread_count && t < w * 32 + 32; t++) {
        u32 n = fibers[t].blocks[b];
        threads_total += n;
        most = n > most ? n : most;
      }
      warps_total += most;
    }
    launch->thread_instructions += threads_total * kernel->block_sizes[b];
    launch->warp_instructions += warps_total * kernel->block_sizes[b];
  }
}
extern "C" __attribute__((visibility("default"))) const FaultRecord* emu_fault_record() { return &record; }

// 0: done; 1: fault, see emu_fault_record(); 2: no memory for the fibers
extern "C" __attribute__((visibility("default"))) int emu_launch(LaunchInfo* info) {
  launch = info;
  kernel = &emu_kernels[info->kernel];
  record.set = 0;
  current = nullptr;
  thread_count = info->block[0] * info->block[1] * info->block[2];
  emu_dynamic_bytes = info->dynamic_shared;
  emu_static_bytes = kernel->static_shared;
  random_state = info->seed * 0x9E3779B97F4A7C15ull + 0x632BE59BD9B4E019ull;
  if (!random_state) random_state = 1;
  // Small stacks share page-table lines; the odd stride keeps equal frames of different fibers out of one cache set.
  stack_bytes = (32u << 10) + ((2 * (size_t)kernel->frame_bytes + 4095u) & ~(size_t)4095u);
  stack_stride = stack_bytes + 64 * 5;
  const size_t total = stack_stride * thread_count;
  void* map = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return 2;
  stacks = (u8*)map;
  fibers = (Fiber*)calloc(thread_count, sizeof(Fiber));
  block_counts = (u32*)calloc((size_t)thread_count * kernel->block_count + 1, 4);
  for (u32 i = 0; i < kernel->global_count; i++) {
    const GlobalVariable& g = kernel->globals[i];
    if (!g.writable) continue;
    memset(g.address, 0, g.bytes);
    if (g.initial_bytes) memcpy(g.address, g.initial, g.initial_bytes);
  }
  check_begin_launch();
  block_index = 0;
  for (u32 z = 0; z < info->grid[2] && !record.set; z++)
    for (u32 y = 0; y < info->grid[1] && !record.set; y++)
      for (u32 x = 0; x < info->grid[0] && !record.set; x++) {
        block_index++;
        begin_block(x, y, z);
        switch_to(nullptr, info->schedule == 1 ? &fibers[thread_count - 1] : info->schedule == 0 ? &fibers[0] : next_fiber(0));
        current = nullptr;
        if (!record.set) end_block();
      }
  check_end_launch();
  for (u32 t = 0; t < thread_count; t++) free(fibers[t].copies.ops);
  free(fibers);
  free(block_counts);
  munmap(stacks, total);
  return record.set ? 1 : 0;
}
