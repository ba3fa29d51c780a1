// transfers.h - what is under way in a block: its mbarriers, and the copies that nobody has waited for yet.
//
// Bytes move as late as a kernel can notice: a load's when somebody waits on its mbarrier, a store's source when its group
// is waited for. What reads too early finds the old bytes, what overwrites too early spoils the new ones.
#pragma once
#include "runtime.h"
#include <memory>
#include <vector>

struct SharedByte {  // a byte of some block's shared memory
  Block* block;
  u32 offset;
};
SharedByte shared_byte(u32 address, u32 bytes, u32 alignment, u32 site);

// ---------------------------------------------------------------- mbarriers
struct MbarrierWord {  // the 64 bits in shared memory
  u64 pending : 20, expected : 20;
  s64 bytes : 22;
  u64 phase : 1, spare : 1;
};
static_assert(sizeof(MbarrierWord) == 8, "an mbarrier is 64 bits");
constexpr u32 MBARRIER_LIMIT = (1u << 20) - 1;

struct Transfer;
struct Due {  // what happens to an mbarrier on its own: a transfer lands, or a thread's cp.async are done
  Transfer* transfer;
  Fiber* copier;
  u64 serial;
};
struct Waiter {
  Fiber* fiber;
  bool relaxed;
};
struct Mbarrier {
  u32 offset, number;
  bool live;
  std::vector<Due> due;
  std::vector<Waiter> waiting;
};
Mbarrier& find_mbarrier(const SharedByte& p, u32 site);
MbarrierWord mbarrier_word(const SharedByte& p);
void mbarrier_add_due(const SharedByte& p, const Due& due, u32 site);
void mbarrier_forget(const SharedByte& p, const Fiber* copier, u64 serial);
void mbarrier_count(const SharedByte& p, u32 arrivals, s64 bytes, u32 site);  // may complete the phase
void mbarrier_expect_arrival(const SharedByte& p, u32 site);                  // one more in this phase

// ---------------------------------------------------------------- transfers
struct TensorMap {  // tensor_map.py writes these bytes
  u64 magic, address, strides[4];
  u32 last[5];  // greatest coordinate
  u16 box[5];
  u8 steps[5], type, rank, swizzle, fills_nan, reserved[41];
};
static_assert(sizeof(TensorMap) == 128, "a tensor map is 128 bytes");
constexpr u64 TENSOR_MAP_MAGIC = 0x70616d2d6e65746bull;
constexpr u8 ELEMENT_BYTES[ELEMENT_TYPES] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};

constexpr u32 NO_RANGE = ~0u;
enum Direction : u8 { TO_SHARED, TO_GLOBAL, BETWEEN_SHARED, VALUE_TO_SHARED };
struct Transfer {
  Direction direction;
  bool is_tensor, was_read;
  u32 mode;
  u32 reduction = NO_REDUCTION, byte_mask = 0xffff;
  u32 bytes, site, group, bytes_read;  // read: of global memory
  u32 reads = NO_RANGE;                // check mode: the range that it reads, where another kernel may write it
  Fiber* issuer;
  SharedByte shared;    // its end in shared memory; the destination where both are
  SharedByte source;    // BETWEEN_SHARED
  SharedByte mbarrier;  // none: block is nullptr
  u64 global;
  TensorMap map;
  s32 at[5];
  std::vector<u8> data;  // a store's bytes, once read
};
struct BlockAsync {
  std::vector<std::unique_ptr<Mbarrier>> mbarriers;
  std::vector<std::unique_ptr<Transfer>> transfers;  // in order of issue
};
void copies_thread_exits(Fiber& f);
void bulk_thread_exits(Fiber& f);
void perform_copies(Fiber& f, u64 until);  // cp.async of serial below `until`, and the arrivals behind them
u32 tile_bytes(const Transfer& t);
void issue(const Transfer& made);
void issue_loads(Transfer t, u32 to, u32 mbarrier, u32 blocks, u32 alignment);  // to one block or to each of a mask
void land(Transfer& t);  // the bytes arrive in shared memory, and the mbarrier counts them

// f(global address, offset in the tile, bytes, inside the tensor): contiguous runs, in the order of the tile.
template <class F> void each_run(const Transfer& t, F f) {
  if (!t.is_tensor) return f(t.global, 0u, t.bytes, true);
  const TensorMap& m = t.map;
  const u32 element = ELEMENT_BYTES[m.type], width = m.box[0], outer = m.rank - 1u;
  u32 count[4] = {1, 1, 1, 1}, k[4] = {};
  for (u32 d = 0; d < outer; d++) count[d] = t.mode == TENSOR_ROWS ? 4 : (m.box[d + 1] + m.steps[d + 1] - 1u) / m.steps[d + 1];
  const s64 x = t.at[0], left = x < 0 ? (-x < (s64)width ? -x : (s64)width) : 0, room = (s64)m.last[0] + 1 - x;
  const u32 from = (u32)left, to = room < (s64)from ? from : room < (s64)width ? (u32)room : width;
  for (u32 tile = 0;; tile += width * element) {
    bool inside = from < to;
    u64 address = m.address + (u64)(x + from) * element;
    for (u32 d = 0; d < outer; d++) {
      const s64 c = t.mode == TENSOR_ROWS ? t.at[1 + k[0]] : (s64)t.at[d + 1] + (s64)k[d] * m.steps[d + 1];
      inside &= c >= 0 && c <= (s64)m.last[d + 1];
      address += (u64)c * m.strides[d];
    }
    if (!inside) {
      f(0, tile, width * element, false);
    } else {
      if (from) f(0, tile, from * element, false);
      f(address, tile + from * element, (to - from) * element, true);
      if (to < width) f(0, tile + to * element, (width - to) * element, false);
    }
    u32 d = 0;
    while (d < outer && ++k[d] == count[d]) k[d++] = 0;
    if (d >= outer) return;
  }
}
// f(offset in shared memory, offset in the tile, bytes): the same bytes where the swizzle puts them.
template <class F> void each_chunk(const Transfer& t, u32 tile, u32 bytes, F f) {
  const u32 base = t.direction == BETWEEN_SHARED ? t.source.offset : t.shared.offset;
  const u32 bits = t.is_tensor ? (1u << t.map.swizzle) - 1 : 0;  // 32, 64, 128 bytes: one, two, three bits
  if (!bits) return f(base + tile, tile, bytes);
  for (u32 end = tile + bytes; tile < end;) {
    const u32 n = smaller_of(end - tile, 16 - tile % 16), address = SHARED_ORIGIN + base + tile;
    f((address ^ (address >> 7 & bits) << 4) - SHARED_ORIGIN, tile, n);
    tile += n;
  }
}

#if EMU_CHECK
void check_mbarrier_init(Block& b, const Mbarrier& m, u32 site);
void check_mbarrier_use(Block& b, const Mbarrier& m, bool by_async_proxy, u32 site);
void check_mbarrier_arrive(Block& b, const Mbarrier& m, bool relaxed);
void check_mbarrier_complete(Block& b, const Mbarrier& m);
void check_mbarrier_observe(Block& b, const Mbarrier& m, const Fiber& f, bool relaxed);
void check_mbarrier_invalidate(Block& b, const Mbarrier& m, u32 site);
void check_copy_landed(const Fiber& f, const CopyOp& op, const SharedByte* mbarrier);
void check_copies_arrive(const Fiber& f, const SharedByte& mbarrier);
void check_transfer_issue(Transfer& t);
void check_transfer_landed(const Transfer& t);
void check_transfer_read(const Transfer& t);
void check_transfer_written(const Transfer& t);
void check_prefetch(const Transfer& t);
void check_tensor_map(u64 address, u32 site);  // that it may be read
void check_thread_leaves(const Fiber& f);
void check_block_leaves(Block& b);
#else
inline void check_mbarrier_init(Block&, const Mbarrier&, u32) {}
inline void check_mbarrier_use(Block&, const Mbarrier&, bool, u32) {}
inline void check_mbarrier_arrive(Block&, const Mbarrier&, bool) {}
inline void check_mbarrier_complete(Block&, const Mbarrier&) {}
inline void check_mbarrier_observe(Block&, const Mbarrier&, const Fiber&, bool) {}
inline void check_mbarrier_invalidate(Block&, const Mbarrier&, u32) {}
inline void check_copy_landed(const Fiber&, const CopyOp&, const SharedByte*) {}
inline void check_copies_arrive(const Fiber&, const SharedByte&) {}
inline void check_transfer_issue(Transfer&) {}
inline void check_transfer_landed(const Transfer&) {}
inline void check_transfer_read(const Transfer&) {}
inline void check_transfer_written(const Transfer&) {}
inline void check_prefetch(const Transfer&) {}
inline void check_tensor_map(u64, u32) {}
inline void check_thread_leaves(const Fiber&) {}
inline void check_block_leaves(Block&) {}
#endif
