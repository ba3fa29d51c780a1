// wgmma.cpp - asynchronous products of a warpgroup; how its warps meet, for setmaxnreg (registers.cpp) too.
//
// A product is computed when the first warp waits for it. Until then each accumulator register holds a token: a NaN that
// names the product and the element. A wait puts results where it finds tokens of what it waited for, so that results
// follow the values through moves between registers; who uses one too early gets a NaN (in check mode a fault). Operands
// in shared memory are read at the wait, fragments of A in registers at the issue.
#include "warpgroup.h"

namespace {
Warpgroup& my_group() {
  const Fiber& me = *worker->current;
  if (!me.block->warpgroups) me.block->warpgroups = new Warpgroup[MAX_WARPS / GROUP_WARPS]{};
  return me.block->warpgroups[me.warp / GROUP_WARPS];
}
u32 my_number() { return worker->current->warp % GROUP_WARPS; }

// ---------------------------------------------------------------- computing
const u8* operand_place(const Block& block, u32 address, u32 site) {
  const u32 o = address - SHARED_ORIGIN;
  if (o >= WINDOW_STRIDE - 16) fault("shared_out_of_bounds", site, "shared memory", "%s reads 16 bytes at shared address %#x, which is outside of shared memory", op_text(site), address);
  return block.shared + o;
}
// Element (x, i) of the operand, x along m or n and i along k, becomes to[x * along_mn + i * along_k].
void read_operand(const Block& block, const Operand& from, Element kind, u32 site, double* to, u32 along_mn, u32 along_k) {
  const Unpack unpack = unpack_of(kind);
  const u32 count = 128 / bits_of(kind), line_step = from.mn_major ? along_k : along_mn, step = from.mn_major ? along_mn : along_k;
  double values[16];
  for (u32 line = 0; line < from.lines; line++)
    for (u32 i = 0; i < from.chunks; i++) {
      unpack(operand_place(block, from.chunk(line, i), site), 4, values);
      double* at = to + line * line_step + i * count * step;
      for (u32 j = 0; j < count; j++) at[j * step] = values[j];
    }
}
void read_fragments(const Product& p, double* a) {  // rows of 8 words along k
  u32 rows[64 * 8];
  for (u32 l = 0; l < GROUP_LANES; l++)
    for (u32 i = 0; i < 4; i++) rows[(l / 32 * 16 + l % 32 / 4 + i % 2 * 8) * 8 + l % 4 + i / 2 * 4] = p.fragments[l * 4 + i];
  unpack_of(p.form->a)(rows, 64 * 8, a);
}
// Tokens of products that are done, and numbered below `limit`, become their results.
void resolve(Warpgroup& g, u32 lane, u32* words, u32 count, u32 limit) {
  u32 named = 0;  // by the last token
  const Product* p = nullptr;
  for (u32 i = 0; i < count; i++) {
    if ((words[i] & TOKEN_MASK) != TOKEN) continue;
    if (words[i] / TOKEN_ELEMENTS != named) {
      named = words[i] / TOKEN_ELEMENTS, p = g.find(words[i]);
      if (p && (!p->done || g.number(words[i]) >= limit)) p = nullptr;
    }
    if (p && words[i] % TOKEN_ELEMENTS < p->registers) words[i] = p->sums[lane * p->registers + words[i] % TOKEN_ELEMENTS];
  }
}
void compute(const Block& block, Warpgroup& g, Product& p) {
  const MatrixForm& form = *p.form;
  const u32 n = form.n, k = form.k;
  g.a.resize(64 * k), g.b.resize(k * n), g.sums.resize(16 * n);
  read_operand(block, Operand(p.b, form.b_mn_major, n, k), form.b, p.site, g.b.data(), 1, n);
  if (p.a_in_registers) read_fragments(p, g.a.data());
  else read_operand(block, Operand(p.a, form.a_mn_major, 64, k), form.a, p.site, g.a.data(), k, 1);
  if (form.sign < 0)
    for (double& x : g.a) x = -x;
  for (u32 w = 0; w < GROUP_WARPS; w++) {
    u32* sums = &p.sums[w * 32 * p.registers];
    if (!p.accumulates) memset(g.sums.data(), 0, 16 * n * sizeof(double));
    for (u32 l = 0; l < 32 && p.accumulates; l++) {
      resolve(g, w * 32 + l, sums + l * p.registers, p.registers, ~0u);
      take_sums(form, l, sums + l * p.registers, g.sums.data());
    }
    multiply(16, n, k, &g.a[w * 16 * k], g.b.data(), g.sums.data());
    for (u32 l = 0; l < 32; l++) give_sums(form, l, g.sums.data(), sums + l * p.registers);
  }
  p.done = true;
}

// ---------------------------------------------------------------- instructions of the whole warpgroup
void issue(Block& block, Warpgroup& g, u32 index) {
  const Arrival& first = *g.lanes[0];
  if (g.products.size() == TOKEN_OPERATIONS) fault("runaway", first.site, nullptr, "%u wgmma.mma_async are not waited for", TOKEN_OPERATIONS);
  Product p{first.form, first.a_descriptor, first.b_descriptor, first.site, first.registers, 0, first.a != nullptr, first.accumulates != 0};
  for (Arrival* lane : g.lanes) {
    if (lane->a) p.fragments.insert(p.fragments.end(), lane->a, lane->a + 4);
    p.sums.insert(p.sums.end(), lane->d, lane->d + p.registers);
  }
  for (u32 w = 0; w < GROUP_WARPS; w++) p.fences[w] = g.warps[w].fences;
  check_product(block, g, index, p);
  const u32 token = TOKEN | g.next() % TOKEN_OPERATIONS * TOKEN_ELEMENTS;
  for (Arrival* lane : g.lanes)
    for (u32 i = 0; i < p.registers; i++) lane->d[i] = token + i;
  g.products.push_back(std::move(p));
}
void compare(const Arrival& a, const Arrival& b, const char* who, u32 i, u32 j) {
  if (a.site != b.site)
    fault("warp_mismatch", a.site, nullptr, "%s %u and %u of the warpgroup meet in different instructions: %s at %s / %s at %s", who, i, j, op_text(a.site), emu_sites[a.site].where, op_text(b.site),
          emu_sites[b.site].where);
  if ((!a.a && a.a_descriptor != b.a_descriptor) || a.b_descriptor != b.b_descriptor || !a.accumulates != !b.accumulates)
    fault("warp_mismatch", a.site, nullptr, "%s: %s %u and %u of the warpgroup differ in a descriptor or in scale-d", op_text(a.site), who, i, j);
}
void arrive_op(void** lanes, u32) {
  const Fiber& me = *worker->current;
  Block& block = *me.block;
  Warpgroup& g = my_group();
  const Arrival& mine = *(Arrival*)lanes[0];
  const u32 index = me.warp / GROUP_WARPS, number = my_number();
  for (u32 l = 1; l < 32; l++) compare(mine, *(Arrival*)lanes[l], "lanes", 0, l);
  u32 needed = 0;
  for (u32 w = 0; w < GROUP_WARPS; w++) {
    const Warp& warp = block.warps[index * GROUP_WARPS + w];
    needed |= (u32)(warp.born != 0) << w;
    if (mine.form && ~warp.born) fault("warp_mismatch", mine.site, nullptr, "%s: the warpgroup of warp %u has no four whole warps", op_text(mine.site), me.warp);
    if (warp.born & ~warp.alive) fault("warp_mismatch", mine.site, nullptr, "%s: threads of warp %u, of the same warpgroup, have exited", op_text(mine.site), index * GROUP_WARPS + w);
    if (g.arrived >> w & 1) compare(mine, *g.lanes[w * 32], "warps", number, w);
  }
  g.arrived |= 1u << number, g.site = mine.site;
  memcpy(g.lanes + number * 32, lanes, 32 * sizeof *lanes);
  if (g.arrived != needed) return;
  g.arrived = 0;
  if (mine.form) issue(block, g, index);
  else if (!set_registers(block, g, index, mine.count, mine.takes, mine.site)) return;
  for (u32 l = 0; l < GROUP_LANES; l++)
    if (needed >> l / 32 & 1) {
      g.lanes[l]->waiting = false;
      fiber_wake(block.fibers[index * GROUP_LANES + l]);
    }
}
void meet(Arrival& arrival) {
  arrival.waiting = true;
  warp_operation(~0u, arrive_op, &arrival, arrival.site, false, true);
  while (arrival.waiting) {
    worker->current->state = AT_WARP_OP;
    fiber_wait();
  }
}

// ---------------------------------------------------------------- instructions of one warp
void fence_op(void**, u32) { my_group().warps[my_number()].fences++; }
void commit_op(void**, u32) {
  Warpgroup& g = my_group();
  g.warps[my_number()].groups.push_back(g.next());
}
struct Wait {
  u32 keep;
  u32* late;  // registers that may hold tokens
  u32 count;
};
void wait_op(void** lanes, u32) {
  const Fiber& me = *worker->current;
  Warpgroup& g = my_group();
  GroupWarp& warp = g.warps[my_number()];
  warp.fences_waited = warp.fences;
  for (; warp.groups.size() > ((Wait*)lanes[0])->keep; warp.groups.pop_front()) warp.awaited = warp.groups.front();
  for (u32 i = 0; g.first + i < warp.awaited; i++) {
    Product& p = g.products[i];
    if (!p.done) {
      compute(*me.block, g, p);
      check_product_done(*me.block, me.warp / GROUP_WARPS, p);
    }
    p.awaited |= 1u << my_number();
    check_product_awaited(*me.block, me.warp, p);
  }
  for (u32 l = 0; l < 32; l++) resolve(g, my_number() * 32 + l, ((Wait*)lanes[l])->late, ((Wait*)lanes[l])->count, warp.awaited);
  while (!g.products.empty() && g.products[0].awaited == (1 << GROUP_WARPS) - 1) {
    for (Product& later : g.products)
      for (u32 l = 0; l < GROUP_LANES && !later.done; l++) resolve(g, l, &later.sums[l * later.registers], later.registers, g.first + 1);
    g.products.pop_front();
    g.first++;
  }
}
}  // namespace

void emu_wgmma(u32* d, u32 registers, const u32* a, u64 a_descriptor, u64 b_descriptor, u32 accumulates, const MatrixForm* form, u32 site) {
  Arrival arrival{site, d, registers, a, a_descriptor, b_descriptor, accumulates, form};
  meet(arrival);
}
void emu_setmaxnreg(u32 count, u32 takes, u32 site) {
  Arrival arrival{site};
  arrival.count = count, arrival.takes = takes != 0;
  meet(arrival);
}
void emu_wgmma_fence(u32 site) { warp_operation(~0u, fence_op, nullptr, site, false, true); }
void emu_wgmma_commit(u32 site) { warp_operation(~0u, commit_op, nullptr, site, false, true); }
void emu_wgmma_wait(u32 keep, u32* late, u32 count, u32 site) {
  Wait wait{keep, late, count};
  warp_operation(~0u, wait_op, &wait, site, false, true);
}
void emu_wgmma_use(u32 token, u32 site) {
  const Block& block = *worker->current->block;
  const Product* p = block.warpgroups ? my_group().find_pending(token, my_number()) : nullptr;
  if (p) fault("in_flight", site, nullptr, "%s uses a result of the wgmma at %s before wgmma.wait_group", op_text(site), emu_sites[p->site].where);
}

void warpgroup_exit(const Fiber& me) {
  if (!me.block->warpgroups) return;
  const Warpgroup& g = my_group();
  if (g.arrived) fault("warp_mismatch", g.site, nullptr, "warp %u exits while others of its warpgroup wait for it in %s", me.warp, op_text(g.site));
#if EMU_CHECK
  for (const Product& p : g.products)
    if (!(p.awaited >> my_number() & 1)) fault("in_flight", p.site, nullptr, "warp %u exits without wgmma.wait_group for the %s at %s", me.warp, op_text(p.site), emu_sites[p.site].where);
#endif
}
void begin_warpgroups(Block& block) {
  for (u32 i = 0; block.warpgroups && i < MAX_WARPS / GROUP_WARPS; i++) block.warpgroups[i] = Warpgroup{};
}
void end_warpgroups(Block& block) { delete[] block.warpgroups; }
