// dependents.cpp - check mode: launches that overlap. Memory that the kernel before may still write is touched behind griddepcontrol.wait
// only. Memory that the kernel behind may overwrite is read before griddepcontrol.launch_dependents only, whichever thread runs it.
//
// A read counts when it is done: a thread's own behind its next barrier or release, a copy's when its bytes have landed. For each
// thread, and for each mbarrier's agent, the clock of the last read is remembered; the trigger must know of all of them.
#include "checker.h"
#include "transfers.h"
#include <algorithm>
#include <string.h>

#if EMU_CHECK
void emu_grid_wait() {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear;
  if (!b.grid_waits[t]) b.grid_waits[t] = b.clocks[t]++;
}
static bool knows_grid(BlockChecker& b, u32 t) {
  for (u32 u = 0; !b.grid_waits[t] && u < thread_count; u++)
    if (b.grid_waits[u] && b.ordered(t, u, b.grid_waits[u])) b.grid_waits[t] = b.clocks[t];
  return b.grid_waits[t];
}
static bool reads(u32 flags) { return flags & A_ATOMIC || !(flags & A_WRITE); }

void check_settled(const Range& r, u64 address, u32 flags, u32 site) {
  if (!launch->programmatic || r.settled) return;
  BlockChecker& b = checker_here();
  const unsigned long long at = address - r.low;
  worker->level = HARDWARE;
  if (!knows_grid(b, worker->current->linear))
    fault("before_grid_wait", site, r.name, "%s of '%s' at byte %llu before griddepcontrol.wait: the kernel before this one may still be running", verb(flags), r.name, at);
  if (b.trigger_site == NO_SITE || !reads(flags)) return;
  const char* where = emu_sites[b.trigger_site].where;
  fault("after_trigger", site, r.name, "%s of '%s' at byte %llu behind the griddepcontrol.launch_dependents of the block at %.*s: the kernel behind this one may overwrite it", verb(flags), r.name, at,
        (int)strcspn(where, "|"), where);
}
// Bytes that another block of the cluster has asked for land in `home`.
void check_landing(const BlockChecker& home, u32 range, u32 site) {
  if (!launch->programmatic || home.trigger_site == NO_SITE) return;
  const char* where = emu_sites[home.trigger_site].where;
  worker->level = HARDWARE;
  fault("after_trigger", site, ranges[range].name, "%s of '%s' that lands behind the griddepcontrol.launch_dependents of its block at %.*s: the kernel behind this one may overwrite it", op_text(site), ranges[range].name,
        (int)strcspn(where, "|"), where);
}
void note_read(BlockChecker& b, u32 me, u32 clock, u32 range, u32 flags, u32 site) {
  if (launch->programmatic && !ranges[range].settled && reads(flags)) b.last_reads[me] = {clock, range, site};
}
// A copy whose bytes are still to be read. Those on the way to another block of a cluster are that block's.
static void check_under_way(const Block& block, u32 site) {
  const auto wrong = [&](u32 range, u32 copy) {
    if (ranges[range].settled) return;
    const char* where = emu_sites[copy].where;
    fault("after_trigger", site, ranges[range].name, "griddepcontrol.launch_dependents while the %s of '%s', issued at %.*s, has not been waited for: the kernel behind this one may overwrite it", op_text(copy),
          ranges[range].name, (int)strcspn(where, "|"), where);
  };
  for (u32 i = 0; i < thread_count; i++)
    for (u32 k = 0; k < block.fibers[i].copies.count; k++) {
      const CopyOp& op = block.fibers[i].copies.ops[k];
      if (!op.arrives_in && op.source_bytes) wrong(find_range(op.source, op.source_bytes, A_READ, op.site), op.site);
    }
  for (u32 r = 0; r < cluster_size; r++)
    for (auto& t : worker->blocks[r].async->transfers) {
      const bool here = t->mbarrier.block ? t->mbarrier.block == &block : t->issuer->block == &block;
      if (here && t->reads != NO_RANGE) wrong(t->reads, t->site);
    }
}
void emu_grid_trigger(u32 site) {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear;
  if (!launch->programmatic || b.trigger_site != NO_SITE) return;
  worker->level = HARDWARE;
  check_under_way(*worker->current->block, site);
  for (u32 u = 0; u < ROW; u++) {
    const BlockChecker::LastRead& read = b.last_reads[u];
    if (!read.clock || (u == t ? read.clock < b.clocks[t] : b.ordered(t, u, read.clock))) continue;
    const char *where = emu_sites[read.site].where, *name = ranges[read.range].name;
    worker->level = !hardware_level() && (u == t ? b.aligned : b.may_follow(t, b.index, u)) ? CHECK : HARDWARE;
    if (u >= MAX_THREADS)
      fault("after_trigger", site, name, "griddepcontrol.launch_dependents: nothing orders the end of the %s of '%s' at %.*s before it: the kernel behind this one may overwrite what is read", op_text(read.site), name,
            (int)strcspn(where, "|"), where);
    const Fiber& other = worker->current->block->fibers[u];
    fault("after_trigger", site, name, "griddepcontrol.launch_dependents: nothing orders the read of '%s' by thread (%u,%u,%u) at %.*s before it: the kernel behind this one may overwrite what is read", name, other.tid[0],
          other.tid[1], other.tid[2], (int)strcspn(where, "|"), where);
  }
  b.trigger_site = site;
}
void begin_dependents(BlockChecker& b) {
  b.trigger_site = NO_SITE;
  if (launch->programmatic) b.last_reads.assign(ROW, {0, 0, 0});
  std::fill(b.grid_waits.begin(), b.grid_waits.end(), 0);
}
#endif
