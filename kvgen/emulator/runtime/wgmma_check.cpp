// wgmma_check.cpp - check mode: descriptors, register fences, and the shared memory that a product reads late.
#include "checker.h"
#include "warpgroup.h"

#if EMU_CHECK
namespace {
void check_descriptor(u64 d, const char* name, const Operand& from, u32 site) {
  constexpr u64 RESERVED = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52;
  if (d & RESERVED) fault("bad_descriptor", site, nullptr, "%s: descriptor %#llx of %s has reserved bits set (%#llx)", op_text(site), (unsigned long long)d, name, (unsigned long long)(d & RESERVED));
  if (d >> 49 & 7) fault("bad_descriptor", site, nullptr, "%s: descriptor of %s has base offset %u; only patterns that start at a multiple of their size, base offset 0, are supported", op_text(site), name, (u32)(d >> 49 & 7));
  const u32 pattern = 8 * from.width, row = from.start % from.width, used = from.mn_major ? smaller_of(from.chunks * 16, from.width) : 32;
  if (from.width == 16) return;
  if (from.start % pattern >= from.width)
    fault("misaligned", site, nullptr, "%s: %s starts at shared address %#x, inside of a pattern of the %u-byte swizzle, which starts at multiples of %u", op_text(site), name, from.start, from.width, pattern);
  if (row + used > from.width) fault("misaligned", site, nullptr, "%s: a line of %s crosses the end of its %u-byte row: it starts at byte %u and has %u bytes", op_text(site), name, from.width, row, used);
}
// Accumulators that are late results of the same shape need no fence; all other registers do, since the last wait.
void check_fences(Warpgroup& g, const Product& p) {
  for (u32 w = 0; w < GROUP_WARPS; w++) {
    const GroupWarp& warp = g.warps[w];
    const bool fenced = warp.fences != warp.fences_waited;
    for (u32 i = w * 32 * p.registers; i < (w + 1) * 32 * p.registers; i++) {
      const Product* before = g.find_pending(p.sums[i], w);
      const bool same = before && before->form->n == p.form->n && before->form->k == p.form->k;
      const bool ready = before ? same || warp.fences != before->fences[w] : fenced;
      if (!ready || (p.a_in_registers && !fenced))
        fault("missing_fence", p.site, nullptr, "%s: no wgmma.fence orders it after what warp %u of the warpgroup did with its %s", op_text(p.site), w, ready ? "registers of A" : "accumulators");
    }
  }
}
// Chunks next to each other become one piece.
void add_pieces(Product& p, const Operand& from) {
  u64 chunks[WINDOW_STRIDE / 16 / 64] = {};
  for (u32 line = 0; line < from.lines; line++)
    for (u32 i = 0; i < from.chunks; i++) {
      const u32 at = from.chunk(line, i), o = (at - SHARED_ORIGIN) / 16;
      if (at < SHARED_ORIGIN || o >= WINDOW_STRIDE / 16) fault("shared_out_of_bounds", p.site, "shared memory", "%s reads 16 bytes at shared address %#x, which is outside of shared memory", op_text(p.site), at);
      chunks[o / 64] |= 1ull << o % 64;
    }
  u32 last = 0;  // behind the last piece
  for (u32 word = 0; word < WINDOW_STRIDE / 16 / 64; word++)
    for (u64 left = chunks[word]; left; left &= left - 1) {
      const u32 at = SHARED_ORIGIN + (word * 64 + (u32)__builtin_ctzll(left)) * 16;
      if (at == last) p.pieces.back().bytes += 16;
      else p.pieces.push_back({at, 16});
      last = at + 16;
    }
}
}  // namespace

void check_product(Block& block, Warpgroup& g, u32 index, Product& p) {
  const MatrixForm& form = *p.form;
  const Operand b(p.b, form.b_mn_major, form.n, form.k), a(p.a, form.a_mn_major, form.m, form.k);
  check_descriptor(p.b, "B", b, p.site);
  if (!p.a_in_registers) check_descriptor(p.a, "A", a, p.site);
  check_fences(g, p);
  add_pieces(p, b);
  if (!p.a_in_registers) add_pieces(p, a);
  for (const Piece& piece : p.pieces) {
    for (u32 w = 0; w < GROUP_WARPS; w++) check_async_read(block, (index * GROUP_WARPS + w) * 32, piece.address, piece.bytes, p.site);
    check_hold(block, piece.address, piece.bytes, p.site);
  }
}
void check_product_done(Block& block, u32 index, Product& p) {
  p.clock = check_agent_tick(block, WARPGROUP_AGENT + index);
  for (const Piece& piece : p.pieces) {
    check_release(block, piece.address, piece.bytes);
    check_agent_read(block, WARPGROUP_AGENT + index, p.clock, piece.address, piece.bytes, p.site);
  }
}
u32 product_site(const Block& block, u32 o) {
  for (u32 i = 0; block.warpgroups && i < MAX_WARPS / GROUP_WARPS; i++)
    for (const Product& p : block.warpgroups[i].products)
      for (const Piece& piece : p.pieces)
        if (!p.done && o - (piece.address - SHARED_ORIGIN) < piece.bytes) return p.site;
  return NO_SITE;
}
void check_product_awaited(Block& block, u32 warp, const Product& p) {
  for (u32 l = 0; l < 32; l++) check_agent_learn(block, warp * 32 + l, WARPGROUP_AGENT + warp / GROUP_WARPS, p.clock);
}
#endif
