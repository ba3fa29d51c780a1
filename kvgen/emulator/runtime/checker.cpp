// checker.cpp - check mode: bounds, alignment, initialisation, copies in flight, happens-before races, request counts.
//
// Order inside a block: every thread has a clock. A barrier of the whole block orders everything before it, so it only
// moves `base`; a thread knows thread u up to max(base, rows[t][u]). Rows are filled by warp and named barriers and by
// acquires, and are empty again after the next full barrier. Shuffles order nothing.
// Order across blocks (they run one after another): only what was released through a fence and an atomic or by a release
// operation, and acquired the same way, is known.
#include "runtime.h"
#include <map>
#include <stdio.h>
#include <stdlib.h>
#include <memory>
#include <string.h>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#if EMU_CHECK
namespace {
// ---------------------------------------------------------------- clocks and knowledge
constexpr u16 NOBODY = 0xffff;
struct Known {  // how far one block's threads are known
  u32 base = 0;
  std::vector<std::pair<u16, u32>> later;  // (thread, clock) beyond base, by thread
};
typedef std::map<u32, Known> Knowledge;  // by block
typedef std::shared_ptr<const Knowledge> KnowledgePtr;

u32 base_clock;
std::vector<u32> clocks, rows, row_warps;
std::vector<KnowledgePtr> acquired, pending, released, released_cta;
KnowledgePtr block_acquired, block_pending;
bool any_knowledge;
struct Location {
  KnowledgePtr all, cta;
  u32 cta_block = 0;
};
std::unordered_map<u64, Location> global_locations, shared_locations;

u32* row(u32 t) { return &rows[(size_t)t * MAX_THREADS]; }

void join_known(Known& to, const Known& from) {
  if (from.base > to.base) to.base = from.base;
  if (from.later.empty()) return;
  std::vector<std::pair<u16, u32>> out;
  size_t i = 0, j = 0;
  while (i < to.later.size() || j < from.later.size()) {
    if (j == from.later.size() || (i < to.later.size() && to.later[i].first < from.later[j].first)) out.push_back(to.later[i++]);
    else if (i == to.later.size() || from.later[j].first < to.later[i].first) out.push_back(from.later[j++]);
    else out.push_back({to.later[i].first, to.later[i].second > from.later[j].second ? to.later[i].second : from.later[j].second}), i++, j++;
  }
  to.later.swap(out);
}
KnowledgePtr join(const KnowledgePtr& a, const KnowledgePtr& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto out = std::make_shared<Knowledge>(*a);
  for (const auto& entry : *b) join_known((*out)[entry.first], entry.second);
  return out;
}
bool knows(const KnowledgePtr& k, u32 block, u32 thread, u32 clock) {
  if (!k) return false;
  auto found = k->find(block);
  if (found == k->end()) return false;
  if (clock <= found->second.base) return true;
  for (const auto& entry : found->second.later)
    if (entry.first == thread) return clock <= entry.second;
  return false;
}
// The calling thread's whole past, for others to acquire.
KnowledgePtr snapshot(u32 t) {
  Knowledge own;
  Known& k = own[block_index];
  k.base = base_clock;
  for (u32 w = 0; w < MAX_WARPS; w++) {
    const bool has = row_warps[t] >> w & 1;
    if (!has && w != t / 32) continue;
    for (u32 u = w * 32; u < w * 32 + 32; u++) {
      u32 c = u == t ? clocks[t] : has ? row(t)[u] : 0;
      if (c > base_clock) k.later.push_back({(u16)u, c});
    }
  }
  KnowledgePtr out = std::make_shared<Knowledge>(std::move(own));
  return join(join(out, acquired[t]), block_acquired);
}
void open_row(u32 t, u32 w) {
  if (row_warps[t] >> w & 1) return;
  memset(row(t) + w * 32, 0, 128);
  row_warps[t] |= 1u << w;
}
void learn(u32 t, const KnowledgePtr& k) {  // t acquires k
  if (!k) return;
  any_knowledge = true;
  auto own = k->find(block_index);
  if (own != k->end())
    for (const auto& entry : own->second.later) {
      open_row(t, entry.first / 32);
      u32& c = row(t)[entry.first];
      if (entry.second > c) c = entry.second;
    }
  acquired[t] = join(acquired[t], k);
}
inline bool ordered(u32 me, u32 u, u32 clock) { return clock <= base_clock || u == me || ((row_warps[me] >> (u >> 5) & 1) && row(me)[u] >= clock); }

// ---------------------------------------------------------------- shadow memory
struct Cell {      // last write to one word, and who has read it since
  u32 generation;  // shared: of the last full barrier; global: block of the write, 0 = never
  u32 clock, readers;
  u16 thread;
  u8 flags;
  u8 split;  // bytes are tracked one by one
};
struct Reader {
  u32 block, clock, lanes, next;
  u8 warp, flags;
};
struct Readers {
  std::vector<Reader> nodes{1};
  u32 free_list = 0;
  u32 add(const Reader& r) {
    if (!free_list) {
      nodes.push_back(r);
      return (u32)nodes.size() - 1;
    }
    u32 i = free_list;
    free_list = nodes[i].next;
    nodes[i] = r;
    return i;
  }
  void release(u32 head) {
    while (head) {
      u32 next = nodes[head].next;
      nodes[head].next = free_list;
      free_list = head;
      head = next;
    }
  }
  u32 copy(u32 head) {
    u32 out = 0;
    for (; head; head = nodes[head].next) {
      Reader r = nodes[head];
      r.next = out;
      out = add(r);
    }
    return out;
  }
  void clear() {
    nodes.resize(1);
    free_list = 0;
  }
};
constexpr u32 PAGE_BYTES = 4096, READERS_KEPT = 48;
struct Page {
  Cell words[PAGE_BYTES / 4];
  Cell* bytes;
};
std::unordered_map<u64, Page*> pages;
struct { u64 number; Page* page; } page_cache[64];
Cell shared_words[SHARED_CAPACITY / 4], shared_bytes[SHARED_CAPACITY];
Readers shared_readers, global_readers;
u32 shared_generation;
enum : u8 { UNWRITTEN = 0, WRITTEN = 1, IN_FLIGHT = 2, OUTSIDE = 3 };
u8 shared_state[SHARED_CAPACITY + 16], shared_layout[SHARED_CAPACITY + 16];
u32 shared_extent;

struct Range { const char* name; u64 low, high; bool writable, tracked, implicit; };
std::vector<Range> ranges;
u32 last_range;

struct Access {
  u32 me, flags, site, clock;
  bool write;
  const char* buffer;
  const char* space;
};
const char* verb(u32 flags) { return flags & A_ATOMIC ? "atomic" : flags & A_WRITE ? "write" : "read"; }

void race(const Access& a, const char* other, u32 block, u32 thread, u64 offset) {
  const u32* b = launch->block;
  if (block == block_index)
    fault("race", a.site, a.buffer, "%s of %s '%s' at byte %llu races with a %s by thread (%u,%u,%u) of the same block: nothing orders the two", verb(a.flags), a.space, a.buffer,
          (unsigned long long)offset, other, thread % b[0], thread / b[0] % b[1], thread / (b[0] * b[1]));
  const u32 i = block - 1;
  fault("race", a.site, a.buffer, "%s of %s '%s' at byte %llu races with a %s by block (%u,%u,%u) thread (%u,%u,%u): no release and acquire orders the two", verb(a.flags), a.space, a.buffer,
        (unsigned long long)offset, other, i % launch->grid[0], i / launch->grid[0] % launch->grid[1], i / (launch->grid[0] * launch->grid[1]), thread % b[0], thread / b[0] % b[1],
        thread / (b[0] * b[1]));
}
template <bool SHARED> bool before(const Access& a, u32 block, u32 thread, u32 clock) {
  if (SHARED || block == block_index) return ordered(a.me, thread, clock);
  return knows(acquired[a.me], block, thread, clock) || knows(block_acquired, block, thread, clock);
}
inline bool both_strong(u32 x, u32 y, bool same_block) { return (x & y & A_STRONG) && (same_block || !((x | y) & A_CTA)); }

template <bool SHARED> void visit(Cell& c, const Access& a, u64 offset) {
  Readers& readers = SHARED ? shared_readers : global_readers;
  if (SHARED && c.generation != shared_generation) c = Cell{shared_generation, 0, 0, NOBODY, 0, 0};
  if (c.generation && c.thread != NOBODY) {
    const u32 block = SHARED ? block_index : c.generation;
    if (!before<SHARED>(a, block, c.thread, c.clock) && !both_strong(a.flags, c.flags, block == block_index)) race(a, verb(c.flags), block, c.thread, offset);
  }
  if (a.write) {
    for (u32 i = c.readers; i; i = readers.nodes[i].next) {
      const Reader& r = readers.nodes[i];
      if (both_strong(a.flags, r.flags, r.block == block_index)) continue;
      for (u32 m = r.lanes; m; m &= m - 1) {
        u32 t = r.warp * 32u + (u32)lowest(m);
        if (!before<SHARED>(a, r.block, t, r.clock)) race(a, "read", r.block, t, offset);
      }
    }
    readers.release(c.readers);
    c.generation = SHARED ? shared_generation : block_index;
    c.clock = a.clock, c.readers = 0, c.thread = (u16)a.me, c.flags = (u8)(a.flags & 0xf);
    return;
  }
  const u32 bit = 1u << (a.me & 31);
  const u8 warp = (u8)(a.me >> 5), flags = (u8)(a.flags & 0xf);
  u32 length = 0, spare = 0;
  for (u32 i = c.readers; i; i = readers.nodes[i].next) {
    Reader& r = readers.nodes[i];
    length++;
    if (r.block != block_index) {
      if (length >= READERS_KEPT) spare = i;
      continue;
    }
    if (r.clock <= base_clock) {
      spare = i;  // ordered before everything from here on
      continue;
    }
    if (r.warp != warp || r.flags != flags) continue;
    if (r.clock == a.clock) {
      r.lanes |= bit;
      return;
    }
    r.lanes &= ~bit;
    if (!r.lanes) spare = i;
  }
  if (spare) {
    Reader& r = readers.nodes[spare];
    r.block = block_index, r.clock = a.clock, r.lanes = bit, r.warp = warp, r.flags = flags;
    return;
  }
  c.readers = readers.add(Reader{block_index, a.clock, bit, c.readers, warp, flags});
}
template <bool SHARED> void visit_range(Cell* words, Cell* bytes, u32 first, u32 count, const Access& a, u64 offset) {
  Readers& readers = SHARED ? shared_readers : global_readers;
  const u32 end = first + count;
  while (first < end) {
    Cell& c = words[first >> 2];
    const u32 stop = smaller_of(end, (first | 3) + 1);
    if (SHARED && c.generation != shared_generation) c = Cell{shared_generation, 0, 0, NOBODY, 0, 0};
    if (!c.split && stop - first == 4) {
      visit<SHARED>(c, a, offset);
    } else {
      Cell* b = bytes + (first & ~3u);
      if (!c.split) {
        for (int i = 0; i < 4; i++) b[i] = c, b[i].readers = readers.copy(c.readers);
        readers.release(c.readers);
        c.readers = 0, c.split = 1;
      }
      for (u32 i = first; i < stop; i++) visit<SHARED>(bytes[i], a, offset + (i - first));
    }
    offset += stop - first;
    first = stop;
  }
}
void visit_global(u64 address, u32 bytes, const Access& a, u64 offset) {
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
  visit_range<false>(p->words, p->bytes, first, bytes, a, offset);
}

// ---------------------------------------------------------------- acquire and release through a location
void synchronise(u64 address, bool shared, const Access& a) {
  auto& locations = shared ? shared_locations : global_locations;
  const u32 t = a.me;
  const bool cta = a.flags & A_CTA, atomic = a.flags & A_ATOMIC, reads = atomic || !(a.flags & A_WRITE), writes = atomic || (a.flags & A_WRITE);
  auto found = locations.find(address);
  if (reads && found != locations.end()) {
    Location& l = found->second;
    KnowledgePtr k = cta ? nullptr : l.all;
    if (l.cta_block == block_index) k = join(k, l.cta);
    if (k && (a.flags & A_ACQUIRE)) learn(t, k);
    else if (k) pending[t] = join(pending[t], k), any_knowledge = true;
  }
  if (!writes) return;
  KnowledgePtr give;
  if (a.flags & A_RELEASE) {
    give = snapshot(t);
    clocks[t]++;
  } else {
    give = cta ? released_cta[t] : released[t];
  }
  KnowledgePtr give_cta = cta ? give : (a.flags & A_RELEASE) ? give : released_cta[t];
  if (!give && !give_cta && found == locations.end()) return;
  Location& l = locations[address];
  if (l.cta_block != block_index) l.cta = nullptr, l.cta_block = block_index;
  l.cta = atomic ? join(l.cta, give_cta) : give_cta;
  if (!cta) l.all = atomic ? join(l.all, give) : give;
  else if (!atomic) l.all = nullptr;
}

// ---------------------------------------------------------------- requests: what a warp asks of one buffer at once
struct Request {
  u64 key;
  u32 epoch;
  u16 count;
  u8 kind;
  u32 range;
  u64 sectors[64];
};
constexpr u32 REQUESTS = 4096;
std::vector<Request> requests;
std::vector<u32> request_slots;
u32 request_epoch = 1;
void flush_requests() {
  for (u32 slot : request_slots) {
    const Request& r = requests[slot];
    if (r.range >= launch->buffer_count) continue;
    BufferCount& c = launch->counts[r.range];
    (r.kind == 0 ? c.load_requests : r.kind == 1 ? c.store_requests : c.atomic_requests)++;
    (r.kind == 0 ? c.load_sectors : r.kind == 1 ? c.store_sectors : c.atomic_sectors) += r.count;
  }
  request_slots.clear();
  request_epoch++;
}
void count_request(u32 range, u64 address, u32 bytes, u32 flags, u32 site) {
  if (range >= launch->buffer_count) return;
  BufferCount& c = launch->counts[range];
  const u8 kind = flags & A_ATOMIC ? 2 : flags & A_WRITE ? 1 : 0;
  (kind == 0 ? c.load_bytes : kind == 1 ? c.store_bytes : c.atomic_bytes) += bytes;
  if (request_slots.size() >= REQUESTS / 2) flush_requests();
  // The lanes of a warp run this instruction at different times here; they belong together when each has run the
  // instruction's basic block equally often.
  const u64 key = ((u64)current->blocks[emu_sites[site].block] << 32 | site) * 32 + current->warp;
  u32 h = (u32)(((key + range) * 0x9E3779B97F4A7C15ull) >> 40) & (REQUESTS - 1);
  while (requests[h].epoch == request_epoch && (requests[h].key != key || requests[h].range != range)) h = (h + 1) & (REQUESTS - 1);
  Request& r = requests[h];
  if (r.epoch != request_epoch) {
    r.key = key, r.epoch = request_epoch, r.count = 0, r.kind = kind, r.range = range;
    request_slots.push_back(h);
  }
  for (u64 sector = address / 32; sector <= (address + bytes - 1) / 32; sector++) {
    u32 i = r.count;
    while (i && r.sectors[i - 1] != sector) i--;
    if (!i && r.count < 64) r.sectors[r.count++] = sector;
  }
}

// ---------------------------------------------------------------- faults of one access
void shared_outside(u32 address, u32 bytes, u32 flags, u32 site) {
  const SharedVariable* near_variable = nullptr;
  const u32 o = address - SHARED_ORIGIN;
  for (u32 i = 0; i < kernel->shared_count; i++)
    if (kernel->shared[i].offset <= o && address >= SHARED_ORIGIN) near_variable = &kernel->shared[i];
  const u32 dynamic = kernel->dynamic_offset;
  if (address >= SHARED_ORIGIN && o >= dynamic) {
    fault("shared_out_of_bounds", site, "dynamic shared memory", "%s of %u bytes at offset %u of dynamic shared memory: the launch gave %u bytes", verb(flags), bytes, o - dynamic, emu_dynamic_bytes);
  }
  if (near_variable)
    fault("shared_out_of_bounds", site, near_variable->name, "%s of %u bytes at offset %u of __shared__ '%s', which has %u bytes", verb(flags), bytes, o - near_variable->offset, near_variable->name,
          near_variable->bytes);
  fault("shared_out_of_bounds", site, "shared memory", "%s of %u bytes at shared address %#x, which belongs to no variable", verb(flags), bytes, address);
}
const char* shared_place(u32 o, u32* offset) {
  for (u32 i = 0; i < kernel->shared_count; i++)
    if (o >= kernel->shared[i].offset && o < kernel->shared[i].offset + kernel->shared[i].bytes) {
      *offset = o - kernel->shared[i].offset;
      return kernel->shared[i].name;
    }
  *offset = o - kernel->dynamic_offset;
  return "dynamic shared memory";
}

// ---------------------------------------------------------------- one access
void shared_access(u32 o, u32 bytes, u32 flags, u32 site) {
  u32 offset;
  const char* name = shared_place(o, &offset);
  Access a{current->linear, flags, site, 0, (flags & (A_WRITE | A_ATOMIC)) != 0, name, "shared"};
  a.clock = clocks[a.me];
  if (flags & A_STRONG) synchronise(o, true, a), a.clock = clocks[a.me] - ((flags & A_RELEASE) ? 1 : 0);
  visit_range<true>(shared_words, shared_bytes, o, bytes, a, offset);
}
const char* in_words(u64 distance, bool past) {
  static char text[64];
  snprintf(text, sizeof text, "%llu bytes %s", (unsigned long long)distance, past ? "past its end" : "before its start");
  return text;
}
u32 find_range(u64 address, u32 bytes, u32 flags, u32 site) {
  const bool write = flags & (A_WRITE | A_ATOMIC);
  if (last_range < ranges.size()) {
    const Range& r = ranges[last_range];
    if (address >= r.low && address + bytes <= r.high && (!write || r.writable)) return last_range;
  }
  const Range* denied = nullptr;
  for (u32 i = 0; i < ranges.size(); i++) {
    const Range& r = ranges[i];
    if (address < r.low || address + bytes > r.high) continue;
    if (!write || r.writable) return last_range = i;
    denied = &r;
  }
  if (denied) fault("read_only", site, denied->name, "%s of %u bytes at byte %llu of '%s', which is read-only", verb(flags), bytes, (unsigned long long)(address - denied->low), denied->name);
  const Range* nearest = nullptr;
  u64 best = ~0ull;
  for (const Range& r : ranges) {
    u64 distance = address >= r.high ? address - r.high : address < r.low ? r.low - address : 0;
    if (distance < best) best = distance, nearest = &r;
  }
  if (!nearest) fault("global_out_of_bounds", site, nullptr, "%s of %u bytes at %#llx: no buffer is registered", verb(flags), bytes, (unsigned long long)address);
  const u64 size = nearest->high - nearest->low;
  if (best == 0 && address >= nearest->low && address < nearest->high)
    fault("global_out_of_bounds", site, nearest->name, "%s of %u bytes at byte %llu of '%s' crosses its end (%llu bytes)", verb(flags), bytes, (unsigned long long)(address - nearest->low), nearest->name,
          (unsigned long long)size);
  const bool past = address >= nearest->high;
  fault("global_out_of_bounds", site, nearest->name, "%s of %u bytes at %#llx lies in no buffer; the nearest is '%s' (%llu bytes): the access starts %s, at byte %lld", verb(flags), bytes,
        (unsigned long long)address, nearest->name, (unsigned long long)size, in_words(best, past), (long long)(address - nearest->low));
}
void global_access(u64 address, u32 bytes, u32 flags, u32 site, u32 alignment) {
  const u32 index = find_range(address, bytes, flags, site);
  const Range& r = ranges[index];
  if (address % alignment)
    fault("misaligned", site, r.name, "%s of %u bytes at byte %llu of '%s' (address %#llx) needs an alignment of %u", verb(flags), bytes, (unsigned long long)(address - r.low), r.name,
          (unsigned long long)address, alignment);
  count_request(index, address, bytes, flags, site);
  if (!r.tracked) return;
  Access a{current->linear, flags, site, 0, (flags & (A_WRITE | A_ATOMIC)) != 0, r.name, "global"};
  if (flags & A_STRONG) synchronise(address, false, a);
  a.clock = clocks[a.me] - ((flags & A_RELEASE) ? 1 : 0);
  visit_global(address, bytes, a, address - r.low);
}
u32 shared_offset(u32 address, u32 bytes, u32 flags, u32 site) {
  const u32 o = address - SHARED_ORIGIN;
  if (address < SHARED_ORIGIN || o + bytes > shared_extent) shared_outside(address, bytes, flags, site);
  for (u32 i = 0; i < bytes; i++)
    if (shared_state[o + i] == OUTSIDE) shared_outside(address, bytes, flags, site);
  if (address % bytes) {
    u32 offset;
    const char* name = shared_place(o, &offset);
    fault("misaligned", site, name, "%s of %u bytes at byte %u of shared '%s' needs an alignment of %u", verb(flags), bytes, offset, name, bytes);
  }
  return o;
}
void shared_not_ready(u32 o, u32 bytes, u32 flags, u32 site) {
  for (u32 i = o; i < o + bytes; i++) {
    u32 offset;
    const char* name = shared_place(i, &offset);
    if (shared_state[i] == IN_FLIGHT)
      fault("in_flight", site, name, "%s of shared '%s' at byte %u: a cp.async to it has not been waited for", verb(flags), name, offset);
    if (shared_state[i] == UNWRITTEN && !(flags & A_WRITE))
      fault("uninitialised", site, name, "%s of shared '%s' at byte %u, which nobody has written", verb(flags), name, offset);
  }
}
bool all_equal(const u8* p, u32 bytes, u8 value) {
  for (u32 i = 0; i < bytes; i++)
    if (p[i] != value) return false;
  return true;
}
bool any_in_flight(const u8* p, u32 bytes) {
  u8 seen = 0;
  for (u32 i = 0; i < bytes; i++) seen |= p[i];
  return seen & 2;
}
// Named barriers: what has arrived so far.
u32 barrier_rows[BARRIERS][MAX_THREADS], barrier_warps[BARRIERS];
KnowledgePtr barrier_acquired[BARRIERS], barrier_pending[BARRIERS];
}  // namespace

// ---------------------------------------------------------------- what kernels and the runtime call
u8* emu_check_shared(u32 address, u32 bytes, u32 flags, u32 site) {
  const u32 o = shared_offset(address, bytes, flags, site);
  u8* state = shared_state + o;
  if (!all_equal(state, bytes, WRITTEN)) {
    if (!(flags & A_WRITE) || any_in_flight(state, bytes)) shared_not_ready(o, bytes, flags, site);
    memset(state, WRITTEN, bytes);
  }
  shared_access(o, bytes, flags, site);
  return emu_shared_memory + o;
}
u8* emu_check_global(u64 address, u32 bytes, u32 flags, u32 site) {
  global_access(address, bytes, flags, site, bytes);
  return (u8*)address;
}
u8* emu_check_generic(u64 address, u32 bytes, u32 flags, u32 site) {
  if (is_shared(address)) return emu_check_shared((u32)shared_from_generic(address), bytes, flags, site);
  const u64 stack = address - (u64)stacks;
  if (stack < stack_stride * thread_count) {
    if (stack / stack_stride != current->linear) fault("local_out_of_bounds", site, "local memory", "%s of %u bytes in the local memory of thread %llu", verb(flags), bytes, (unsigned long long)(stack / stack_stride));
    return (u8*)address;
  }
  return emu_check_global(address, bytes, flags, site);
}
void emu_local_fault(u64 address, u32 bytes, const void* base, u64 size, u32 site) {
  const u64 o = address - (u64)base;
  if (o <= size && o + bytes <= size) fault("misaligned", site, "local memory", "access of %u bytes at byte %llu of local memory is misaligned", bytes, (unsigned long long)o);
  fault("local_out_of_bounds", site, "local memory", "access of %u bytes at byte %lld of the thread's %llu bytes of local memory", bytes, (long long)o, (unsigned long long)size);
}
void emu_fence(u32 cta_scope, u32, u32) {
  const u32 t = current->linear;
  learn(t, join(pending[t], block_pending));
  pending[t] = nullptr;
  released_cta[t] = snapshot(t);
  if (!cta_scope) released[t] = released_cta[t];
  clocks[t]++;
}
void check_copy_issue(const CopyOp& op) {
  if (op.source_bytes) global_access(op.source, op.source_bytes, A_READ, op.site, 1);
  if (op.source_bytes && op.source % op.bytes) fault("misaligned", op.site, nullptr, "cp.async of %u bytes from address %#llx", op.bytes, (unsigned long long)op.source);
  const u32 o = shared_offset(op.destination, op.bytes, A_WRITE, op.site);
  if (any_in_flight(shared_state + o, op.bytes)) shared_not_ready(o, op.bytes, A_WRITE, op.site);
  shared_access(o, op.bytes, A_WRITE, op.site);
  memset(shared_state + o, IN_FLIGHT, op.bytes);
}
void check_copy_complete(const CopyOp& op) {
  const u32 o = op.destination - SHARED_ORIGIN;
  memset(shared_state + o, WRITTEN, op.bytes);
  shared_access(o, op.bytes, A_WRITE, op.site);
}
void check_full_barrier() {
  for (u32 t = 0; t < thread_count; t++) base_clock = clocks[t] > base_clock ? clocks[t] : base_clock;
  for (u32 t = 0; t < thread_count; t++) clocks[t] = base_clock + 1, row_warps[t] = 0;
  shared_generation++;
  shared_readers.clear();
  flush_requests();
  if (!any_knowledge) return;
  for (u32 t = 0; t < thread_count; t++) {
    block_acquired = join(block_acquired, acquired[t]);
    block_pending = join(block_pending, pending[t]);
    acquired[t] = pending[t] = nullptr;
  }
  any_knowledge = false;
}
void check_warp_join(u32 warp, u32 lanes) {
  u32 touched = 1u << warp;
  for (u32 m = lanes; m; m &= m - 1) touched |= row_warps[warp * 32 + (u32)lowest(m)];
  for (u32 rest = touched; rest; rest &= rest - 1) {
    const u32 w = (u32)lowest(rest);
    u32 most[32] = {};
    for (u32 m = lanes; m; m &= m - 1) {
      const u32 t = warp * 32 + (u32)lowest(m);
      if (!(row_warps[t] >> w & 1)) continue;
      const u32* r = row(t) + w * 32;
      for (int i = 0; i < 32; i++) most[i] = r[i] > most[i] ? r[i] : most[i];
    }
    if (w == warp)
      for (u32 m = lanes; m; m &= m - 1) most[lowest(m)] = clocks[warp * 32 + (u32)lowest(m)];
    for (u32 m = lanes; m; m &= m - 1) memcpy(row(warp * 32 + (u32)lowest(m)) + w * 32, most, sizeof most);
  }
  for (u32 m = lanes; m; m &= m - 1) {
    const u32 t = warp * 32 + (u32)lowest(m);
    row_warps[t] = touched;
    clocks[t]++;
  }
  if (!any_knowledge) return;
  KnowledgePtr all, waiting;
  for (u32 m = lanes; m; m &= m - 1) {
    all = join(all, acquired[warp * 32 + (u32)lowest(m)]);
    waiting = join(waiting, pending[warp * 32 + (u32)lowest(m)]);
  }
  for (u32 m = lanes; m; m &= m - 1) acquired[warp * 32 + (u32)lowest(m)] = all, pending[warp * 32 + (u32)lowest(m)] = waiting;
}
void check_barrier_arrive(u32 id) {
  const u32 t = current->linear;
  u32* to = barrier_rows[id];
  for (u32 rest = row_warps[t] | 1u << (t / 32); rest; rest &= rest - 1) {
    const u32 w = (u32)lowest(rest);
    if (!(barrier_warps[id] >> w & 1)) memset(to + w * 32, 0, 128), barrier_warps[id] |= 1u << w;
    if (!(row_warps[t] >> w & 1)) continue;
    for (u32 u = w * 32; u < w * 32 + 32; u++) to[u] = row(t)[u] > to[u] ? row(t)[u] : to[u];
  }
  to[t] = clocks[t] > to[t] ? clocks[t] : to[t];
  clocks[t]++;
  barrier_acquired[id] = join(barrier_acquired[id], acquired[t]);
  barrier_pending[id] = join(barrier_pending[id], pending[t]);
}
void check_barrier_pass(u32 id, u32 t) {
  const u32* from = barrier_rows[id];
  for (u32 rest = barrier_warps[id]; rest; rest &= rest - 1) {
    const u32 w = (u32)lowest(rest);
    open_row(t, w);
    for (u32 u = w * 32; u < w * 32 + 32; u++) row(t)[u] = from[u] > row(t)[u] ? from[u] : row(t)[u];
  }
  acquired[t] = join(acquired[t], barrier_acquired[id]);
  pending[t] = join(pending[t], barrier_pending[id]);
}
void check_barrier_reset(u32 id) {
  barrier_warps[id] = 0;
  barrier_acquired[id] = barrier_pending[id] = nullptr;
}
void check_begin_launch() {
  clocks.assign(thread_count, 1);
  rows.resize((size_t)thread_count * MAX_THREADS);
  row_warps.assign(thread_count, 0);
  acquired.assign(thread_count, nullptr), pending.assign(thread_count, nullptr);
  released.assign(thread_count, nullptr), released_cta.assign(thread_count, nullptr);
  if (requests.empty()) requests.resize(REQUESTS);
  ranges.clear();
  for (u32 i = 0; i < launch->buffer_count; i++) {
    const BufferInfo& b = launch->buffers[i];
    ranges.push_back({b.name, b.address, b.address + b.bytes, b.writable != 0, b.writable != 0, false});
  }
  for (u32 i = 0; i < kernel->global_count; i++) {
    const GlobalVariable& g = kernel->globals[i];
    ranges.push_back({g.name, (u64)g.address, (u64)g.address + g.bytes, g.writable, g.writable, true});
  }
  ranges.push_back({"kernel parameters", (u64)launch->params, (u64)launch->params + kernel->param_bytes, false, false, true});
  for (Range& r : ranges)
    for (const Range& o : ranges)
      if (o.writable && o.low < r.high && r.low < o.high) r.tracked = true;
  last_range = 0;
  memset(shared_layout, OUTSIDE, sizeof shared_layout);
  for (u32 i = 0; i < kernel->shared_count; i++) memset(shared_layout + kernel->shared[i].offset, UNWRITTEN, kernel->shared[i].bytes);
  memset(shared_layout + kernel->dynamic_offset, UNWRITTEN, emu_dynamic_bytes);
  shared_extent = kernel->dynamic_offset + emu_dynamic_bytes;
  if (kernel->static_shared > shared_extent) shared_extent = kernel->static_shared;
}
void check_end_launch() {
  request_slots.clear();
  request_epoch++;
  for (auto& entry : pages) {
    free(entry.second->bytes);
    free(entry.second);
  }
  pages.clear();
  memset(page_cache, 0, sizeof page_cache);
  global_readers.clear();
  global_locations.clear();
  shared_locations.clear();
  block_acquired = block_pending = nullptr;
}
void check_begin_block() {
  base_clock = 0;
  for (u32 t = 0; t < thread_count; t++) {
    clocks[t] = 1, row_warps[t] = 0;
    acquired[t] = pending[t] = released[t] = released_cta[t] = nullptr;
  }
  block_acquired = block_pending = nullptr;
  any_knowledge = false;
  shared_locations.clear();
  shared_generation++;
  shared_readers.clear();
  memcpy(shared_state, shared_layout, shared_extent);
  for (u32 i = 0; i < BARRIERS; i++) check_barrier_reset(i);
}
void check_end_block() { flush_requests(); }
#endif
