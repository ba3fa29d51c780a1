// sync.cpp - everything threads do together: warp operations and barriers.
//
// A lane leaves a pointer to its arguments and waits; the last lane to arrive computes the operation for all of them,
// reading and writing the other lanes' stacks.
#include "runtime.h"
#include <string.h>

// ---------------------------------------------------------------- warp operations
const char* op_text(u32 site) { return emu_sites[site].op; }
static inline Warp& my_warp() { return worker->current->block->warps[worker->current->warp]; }

// What every lane passes through is short; the rest is kept out of its way.
#define RARE __attribute__((noinline, cold))
RARE [[noreturn]] static void bad_mask(const Fiber& me, u32 mask, u32 site, bool aligned) {
  const Warp& w = *me.own_warp;
  if (!(mask >> me.lane & 1)) fault("warp_mask", site, nullptr, "%s: lane %u is not in its own mask %08x", op_text(site), me.lane, mask);
  if (aligned && mask != ~0u) fault("warp_mask", site, nullptr, "%s needs all 32 lanes, mask is %08x", op_text(site), mask);
  fault("warp_mask", site, nullptr, "%s: mask %08x names lanes that have exited (%08x)", op_text(site), mask, mask & (aligned ? ~0u : w.born) & ~w.alive);
}
// Lanes that wait for this one must be in the same operation as it.
RARE static void compare_waiting(const Fiber& me, u32 needed, bool aligned) {
  Warp& w = *me.own_warp;
  const Fiber* lanes = &me - me.lane;
  w.mixed |= me.mask != w.mask;
  for (u32 m = w.waiting & needed; m; m &= m - 1) {
    const Fiber& o = lanes[lowest(m)];
    if (!(o.mask >> me.lane & 1)) continue;
    if (o.mask != me.mask || op_text(o.site) != op_text(me.site) || (aligned && o.site != me.site))
      fault("warp_mismatch", me.site, nullptr, "lanes %u and %u of warp %u meet in different warp operations: %s mask %08x at %s / %s mask %08x at %s", me.lane, o.lane, me.warp,
            op_text(me.site), me.mask, emu_sites[me.site].where, op_text(o.site), o.mask, emu_sites[o.site].where);
    break;  // the lanes that wait for this one have been compared with each other
  }
}
RARE static bool all_wait_for(const Fiber& me, u32 needed) {
  const Fiber* lanes = &me - me.lane;
  for (u32 m = needed; m; m &= m - 1)
    if (lanes[lowest(m)].mask != me.mask) return false;
  return true;
}
__attribute__((noinline)) static void complete(Fiber& me, u32 needed, WarpOp op, bool orders_memory, bool aligned) {
  Warp& w = *me.own_warp;
  me.state = RUNNING;
  emu_spins = 0;
  worker->warp_operations++;
  if (aligned) check_aligned(me.warp, needed);
  if (op) op(w.arguments, needed);
  if (orders_memory) check_warp_join(me.warp, needed);
  w.waiting &= ~needed;
  lanes_wake(me, needed);
  if (++w.operations % 256 == 0) fiber_yield();  // a loop of warp operations may wait for another warp
}
void warp_operation(u32 mask, WarpOp op, void* argument, u32 site, bool orders_memory, bool aligned) {
  Fiber& me = *worker->current;
  Warp& w = *me.own_warp;
  const u32 lane = me.lane, needed = mask & (aligned ? ~0u : w.born), before = w.waiting;
  if (__builtin_expect(!(mask >> lane & 1) | (aligned & (mask != ~0u)) | ((needed & ~w.alive) != 0), 0)) bad_mask(me, mask, site, aligned);
  me.mask = mask, me.site = site, me.state = AT_WARP_OP;
  w.arguments[lane] = argument;
  if (!before) w.mask = mask, w.site = site, w.mixed = false;
  else if (__builtin_expect(mask != w.mask || site != w.site, 0)) compare_waiting(me, needed, aligned);
  const u32 waiting = before | 1u << lane;
  w.waiting = waiting;
  if (__builtin_expect((waiting & needed) != needed || (w.mixed && !all_wait_for(me, needed)), 1)) return fiber_wait();
  complete(me, needed, op, orders_memory, aligned);
}
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_warp_operation
.type emu_warp_operation,@function
emu_warp_operation:
  subq $8, %rsp
  call emu_warp_operation_body
  addq $8, %rsp
  popq %rcx
  jmp *%rcx
.size emu_warp_operation,.-emu_warp_operation
)");
#else
asm(R"(
.text
.globl emu_warp_operation
.type emu_warp_operation,@function
emu_warp_operation:
  str x30, [sp, #-16]!
  bl emu_warp_operation_body
  ldr x9, [sp], #16
  br x9
.size emu_warp_operation,.-emu_warp_operation
)");
#endif

void emu_shuffle_op(void** a, u32 lanes) {
  for (u32 m = lanes; m; m &= m - 1) {
    Shuffle* s = (Shuffle*)a[lowest(m)];
    if (lanes >> s->from & 1) s->out = ((Shuffle*)a[s->from])->value;
    else s->from = 64;
  }
}
void emu_shuffle_fault(u32 from, u32 mask, u32 site) {
  fault("warp_mask", site, nullptr, "%s: lane %u reads lane %u, which is not taking part (mask %08x)", op_text(site), worker->current->lane, from, mask);
}
void emu_vote_op(void** a, u32 lanes) {
  u32 ballot = 0;
  for (u32 m = lanes; m; m &= m - 1) ballot |= ((Vote*)a[lowest(m)])->predicate << lowest(m);
  for (u32 m = lanes; m; m &= m - 1) ((Vote*)a[lowest(m)])->out = ballot;
}
namespace {
struct Match { u64 value; u32 out; };
void match_op(void** a, u32 lanes) {
  for (u32 m = lanes; m; m &= m - 1) {
    Match* x = (Match*)a[lowest(m)];
    x->out = 0;
    for (u32 k = lanes; k; k &= k - 1) x->out |= (u32)(((Match*)a[lowest(k)])->value == x->value) << lowest(k);
  }
}
struct Reduce { u32 value, out, kind, is_signed; };
void reduce_op(void** a, u32 lanes) {
  Reduce* first = (Reduce*)a[lowest(lanes)];
  u32 r = first->value;
  for (u32 m = lanes & (lanes - 1); m; m &= m - 1) {
    u32 v = ((Reduce*)a[lowest(m)])->value;
    r = first->is_signed ? (u32)combine<s32>((int)first->kind, (s32)r, (s32)v) : combine<u32>((int)first->kind, r, v);
  }
  for (u32 m = lanes; m; m &= m - 1) ((Reduce*)a[lowest(m)])->out = r;
}
}  // namespace

u32 emu_match(u32 all, u64 value, u32 mask, bool* predicate, u32 site) {
  Match m{value, 0};
  const u32 present = mask & my_warp().born;
  warp_operation(mask, match_op, &m, site, false, false);
  *predicate = m.out == present;
  return all ? (*predicate ? mask : 0) : m.out;
}
u32 emu_reduce(u32 kind, u32 is_signed, u32 value, u32 mask, u32 site) {
  Reduce r{value, 0, kind, is_signed};
  warp_operation(mask, reduce_op, &r, site, false, false);
  return r.out;
}
u32 emu_born() { return my_warp().born; }  // lanes of this warp that the block has
u32 emu_elect(u32 mask, u32 site) {
  const u32 born = my_warp().born;
  warp_operation(mask, nullptr, nullptr, site, false, false);
  return (u32)lowest(mask & born);
}

// ---------------------------------------------------------------- barriers
// A barrier counts threads. An aligned instruction is the whole warp's: its lanes come together and then arrive as one, so
// that a warp may arrive at a barrier and wait at it within one phase. Who waits releases its past when the phase ends,
// as it does nothing until then.
namespace {
struct Arriving { u32 id, expected, site; bool waits; };
u32 whole_block() { return (thread_count + 31) & ~31u; }
template <class F> void each_waiting(Block& block, const Barrier& b, F f) {
  for (u32 w = 0; w * 32 < thread_count; w++)
    for (u32 m = b.lanes[w]; m; m &= m - 1) f(block.fibers[w * 32 + lowest(m)]);
}
void complete_barrier(Block& block, u32 id) {
  Barrier& b = block.barriers[id];
  emu_spins = 0;
  worker->barriers++;
  const bool everyone = b.waiting == thread_count;
  if (everyone) check_full_barrier();
  else each_waiting(block, b, [&](Fiber& f) { check_barrier_arrive(id, f.linear); });
  each_waiting(block, b, [&](Fiber& f) {
    if (!everyone) check_barrier_pass(id, f.linear);
    f.reduced = b.reduced;
    fiber_wake(f);
  });
  check_barrier_reset(id);
  memset(&b, 0, sizeof b);
}
// `lanes` of one warp arrive together; a partial last warp counts as a whole one, by its first lane.
void count_arrival(Block& block, const Arriving& a, u32 warp, u32 lanes, u32 predicates) {
  Barrier& b = block.barriers[a.id];
  if (!b.arrived) b.expected = a.expected, b.first_site = a.site, b.reduced = {false, true, 0};
  else if (b.expected != a.expected)
    fault("bad_barrier", a.site, nullptr, "barrier %u: thread counts differ, %u here and %u at %s", a.id, a.expected, b.expected, emu_sites[b.first_site].where);
  const u32 count = (u32)__builtin_popcount(lanes);
  b.reduced.any |= predicates != 0, b.reduced.all &= predicates == lanes, b.reduced.count += (u32)__builtin_popcount(predicates);
  b.arrived += count + (lanes & 1 && warp == thread_count >> 5 ? whole_block() - thread_count : 0);
  if (a.waits) b.lanes[warp] |= lanes, b.waiting += count;
  for (u32 m = a.waits ? 0 : lanes; m; m &= m - 1) check_barrier_arrive(a.id, warp * 32 + (u32)lowest(m));
  if (b.arrived >= b.expected) complete_barrier(block, a.id);
}
void gather(Block& block, Fiber& me, const Arriving& a, u32 predicate) {
  Warp& w = *me.own_warp;
  if (w.born & ~w.alive) fault_with_states("divergent_barrier", a.site, "a warp arrives at an aligned barrier after some of its lanes have exited");
  if (!w.gathered) w.gathered_site = a.site, w.gathered_barrier = a.id, w.predicates = 0;
  else if (w.gathered_site != a.site || w.gathered_barrier != a.id)
    fault("divergent_barrier", a.site, nullptr, "lanes of warp %u meet at different barriers: lane %u at %s (barrier %u), lanes %08x at %s (barrier %u)", me.warp, me.lane, emu_sites[a.site].where, a.id,
          w.gathered, emu_sites[w.gathered_site].where, w.gathered_barrier);
  w.gathered |= 1u << me.lane, w.predicates |= predicate << me.lane;
  if (w.gathered != w.born) return;
  w.gathered = 0;
  check_aligned(me.warp, w.born);
  if (!a.waits) me.state = RUNNING, lanes_wake(me, w.born);
  count_arrival(block, a, me.warp, w.born, w.predicates);
}
void arrive(u32 id, u32 threads, bool aligned, bool waits, u32 predicate, u32 site) {
  Fiber& me = *worker->current;
  Block& block = *me.block;
  if (id >= BARRIERS) fault("bad_barrier", site, nullptr, "barrier %u: barriers are numbered 0 to 15", id);
  if (threads % 32) fault("bad_barrier", site, nullptr, "barrier %u: the thread count %u is no multiple of 32", id, threads);
  if (threads > whole_block()) fault("bad_barrier", site, nullptr, "barrier %u expects %u threads, the block has %u", id, threads, thread_count);
  if (!threads && block.alive != thread_count)
    fault_with_states("divergent_barrier", site, "a barrier of the whole block is reached after some of its threads have exited");
  const Arriving a{id, threads ? threads : whole_block(), site, waits};
  me.site = site, me.barrier = id;
  if (aligned || waits) me.state = AT_BARRIER;
  if (aligned) gather(block, me, a, predicate);
  else count_arrival(block, a, me.warp, 1u << me.lane, predicate << me.lane);
  if (me.state == AT_BARRIER) fiber_wait();
}
}  // namespace
void emu_barrier(u32 id, u32 threads, u32 aligned, u32 site) { arrive(id, threads, aligned, true, 0, site); }
void emu_barrier_arrive(u32 id, u32 threads, u32 aligned, u32 site) { arrive(id, threads, aligned, false, 0, site); }
u32 emu_barrier_reduce(u32 id, u32 threads, u32 kind, u32 predicate, u32 aligned, u32 site) {
  arrive(id, threads, aligned, true, predicate, site);
  const Reduced& r = worker->current->reduced;
  return kind == 0 ? r.any : kind == 1 ? r.all : r.count;
}
void thread_exits() {
  const Fiber* me = worker->current;
  const Block& block = *me->block;
  const Warp& w = block.warps[me->warp];
  warpgroup_exit(*me);
  for (u32 m = w.waiting; m; m &= m - 1) {
    const Fiber& o = block.fibers[me->warp * 32 + lowest(m)];
    if (o.mask >> me->lane & 1) fault("warp_mask", o.site, nullptr, "lane %u exits while lane %u waits for it in %s (mask %08x)", me->lane, o.lane, op_text(o.site), o.mask);
  }
  if (w.gathered) fault_with_states("divergent_barrier", w.gathered_site, "a warp arrived at an aligned barrier with only some of its lanes");
  for (const Barrier& b : block.barriers)
    if (b.waiting && b.expected == whole_block() && b.waiting == block.alive)
      fault_with_states("divergent_barrier", b.first_site, "a thread exits while the rest of the block waits for it at a barrier");
}

#if !EMU_CHECK
void emu_fence(u32 scope, u32, u32) {  // what is stored behind it may be a message to another block
  if (!scope) emu_await_turn();
}
void emu_proxy_fence(u32, u32) {}
void emu_grid_wait() {}
void emu_grid_trigger(u32) {}
#endif
