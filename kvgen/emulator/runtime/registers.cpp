// registers.cpp - setmaxnreg: the registers that a block's warpgroups hold, give away and wait for.
//
// A block has what it was launched with: registers a thread times the threads of its warps. `dec` gives some to the block's pool, `inc`
// takes from it and waits until there are enough; those of warps that have exited stay with them.
#include "warpgroup.h"

namespace {
u32 threads_of(const Block& block, u32 index) {  // of a warpgroup; a warp of fewer lanes holds as many registers as a whole one
  u32 warps = 0;
  for (u32 w = 0; w < GROUP_WARPS && index * GROUP_WARPS + w < MAX_WARPS; w++) warps += block.warps[index * GROUP_WARPS + w].born != 0;
  return warps * 32;
}
u32 held(const Warpgroup& g) { return g.registers ? g.registers : launch->registers; }
void wake(Block& block, Warpgroup& g, u32 index) {
  for (u32 l = 0; l < GROUP_LANES; l++)
    if (block.warps[index * GROUP_WARPS + l / 32].born >> l % 32 & 1) {
      g.lanes[l]->waiting = false;
      fiber_wake(block.fibers[index * GROUP_LANES + l]);
    }
}
// Warpgroups that wait, in order of their number, as far as there are registers.
void serve(Block& block) {
  for (u32 i = 0; i < MAX_WARPS / GROUP_WARPS; i++) {
    Warpgroup& g = block.warpgroups[i];
    const u32 more = g.wanted ? (g.wanted - held(g)) * threads_of(block, i) : 0;
    if (!more || more > block.free_registers) continue;
    block.free_registers -= more;
    g.registers = g.wanted, g.wanted = 0;
    wake(block, g, i);
  }
}
}  // namespace

// Whether the warpgroup, all of whose warps have come, may go on.
bool set_registers(Block& block, Warpgroup& g, u32 index, u32 count, bool takes, u32 site) {
  if (!launch->registers)
    fault("bad_registers", site, nullptr, "%s: ptxas drops it, as the kernel says neither .maxnreg nor .maxntid with .minnctapersm: how many registers a thread starts with is not known", op_text(site));
  const u32 threads = threads_of(block, index), has = held(g);
  if (takes ? count < has : count > has)
    fault("bad_registers", site, nullptr, "%s %u: a thread of the warpgroup has %u registers already", op_text(site), count, has);
  if (!takes) {
    block.free_registers += (has - count) * threads;
    g.registers = count;
    serve(block);
    return true;
  }
  const u32 all = launch->registers * ((thread_count + 31) & ~31u), others = ((thread_count + 31) & ~31u) - threads;
  if (count * threads + LEAST_REGISTERS * others > all)
    fault("bad_registers", site, nullptr, "%s %u: %u threads take %u registers and %u others at least %u, of %u that the block has: no wait ends", op_text(site), count, threads, count * threads, others,
          LEAST_REGISTERS * others, all);
  const u32 more = (count - has) * threads;
  if (more > block.free_registers) {
    g.wanted = count;
    return false;
  }
  block.free_registers -= more;
  g.registers = count;
  return true;
}
u32 awaited_registers(const Block& block, u32 warp) {
  const u32 index = warp / GROUP_WARPS;
  const Warpgroup* g = block.warpgroups ? &block.warpgroups[index] : nullptr;
  return g && g->wanted ? (g->wanted - held(*g)) * threads_of(block, index) : 0;
}
