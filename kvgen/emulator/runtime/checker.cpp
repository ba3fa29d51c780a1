// checker.cpp - check mode: one access - bounds, alignment, initialisation, copies in flight - and the life of a checker.
#include "checker.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>

#if EMU_CHECK
std::vector<Range> ranges;
const char* verb(u32 flags) { return flags & A_ATOMIC ? "atomic" : flags & A_WRITE ? "write" : "read"; }
namespace {
u8 shared_layout[SHARED_CAPACITY + 16];
u32 shared_extent;

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
struct Words { char text[64]; };
Words in_words(u64 distance, bool past) {
  Words w;
  snprintf(w.text, sizeof w.text, "%llu bytes %s", (unsigned long long)distance, past ? "past its end" : "before its start");
  return w;
}
}  // namespace

// ---------------------------------------------------------------- one access
static bool ordinary_store(u32 flags) { return (flags & (A_WRITE | A_ATOMIC | A_STRONG)) == A_WRITE; }
void check_leave() {
  if (!worker->record.set) settle_store(checker_here());
}
void shared_access(BlockChecker& home, u32 o, u32 bytes, u32 flags, u32 site, u8* place) {
  u32 offset;
  const char* name = shared_place(o, &offset);
  Access a{worker->current->linear, flags, site, 0, (flags & (A_WRITE | A_ATOMIC)) != 0, name, "shared"};
  BlockChecker& b = checker_here();
  settle_store(b);
  if (place && ordinary_store(flags)) a.place = place, a.bytes = bytes;
  if (flags & A_STRONG) synchronise(b, home.shared_locations, o, a);
  a.clock = b.clocks[a.me] - ((flags & A_RELEASE) ? 1 : 0);
  visit_shared(b, home, o, bytes, a, offset);
}
u32 find_range(u64 address, u32 bytes, u32 flags, u32 site) {
  const bool write = flags & (A_WRITE | A_ATOMIC);
  if (worker->last_range < ranges.size()) {
    const Range& r = ranges[worker->last_range];
    if (address >= r.low && address + bytes <= r.high && (!write || r.writable)) return worker->last_range;
  }
  const Range* denied = nullptr;
  for (u32 i = 0; i < ranges.size(); i++) {
    const Range& r = ranges[i];
    if (address < r.low || address + bytes > r.high) continue;
    if (!write || r.writable) return worker->last_range = i;
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
        (unsigned long long)address, nearest->name, (unsigned long long)size, in_words(best, past).text, (long long)(address - nearest->low));
}
// `later`: of a copy, which reads when it lands.
static void global_access(u64 address, u32 bytes, u32 flags, u32 site, u32 alignment, bool later = false) {
  const u32 index = find_range(address, bytes, flags, site);
  const Range& r = ranges[index];
  if (flags & A_CLUSTER && cluster_size == 1) flags |= A_CTA;
  if (address % alignment)
    fault("misaligned", site, r.name, "%s of %u bytes at byte %llu of '%s' (address %#llx) needs an alignment of %u", verb(flags), bytes, (unsigned long long)(address - r.low), r.name,
          (unsigned long long)address, alignment);
  count_request(index, address, bytes, flags, site);
  check_settled(r, address, flags, site);
  if (!later) note_read(checker_here(), worker->current->linear, checker_here().clocks[worker->current->linear], index, flags, site);
  if (!r.tracked) return;
  emu_await_turn();
  BlockChecker& b = checker_here();
  if (b.stores_under_way) check_unwritten(address, bytes, flags, site);
  settle_store(b);
  Access a{worker->current->linear, flags, site, 0, (flags & (A_WRITE | A_ATOMIC)) != 0, r.name, "global"};
  if (ordinary_store(flags)) a.place = (u8*)address, a.bytes = bytes;
  if (flags & A_STRONG) synchronise(b, global_locations, address, a);
  a.clock = b.clocks[a.me] - ((flags & A_RELEASE) ? 1 : 0);
  visit_global(b, address, bytes, a, address - r.low);
}
u32 shared_bounds(u32 address, u32 bytes, u32 flags, u32 site) {
  const u32 o = address - SHARED_ORIGIN;
  if (address < SHARED_ORIGIN || o + bytes > shared_extent) shared_outside(address, bytes, flags, site);
  for (u32 i = 0; i < bytes; i++)
    if (shared_layout[o + i] == OUTSIDE) shared_outside(address, bytes, flags, site);
  return o;
}
static u32 shared_offset(u32 address, u32 bytes, u32 flags, u32 site) {
  const u32 o = shared_bounds(address, bytes, flags, site);
  if (address % bytes) {
    u32 offset;
    const char* name = shared_place(o, &offset);
    fault("misaligned", site, name, "%s of %u bytes at byte %u of shared '%s' needs an alignment of %u", verb(flags), bytes, offset, name, bytes);
  }
  return o;
}
void shared_not_ready(const BlockChecker& home, u32 o, u32 bytes, u32 flags, u32 site) {
  const u8* shared_state = home.shared_state;
  for (u32 i = o; i < o + bytes; i++) {
    u32 offset;
    const char* name = shared_place(i, &offset);
    const u32 other = shared_state[i] & IN_FLIGHT ? flight_site(home, i) : shared_state[i] & HELD ? home.hold_sites[i] : NO_SITE;
    const char* op = other == NO_SITE ? "asynchronous operation" : emu_sites[other].op;
    const char* where = other == NO_SITE ? "an earlier line" : emu_sites[other].where;
    const int length = (int)strcspn(where, "|");
    if (shared_state[i] & IN_FLIGHT)
      fault("in_flight", site, name, "%s of shared '%s' at byte %u: the %s to it, issued at %.*s, has not been waited for", verb(flags), name, offset, op, length, where);
    if (shared_state[i] & HELD && flags & (A_WRITE | A_ATOMIC))
      fault("in_flight", site, name, "%s of shared '%s' at byte %u: the %s issued at %.*s may still read it", verb(flags), name, offset, op, length, where);
    if (shared_state[i] & MBARRIER)
      fault("bad_mbarrier", site, name, "%s of shared '%s' at byte %u, which holds a live mbarrier", verb(flags), name, offset);
    if (shared_state[i] == UNWRITTEN && !(flags & (A_WRITE | A_ATOMIC)) && hardware_level())
      suspect("uninitialised", site, name, "%s of shared '%s' at byte %u, which nobody has written", verb(flags), name, offset);
    else if (shared_state[i] == UNWRITTEN && !(flags & A_WRITE))
      fault("uninitialised", site, name, "%s of shared '%s' at byte %u, which nobody has written", verb(flags), name, offset);
  }
}
static bool all_equal(const u8* p, u32 bytes, u8 value) {
  for (u32 i = 0; i < bytes; i++)
    if (p[i] != value) return false;
  return true;
}
static bool any_busy(const u8* p, u32 bytes) {
  u8 seen = 0;
  for (u32 i = 0; i < bytes; i++) seen |= p[i];
  return seen & (IN_FLIGHT | HELD | MBARRIER);
}

// ---------------------------------------------------------------- what kernels and the runtime call
static u8* check_window(Block& block, u32 address, u32 bytes, u32 flags, u32 site) {
  BlockChecker& home = *block.checker;
  const u32 o = shared_offset(address, bytes, flags, site);
  u8* state = home.shared_state + o;
  if (!all_equal(state, bytes, WRITTEN)) {
    if (!(flags & A_WRITE) || any_busy(state, bytes)) shared_not_ready(home, o, bytes, flags, site);
    if (flags & A_WRITE) memset(state, WRITTEN, bytes);
  }
  count_request(SHARED_MEMORY, o, bytes, flags, site);
  worker->raced = false;
  if (flags & A_WRITE) determine_bytes(home, o, bytes);
  shared_access(home, o, bytes, flags, site, block.shared + o);
  return flags & (A_WRITE | A_ATOMIC) ? block.shared + o : read_or_probe(home, o, block.shared + o, bytes, site);
}
void note_visit(Block& block, u32 site) {
  const Fiber& me = *worker->current;
  if (&block != me.block) block.checker->visits[me.slot] = {checker_here().clocks[me.linear], site};
}
u8* emu_check_shared(u32 address, u32 bytes, u32 flags, u32 site) { return check_window(*worker->current->block, address, bytes, flags, site); }
u8* emu_check_cluster(u32 address, u32 bytes, u32 flags, u32 site) {
  const u32 rank = address >> RANK_SHIFT;
  if (rank > cluster_size) fault("shared_out_of_bounds", site, "shared memory", "%s of %u bytes at shared::cluster address %#x: there is no block %u in a cluster of %u", verb(flags), bytes, address, rank - 1, cluster_size);
  Block& block = rank ? worker->blocks[rank - 1] : *worker->current->block;
  if (!block.alive) fault("exited_block", site, "shared memory", "%s of %u bytes in the shared memory of block %u of the cluster, which has exited", verb(flags), bytes, block.rank);
  u8* place = check_window(block, address & WINDOW_MASK, bytes, flags, site);
  note_visit(block, site);
  return place;
}
// Its shared memory ends with a block: whoever used it from elsewhere must have said so.
void check_block_exit(Block& block) {
  BlockChecker& b = *block.checker;
  for (u32 slot = 0; slot < b.visits.size(); slot++) {
    const BlockChecker::Visit v = b.visits[slot];
    const Fiber& visitor = worker->fibers[slot];
    bool known = !v.clock;
    for (u32 t = 0; !known && t < thread_count; t++) known = b.knows_block(t, visitor.block->index, visitor.linear, v.clock);
    const char* where = emu_sites[v.site].where;
    if (!known)
      fault("exited_block", NO_SITE, "shared memory", "the block exits, and nothing orders before that the use of its shared memory by thread (%u,%u,%u) of block %u of the cluster at %.*s", visitor.tid[0],
            visitor.tid[1], visitor.tid[2], visitor.rank, (int)strcspn(where, "|"), where);
  }
  for (const BlockChecker::AgentVisit& v : b.agent_visits) {
    bool known = false;
    for (u32 t = 0; !known && t < thread_count; t++) known = b.knows_block(t, v.block, v.agent, v.clock);
    if (!known) fault("exited_block", v.site, "shared memory", "the block exits, and nothing orders before that the end of the %s that reads its shared memory", op_text(v.site));
  }
}
u8* emu_check_global(u64 address, u32 bytes, u32 flags, u32 site) {
  global_access(address, bytes, flags, site, bytes);
  return (u8*)address;
}
u8* emu_check_generic(u64 address, u32 bytes, u32 flags, u32 site) {
  if (is_shared(worker->current, address)) return emu_check_cluster((u32)shared_from_generic(worker->current, address), bytes, flags, site);
  const u64 stack = address - (u64)worker->stacks;
  if (stack < stack_stride * worker->fiber_count) {
    if (stack / stack_stride != worker->current->slot) fault("local_out_of_bounds", site, "local memory", "%s of %u bytes in the local memory of thread %llu", verb(flags), bytes, (unsigned long long)(stack / stack_stride));
    return at_local(worker->current, local_from_generic(worker->current, address), bytes, site);
  }
  return emu_check_global(address, bytes, flags, site);
}
void check_copy_issue(const CopyOp& op) {
  BlockChecker& b = checker_here();
  if (op.source_bytes) global_access(op.source, op.source_bytes, A_READ, op.site, 1, true);
  if (op.source_bytes && op.source % op.bytes) fault("misaligned", op.site, nullptr, "cp.async of %u bytes from address %#llx", op.bytes, (unsigned long long)op.source);
  const u32 o = shared_offset(op.destination, op.bytes, A_WRITE, op.site);
  if (any_busy(b.shared_state + o, op.bytes)) shared_not_ready(b, o, op.bytes, A_WRITE, op.site);
  count_request(SHARED_MEMORY, o, op.bytes, A_WRITE, op.site);
  note_in_flight(*worker->current, op.source_bytes);
  determine_bytes(b, o, op.bytes);
  shared_access(b, o, op.bytes, A_WRITE, op.site);
  memset(b.shared_state + o, IN_FLIGHT, op.bytes);
}

// ---------------------------------------------------------------- launch, worker, block
void check_begin_launch() {
  begin_padding();
  begin_launch_counts();
  ranges.clear();
  for (u32 i = 0; i < launch->buffer_count; i++) {
    const BufferInfo& b = launch->buffers[i];
    ranges.push_back({b.name, b.address, b.address + b.bytes, b.writable != 0, b.writable != 0, false, b.settled != 0});
  }
  for (u32 i = 0; i < kernel->global_count; i++) {
    const GlobalVariable& g = kernel->globals[i];
    ranges.push_back({g.name, (u64)g.address, (u64)g.address + g.bytes, g.writable, g.writable, true, true});
  }
  ranges.push_back({"kernel parameters", (u64)launch->params, (u64)launch->params + kernel->param_bytes, false, false, true, true});
  for (Range& r : ranges)
    for (const Range& o : ranges)
      if (o.writable && o.low < r.high && r.low < o.high) r.tracked = true;
  memset(shared_layout, OUTSIDE, sizeof shared_layout);
  for (u32 i = 0; i < kernel->shared_count; i++) memset(shared_layout + kernel->shared[i].offset, UNWRITTEN, kernel->shared[i].bytes);
  memset(shared_layout + kernel->dynamic_offset, UNWRITTEN, emu_dynamic_bytes);
  shared_extent = kernel->dynamic_offset + emu_dynamic_bytes;
  if (kernel->static_shared > shared_extent) shared_extent = kernel->static_shared;
}
void check_end_launch() {
  end_shadow();
  end_launch_counts();
  end_proxy_fences();
}
void check_begin_worker() {
  begin_counting();
  worker->cluster_order = new ClusterOrder;
  for (u32 r = 0; r < cluster_size; r++) {
    BlockChecker& b = *(worker->blocks[r].checker = new BlockChecker);
    b.clocks.resize(thread_count), b.rows.resize((size_t)thread_count * ROW), b.row_groups.resize(thread_count), b.grid_waits.resize(thread_count), b.init_fences.resize(thread_count), b.proxy_fences.resize(thread_count);
    b.acquired.resize(thread_count), b.pending.resize(thread_count), b.released.resize(thread_count), b.released_cta.resize(thread_count);
  }
}
void check_end_worker() {
  for (u32 r = 0; r < cluster_size; r++) delete worker->blocks[r].checker;
  delete worker->cluster_order;
  end_counting();
}
void check_begin_block(Block& block) {
  BlockChecker& b = *block.checker;
  b.visits.assign(cluster_size > 1 ? worker->fiber_count : 0, {});
  b.agent_visits.clear();
  b.index = block.index, b.rank = block.rank;
  *worker->cluster_order = {};
  b.base_clock = 0;
  for (u32 t = 0; t < thread_count; t++) {
    b.clocks[t] = 1, b.row_groups[t] = b.init_fences[t] = 0;
    b.acquired[t] = b.pending[t] = b.released[t] = b.released_cta[t] = nullptr;
  }
  memset(b.agent_base, 0, sizeof b.agent_base);
  memset(b.followed, 0, sizeof b.followed);
  b.aligned = false;
  b.undetermined.clear();
  b.observed.clear();
  b.block_acquired = b.block_pending = nullptr;
  b.any_knowledge = false;
  b.shared_locations.clear();
  b.first_generation = ++b.generation;
  b.shared_readers.clear();
  memset(b.agent_ticks, 0, sizeof b.agent_ticks);
  b.mbarriers.clear();
  b.holds.clear();
  b.stores_under_way = 0;
  reset_proxy_fences(b);
  begin_dependents(b);
  memcpy(b.shared_state, shared_layout, shared_extent);
  for (u32 i = 0; i < BARRIERS; i++) b.barrier_rows[i].groups = b.barrier_rows[i].warps = 0, b.barrier_acquired[i] = b.barrier_pending[i] = nullptr;
}
void check_end_block(Block& block) { end_block_counts(block); }
#endif
