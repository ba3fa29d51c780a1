// bulk.cpp - bulk copies: issued here, performed when their mbarrier or their group is waited for.
#include "transfers.h"
#include <string.h>

// ---------------------------------------------------------------- reductions
template <class T> static void reduce_integers(u8* to, const u8* from, u32 bytes, u32 op) {
  for (u32 i = 0; i < bytes; i += sizeof(T)) store<T>(to + i, combine<T>((int)op, load<T>(to + i), load<T>(from + i)));
}
template <class F> static void reduce_halves(u8* to, const u8* from, u32 bytes, u32 op) {
  for (u32 i = 0; i < bytes; i += 2) {
    const u16 a = load<u16>(to + i), b = load<u16>(from + i);
    store<u16>(to + i, half_op<F>(op == T_ADD ? H_ADD : op == T_MIN ? H_MIN : H_MAX, 0, a, b, 0));
  }
}
static void reduce_bytes(u8* to, const u8* from, u32 bytes, u32 reduction) {
  const u32 op = reduction & 0xff;
  switch (reduction >> 8) {
    case E_U32: return reduce_integers<u32>(to, from, bytes, op);
    case E_S32: return reduce_integers<s32>(to, from, bytes, op);
    case E_U64: return reduce_integers<u64>(to, from, bytes, op);
    case E_S64: return reduce_integers<s64>(to, from, bytes, op);
    case E_F16: return reduce_halves<Half>(to, from, bytes, op);
    case E_BF16: return reduce_halves<Bfloat>(to, from, bytes, op);
    case E_F32:  // flushes subnormals, as red.global.add.f32 does
      for (u32 i = 0; i < bytes; i += 4) store<float>(to + i, ftz(ftz(load<float>(to + i)) + ftz(load<float>(from + i))));
      return;
    default:
      for (u32 i = 0; i < bytes; i += 8) store<double>(to + i, load<double>(to + i) + load<double>(from + i));
  }
}

// ---------------------------------------------------------------- bytes
u32 tile_bytes(const Transfer& t) {
  if (!t.is_tensor) return t.bytes;
  u32 end = 0;
  each_run(t, [&](u64, u32 tile, u32 bytes, bool) { end = tile + bytes; });
  return end;
}
static void read_source(Transfer& t) {
  t.data.resize(tile_bytes(t));
  const u8* from = (t.direction == BETWEEN_SHARED ? t.source : t.shared).block->shared;
  each_run(t, [&](u64, u32 tile, u32 bytes, bool inside) {
    if (inside) each_chunk(t, tile, bytes, [&](u32 offset, u32 at, u32 n) { memcpy(&t.data[at], from + offset, n); });
  });
}
static void write_global(const Transfer& t) {
  emu_await_turn();
  each_run(t, [&](u64 address, u32 tile, u32 bytes, bool inside) {
    u8* to = (u8*)address;
    const u8* from = &t.data[tile];
    if (!inside) return;
    if (t.reduction != NO_REDUCTION) return reduce_bytes(to, from, bytes, t.reduction);
    if (t.byte_mask == 0xffff) return (void)memcpy(to, from, bytes);
    for (u32 i = 0; i < bytes; i++)
      if (t.byte_mask >> (i & 15) & 1) to[i] = from[i];
  });
}
static void write_shared(const Transfer& t) {
  u8* to = t.shared.block->shared;
  if (t.direction != TO_SHARED) {
    if (t.reduction == NO_REDUCTION) memcpy(to + t.shared.offset, t.data.data(), t.bytes);
    else reduce_bytes(to + t.shared.offset, t.data.data(), t.bytes, t.reduction);
    return;
  }
  const u32 element = t.is_tensor ? ELEMENT_BYTES[t.map.type] : 1;
  const u64 nan = element == 2 ? 0x7fff : element == 4 ? 0x7fffffff : 0x7fffffffffffffffull, fill = t.is_tensor && t.map.fills_nan ? nan : 0;
  each_run(t, [&](u64 address, u32 tile, u32 bytes, bool inside) {
    each_chunk(t, tile, bytes, [&](u32 offset, u32 at, u32 n) {
      if (inside) return (void)memcpy(to + offset, (const u8*)address + (at - tile), n);
      for (u32 i = 0; i < n; i += element) memcpy(to + offset + i, &fill, element);
    });
  });
}

// ---------------------------------------------------------------- life of a transfer
static void retire(Transfer& t) {
  auto& all = t.issuer->block->async->transfers;
  for (size_t i = 0; i < all.size(); i++)
    if (all[i].get() == &t) return (void)all.erase(all.begin() + (long)i);
}
void land(Transfer& t) {
  if (t.direction == BETWEEN_SHARED) {
    read_source(t);
    check_transfer_read(t);
  }
  check_transfer_landed(t);
  write_shared(t);
  const SharedByte mbarrier = t.mbarrier;
  const s64 bytes = tile_bytes(t);
  const u32 site = t.site;
  retire(t);
  mbarrier_count(mbarrier, 0, -bytes, site);
}
static void finish_read(Transfer& t) {
  if (t.was_read) return;
  read_source(t);
  check_transfer_read(t);
  t.was_read = true;
}
static void finish_store(Transfer& t) {
  finish_read(t);
  check_transfer_written(t);
  write_global(t);
  retire(t);
}
void issue(const Transfer& made) {
  Fiber& me = *worker->current;
  me.site = made.site;
  auto& all = me.block->async->transfers;
  all.emplace_back(new Transfer(made));
  Transfer& t = *all.back();
  t.issuer = &me, t.group = me.bulk_group;
  check_transfer_issue(t);
  if (t.mbarrier.block) mbarrier_add_due(t.mbarrier, {&t, nullptr, 0}, t.site);
}
void issue_loads(Transfer t, u32 to, u32 mbarrier, u32 blocks, u32 alignment) {
  if (!blocks) {
    t.shared = shared_byte(to, tile_bytes(t), alignment, t.site), t.mbarrier = shared_byte(mbarrier, 8, 8, t.site);
    if (t.shared.block != t.mbarrier.block) fault("bad_copy", t.site, nullptr, "%s: the destination and its mbarrier are in different blocks of the cluster", op_text(t.site));
    issue(t);
    return;
  }
  if (blocks >> cluster_size) fault("bad_copy", t.site, nullptr, "%s: multicast to blocks %#x, the cluster has %u", op_text(t.site), blocks, cluster_size);
  for (u32 m = blocks; m; m &= m - 1) {  // the same place in each
    const u32 window = (u32)(lowest(m) + 1) << RANK_SHIFT;
    t.shared = shared_byte((to & WINDOW_MASK) | window, tile_bytes(t), alignment, t.site);
    t.mbarrier = shared_byte((mbarrier & WINDOW_MASK) | window, 8, 8, t.site);
    issue(t);
  }
}
static void check_size(u32 bytes, u32 site) {
  if (bytes % 16) fault("bad_copy", site, nullptr, "%s of %u bytes: the size must be a multiple of 16", op_text(site), bytes);
}
static void check_global_alignment(u64 address, u32 site) {
  if (address % 16) fault("misaligned", site, nullptr, "%s: the global address %#llx needs an alignment of 16", op_text(site), (unsigned long long)address);
}
static Transfer bulk(Direction direction, u32 bytes, u32 site) {
  check_size(bytes, site);
  Transfer t{direction};
  t.bytes = bytes, t.site = site;
  return t;
}

// ---------------------------------------------------------------- what kernels call
void emu_bulk_load(u32 to, u64 from, u32 bytes, u32 mbarrier, u32 blocks, u32 site) {
  Transfer t = bulk(TO_SHARED, bytes, site);
  check_global_alignment(t.global = from, site);
  issue_loads(t, to, mbarrier, blocks, 16);
}
void emu_bulk_store(u64 to, u32 from, u32 bytes, u32 byte_mask, u32 reduction, u32 site) {
  Transfer t = bulk(TO_GLOBAL, bytes, site);
  check_global_alignment(t.global = to, site);
  t.shared = shared_byte(from, bytes, 16, site), t.byte_mask = byte_mask, t.reduction = reduction;
  issue(t);
}
void emu_bulk_between(u32 to, u32 from, u32 bytes, u32 mbarrier, u32 reduction, u32 site) {
  Transfer t = bulk(BETWEEN_SHARED, bytes, site);
  t.source = shared_byte(from, bytes, 16, site), t.reduction = reduction;
  issue_loads(t, to, mbarrier, 0, 16);
}
void emu_bulk_value(u32 to, const void* value, u32 bytes, u32 mbarrier, u32 reduction, u32 site) {
  Transfer t{VALUE_TO_SHARED};
  t.bytes = bytes, t.site = site, t.reduction = reduction;
  t.data.assign((const u8*)value, (const u8*)value + bytes);
  issue_loads(t, to, mbarrier, 0, bytes);
}
void emu_bulk_prefetch(u64 from, u32 bytes, u32 site) {
  Transfer t = bulk(TO_SHARED, bytes, site);
  check_global_alignment(t.global = from, site);
  check_prefetch(t);
}
void emu_bulk_commit() { worker->current->bulk_group++; }
void emu_bulk_wait(u32 keep, u32 only_read) {
  Fiber& me = *worker->current;
  auto& all = me.block->async->transfers;
  const u32 limit = me.bulk_group > keep ? me.bulk_group - keep : 0;
  for (size_t i = 0; i < all.size();) {
    Transfer& t = *all[i];
    const bool mine = t.direction == TO_GLOBAL && t.issuer == &me && t.group < limit;
    if (mine && only_read) finish_read(t);
    if (mine && !only_read) finish_store(t);
    else i++;
  }
}
void bulk_thread_exits(Fiber& me) {
  auto& all = me.block->async->transfers;
  check_thread_leaves(me);
  for (size_t i = 0; i < all.size();) {
    if (all[i]->direction == TO_GLOBAL && all[i]->issuer == &me) finish_store(*all[i]);
    else i++;
  }
}
