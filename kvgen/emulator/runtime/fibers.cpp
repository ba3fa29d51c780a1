// fibers.cpp - one fiber per CUDA thread: the context switch and the scheduler of one worker.
//
// A fiber runs until it has to wait for others (warp operation, barrier, spin). The order in which waiting fibers resume
// is the schedule: ascending, descending, or drawn from a seed.
#include "runtime.h"
#include <string.h>

__thread Worker* worker __attribute__((tls_model("initial-exec")));
__thread u32 emu_spins __attribute__((tls_model("initial-exec")));
size_t stack_stride, stack_bytes;

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

void prepare_stack(Fiber& f) {
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
void switch_to(Fiber* from, Fiber* to) {
  Worker& w = *worker;
  if (from) check_leave();
  w.switches++;
  void** save = from ? &from->stack_pointer : &w.main_stack_pointer;
  if (to) w.current = to;
  emu_switch_stacks(save, to ? to->stack_pointer : w.main_stack_pointer);
}

// ---------------------------------------------------------------- scheduler
void fiber_wake(Fiber& f) {
  f.state = RUNNING;
  worker->runnable[f.slot >> 5] |= 1u << (f.slot & 31);
}
void lanes_wake(const Fiber& one, u32 lanes) { worker->runnable[one.slot >> 5] |= lanes; }

// In ascending order the next is the lowest lane of the same warp above `after`, else its lowest (a warp runs on alone as far
// as it can, which keeps its 32 stacks in the cache), else the lowest lane of the next warp that has one; with `leave`,
// lanes below `after` come last, so that nobody is passed over.
static Fiber* ascending(u32 after, bool leave) {
  const Worker& k = *worker;
  u32 w = after >> 5, lanes = k.runnable[w], above = lanes & (~0u << (after & 31) << 1);
  if (above || (lanes && !leave)) return &k.fibers[w * 32 + lowest(above ? above : lanes)];
  for (u32 i = 0; i < k.warp_count; i++) {
    if (++w == k.warp_count) w = 0;
    if (k.runnable[w]) return &k.fibers[w * 32 + lowest(k.runnable[w])];
  }
  return nullptr;
}
static Fiber* descending(u32 after, bool leave) {
  const Worker& k = *worker;
  u32 w = after >> 5, lanes = k.runnable[w], below = lanes & ((1u << (after & 31)) - 1);
  if (below || (lanes && !leave)) return &k.fibers[w * 32 + highest(below ? below : lanes)];
  for (u32 i = 0; i < k.warp_count; i++) {
    w = w ? w - 1 : k.warp_count - 1;
    if (k.runnable[w]) return &k.fibers[w * 32 + highest(k.runnable[w])];
  }
  return nullptr;
}
static u64 next_random() {
  u64& r = worker->random_state;
  r ^= r << 13;
  r ^= r >> 7;
  r ^= r << 17;
  return r >> 32;
}
u32 draw(u32 n) { return launch->schedule < 2 ? 0 : (u32)(next_random() * n >> 32); }
static Fiber* drawn() {
  Worker& k = *worker;
  const u32 slot = (u32)(next_random() * (k.warp_count * 32) >> 32);
  const u32 lanes = k.runnable[slot >> 5] & (~0u << (slot & 31));
  return lanes ? &k.fibers[(slot & ~31u) + lowest(lanes)] : ascending(slot | 31, true);
}
static inline Fiber* next_fiber(u32 after, bool leave) {
  return launch->schedule == 0 ? ascending(after, leave) : launch->schedule == 1 ? descending(after, leave) : drawn();
}
Fiber* first_fiber() { return next_fiber(launch->schedule == 0 ? worker->warp_count * 32 - 1 : 0, true); }
void fiber_wait() {
  Worker& k = *worker;
  Fiber* me = k.current;
  u32& lanes = k.runnable[me->slot >> 5];
  lanes &= ~(1u << (me->slot & 31));
  // Mostly the neighbour is next: guessing so keeps the switch from waiting for the masks.
  const u32 beside = (me->slot & 31) + (u32)k.step;
  Fiber* next = me + k.step;
  if (__builtin_expect(!k.step || beside > 31 || !(lanes >> beside & 1), 0)) next = next_fiber(me->slot, false);
  if (__builtin_expect(!next, 0)) deadlock("no thread can run");
  switch_to(me, next);
  me->state = RUNNING;
}
void fiber_yield() {
  Fiber* me = worker->current;
  Fiber* next = next_fiber(me->slot, true);
  if (next != me) switch_to(me, next);
}
void emu_yield() {
  if (++emu_spins > 4000000u)
    deadlock("threads spin on memory that no thread of this block changes any more (blocks run one after another: a block cannot wait for a later one)");
  fiber_yield();
}

// ---------------------------------------------------------------- end of a fiber
[[noreturn]] static void finish() {
  Worker& w = *worker;
  Fiber* me = w.current;
  async_thread_exits(*me);
  emu_spins = 0;
  me->state = EXITED;
  w.runnable[me->slot >> 5] &= ~(1u << (me->slot & 31));
  me->block->alive--;
  w.alive--;
  me->block->warps[me->warp].alive &= ~(1u << me->lane);
  thread_exits();
  cluster_exit(*me);
  if (!me->block->alive) check_block_exit(*me->block);
  Fiber* next = w.alive ? next_fiber(me->slot, false) : nullptr;
  if (w.alive && !next) deadlock("no thread can run");
  switch_to(me, next);
  __builtin_trap();
}
static void fiber_main() {
  kernel->entry(worker->current);
  finish();
}
void emu_exit() { finish(); }
