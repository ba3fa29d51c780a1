// mbarrier.cpp - mbarriers: counted in their own 64 bits; what waits on one, and what will still count on it, beside them.
#include "transfers.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

SharedByte shared_byte(u32 address, u32 bytes, u32 alignment, u32 site) {
  const u32 rank = address >> RANK_SHIFT, offset = (address & WINDOW_MASK) - SHARED_ORIGIN;
  if (rank > cluster_size || offset >= SHARED_CAPACITY || bytes > SHARED_CAPACITY - offset)
    fault("shared_out_of_bounds", site, "shared memory", "%s: %u bytes at shared address %#x lie outside of it", op_text(site), bytes, address);
  if (address % alignment) {
    u32 at;
    const char* name = shared_place(offset, &at);
    fault("misaligned", site, name, "%s: byte %u of shared '%s' (address %#x) needs an alignment of %u", op_text(site), at, name, address, alignment);
  }
  Block& block = rank ? worker->blocks[rank - 1] : *worker->current->block;
  if (!block.alive) fault("exited_block", site, "shared memory", "%s: shared memory of block %u of the cluster, which has exited", op_text(site), block.rank);
  return {&block, offset};
}
u32 emu_shared_address(u64 generic, u32 site) {
  const Fiber& me = *worker->current;
  if (!is_shared(&me, generic)) fault("shared_out_of_bounds", site, nullptr, "%s: the generic address %#llx is not in shared memory", op_text(site), (unsigned long long)generic);
  return (u32)shared_from_generic(&me, generic);
}

// ---------------------------------------------------------------- the object
static SharedByte mbarrier_at(u32 address, u32 site) { return shared_byte(address, 8, 8, site); }
__attribute__((format(printf, 3, 4))) [[noreturn]] static void refuse(const SharedByte& p, u32 site, const char* format, ...) {
  char text[160];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  u32 at;
  const char* name = shared_place(p.offset, &at);
  fault("bad_mbarrier", site, name, "%s: the mbarrier at byte %u of shared '%s' %s", op_text(site), at, name, text);
}
MbarrierWord mbarrier_word(const SharedByte& p) {
  MbarrierWord w;
  memcpy(&w, p.block->shared + p.offset, 8);
  return w;
}
static void write_word(const SharedByte& p, MbarrierWord w) { memcpy(p.block->shared + p.offset, &w, 8); }
static Mbarrier* known_at(const SharedByte& p) {
  for (auto& m : p.block->async->mbarriers)
    if (m->offset == p.offset) return m.get();
  return nullptr;
}
Mbarrier& find_mbarrier(const SharedByte& p, u32 site) {
  Mbarrier* m = known_at(p);
  if (!m || !m->live) refuse(p, site, "has not been initialised");
  return *m;
}
static void check_count(const SharedByte& p, u32 count, u32 site) {
  if (count - 1 >= MBARRIER_LIMIT) refuse(p, site, "takes a count of 1 to %u, got %u", MBARRIER_LIMIT, count);
}
void emu_mbarrier_init(u32 address, u32 count, u32 site) {
  const SharedByte p = mbarrier_at(address, site);
  check_count(p, count, site);
  Mbarrier* m = known_at(p);
  if (m && m->live) refuse(p, site, "is live: invalidate it first");
  if (!m) {
    auto& all = p.block->async->mbarriers;
    all.emplace_back(m = new Mbarrier{p.offset, (u32)all.size()});
  }
  m->live = true;
  check_mbarrier_init(*p.block, *m, site);
  MbarrierWord w{};
  w.pending = w.expected = count;
  write_word(p, w);
}
void emu_mbarrier_invalidate(u32 address, u32 site) {
  const SharedByte p = mbarrier_at(address, site);
  Mbarrier& m = find_mbarrier(p, site);
  check_mbarrier_use(*p.block, m, false, site);
  if (!m.waiting.empty()) refuse(p, site, "has threads that wait on it");
  if (!m.due.empty()) refuse(p, site, "has copies that will complete on it");
  m.live = false;
  check_mbarrier_invalidate(*p.block, m, site);
}

// ---------------------------------------------------------------- counting
static void complete_phase(const SharedByte& p, Mbarrier& m, MbarrierWord& w) {
  emu_spins = 0;
  w.phase ^= 1;
  w.pending = w.expected;
  write_word(p, w);
  check_mbarrier_complete(*p.block, m);
  for (const Waiter& waiter : m.waiting) {
    check_mbarrier_observe(*p.block, m, *waiter.fiber, waiter.relaxed);
    fiber_wake(*waiter.fiber);
  }
  m.waiting.clear();
}
static void count(const SharedByte& p, Mbarrier& m, u32 arrivals, s64 bytes, u32 site) {
  MbarrierWord w = mbarrier_word(p);
  if (arrivals > w.pending) refuse(p, site, "expects %u more arrivals of %u in this phase, got %u", (u32)w.pending, (u32)w.expected, arrivals);
  const s64 total = w.bytes + bytes;
  if (total > (s64)MBARRIER_LIMIT || total < -(s64)MBARRIER_LIMIT) refuse(p, site, "would have %lld bytes outstanding; it counts up to %u", (long long)total, MBARRIER_LIMIT);
  w.pending -= arrivals, w.bytes = total;
  emu_spins = 0;
  if (!w.pending && !w.bytes) complete_phase(p, m, w);
  else write_word(p, w);
}
void mbarrier_expect_arrival(const SharedByte& p, u32 site) {
  MbarrierWord w = mbarrier_word(p);
  check_count(p, (u32)w.pending + 1, site);
  w.pending++;
  write_word(p, w);
}
void mbarrier_count(const SharedByte& p, u32 arrivals, s64 bytes, u32 site) { count(p, find_mbarrier(p, site), arrivals, bytes, site); }

u64 emu_mbarrier_arrive(u32 address, u32 arrivals, u32 bytes, u32 flags, u32 site) {
  const SharedByte p = mbarrier_at(address, site);
  Mbarrier& m = find_mbarrier(p, site);
  check_mbarrier_use(*p.block, m, false, site);
  check_count(p, arrivals, site);
  worker->current->site = site;
  check_mbarrier_arrive(*p.block, m, flags & MB_RELAXED);
  MbarrierWord before = mbarrier_word(p);
  if (flags & MB_KEEPS_PHASE && arrivals >= before.pending) refuse(p, site, "misses only %u arrivals: this one must not complete its phase", (u32)before.pending);
  if (flags & MB_DROP) {
    MbarrierWord w = before;
    w.expected -= arrivals <= w.expected ? arrivals : 0;
    write_word(p, w);
  }
  if (bytes) count(p, m, 0, bytes, site);
  count(p, m, arrivals, 0, site);
  return bits<u64>(before);
}
void emu_mbarrier_expect(u32 address, u32 bytes, u32 site) {
  const SharedByte p = mbarrier_at(address, site);
  Mbarrier& m = find_mbarrier(p, site);
  check_mbarrier_use(*p.block, m, false, site);
  count(p, m, 0, bytes, site);
}
void emu_mbarrier_complete(u32 address, u32 bytes, u32 site) {
  const SharedByte p = mbarrier_at(address, site);
  Mbarrier& m = find_mbarrier(p, site);
  check_mbarrier_use(*p.block, m, false, site);
  count(p, m, 0, -(s64)bytes, site);
}
u32 emu_mbarrier_pending(u64 state) { return (u32)bits<MbarrierWord>(state).pending; }

// ---------------------------------------------------------------- waiting
static void perform_first_due(Mbarrier& m) {
  const u32 i = draw((u32)m.due.size());
  const Due due = m.due[i];
  if (due.transfer) {
    m.due.erase(m.due.begin() + i);
    land(*due.transfer);
  } else {
    perform_copies(*due.copier, due.serial + 1);  // takes the entry away
  }
}
void mbarrier_add_due(const SharedByte& p, const Due& due, u32 site) {
  Mbarrier& m = find_mbarrier(p, site);
  m.due.push_back(due);
  // Somebody is waiting already; or, in a seeded schedule, the hardware happens to be quick.
  while (!m.due.empty() && (!m.waiting.empty() || draw(8) == 1)) perform_first_due(m);
}
void mbarrier_forget(const SharedByte& p, const Fiber* copier, u64 serial) {
  if (Mbarrier* m = known_at(p))
    for (size_t i = 0; i < m->due.size(); i++)
      if (m->due[i].copier == copier && m->due[i].serial == serial) {
        m->due.erase(m->due.begin() + (long)i);
        return;
      }
}
bool emu_mbarrier_wait(u32 address, u64 phase, u32 flags, u32 site) {
  const SharedByte p = mbarrier_at(address, site);
  Fiber& me = *worker->current;
  if (p.block != me.block) refuse(p, site, "is in another block: only its own threads can wait on it");
  me.site = site;
  if (!(flags & MB_SUSPENDS)) emu_yield();
  Mbarrier& m = find_mbarrier(p, site);
  check_mbarrier_use(*p.block, m, false, site);
  const u64 wanted = flags & MB_PARITY ? phase : bits<MbarrierWord>(phase).phase;
  if (wanted > 1) refuse(p, site, "has phases of parity 0 and 1, got %llu", (unsigned long long)wanted);
  while (mbarrier_word(p).phase == wanted && !m.due.empty()) perform_first_due(m);
  if (mbarrier_word(p).phase != wanted) {
    emu_spins = 0;
    check_mbarrier_observe(*p.block, m, me, flags & MB_RELAXED);
    return true;
  }
  if (!(flags & MB_SUSPENDS)) return false;
  if (draw(4) == 1) {  // try_wait may give up: a kernel must try again
    emu_yield();
    return false;
  }
  m.waiting.push_back({&me, (flags & MB_RELAXED) != 0});
  me.barrier = p.offset, me.state = AT_MBARRIER;
  fiber_wait();
  return true;
}

// ---------------------------------------------------------------- a block begins and ends
void async_begin_block(Block& b) {
  if (!b.async) b.async = new BlockAsync;
  b.async->mbarriers.clear();
  b.async->transfers.clear();
}
void async_end_worker(Block& b) {
  delete b.async;
  b.async = nullptr;
}
void async_thread_exits(Fiber& f) {
  copies_thread_exits(f);
  bulk_thread_exits(f);
  if (f.block->alive == 1) check_block_leaves(*f.block);
}
size_t describe_mbarrier(char* out, size_t size, Block& b, u32 offset) {
  u32 at;
  const char* name = shared_place(offset, &at);
  const MbarrierWord w = mbarrier_word({&b, offset});
  return (size_t)snprintf(out, size, "%s+%u for the end of phase %u: %u of %u arrivals and %lld bytes are missing", name, at, (u32)w.phase, (u32)w.pending, (u32)w.expected, (long long)w.bytes);
}
