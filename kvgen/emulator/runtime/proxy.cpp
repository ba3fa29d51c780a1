// proxy.cpp - check mode: what the async proxy may see of what was written through the generic one.
//
// A write is visible to the async proxy where a proxy fence lies between the two: executed by the writer, by the thread that
// issues the asynchronous operation, or by anybody on the way. Each fence is remembered with all that its thread knew; it
// counts for who knows of the fence.
#include "transfers.h"
#include "checker.h"
#include <string.h>

#if EMU_CHECK
namespace {
constexpr size_t FENCES_KEPT = 16;  // of each thread; older ones are taken to be known to everybody
struct GlobalFence { u32 thread, clock, base; };  // it covers what the thread did, and what all of its block did up to `base`
std::unordered_map<u32, std::vector<GlobalFence>> global_fences;  // by block; touched only by the block whose turn it is

u32 index_of(u32 kind) { return (u32)lowest(kind); }
bool knows_fence(BlockChecker& b, u32 me, const ProxyFence& f) { return b.ordered(me, f.thread, f.clock + 1); }
void fold(BlockChecker& b, const ProxyFence& f) {
  for (u32 k = 0; k < FENCE_KINDS; k++) {
    if (!(f.covers >> k & 1)) continue;
    u32* fenced = b.fenced[k];
    b.fenced_base[k] = f.base > b.fenced_base[k] ? f.base : b.fenced_base[k];
    fenced[f.thread] = f.clock > fenced[f.thread] ? f.clock : fenced[f.thread];
    b.fenced_acquired[k] = join(b.fenced_acquired[k], f.acquired);
    for (u64 rest = f.known.groups; rest; rest &= rest - 1)
      for (u32 u = (u32)__builtin_ctzll(rest) * 32, end = u + 32; u < end; u++) fenced[u] = f.known.clocks[u] > fenced[u] ? f.known.clocks[u] : fenced[u];
  }
}
// Of the same block. `covers` is one bit.
bool fenced_here(BlockChecker& b, u32 me, u32 covers, u32 writer, u32 clock) {
  const u32 k = index_of(covers);
  if (clock <= b.fenced[k][writer] || (writer < MAX_THREADS && clock <= b.fenced_base[k])) return true;
  auto any_of = [&](u32 t) {
    for (const ProxyFence& f : b.proxy_fences[t])
      if (f.covers & covers && f.includes(writer, clock) && knows_fence(b, me, f)) return true;
    return false;
  };
  if (any_of(me) || (writer < thread_count && any_of(writer))) return true;
  for (u16 t : b.fencing)
    if (any_of(t)) return true;
  return false;
}
bool fenced_elsewhere(BlockChecker& b, u32 me, u32 covers, u32 block, u32 writer, u32 clock) {
  if (knows(b.fenced_acquired[index_of(covers)], block, writer, clock)) return true;
  for (u16 t : b.fencing)  // on this block's side, after what it acquired
    for (const ProxyFence& f : b.proxy_fences[t])
      if (f.covers & covers && knows_fence(b, me, f) && knows(f.acquired, block, writer, clock)) return true;
  if (covers == PROXY_GLOBAL) {
    for (const GlobalFence& f : global_fences[block])
      if (clock <= (f.thread == writer ? f.clock : f.base) && b.knows_block(me, block, f.thread, f.clock + 1)) return true;
    return false;
  }
  for (u32 r = 0; r < cluster_size; r++) {
    BlockChecker& other = *worker->blocks[r].checker;
    if (other.index != block) continue;
    if (clock <= other.fenced[index_of(covers)][writer] || (writer < MAX_THREADS && clock <= other.fenced_base[index_of(covers)])) return true;
    for (u16 t : other.fencing)
      for (const ProxyFence& f : other.proxy_fences[t])
        if (f.covers & covers && f.includes(writer, clock) && b.knows_block(me, block, t, f.clock + 1)) return true;
  }
  return false;
}
}  // namespace

bool proxy_fenced(BlockChecker& b, u32 me, u32 covers, u32 block, u32 writer, u32 clock) {
  return block == b.index ? fenced_here(b, me, covers, writer, clock) : fenced_elsewhere(b, me, covers, block, writer, clock);
}
void emu_proxy_fence(u32 covers, u32) {
  BlockChecker& b = checker_here();
  const u32 t = worker->current->linear;
  std::vector<ProxyFence>& mine = b.proxy_fences[t];
  if (mine.empty()) b.fencing.push_back((u16)t);
  mine.emplace_back();
  ProxyFence& f = mine.back();
  f.thread = t, f.clock = b.clocks[t], f.covers = covers, f.base = 0;
  if (covers == PROXY_INIT) {
    b.init_fences[t] = f.clock;
  } else {  // fence.mbarrier_init covers the thread's own inits only
    f.base = b.base_clock;
    b.give(t, f.known);
    for (u32 a = 0; a < AGENTS; a++) {
      const u32 u = MAX_THREADS + a;
      if (!b.agent_base[a]) continue;
      f.known.open(u / 32);
      f.known.clocks[u] = b.agent_base[a] > f.known.clocks[u] ? b.agent_base[a] : f.known.clocks[u];
    }
    f.acquired = join(b.acquired[t], b.block_acquired);
  }
  b.clocks[t]++;
  if (covers & PROXY_GLOBAL) {
    emu_await_turn();
    global_fences[b.index].push_back({t, f.clock, b.base_clock});
  }
  if (mine.size() <= FENCES_KEPT) return;
  fold(b, mine.front());
  mine.erase(mine.begin());
}
void fold_proxy_fences(BlockChecker& b) {  // everybody knows of all of them now
  for (u16 t : b.fencing) {
    for (const ProxyFence& f : b.proxy_fences[t]) fold(b, f);
    b.proxy_fences[t].clear();
  }
  b.fencing.clear();
}
void reset_proxy_fences(BlockChecker& b) {
  for (u16 t : b.fencing) b.proxy_fences[t].clear();
  b.fencing.clear();
  memset(b.fenced_base, 0, sizeof b.fenced_base);
  memset(b.fenced, 0, sizeof b.fenced);
  for (KnowledgePtr& k : b.fenced_acquired) k = nullptr;
}
void end_proxy_fences() { global_fences.clear(); }
#endif
