// order.cpp - check mode: who knows of whose past (happens-before).
//
// Order inside a block: every thread has a clock. A barrier of the whole block orders everything before it, so it only
// moves `base`; a thread knows thread u up to max(base, row(t)[u]). Rows are filled by warp and named barriers and by
// acquires, and are empty again after the next full barrier. Shuffles order nothing. Behind the threads, rows have room
// for agents: what the asynchronous units do for one mbarrier, with its phases as their clock.
// Order across blocks (they run as if one after another): only what was released through a fence and an atomic or by a
// release operation, and acquired the same way, is known.
#include "checker.h"
#include "transfers.h"
#include <string.h>

#if EMU_CHECK
static void join_known(Known& to, const Known& from) {
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
  if (thread < MAX_THREADS && clock <= found->second.base) return true;
  for (const auto& entry : found->second.later)
    if (entry.first == thread) return clock <= entry.second;
  return false;
}

void Row::open(u32 group) {
  if (groups >> group & 1) return;
  memset(clocks + group * 32, 0, 128);
  groups |= 1ull << group;
}
void BlockChecker::open_row(u32 t, u32 group) {
  if (row_groups[t] >> group & 1) return;
  memset(row(t) + group * 32, 0, 128);
  row_groups[t] |= 1ull << group;
}
void BlockChecker::give(u32 t, Row& to) {
  for (u64 rest = row_groups[t]; rest; rest &= rest - 1) {
    const u32 g = (u32)__builtin_ctzll(rest);
    to.open(g);
    for (u32 u = g * 32; u < g * 32 + 32; u++) to.clocks[u] = row(t)[u] > to.clocks[u] ? row(t)[u] : to.clocks[u];
  }
  to.open(t / 32);
  to.clocks[t] = clocks[t] > to.clocks[t] ? clocks[t] : to.clocks[t];
  to.warps |= followed[t / 32] | 1ull << t / 32;
}
void BlockChecker::take(u32 t, const Row& from) {
  followed[t / 32] |= from.warps;
  for (u64 rest = from.groups; rest; rest &= rest - 1) {
    const u32 g = (u32)__builtin_ctzll(rest);
    open_row(t, g);
    for (u32 u = g * 32; u < g * 32 + 32; u++) row(t)[u] = from.clocks[u] > row(t)[u] ? from.clocks[u] : row(t)[u];
  }
}
KnowledgePtr BlockChecker::snapshot(u32 t) {
  Knowledge own;
  Known& k = own[index];
  k.base = base_clock;
  for (u32 g = 0; g < MAX_WARPS; g++) {
    const bool has = row_groups[t] >> g & 1;
    if (!has && g != t / 32) continue;
    for (u32 u = g * 32; u < g * 32 + 32; u++) {
      u32 c = u == t ? clocks[t] : has ? row(t)[u] : 0;
      if (c > base_clock) k.later.push_back({(u16)u, c});
    }
  }
  for (u32 a = 0; a < AGENTS; a++) {
    const u32 u = MAX_THREADS + a, known = row_groups[t] >> (u >> 5) & 1 ? row(t)[u] : 0, c = known > agent_base[a] ? known : agent_base[a];
    if (c) k.later.push_back({(u16)u, c});
  }
  KnowledgePtr out = std::make_shared<Knowledge>(std::move(own));
  return join(join(out, acquired[t]), block_acquired);
}
void BlockChecker::learn(u32 t, const KnowledgePtr& k) {
  if (!k) return;
  any_knowledge = true;
  followed[t / 32] = ~0ull;
  auto own = k->find(index);
  if (own != k->end())
    for (const auto& entry : own->second.later) {
      open_row(t, entry.first / 32);
      u32& c = row(t)[entry.first];
      if (entry.second > c) c = entry.second;
    }
  acquired[t] = join(acquired[t], k);
}
bool BlockChecker::knows_block(u32 t, u32 block, u32 thread, u32 clock) { return knows(acquired[t], block, thread, clock) || knows(block_acquired, block, thread, clock); }

bool BlockChecker::may_follow(u32 t, u32 block, u32 u) const {
  if (block == index) return aligned && followed[t / 32] >> (u < MAX_THREADS ? u / 32 : MAX_WARPS) & 1;
  auto mentioned = [&](const KnowledgePtr& k) { return k && k->count(block); };
  bool any = mentioned(block_acquired);
  for (const KnowledgePtr& k : acquired) any |= mentioned(k);
  return any;
}

// ---------------------------------------------------------------- barriers and fences
void emu_fence(u32 scope, u32 what, u32) {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear;
  if (what & FENCE_ACQUIRE) {
    b.learn(t, join(b.pending[t], b.block_pending));
    b.pending[t] = nullptr;
  }
  if (!(what & FENCE_RELEASE)) return;
  b.released_cta[t] = b.snapshot(t);
  if (!scope || (scope == 2 && cluster_size > 1)) b.released[t] = b.released_cta[t];
  b.clocks[t]++;
}
void check_full_barrier() {
  BlockChecker& b = checker_here();
  for (u32 t = 0; t < thread_count; t++) {
    b.base_clock = b.clocks[t] > b.base_clock ? b.clocks[t] : b.base_clock;
    for (u32 g = MAX_WARPS; g < ROW / 32; g++)
      for (u32 u = g * 32; b.row_groups[t] >> g & 1 && u < g * 32 + 32; u++) {
        u32& known = b.agent_base[u - MAX_THREADS];
        known = b.row(t)[u] > known ? b.row(t)[u] : known;
      }
  }
  for (u32 t = 0; t < thread_count; t++) b.clocks[t] = b.base_clock + 1, b.row_groups[t] = 0;
  memset(b.followed, 0, sizeof b.followed);
  b.aligned = false;
  fold_proxy_fences(b);
  if (cluster_size == 1) {  // else other blocks may have been here, whom this barrier does not order
    b.generation++;
    b.shared_readers.clear();
  }
  if (!b.any_knowledge) return;
  for (u32 t = 0; t < thread_count; t++) {
    b.block_acquired = join(b.block_acquired, b.acquired[t]);
    b.block_pending = join(b.block_pending, b.pending[t]);
    b.acquired[t] = b.pending[t] = nullptr;
  }
  b.any_knowledge = false;
}
void check_warp_join(u32 warp, u32 lanes) {
  BlockChecker& b = checker_here();
  u64 touched = 1ull << warp;
  for (u32 m = lanes; m; m &= m - 1) touched |= b.row_groups[warp * 32 + (u32)lowest(m)];
  for (u64 rest = touched; rest; rest &= rest - 1) {
    const u32 g = (u32)__builtin_ctzll(rest);
    u32 most[32] = {};
    for (u32 m = lanes; m; m &= m - 1) {
      const u32 t = warp * 32 + (u32)lowest(m);
      if (!(b.row_groups[t] >> g & 1)) continue;
      const u32* r = b.row(t) + g * 32;
      for (int i = 0; i < 32; i++) most[i] = r[i] > most[i] ? r[i] : most[i];
    }
    if (g == warp)
      for (u32 m = lanes; m; m &= m - 1) most[lowest(m)] = b.clocks[warp * 32 + (u32)lowest(m)];
    for (u32 m = lanes; m; m &= m - 1) memcpy(b.row(warp * 32 + (u32)lowest(m)) + g * 32, most, sizeof most);
  }
  for (u32 m = lanes; m; m &= m - 1) {
    const u32 t = warp * 32 + (u32)lowest(m);
    b.row_groups[t] = touched;
    b.clocks[t]++;
  }
  if (!b.any_knowledge) return;
  KnowledgePtr all, waiting;
  for (u32 m = lanes; m; m &= m - 1) {
    all = join(all, b.acquired[warp * 32 + (u32)lowest(m)]);
    waiting = join(waiting, b.pending[warp * 32 + (u32)lowest(m)]);
  }
  for (u32 m = lanes; m; m &= m - 1) b.acquired[warp * 32 + (u32)lowest(m)] = all, b.pending[warp * 32 + (u32)lowest(m)] = waiting;
}
void check_aligned(u32 warp, u32 lanes) {
  if (hardware_level()) return check_warp_join(warp, lanes);
  BlockChecker& b = checker_here();
  b.followed[warp] |= 1ull << warp, b.aligned = true;
}
void check_barrier_arrive(u32 id, u32 t) {
  BlockChecker& b = checker_here();
  b.give(t, b.barrier_rows[id]);
  b.clocks[t]++;
  b.barrier_acquired[id] = join(b.barrier_acquired[id], b.acquired[t]);
  b.barrier_pending[id] = join(b.barrier_pending[id], b.pending[t]);
}
void check_barrier_pass(u32 id, u32 t) {
  BlockChecker& b = checker_here();
  b.take(t, b.barrier_rows[id]);
  b.acquired[t] = join(b.acquired[t], b.barrier_acquired[id]);
  b.pending[t] = join(b.pending[t], b.barrier_pending[id]);
}
void check_barrier_reset(u32 id) {
  BlockChecker& b = checker_here();
  b.barrier_rows[id].groups = b.barrier_rows[id].warps = 0;
  b.barrier_acquired[id] = b.barrier_pending[id] = nullptr;
}

// ---------------------------------------------------------------- mbarriers
// An arrival releases the arriver's past to the phase, the end of a phase hands on what has arrived so far. Bytes that land
// belong to the mbarrier's agent, at the number of the phase they land in: who has seen its end knows of them. With more
// mbarriers than agents, the bytes of the later ones count as known to everybody.
static MbarrierOrder& order_of(Block& home, const Mbarrier& m) { return *home.checker->mbarriers[m.number]; }
static bool has_agent(const Mbarrier& m) { return m.number < WARPGROUP_AGENT; }

void check_mbarrier_init(Block& home, const Mbarrier& m, u32 site) {
  BlockChecker& b = *home.checker;
  shared_bounds(SHARED_ORIGIN + m.offset, 8, A_WRITE, site);
  shared_not_ready(b, m.offset, 8, A_WRITE, site);
  shared_access(b, m.offset, 8, A_WRITE, site);
  memset(b.shared_state + m.offset, MBARRIER, 8);
  if (b.mbarriers.size() <= m.number) b.mbarriers.resize(m.number + 1);
  b.mbarriers[m.number].reset(new MbarrierOrder{});
  MbarrierOrder& o = order_of(home, m);
  o.init_thread = worker->current->linear, o.init_clock = checker_here().clocks[o.init_thread], o.init_site = site;
}
void check_mbarrier_invalidate(Block& home, const Mbarrier& m, u32 site) {
  memset(home.checker->shared_state + m.offset, UNWRITTEN, 8);
  shared_access(*home.checker, m.offset, 8, A_WRITE, site);
}
void check_mbarrier_use(Block& home, const Mbarrier& m, bool by_async_proxy, u32 site) {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear, index = home.checker->index;
  const MbarrierOrder& o = order_of(home, m);
  if (knows(worker->cluster_order->inits, index, o.init_thread, o.init_clock)) return;
  const bool ordered = index == b.index ? b.ordered(t, o.init_thread, o.init_clock) : b.knows_block(t, index, o.init_thread, o.init_clock);
  if (ordered && (!by_async_proxy || proxy_fenced(b, t, PROXY_INIT, index, o.init_thread, o.init_clock))) return;
  const bool barrier = (index == b.index && o.init_clock <= b.base_clock) || knows(worker->cluster_order->complete, index, o.init_thread, o.init_clock);
  if (ordered && barrier && hardware_level()) return;
  worker->level = ordered ? (barrier ? CHECK : HARDWARE) : b.may_follow(t, index, o.init_thread) ? CHECK : HARDWARE;
  u32 at;
  const char *name = shared_place(m.offset, &at), *where = emu_sites[o.init_site].where;
  const int length = (int)strcspn(where, "|");
  if (!ordered)
    fault("race", site, name, "%s: nothing orders this use of the mbarrier at byte %u of shared '%s' after its init at %.*s", op_text(site), at, name, length, where);
  fault("proxy_fence", site, name, "%s: no fence.mbarrier_init or fence.proxy.async makes the init at %.*s of the mbarrier at byte %u of shared '%s' visible to the async proxy", op_text(site), length, where,
        at, name);
}
void check_mbarrier_arrive(Block& home, const Mbarrier& m, bool relaxed) {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear;
  MbarrierOrder& o = order_of(home, m);
  if (relaxed) {  // it only publishes what a fence before it did
    o.arrived_acquired = join(o.arrived_acquired, &b == home.checker ? b.released_cta[t] : b.released[t]);
    return;
  }
  note_visit(home, worker->current->site);
  if (&b == home.checker) b.give(t, o.arrived), o.arrived_acquired = join(o.arrived_acquired, b.acquired[t]);
  else o.arrived_acquired = join(o.arrived_acquired, b.snapshot(t));
  b.clocks[t]++;
}
void check_mbarrier_complete(Block& home, const Mbarrier& m) {
  BlockChecker& b = *home.checker;
  MbarrierOrder& o = order_of(home, m);
  if (has_agent(m)) {
    const u32 agent = MAX_THREADS + m.number;
    o.arrived.open(agent / 32);
    o.arrived.clocks[agent] = ++b.agent_ticks[m.number];
    o.arrived.warps |= 1ull << MAX_WARPS;
  }
  o.complete = o.arrived;
  o.complete_acquired = o.arrived_acquired;
}
void check_mbarrier_observe(Block& home, const Mbarrier& m, const Fiber& f, bool relaxed) {
  BlockChecker& b = *home.checker;
  const MbarrierOrder& o = order_of(home, m);
  if (!relaxed) {
    b.take(f.linear, o.complete);
    b.learn(f.linear, o.complete_acquired);
    return;
  }
  Knowledge own;  // what a fence after it will acquire
  for (u64 rest = o.complete.groups; rest; rest &= rest - 1)
    for (u32 u = (u32)__builtin_ctzll(rest) * 32, end = u + 32; u < end; u++)
      if (o.complete.clocks[u]) own[b.index].later.push_back({(u16)u, o.complete.clocks[u]});
  b.pending[f.linear] = join(join(b.pending[f.linear], o.complete_acquired), std::make_shared<Knowledge>(std::move(own)));
  b.any_knowledge = true;
}
// The copies of `f` before this arrival are done: who waits for the phase knows of them, but of nothing else `f` did.
void check_copies_arrive(const Fiber& f, const SharedByte& mbarrier) {
  BlockChecker& b = *f.block->checker;
  MbarrierOrder& o = order_of(*mbarrier.block, find_mbarrier(mbarrier, f.site));
  for (u32 g = MAX_WARPS; g < ROW / 32; g++) {
    if (!(b.row_groups[f.linear] >> g & 1)) continue;
    o.arrived.open(g);
    for (u32 u = g * 32; u < g * 32 + 32; u++) o.arrived.clocks[u] = b.row(f.linear)[u] > o.arrived.clocks[u] ? b.row(f.linear)[u] : o.arrived.clocks[u];
  }
}
u32 check_agent_tick(Block& home, u32 agent) { return ++home.checker->agent_ticks[agent]; }
void check_agent_learn(Block& home, u32 thread, u32 agent, u32 clock) {
  BlockChecker& b = *home.checker;
  const u32 u = MAX_THREADS + agent;
  b.followed[thread / 32] |= 1ull << MAX_WARPS;
  b.open_row(thread, u / 32);
  b.row(thread)[u] = clock > b.row(thread)[u] ? clock : b.row(thread)[u];
}

// ---------------------------------------------------------------- the cluster's barrier
// What the arrivals of a phase released; a thread of the next phase can only arrive once it has left this one.
void check_cluster_arrive(u32 release) {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear;
  ClusterOrder& order = *worker->cluster_order;
  order.arriving = join(order.arriving, release ? b.snapshot(t) : b.released[t]);
  if (b.init_fences[t]) order.arriving_inits = join(order.arriving_inits, std::make_shared<Knowledge>(Knowledge{{b.index, {0, {{(u16)t, b.init_fences[t]}}}}}));
  b.clocks[t]++;
}
void check_cluster_complete() {
  ClusterOrder& order = *worker->cluster_order;
  order.complete = std::move(order.arriving), order.inits = join(order.inits, order.arriving_inits);
  order.arriving = order.arriving_inits = nullptr;
}
void check_cluster_pass() { checker_here().learn(worker->current->linear, worker->cluster_order->complete); }
#endif
