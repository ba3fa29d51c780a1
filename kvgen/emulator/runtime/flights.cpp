// flights.cpp - check mode: copies under way - what they touch when issued, when they have read, when their bytes land.
//
// Issuing a load is a write by the issuing thread, so that whoever still reads the bytes unordered is found; from then on
// the bytes are IN_FLIGHT until they land as the mbarrier's agent's. Issuing a store is a read, and the bytes are HELD
// until its group was waited for; the write to global memory is the waiting thread's.
#include "checker.h"
#include "transfers.h"
#include <string.h>

#if EMU_CHECK
namespace {
constexpr u32 PAGE = 4096;
BlockChecker& checker_of(const Transfer& t) { return *t.issuer->block->checker; }
bool covers(const Transfer& t, const SharedByte& end, u32 o) {
  if (!t.is_tensor) return o - end.offset < t.bytes;
  bool found = false;
  each_run(t, [&](u64, u32 tile, u32 bytes, bool) { each_chunk(t, tile, bytes, [&](u32 offset, u32, u32 n) { found |= o - offset < n; }); });
  return found;
}
Access access_of(const Transfer& t, u32 flags, const char* space) {
  BlockChecker& b = checker_of(t);
  Access a{t.issuer->linear, flags, t.site, b.clocks[t.issuer->linear], (flags & (A_WRITE | A_ATOMIC)) != 0, "", space};
  a.async = t.direction != VALUE_TO_SHARED;
  return a;
}
void visit_shared_bytes(BlockChecker& b, BlockChecker& home, u32 o, u32 bytes, Access a) {
  u32 offset;
  a.buffer = shared_place(o, &offset);
  visit_shared(b, home, o, bytes, a, offset);
}
// f(offset in shared memory, bytes) for the destination of what goes to shared memory.
template <class F> void each_destination(const Transfer& t, F f) {
  if (t.direction != TO_SHARED) return f(t.shared.offset, t.bytes);
  each_run(t, [&](u64, u32 tile, u32 bytes, bool) { each_chunk(t, tile, bytes, [&](u32 offset, u32, u32 n) { f(offset, n); }); });
}
template <class F> void each_source(const Transfer& t, F f) {
  each_run(t, [&](u64, u32 tile, u32 bytes, bool inside) {
    if (inside) each_chunk(t, tile, bytes, [&](u32 offset, u32, u32 n) { f(offset, n); });
  });
}
void visit_global_bytes(const Transfer& t, u64 address, u32 bytes, Access& a) {
  BlockChecker& b = checker_of(t);
  const Range& r = ranges[find_range(address, bytes, a.flags, t.site)];
  if (!r.tracked) return;
  emu_await_turn();
  a.buffer = r.name;
  if (t.byte_mask != 0xffff) {
    for (u32 i = 0; i < bytes; i++)
      if (t.byte_mask >> (i & 15) & 1) visit_global(b, address + i, 1, a, address + i - r.low);
    return;
  }
  while (bytes) {
    const u32 n = smaller_of(bytes, PAGE - (u32)(address % PAGE));
    visit_global(b, address, n, a, address - r.low);
    address += n, bytes -= n;
  }
}
// Bounds of all it touches in global memory, and one request for all of it. Returns its bytes.
u32 count_global(Transfer& t, u32 flags) {
  u32 bytes = 0, counted = ~0u;
  each_run(t, [&](u64 address, u32, u32 n, bool inside) {
    if (!inside || !n) return;
    const u32 range = find_range(address, n, flags, t.site);
    check_settled(ranges[range], address, flags, t.site);
    count_bulk(range, address, n, flags, t.site, range != counted);
    if (flags != A_WRITE && !ranges[range].settled) t.reads = range;
    counted = range, bytes += n;
  });
  return bytes;
}
void read_source_bytes(Transfer& t) {
  const SharedByte& from = t.direction == BETWEEN_SHARED ? t.source : t.shared;
  Access a = access_of(t, A_READ, "shared");
  each_source(t, [&](u32 o, u32 n) {
    check_async_read(*from.block, t.issuer->linear, SHARED_ORIGIN + o, n, t.site);
    check_hold(*from.block, SHARED_ORIGIN + o, n, t.site);
    visit_shared_bytes(checker_of(t), *from.block->checker, o, n, a);
  });
}
}  // namespace

// ---------------------------------------------------------------- operands of asynchronous operations
void check_async_read(Block& block, u32 thread, u32 address, u32 bytes, u32 site) {
  BlockChecker &home = *block.checker, &b = checker_here();
  const u32 o = shared_bounds(address, bytes, A_READ, site);
  shared_not_ready(home, o, bytes, A_READ, site);
  Access a{thread, A_READ, site, b.clocks[thread], false, "", "shared", true};
  a.forgotten = true;
  visit_shared_bytes(b, home, o, bytes, a);
}
void check_hold(Block& block, u32 address, u32 bytes, u32 site) {
  BlockChecker& home = *block.checker;
  if (home.holds.empty()) home.holds.resize(SHARED_CAPACITY), home.hold_sites.resize(SHARED_CAPACITY);
  for (u32 o = address - SHARED_ORIGIN, end = o + bytes; o < end; o++) home.holds[o]++, home.hold_sites[o] = site, home.shared_state[o] |= HELD;
}
void check_release(Block& block, u32 address, u32 bytes) {
  BlockChecker& home = *block.checker;
  for (u32 o = address - SHARED_ORIGIN, end = o + bytes; o < end; o++)
    if (!--home.holds[o]) home.shared_state[o] &= (u8)~HELD;
}
void check_agent_read(Block& block, u32 agent, u32 clock, u32 address, u32 bytes, u32 site) {
  BlockChecker& home = *block.checker;
  Access a{MAX_THREADS + agent, A_READ, site, clock, false, "", "shared", true, true};
  visit_shared_bytes(home, home, address - SHARED_ORIGIN, bytes, a);
}

// ---------------------------------------------------------------- a transfer
void check_transfer_issue(Transfer& t) {
  const bool to_global = t.direction == TO_GLOBAL, reduces = t.reduction != NO_REDUCTION;
  if (t.mbarrier.block) check_mbarrier_use(*t.mbarrier.block, find_mbarrier(t.mbarrier, t.site), t.direction != VALUE_TO_SHARED, t.site);
  if (t.direction == TO_SHARED) {
    t.bytes_read = count_global(t, A_READ);
    note_in_flight(*t.issuer, t.bytes_read);
    each_run(t, [&](u64 address, u32, u32 n, bool inside) {
      Access a = access_of(t, A_READ, "global");
      if (inside && checker_of(t).stores_under_way) check_unwritten(address, n, A_READ, t.site);
      if (inside) visit_global_bytes(t, address, n, a);
    });
  }
  if (to_global) count_global(t, reduces ? A_ATOMIC : A_WRITE);
  if (to_global || t.direction == BETWEEN_SHARED) read_source_bytes(t);
  if (to_global) {
    checker_of(t).stores_under_way++;
    return;
  }
  BlockChecker& home = *t.shared.block->checker;
  const u32 flags = reduces ? A_ATOMIC : A_WRITE;
  Access a = access_of(t, flags, "shared");
  each_destination(t, [&](u32 o, u32 n) {
    shared_bounds(SHARED_ORIGIN + o, n, flags, t.site);
    shared_not_ready(home, o, n, flags, t.site);
    determine_bytes(home, o, n);
    visit_shared_bytes(checker_of(t), home, o, n, a);
    memset(home.shared_state + o, IN_FLIGHT, n);
  });
}
void check_transfer_landed(const Transfer& t) {
  BlockChecker& home = *t.shared.block->checker;
  const Mbarrier& m = find_mbarrier(t.mbarrier, t.site);
  const bool tracked = m.number < WARPGROUP_AGENT;
  if (t.direction == TO_SHARED) note_in_flight(*t.issuer, -(s64)t.bytes_read);
  if (t.reads != NO_RANGE) check_landing(home, t.reads, t.site);
  if (t.reads != NO_RANGE && tracked) note_read(home, MAX_THREADS + m.number, home.agent_ticks[m.number] + 1, t.reads, A_READ, t.site);
  Access a{tracked ? MAX_THREADS + m.number : 0, A_WRITE, t.site, tracked ? home.agent_ticks[m.number] + 1 : 0, true, "", "shared", t.direction != VALUE_TO_SHARED, true};
  each_destination(t, [&](u32 o, u32 n) {
    memset(home.shared_state + o, WRITTEN, n);
    visit_shared_bytes(home, home, o, n, a);
  });
}
void check_transfer_read(const Transfer& t) {
  const SharedByte& from = t.direction == BETWEEN_SHARED ? t.source : t.shared;
  Access a = access_of(t, A_READ, "shared");
  a.ordered = true;
  BlockChecker* reader = &checker_of(t);
  if (t.direction == BETWEEN_SHARED) {  // whoever sees the end of the phase that the bytes land in
    reader = t.shared.block->checker;
    const u32 agent = find_mbarrier(t.mbarrier, t.site).number;
    if (agent < WARPGROUP_AGENT) a.me = MAX_THREADS + agent, a.clock = reader->agent_ticks[agent] + 1;
    if (reader != from.block->checker) from.block->checker->agent_visits.push_back({reader->index, a.me, a.clock, t.site});
  }
  each_source(t, [&](u32 o, u32 n) {
    check_release(*from.block, SHARED_ORIGIN + o, n);
    visit_shared_bytes(*reader, *from.block->checker, o, n, a);
  });
}
void check_transfer_written(const Transfer& t) {
  checker_of(t).stores_under_way--;
  if (t.reads != NO_RANGE) note_read(checker_of(t), t.issuer->linear, checker_of(t).clocks[t.issuer->linear], t.reads, A_ATOMIC, t.site);
  Access a = access_of(t, t.reduction != NO_REDUCTION ? A_ATOMIC | A_STRONG : A_WRITE, "global");
  each_run(t, [&](u64 address, u32, u32 n, bool inside) {
    if (inside) visit_global_bytes(t, address, n, a);
  });
}
void check_prefetch(const Transfer& t) {
  each_run(t, [&](u64 address, u32, u32 n, bool inside) {
    if (inside) find_range(address, n, A_READ, t.site);
  });
}
void check_tensor_map(u64 address, u32 site) {
  if (!is_shared(worker->current, address)) find_range(address, sizeof(TensorMap), A_READ, site);
}
void check_unwritten(u64 address, u32 bytes, u32 flags, u32 site) {
  for (auto& t : worker->current->block->async->transfers) {
    if (t->direction != TO_GLOBAL) continue;
    const char* where = emu_sites[t->site].where;
    each_run(*t, [&](u64 low, u32, u32 n, bool inside) {
      if (!inside || address + bytes <= low || low + n <= address) return;
      const Range& r = ranges[find_range(address, bytes, A_READ, site)];
      fault("in_flight", site, r.name, "%s of '%s' at byte %llu: the %s to it, issued at %.*s, has not been waited for", verb(flags), r.name, (unsigned long long)(address - r.low), op_text(t->site),
            (int)strcspn(where, "|"), where);
    });
  }
}

// ---------------------------------------------------------------- cp.async
void check_copy_landed(const Fiber& f, const CopyOp& op, const SharedByte* mbarrier) {
  BlockChecker& b = *f.block->checker;
  const u32 o = op.destination - SHARED_ORIGIN;
  Access a{f.linear, A_WRITE, op.site, b.clocks[f.linear], true, "", "shared", false, true};
  const Mbarrier* m = mbarrier ? &find_mbarrier(*mbarrier, op.site) : nullptr;
  if (m && mbarrier->block == f.block && m->number < WARPGROUP_AGENT) {
    a.me = MAX_THREADS + m->number, a.clock = b.agent_ticks[m->number] + 1;
    check_agent_learn(*f.block, f.linear, m->number, a.clock);
  }
  note_in_flight(f, -(s64)op.source_bytes);
  if (op.source_bytes) note_read(b, a.me, a.clock, find_range(op.source, op.source_bytes, A_READ, op.site), A_READ, op.site);
  memset(b.shared_state + o, WRITTEN, op.bytes);
  visit_shared_bytes(b, b, o, op.bytes, a);
}

// ---------------------------------------------------------------- what is left under way
u32 flight_site(const BlockChecker& home, u32 o) {
  for (u32 r = 0; r < cluster_size; r++)
    for (auto& t : worker->blocks[r].async->transfers) {
      if (t->shared.block->checker == &home && covers(*t, t->shared, o)) return t->site;
      if (t->direction == BETWEEN_SHARED && t->source.block->checker == &home && covers(*t, t->source, o)) return t->site;
    }
  const Fiber* fibers = worker->blocks[home.rank].fibers;
  for (u32 i = 0; i < thread_count; i++)
    for (u32 k = 0; k < fibers[i].copies.count; k++) {
      const CopyOp& op = fibers[i].copies.ops[k];
      if (!op.arrives_in && o - (op.destination - SHARED_ORIGIN) < op.bytes) return op.site;
    }
  return product_site(worker->blocks[home.rank], o);
}
void check_thread_leaves(const Fiber& f) {
  for (auto& t : f.block->async->transfers) {
    if (t->direction != TO_GLOBAL || t->issuer != &f || t->was_read || hardware_level()) continue;
    worker->level = CHECK;
    u32 at;
    const char* name = shared_place(t->shared.offset, &at);
    fault("in_flight", t->site, name, "the thread exits while its %s may still read shared '%s' at byte %u: it needs cp.async.bulk.commit_group and wait_group", op_text(t->site), name, at);
  }
}
void check_block_leaves(Block& block) {
  for (auto& t : block.async->transfers)
    if (t->direction == BETWEEN_SHARED) {
      u32 at;
      const char* name = shared_place(t->source.offset, &at);
      fault("in_flight", t->site, name, "the block exits while its %s may still read shared '%s' at byte %u", op_text(t->site), name, at);
    }
  for (auto& m : block.async->mbarriers) {
    if (!m->live) continue;
    u32 at;
    const char* name = shared_place(m->offset, &at);
    for (const Due& due : m->due)
      if (due.transfer) fault("in_flight", due.transfer->site, name, "the block exits before anybody waited for this %s on the mbarrier at byte %u of shared '%s'", op_text(due.transfer->site), at, name);
    const MbarrierWord w = mbarrier_word({&block, m->offset});
    if (w.bytes) fault("in_flight", NO_SITE, name, "the block exits while the mbarrier at byte %u of shared '%s' has %lld bytes outstanding", at, name, (long long)w.bytes);
  }
}
#endif
