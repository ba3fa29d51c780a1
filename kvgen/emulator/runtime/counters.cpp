// counters.cpp - check mode: what the lanes of a warp ask of memory at once: sectors of a buffer, wavefronts of shared memory.
//
// The lanes of a warp run an instruction at different times here; they belong together when each has run the instruction's
// basic block equally often. A request stays open until every lane that is alive has taken part or gone past it, so that
// what is counted does not depend on who ran first.
#include "counters.h"
#include <map>
#include <vector>

#if EMU_CHECK
namespace {
constexpr u32 SECTOR = 32, BANKS = 32, FREE = ~0u, CLOSED = ~0u - 1;
struct Lanes {  // of one open request
  u64 address[32];
  u8 bytes[32];
};
struct Slot {  // of a hash table; lanes: an index, FREE, or CLOSED where its request has been counted
  u64 key;     // execution of the basic block, site, block of the cluster, warp
  u32 range, present, lanes;
  u32 kind;
};
constexpr u32 WARP_BITS = 5, RANK_BITS = 4, SITE_BITS = 27;  // and 28 for executions, of which there are fewer than RUNAWAY
static_assert(RUNAWAY == 1u << (64 - WARP_BITS - RANK_BITS - SITE_BITS) && MAX_CLUSTER == 1u << RANK_BITS && MAX_WARPS == 1u << WARP_BITS, "");

typedef std::pair<u32, u32> Place;  // site, buffer
pthread_mutex_t merging = PTHREAD_MUTEX_INITIALIZER;
std::map<Place, SiteCount> merged;
std::vector<SiteCount> result;
}  // namespace

struct WorkerCounters {
  std::vector<Slot> slots;
  u32 mask = 0, taken = 0;  // taken: slots that are not free
  std::vector<Lanes> lanes;
  std::vector<u32> idle_lanes;
  std::vector<SiteCount> rows;
  std::vector<u32> first_row, next_row;  // of a site; further buffers of the same one
  std::vector<s64> in_flight, most_in_flight;  // bytes of each thread's own copies
  u64 peak = 0;
  u64 bulk_bytes = 0, bulk_sector = 0;

  WorkerCounters() : in_flight(worker->fiber_count), most_in_flight(worker->fiber_count) { resize(512); }
  void resize(u32 size) { slots.assign(size, Slot{0, 0, 0, FREE, 0}), mask = size - 1; }
  u32 home(u64 key, u32 range) const { return (u32)(((key + range) * 0x9E3779B97F4A7C15ull) >> 32) & mask; }
  Slot& find(u64 key, u32 range);
  void open(Slot& s, u64 key, u32 range, u32 kind);
  void close(Slot& s);
  bool complete(const Slot& s) const;
  void sweep(bool all);
  SiteCount& row(u32 site, u32 range, u32 kind);
};

namespace {
u32 warp_of(u64 key) { return key & (MAX_WARPS - 1); }
u32 rank_of(u64 key) { return key >> WARP_BITS & (MAX_CLUSTER - 1); }
u32 site_of(u64 key) { return key >> (WARP_BITS + RANK_BITS) & ((1u << SITE_BITS) - 1); }
u32 execution_of(u64 key) { return (u32)(key >> (WARP_BITS + RANK_BITS + SITE_BITS)); }
u32 kind_of(u32 flags) { return flags & A_ATOMIC ? 2 : flags & A_WRITE ? 1 : 0; }

// ---------------------------------------------------------------- one request
void count_sectors(const Lanes& l, u32 present, SiteCount& row) {
  struct Part { u64 low, high; } parts[32];
  u32 n = 0;
  bool ascending = true;
  for (u32 m = present; m; m &= m - 1) {
    const u32 i = lowest(m);
    parts[n] = {l.address[i], l.address[i] + l.bytes[i]};
    row.bytes += l.bytes[i];
    ascending &= !n || parts[n].low >= parts[n - 1].low;
    n++;
  }
  for (u32 i = 1; i < n && !ascending; i++) {
    const Part p = parts[i];
    u32 j = i;
    for (; j && parts[j - 1].low > p.low; j--) parts[j] = parts[j - 1];
    parts[j] = p;
  }
  u64 covered = 0, next_sector = 0, distinct = 0;
  for (u32 i = 0; i < n; i++) {
    const u64 first = parts[i].low / SECTOR, past = (parts[i].high - 1) / SECTOR + 1;
    row.units += past - (first > next_sector ? first : next_sector), next_sector = past;
    if (parts[i].high > covered) distinct += parts[i].high - (parts[i].low > covered ? parts[i].low : covered), covered = parts[i].high;
  }
  row.ideal += (distinct + SECTOR - 1) / SECTOR;
}
// A wavefront serves each bank once. Lanes that read or write one word share it; atomics on one word do not.
u32 wavefronts(const Lanes& l, u32 present, bool atomic) {
  u32 words[BANKS][32];
  u8 depth[BANKS] = {};
  u32 most = 0;
  for (u32 m = present; m; m &= m - 1) {
    const u32 i = lowest(m);
    for (u32 w = (u32)l.address[i] / 4; w <= ((u32)l.address[i] + l.bytes[i] - 1) / 4; w++) {
      const u32 bank = w % BANKS;
      u32 d = atomic ? depth[bank] : 0;
      while (d < depth[bank] && words[bank][d] != w) d++;
      if (d < depth[bank]) continue;
      words[bank][d] = w;
      depth[bank] = (u8)(d + 1);
      if (d + 1 > most) most = d + 1;
    }
  }
  return most;
}
bool banks_differ(const Lanes& l, u32 present, u32 bytes) {  // of any two lanes: most requests are like that
  const u32 shift = (u32)__builtin_ctz(bytes < 4 ? 4 : bytes), places = (4 * BANKS >> shift) - 1;
  u32 seen = 0;
  for (u32 m = present; m; m &= m - 1) {
    const u32 bit = 1u << ((u32)l.address[lowest(m)] >> shift & places);
    if (seen & bit) return false;
    seen |= bit;
  }
  return true;
}
// 8-byte accesses are served by half-warps, 16-byte ones by quarter-warps: of ldmatrix, the eight rows of one matrix.
void count_wavefronts(const Lanes& l, u32 present, bool atomic, SiteCount& row) {
  const u32 bytes = l.bytes[lowest(present)], group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  row.bytes += (u64)bytes * __builtin_popcount(present);
  for (u32 first = 0; first < 32; first += group) {
    const u32 lanes = present & (u32)(((1ull << group) - 1) << first);
    if (!lanes) continue;
    const u32 ways = banks_differ(l, lanes, bytes) ? 1 : wavefronts(l, lanes, atomic);
    row.units += ways, row.ideal++;
    if (ways > row.worst) row.worst = ways;
  }
}
}  // namespace

SiteCount& WorkerCounters::row(u32 site, u32 range, u32 kind) {
  if (site >= first_row.size()) first_row.resize(site + 64, FREE);
  u32* at = &first_row[site];
  while (*at != FREE && rows[*at].buffer != range) at = &next_row[*at];
  if (*at == FREE) {
    *at = (u32)rows.size();
    rows.push_back(SiteCount{emu_sites[site].where, site, range, kind, 0, 0, 0, 0, 0, 0});
    next_row.push_back(FREE);
    return rows.back();
  }
  return rows[*at];
}

// ---------------------------------------------------------------- open requests
Slot& WorkerCounters::find(u64 key, u32 range) {  // its slot, or one where it may begin
  Slot* closed = nullptr;
  for (u32 h = home(key, range);; h = (h + 1) & mask) {
    Slot& s = slots[h];
    if (s.lanes == FREE) return closed ? *closed : s;
    if (s.lanes == CLOSED) closed = closed ? closed : &s;
    else if (s.key == key && s.range == range) return s;
  }
}
void WorkerCounters::open(Slot& s, u64 key, u32 range, u32 kind) {
  taken += s.lanes == FREE;
  if (idle_lanes.empty()) {
    idle_lanes.push_back((u32)lanes.size());
    lanes.emplace_back();
  }
  s = {key, range, 0, idle_lanes.back(), kind};
  idle_lanes.pop_back();
}
void WorkerCounters::close(Slot& s) {
  const Lanes& l = lanes[s.lanes];
  SiteCount& r = row(site_of(s.key), s.range, s.kind);
  r.requests++;
  if (s.range == SHARED_MEMORY) count_wavefronts(l, s.present, s.kind == 2, r);
  else count_sectors(l, s.present, r);
  idle_lanes.push_back(s.lanes);
  s.lanes = CLOSED;
}
bool WorkerCounters::complete(const Slot& s) const {
  const Block& b = worker->blocks[rank_of(s.key)];
  const u32 warp = warp_of(s.key), block = emu_sites[site_of(s.key)].block;
  for (u32 m = b.warps[warp].alive & ~s.present; m; m &= m - 1)
    if (b.fibers[warp * 32 + lowest(m)].blocks[block] <= execution_of(s.key)) return false;
  return true;
}
void WorkerCounters::sweep(bool all) {
  std::vector<Slot> left;
  for (Slot& s : slots) {
    if (s.lanes >= CLOSED) continue;
    if (all || complete(s)) close(s);
    else left.push_back(s);
  }
  u32 size = (u32)slots.size();
  while (left.size() > size / 4) size *= 2;
  resize(size);
  taken = (u32)left.size();
  for (const Slot& s : left) find(s.key, s.range) = s;
}

// ---------------------------------------------------------------- what the checker calls
void count_request(u32 range, u64 address, u32 bytes, u32 flags, u32 site) {
  if (range != SHARED_MEMORY && range >= launch->buffer_count) return;
  WorkerCounters& k = *worker->counters;
  const Fiber& me = *worker->current;
  const u64 key = ((((u64)me.blocks[emu_sites[site].block] << SITE_BITS | site) << RANK_BITS | me.rank) << WARP_BITS) | me.warp;
  Slot* s = &k.slots[k.home(key, range)];
  if (s->lanes >= CLOSED || s->key != key || s->range != range) s = &k.find(key, range);
  const bool is_open = s->lanes < CLOSED;
  if (is_open && s->present >> me.lane & 1) k.close(*s);  // an instruction with several accesses
  if (s->lanes >= CLOSED) {
    if (!is_open && k.taken > k.mask / 2) {
      k.sweep(false);
      s = &k.find(key, range);
    }
    k.open(*s, key, range, kind_of(flags));
  }
  Lanes& l = k.lanes[s->lanes];
  l.address[me.lane] = address, l.bytes[me.lane] = (u8)bytes;
  s->present |= 1u << me.lane;
  const u32 alive = me.block->warps[me.warp].alive;
  if ((s->present & alive) == alive) k.close(*s);
}
void count_bulk(u32 range, u64 address, u64 bytes, u32 flags, u32 site, bool first) {
  if (range >= launch->buffer_count || !bytes) return;
  WorkerCounters& k = *worker->counters;
  SiteCount& r = k.row(site, range, kind_of(flags));
  if (first) k.bulk_bytes = k.bulk_sector = 0, r.requests++;
  const u64 begin = address / SECTOR, past = (address + bytes - 1) / SECTOR + 1;
  r.bytes += bytes;
  r.units += past - begin - (begin + 1 == k.bulk_sector);  // the row before may end in the sector where this one begins
  r.ideal += (k.bulk_bytes + bytes + SECTOR - 1) / SECTOR - (k.bulk_bytes + SECTOR - 1) / SECTOR;
  k.bulk_bytes += bytes, k.bulk_sector = past;
}
void note_in_flight(const Fiber& issuer, s64 bytes) {
  WorkerCounters& k = *worker->counters;
  const s64 now = k.in_flight[issuer.slot] += bytes;
  if (now > k.most_in_flight[issuer.slot]) k.most_in_flight[issuer.slot] = now;
}

// ---------------------------------------------------------------- blocks, workers, the launch
void end_block_counts(const Block& b) {
  WorkerCounters& k = *worker->counters;
  k.sweep(true);
  u64 sum = 0;
  for (u32 t = 0; t < thread_count; t++) {
    const u32 slot = b.fibers[t].slot;
    sum += (u64)k.most_in_flight[slot];
    k.in_flight[slot] = k.most_in_flight[slot] = 0;
  }
  if (sum > k.peak) k.peak = sum;
}
void begin_counting() { worker->counters = new WorkerCounters; }
void end_counting() {
  const WorkerCounters& k = *worker->counters;
  pthread_mutex_lock(&merging);
  for (const SiteCount& r : k.rows) {
    SiteCount& sum = merged.emplace(Place{r.site, r.buffer}, SiteCount{r.where, r.site, r.buffer, r.kind, 0, 0, 0, 0, 0, 0}).first->second;
    sum.requests += r.requests, sum.bytes += r.bytes, sum.units += r.units, sum.ideal += r.ideal;
    if (r.worst > sum.worst) sum.worst = r.worst;
  }
  if (k.peak > launch->peak_in_flight) launch->peak_in_flight = k.peak;
  pthread_mutex_unlock(&merging);
  delete worker->counters;
}
void begin_launch_counts() { merged.clear(); }
void end_launch_counts() {
  result.clear();
  for (const auto& found : merged) result.push_back(found.second);
  launch->sites = result.data(), launch->site_count = result.size();
}
#endif
