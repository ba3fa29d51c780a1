// cluster.cpp - what the blocks of a cluster do together: they run on one worker, their fibers under one scheduler.
#include "runtime.h"

static void complete_phase(Worker& w) {
  emu_spins = 0;
  w.barriers++;
  w.cluster_phase++;
  w.cluster_arrived = 0;
  check_cluster_complete();
  for (u32 i = 0; i < w.fiber_count; i++)
    if (w.fibers[i].state == AT_CLUSTER) fiber_wake(w.fibers[i]);
}
// Exited threads are not waited for; what an exited thread had released before still counts.
void cluster_exit(Fiber& f) {
  Worker& w = *worker;
  if (f.cluster_arrived && f.cluster_phase == w.cluster_phase) w.cluster_arrived--;
  if (w.cluster_arrived && w.cluster_arrived == w.alive) complete_phase(w);
}
static void converge(u32 site) {  // the lanes of a warp come together
  const auto meet = [](void**, u32 lanes) { check_aligned(worker->current->warp, lanes); };
  warp_operation(worker->current->own_warp->born, meet, nullptr, site, false, false);
}

void emu_cluster_arrive(u32 release, u32 aligned, u32 site) {
  Worker& w = *worker;
  Fiber& me = *w.current;
  if (aligned) converge(site);
  if (me.cluster_arrived) fault("bad_barrier", site, nullptr, "the thread arrives at the cluster's barrier twice without barrier.cluster.wait in between");
  me.cluster_arrived = true, me.cluster_phase = w.cluster_phase, me.site = site;
  check_cluster_arrive(release);
  if (++w.cluster_arrived == w.alive) complete_phase(w);
}
void emu_cluster_wait(u32 aligned, u32 site) {
  Worker& w = *worker;
  Fiber& me = *w.current;
  if (aligned) converge(site);
  if (!me.cluster_arrived) fault("bad_barrier", site, nullptr, "the thread waits at the cluster's barrier without barrier.cluster.arrive");
  me.cluster_arrived = false, me.site = site;
  if (me.cluster_phase == w.cluster_phase) {
    me.state = AT_CLUSTER;
    fiber_wait();
  }
  check_cluster_pass();
}
u64 emu_map_rank(u64 address, u32 rank, u32 generic, u32 site) {
  const Fiber& me = *worker->current;
  if (rank >= cluster_size) fault("bad_cluster", site, nullptr, "mapa: rank %u in a cluster of %u blocks", rank, cluster_size);
  if (!generic) return (address & WINDOW_MASK) | (u64)(rank + 1) << RANK_SHIFT;
  const u64 offset = address - (u64)me.windows;
  if (offset >= me.window_bytes) fault("bad_cluster", site, nullptr, "mapa: the generic address %#llx is not in shared memory", (unsigned long long)address);
  return (u64)me.windows + (u64)rank * WINDOW_STRIDE + offset % WINDOW_STRIDE;
}
u32 emu_rank_of(u64 address, u32 generic, u32 site) {
  const Fiber& me = *worker->current;
  if (!generic) return address >> RANK_SHIFT ? (u32)(address >> RANK_SHIFT) - 1 : me.rank;
  const u64 offset = address - (u64)me.windows;
  if (offset >= me.window_bytes) fault("bad_cluster", site, nullptr, "getctarank: the generic address %#llx is not in shared memory", (unsigned long long)address);
  return (u32)(offset / WINDOW_STRIDE);
}
