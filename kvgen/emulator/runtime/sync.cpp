// sync.cpp - everything threads do together: warp operations, barriers, cp.async groups.
//
// A lane leaves a pointer to its arguments and waits; the last lane to arrive computes the operation for all of them,
// reading and writing the other lanes' stacks.
#include "runtime.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------- warp operations
const char* op_text(u32 site) { return emu_sites[site].op; }
static inline Warp& my_warp() { return worker->current->block->warps[worker->current->warp]; }

// Lanes that wait for this one must be in the same operation as it.
static void compare_waiting(Warp& w, const Fiber& me, u32 needed, bool aligned) {
  const Fiber* lanes = me.block->fibers + me.warp * 32;
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
static bool all_wait_for(const Fiber& me, u32 needed) {
  const Fiber* lanes = me.block->fibers + me.warp * 32;
  for (u32 m = needed; m; m &= m - 1)
    if (lanes[lowest(m)].mask != me.mask) return false;
  return true;
}
void warp_operation(u32 mask, WarpOp op, void* argument, u32 site, bool orders_memory, bool aligned) {
  Fiber* me = worker->current;
  Warp& w = me->block->warps[me->warp];
  const u32 bit = 1u << me->lane;
  if (!(mask & bit)) fault("warp_mask", site, nullptr, "%s: lane %u is not in its own mask %08x", op_text(site), me->lane, mask);
  if (aligned && mask != ~0u) fault("warp_mask", site, nullptr, "%s needs all 32 lanes, mask is %08x", op_text(site), mask);
  const u32 needed = aligned ? mask : mask & w.born;
  if (needed & ~w.alive) fault("warp_mask", site, nullptr, "%s: mask %08x names lanes that have exited (%08x)", op_text(site), mask, needed & ~w.alive);
  me->mask = mask, me->site = site;
  w.arguments[me->lane] = argument;
  if (!w.waiting) w.mask = mask, w.site = site, w.mixed = false;
  else if (mask != w.mask || site != w.site) compare_waiting(w, *me, needed, aligned);
  w.waiting |= bit;
  me->state = AT_WARP_OP;
  if ((w.waiting & needed) != needed || (w.mixed && !all_wait_for(*me, needed))) return fiber_wait();
  me->state = RUNNING;
  emu_spins = 0;
  worker->warp_operations++;
  if (op) op(w.arguments, needed);
  if (orders_memory) check_warp_join(me->warp, needed);
  w.waiting &= ~needed;
  lanes_wake(*me, needed);
  if (++w.operations % 256 == 0) fiber_yield();  // a loop of warp operations may wait for another warp
}
void emu_warp_sync(u32 mask, u32 site) { warp_operation(mask, nullptr, nullptr, site, true, false); }

namespace {
struct Shuffle { u32 value, out, from; };
void shuffle_op(void** a, u32 lanes) {
  for (u32 m = lanes; m; m &= m - 1) {
    Shuffle* s = (Shuffle*)a[lowest(m)];
    if (lanes >> s->from & 1) s->out = ((Shuffle*)a[s->from])->value;
    else s->from = 64;
  }
}
struct Vote { u32 predicate, out; };
void vote_op(void** a, u32 lanes) {
  u32 ballot = 0;
  for (u32 m = lanes; m; m &= m - 1) ballot |= ((Vote*)a[lowest(m)])->predicate << lowest(m);
  for (u32 m = lanes; m; m &= m - 1) ((Vote*)a[lowest(m)])->out = ballot;
}
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
struct Matrix { u32* out; const u8* row; u32 count, transposed; };
void matrix_op(void** a, u32) {
  Matrix* first = (Matrix*)a[0];
  u16 m[4][8][8];
  for (u32 i = 0; i < 8 * first->count; i++) memcpy(m[i >> 3][i & 7], ((Matrix*)a[i])->row, 16);
  for (u32 l = 0; l < 32; l++)
    for (u32 j = 0; j < first->count; j++) {
      u32 r = l >> 2, c = (l & 3) * 2;
      ((Matrix*)a[l])->out[j] = first->transposed ? m[j][c][r] | (u32)m[j][c + 1][r] << 16 : m[j][r][c] | (u32)m[j][r][c + 1] << 16;
    }
}
struct Mma { float* c; const u32 *a, *b; };
template <int K, bool BF> void mma_op(void** p, u32) {
  float A[16][K], B[K][8];
  auto value = [](u32 w, int half) {
    u16 x = (u16)(half ? w >> 16 : w);
    return BF ? bfloat_value(x) : half_value(x);
  };
  for (int l = 0; l < 32; l++) {
    Mma* x = (Mma*)p[l];
    const int g = l >> 2, t = (l & 3) * 2;
    for (int i = 0; i < K / 4; i++)
      for (int h = 0; h < 2; h++) A[g + (i & 1) * 8][t + h + (i >> 1) * 8] = value(x->a[i], h);
    for (int i = 0; i < K / 8; i++)
      for (int h = 0; h < 2; h++) B[t + h + 8 * i][g] = value(x->b[i], h);
  }
  float C[16][8];
  for (int r = 0; r < 16; r++) {
    float sum[8] = {};
    for (int k = 0; k < K; k++)
      for (int c = 0; c < 8; c++) sum[c] += A[r][k] * B[k][c];
    memcpy(C[r], sum, sizeof sum);
  }
  for (int l = 0; l < 32; l++) {
    Mma* x = (Mma*)p[l];
    const int g = l >> 2, t = (l & 3) * 2;
    x->c[0] += C[g][t], x->c[1] += C[g][t + 1], x->c[2] += C[g + 8][t], x->c[3] += C[g + 8][t + 1];
  }
}
}  // namespace

u32 emu_shuffle(u32 mode, u32 value, u32 b, u32 c, u32 mask, bool* in_range, u32 site) {
  const u32 lane = worker->current->lane, segment = c >> 8 & 31, clamp = c & 31;
  const u32 top = (lane & segment) | (clamp & ~segment), bottom = lane & segment;
  int from;
  bool ok;
  b &= 31;
  switch (mode) {
    case 0: from = (int)(lane ^ b), ok = from <= (int)top; break;                           // bfly
    case 1: from = (int)lane - (int)b, ok = from >= (int)top; break;                        // up
    case 2: from = (int)(lane + b), ok = from <= (int)top; break;                           // down
    default: from = (int)(bottom | (b & ~segment)), ok = from <= (int)top; break;           // idx
  }
  if (!ok) from = (int)lane;
  Shuffle s{value, 0, (u32)from};
  warp_operation(mask, shuffle_op, &s, site, false, false);
  if (s.from == 64) fault("warp_mask", site, nullptr, "%s: lane %u reads lane %d, which is not taking part (mask %08x)", op_text(site), lane, from, mask);
  *in_range = ok;
  return s.out;
}
u32 emu_ballot(u32 mask, u32 predicate, u32 site) {
  Vote v{predicate, 0};
  warp_operation(mask, vote_op, &v, site, false, false);
  return v.out;
}
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
void emu_ldmatrix(u32* out, u32 count, u32 transposed, u32 address, u32 site) {
  Matrix m{out, nullptr, count, transposed};
  if (worker->current->lane < 8 * count) m.row = at_shared(worker->current, address, 16, A_READ, site);
  warp_operation(~0u, matrix_op, &m, site, false, true);
}
void emu_mma(float* c, const u32* a, const u32* b, u32 k, u32 is_bf16, u32 site) {
  Mma m{c, a, b};
  WarpOp op = k == 16 ? (is_bf16 ? mma_op<16, true> : mma_op<16, false>) : (is_bf16 ? mma_op<8, true> : mma_op<8, false>);
  warp_operation(~0u, op, &m, site, false, true);
}

// ---------------------------------------------------------------- barriers
static void complete_barrier(Block& block, u32 id) {
  Barrier& b = block.barriers[id];
  if (b.aligned)
    for (u32 w = 0; w * 32 < thread_count; w++)
      if (b.lanes[w] && b.lanes[w] != block.warps[w].born) fault_with_states("divergent_barrier", b.sites[w], "a warp arrived at an aligned barrier with only some of its lanes");
  emu_spins = 0;
  worker->barriers++;
  b.out_any = b.any, b.out_all = b.all, b.out_count = b.count;
  const bool everyone = b.waiting == thread_count;
  if (everyone) check_full_barrier();
  for (u32 w = 0; w * 32 < thread_count; w++)
    for (u32 m = b.lanes[w]; m; m &= m - 1) {
      Fiber& f = block.fibers[w * 32 + lowest(m)];
      if (f.state != AT_BARRIER || f.barrier != id) continue;
      if (!everyone) check_barrier_pass(id, f.linear);
      fiber_wake(f);
    }
  check_barrier_reset(id);
  const u32 any = b.out_any, all = b.out_all, count = b.out_count;
  memset(&b, 0, sizeof b);
  b.out_any = any, b.out_all = all, b.out_count = count;
}
static void arrive(u32 id, u32 threads, bool aligned, bool waits, u32 predicate, u32 site) {
  Fiber* me = worker->current;
  Block& block = *me->block;
  if (id >= BARRIERS) fault("bad_barrier", site, nullptr, "barrier %u: barriers are numbered 0 to 15", id);
  if (threads % 32) fault("bad_barrier", site, nullptr, "barrier %u: the thread count %u is no multiple of 32", id, threads);
  const u32 expected = threads ? threads : thread_count;
  if (threads > ((thread_count + 31) & ~31u)) fault("bad_barrier", site, nullptr, "barrier %u expects %u threads, the block has %u", id, threads, thread_count);
  if (!threads && block.alive != thread_count)
    fault_with_states("divergent_barrier", site, "a barrier of the whole block is reached after some of its threads have exited");
  Barrier& b = block.barriers[id];
  const u32 bit = 1u << me->lane;
  if (!b.arrived) b.expected = expected, b.aligned = aligned, b.any = 0, b.all = 1, b.count = 0, b.first_site = site;
  else if (b.expected != expected)
    fault("bad_barrier", site, nullptr, "barrier %u: thread counts differ, %u here and %u at %s", id, expected, b.expected, emu_sites[b.first_site].where);
  if (b.lanes[me->warp] & bit) fault("divergent_barrier", site, nullptr, "barrier %u: the thread arrives twice in one phase", id);
  if (aligned && b.lanes[me->warp] && b.sites[me->warp] != site)
    fault("divergent_barrier", site, nullptr, "lanes of warp %u meet at different barriers: lane %u at %s, lanes %08x at %s", me->warp, me->lane, emu_sites[site].where, b.lanes[me->warp],
          emu_sites[b.sites[me->warp]].where);
  b.lanes[me->warp] |= bit, b.sites[me->warp] = site;
  b.any |= predicate, b.all &= predicate, b.count += predicate;
  b.arrived++;
  if (threads) check_barrier_arrive(id);
  me->site = site;
  if (waits) me->barrier = id, me->state = AT_BARRIER, b.waiting++;
  // A partial last warp counts as a whole one, as the hardware counts warps.
  u32 missing = 0;
  if (threads && (thread_count & 31) && b.lanes[thread_count >> 5]) missing = 32 - (thread_count & 31);
  if (b.arrived + missing >= b.expected) complete_barrier(block, id);
  if (waits && me->state == AT_BARRIER) fiber_wait();
}
void emu_barrier(u32 id, u32 threads, u32 aligned, u32 site) { arrive(id, threads, aligned, true, 0, site); }
void emu_barrier_arrive(u32 id, u32 threads, u32 aligned, u32 site) { arrive(id, threads, aligned, false, 0, site); }
u32 emu_barrier_reduce(u32 id, u32 threads, u32 kind, u32 predicate, u32 aligned, u32 site) {
  arrive(id, threads, aligned, true, predicate, site);
  const Barrier& b = worker->current->block->barriers[id];
  return kind == 0 ? b.out_any : kind == 1 ? b.out_all : b.out_count;
}
void thread_exits() {
  const Fiber* me = worker->current;
  const Block& block = *me->block;
  const Warp& w = block.warps[me->warp];
  for (u32 m = w.waiting; m; m &= m - 1) {
    const Fiber& o = block.fibers[me->warp * 32 + lowest(m)];
    if (o.mask >> me->lane & 1) fault("warp_mask", o.site, nullptr, "lane %u exits while lane %u waits for it in %s (mask %08x)", me->lane, o.lane, op_text(o.site), o.mask);
  }
  const u32 exited = thread_count - block.alive;
  for (const Barrier& b : block.barriers)
    if (b.arrived && b.expected == thread_count && b.waiting == b.arrived && !(b.lanes[me->warp] >> me->lane & 1) && b.arrived + exited >= b.expected)
      fault_with_states("divergent_barrier", b.first_site, "a thread exits while the rest of the block waits for it at a barrier");
}

// ---------------------------------------------------------------- cp.async
void emu_cp_async(u32 destination, u64 source, u32 bytes, u32 source_bytes, u32 site) {
  CopyQueue& q = worker->current->copies;
  if (source_bytes > bytes) fault("bad_copy", site, nullptr, "cp.async: source size %u is larger than the copy of %u bytes", source_bytes, bytes);
  if (q.count == q.capacity) {
    q.capacity = q.capacity ? q.capacity * 2 : 16;
    q.ops = (CopyOp*)realloc(q.ops, q.capacity * sizeof(CopyOp));
  }
  CopyOp op{destination, bytes, source_bytes, site, q.next_group, source};
  check_copy_issue(op);
  q.ops[q.count++] = op;
}
void emu_cp_async_commit() { worker->current->copies.next_group++; }
void emu_cp_async_wait(u32 keep) {  // the bytes move only here: a missing wait leaves the 0xFF pattern
  CopyQueue& q = worker->current->copies;
  const u32 limit = q.next_group > keep ? q.next_group - keep : 0;
  u32 n = 0;
  for (; n < q.count && q.ops[n].group < limit; n++) {
    const CopyOp& op = q.ops[n];
    u8* to = shared_at(op.destination);
    check_copy_complete(op);
    if (op.source_bytes) memcpy(to, (const void*)op.source, op.source_bytes);
    if (op.source_bytes < op.bytes) memset(to + op.source_bytes, 0, op.bytes - op.source_bytes);
  }
  q.count -= n;
  memmove(q.ops, q.ops + n, q.count * sizeof(CopyOp));
}
#if !EMU_CHECK
void emu_fence(u32, u32, u32) {}
void emu_grid_wait() {}
#endif
