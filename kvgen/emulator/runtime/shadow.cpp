// shadow.cpp - check mode: for every word (byte where needed) the last write and the reads since, and what of it races.
#include "checker.h"
#include <stdlib.h>
#include <string.h>

#if EMU_CHECK
Locations global_locations;
namespace {
constexpr u32 READERS_KEPT = 48;
struct Page {
  Cell words[PAGE_BYTES / 4];
  Cell* bytes;
  bool kept;
};
// Global memory is only tracked by the block whose turn it is, so nothing here needs a lock.
std::unordered_map<u64, Page*> pages;
struct { u64 number; Page* page; } page_cache[64];
Readers global_readers;

void race(const BlockChecker& b, const Access& a, u32 other_flags, u32 site, u32 block, u32 thread, u64 offset) {
  const u32* n = launch->block;
  const char* other = verb(other_flags);
  const u32 t[3] = {thread % n[0], thread / n[0] % n[1], thread / (n[0] * n[1])};
  const char* where = emu_sites[site].where;
  const int length = (int)strcspn(where, "|");
  const auto report = tolerates_race(a, other_flags, site) ? suspect : (void (*)(const char*, u32, const char*, const char*, ...))fault;
  worker->level = !hardware_level() && b.may_follow(a.me, block, thread) ? CHECK : HARDWARE;
  if (thread >= MAX_THREADS)
    return report("race", a.site, a.buffer, "%s of %s '%s' at byte %llu races with the asynchronous %s issued at %.*s: its end was not waited for on this path", verb(a.flags), a.space, a.buffer,
          (unsigned long long)offset, other, length, where);
  if (block == b.index)
    return report("race", a.site, a.buffer, "%s of %s '%s' at byte %llu races with the %s by thread (%u,%u,%u) of the same block at %.*s: nothing orders the two", verb(a.flags), a.space, a.buffer,
          (unsigned long long)offset, other, t[0], t[1], t[2], length, where);
  const u32 i = block - 1;
  report("race", a.site, a.buffer, "%s of %s '%s' at byte %llu races with the %s by block (%u,%u,%u) thread (%u,%u,%u) at %.*s: no release and acquire orders the two", verb(a.flags), a.space, a.buffer,
        (unsigned long long)offset, other, i % launch->grid[0], i / launch->grid[0] % launch->grid[1], i / (launch->grid[0] * launch->grid[1]), t[0], t[1], t[2], length, where);
}
// The hardware lets one lane win, whichever: with equal bytes nobody can tell.
bool same_store(const BlockChecker& b, const Access& a, const Cell& c, u32 block, u32 thread) {
  return a.place && c.site == a.site && block == b.index && thread / 32 == a.me / 32 && !(c.flags & (A_ATOMIC | A_STRONG | ASYNC_WRITE));
}
void await_store(BlockChecker& b, const Access& a, u32 thread, u64 offset) {
  if (b.twice.access.bytes) return;  // another word of the same store
  b.twice.access = a, b.twice.thread = thread, b.twice.offset = offset;
  memcpy(b.twice.before, a.place, a.bytes);
}
bool before(BlockChecker& b, const Access& a, u32 block, u32 thread, u32 clock) {
  return block == b.index ? b.ordered(a.me, thread, clock) : b.knows_block(a.me, block, thread, clock);
}
// Whether a later thread of the block could know of a fence if aligned instructions ordered memory.
bool fence_may_count(const BlockChecker& b, const Access& a) {
  for (u16 t : b.fencing)
    if (a.me < MAX_THREADS && b.may_follow(a.me, b.index, t)) return true;
  return false;
}
void missing_fence(const BlockChecker& b, const Access& a, u32 site, u64 offset) {
  const bool copied = !strncmp(emu_sites[site].op, "cp.async.", 9) && !strncmp(emu_sites[a.site].op, "wgmma.", 6);
  if (copied && hardware_level()) return;
  worker->level = copied || (!hardware_level() && fence_may_count(b, a)) ? CHECK : HARDWARE;
  const char* where = emu_sites[site].where;
  fault("proxy_fence", a.site, a.buffer, "asynchronous %s of %s '%s' at byte %llu, which was written through the generic proxy at %.*s: no fence.proxy.async lies between the two", verb(a.flags), a.space,
        a.buffer, (unsigned long long)offset, (int)strcspn(where, "|"), where);
}
// A full barrier has ordered whatever this cell remembers; its last writer still matters to the async proxy.
inline void renew(const BlockChecker& home, Cell& c) {
  if (c.generation < home.first_generation) c = Cell{home.generation, 0, 0, 0, NOBODY, 0, 0};
  else c.generation = home.generation, c.readers = 0, c.split = 0;
}
void renew_word(const BlockChecker& home, Cell& c, const Cell* parts) {
  if (c.split && c.generation >= home.first_generation)
    for (int i = 0; i < 4; i++) {
      const Cell& part = parts[i];
      const bool later = c.split || (part.clock > c.clock && !(part.flags & ASYNC_WRITE)) || c.flags & ASYNC_WRITE;
      if (part.generation >= home.first_generation && part.thread != NOBODY && later) c = part, c.split = 0;
    }
  renew(home, c);
}
inline bool both_strong(u32 x, u32 y, bool same_block) { return (x & y & A_STRONG) && (same_block || !((x | y) & A_CTA)); }
inline Reader event(u32 block, u32 thread, u32 clock, u32 site, u32 flags) { return {block, clock, 1u << (thread & 31), 0, site, (u8)(thread >> 5), (u8)(flags & 0xf)}; }

// Keeps an access beside the last write. One of the running block that everybody there follows by now makes room.
void remember(const BlockChecker& b, Readers& readers, Cell& c, const Reader& made) {
  u32 length = 0, spare = 0;
  for (u32 i = c.readers; i; i = readers.nodes[i].next) {
    Reader& r = readers.nodes[i];
    length++;
    if (r.block != b.index && length >= READERS_KEPT) spare = i;
    if (r.flags != made.flags) continue;
    if (r.block == b.index && r.clock <= b.base_clock && r.warp < MAX_WARPS) {
      spare = i;
      continue;
    }
    if (r.block != made.block || r.warp != made.warp) continue;
    if (r.clock == made.clock) {
      r.lanes |= made.lanes;
      return;
    }
    r.lanes &= ~made.lanes;
    if (!r.lanes) spare = i;
  }
  const u32 next = spare ? readers.nodes[spare].next : c.readers;
  if (spare) readers.nodes[spare] = made;
  else spare = c.readers = readers.add(made);
  readers.nodes[spare].next = next;
}

// Who has read a strong write strongly follows it, and all that it followed by read-modify-write (the observation order of
// the PTX memory model): the last block of a sum may reset the counter by a plain store. A plain load is held to fences all
// the same: in another order of the blocks it need not have read the last write.
u64 observer(const Cell& c, u32 thread) { return (u64)&c | (u64)thread << 48; }
bool observes(const BlockChecker& b, const Cell& c, const Access& a, u32 block, u32 thread) {
  if (b.observed.empty()) return false;
  auto found = b.observed.find(observer(c, a.me));
  return found != b.observed.end() && found->second.block == block && found->second.thread == thread && found->second.clock == c.clock;
}
// `b` is the accessing thread's block, `home` the one whose shared memory it is; `at` and `bytes` say where in it.
template <bool SHARED> void visit(BlockChecker& b, BlockChecker& home, Cell& c, const Access& a, u64 offset, u32 at, u32 bytes) {
  Readers& readers = SHARED ? home.shared_readers : global_readers;
  if (SHARED && c.generation != home.generation) renew(home, c);
  bool observed = false;  // the last write
  Reader overtaken{};     // the last write, where this one is as strong but does not follow it
  if (c.generation && c.thread != NOBODY && !a.ordered) {
    const u32 rank = SHARED && cluster_size > 1 ? c.thread / ROW : 0, thread = c.thread - rank * ROW;
    const u32 block = SHARED ? worker->blocks[rank].index : c.generation;
    observed = a.write && !(a.flags & A_STRONG) && observes(b, c, a, block, thread);
    if (!observed && !before(b, a, block, thread, c.clock)) {
      if (both_strong(a.flags, c.flags, block == b.index)) overtaken = event(block, thread, c.clock, c.site, c.flags);
      else if (same_store(b, a, c, block, thread)) await_store(b, a, thread, offset);
      else {
        race(b, a, c.flags, c.site, block, thread, offset);
        if (a.write) suspect_bytes(home, at, bytes);
        else worker->raced = true;
      }
    }
    if (!SHARED && a.flags & A_CONSTANT) {
      const char* where = emu_sites[c.site].where;
      fault("not_constant", a.site, a.buffer, "%s of '%s' at byte %llu as data that does not change, but this kernel wrote it at %.*s: a stale value may be returned", op_text(a.site), a.buffer,
            (unsigned long long)offset, (int)strcspn(where, "|"), where);
    }
    if (a.flags & c.flags & A_STRONG && !a.write) b.observed[observer(c, a.me)] = {block, thread, c.clock};
    if (a.async && !(c.flags & ASYNC_WRITE) && !proxy_fenced(b, a.me, SHARED ? PROXY_SHARED : PROXY_GLOBAL, block, thread, c.clock)) missing_fence(b, a, c.site, offset);
  }
  u32 kept = 0;  // strong accesses that a strong write may meet; a weak one later may not
  for (u32 i = a.ordered || !(a.write || c.flags & OVERTAKEN) ? 0 : c.readers; i;) {
    Reader& r = readers.nodes[i];
    const u32 next = r.next, here = i;
    i = next;
    const bool strong = both_strong(a.flags, r.flags, r.block == b.index), followed = observed && r.flags & A_ATOMIC;
    for (u32 m = strong || followed || !(a.write || r.flags & (A_WRITE | A_ATOMIC)) ? 0 : r.lanes; m; m &= m - 1) {
      const u32 t = r.warp * 32u + (u32)lowest(m);
      if (before(b, a, r.block, t, r.clock)) continue;
      race(b, a, r.flags, r.site, r.block, t, offset);
      if (r.flags & A_WRITE) suspect_bytes(home, at, bytes);
      else suspect_reader(r, t);
    }
    if (!a.write) continue;
    r.next = strong ? kept : 0;
    if (strong) kept = here;
    else readers.release(here);
  }
  if (a.forgotten) return;
  if (a.write) {
    if (a.flags & A_ATOMIC && a.flags & A_STRONG) b.observed[observer(c, a.me)] = {b.index, a.me, a.clock};
    if (a.ordered) readers.release(c.readers);
    c.readers = kept;
    if (overtaken.lanes) remember(b, readers, c, overtaken);
    c.generation = SHARED ? home.generation : b.index;
    c.clock = a.clock, c.site = a.site, c.thread = (u16)(SHARED ? b.rank * ROW + a.me : a.me), c.flags = (u8)((a.flags & 0xf) | (a.async ? ASYNC_WRITE : 0) | (c.readers ? OVERTAKEN : 0));
    return;
  }
  remember(b, readers, c, event(b.index, a.me, a.clock, a.site, a.flags));
}
template <bool SHARED> void visit_range(BlockChecker& b, BlockChecker& home, Cell* words, Cell* bytes, u32 first, u32 count, const Access& a, u64 offset) {
  Readers& readers = SHARED ? home.shared_readers : global_readers;
  const u32 end = first + count;
  while (first < end) {
    Cell& c = words[first >> 2];
    const u32 stop = smaller_of(end, (first | 3) + 1);
    if (SHARED && c.generation != home.generation) renew_word(home, c, bytes + (first & ~3u));
    if (!c.split && stop - first == 4) {
      visit<SHARED>(b, home, c, a, offset, first, 4);
    } else {
      Cell* parts = bytes + (first & ~3u);
      if (!c.split) {
        for (int i = 0; i < 4; i++) parts[i] = c, parts[i].readers = readers.copy(c.readers);
        readers.release(c.readers);
        c.readers = 0, c.split = 1;
      }
      for (u32 i = first; i < stop; i++) visit<SHARED>(b, home, bytes[i], a, offset + (i - first), i, 1);
    }
    offset += stop - first;
    first = stop;
  }
}
}  // namespace

void settle_store(BlockChecker& b) {
  Twice& t = b.twice;
  const u32 bytes = t.access.bytes;
  t.access.bytes = 0;
  if (!bytes || !memcmp(t.before, t.access.place, bytes)) return;
  race(b, t.access, A_WRITE, t.access.site, b.index, t.thread, t.offset);
  const u64 o = (u64)(t.access.place - worker->windows);
  suspect_bytes(*worker->blocks[o / WINDOW_STRIDE].checker, (u32)(o % WINDOW_STRIDE), bytes);
}
void visit_shared(BlockChecker& b, BlockChecker& home, u32 o, u32 bytes, const Access& a, u64 offset) { visit_range<true>(b, home, home.shared_words, home.shared_bytes, o, bytes, a, offset); }
void visit_global(BlockChecker& b, u64 address, u32 bytes, const Access& a, u64 offset) {
  const u64 number = address / PAGE_BYTES;
  auto& slot = page_cache[number & 63];
  if (!slot.page || slot.number != number) {
    Page*& p = pages[number];
    if (!p) p = (Page*)calloc(1, sizeof(Page));
    slot.number = number, slot.page = p;
  }
  Page* p = slot.page;
  const u32 first = (u32)(address % PAGE_BYTES);
  if (!p->bytes && ((first | bytes) & 3)) p->bytes = (Cell*)calloc(PAGE_BYTES, sizeof(Cell));
  if (a.write && hardware_level() && !p->kept) keep_page(number * PAGE_BYTES), p->kept = true;
  visit_range<false>(b, b, p->words, p->bytes, first, bytes, a, offset);
}

// ---------------------------------------------------------------- acquire and release through a location
void synchronise(BlockChecker& b, Locations& locations, u64 address, const Access& a) {
  const u32 t = a.me;
  const bool cta = a.flags & A_CTA, atomic = a.flags & A_ATOMIC, reads = atomic || !(a.flags & A_WRITE), writes = atomic || (a.flags & A_WRITE);
  auto found = locations.find(address);
  if (reads && found != locations.end()) {
    Location& l = found->second;
    KnowledgePtr k = cta ? nullptr : l.all;
    if (l.cta_block == b.index) k = join(k, l.cta);
    if (k && (a.flags & A_ACQUIRE)) b.learn(t, k);
    else if (k) b.pending[t] = join(b.pending[t], k), b.any_knowledge = true;
  }
  if (!writes) return;
  KnowledgePtr give;
  if (a.flags & A_RELEASE) {
    give = b.snapshot(t);
    b.clocks[t]++;
  } else {
    give = cta ? b.released_cta[t] : b.released[t];
  }
  KnowledgePtr give_cta = cta ? give : (a.flags & A_RELEASE) ? give : b.released_cta[t];
  if (!give && !give_cta && found == locations.end()) return;
  Location& l = locations[address];
  if (l.cta_block != b.index) l.cta = nullptr, l.cta_block = b.index;
  l.cta = atomic ? join(l.cta, give_cta) : give_cta;
  if (!cta) l.all = atomic ? join(l.all, give) : give;
  else if (!atomic) l.all = nullptr;
}

void end_shadow() {
  for (auto& entry : pages) {
    free(entry.second->bytes);
    free(entry.second);
  }
  pages.clear();
  memset(page_cache, 0, sizeof page_cache);
  global_readers.clear();
  global_locations.clear();
}
#endif
