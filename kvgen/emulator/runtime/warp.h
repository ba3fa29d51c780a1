// warp.h - the commonest operations of a warp as a translated kernel calls them. Included by device.h.
//
// Only emu_warp_operation lies between the kernel and the switch to another lane. The lanes of a warp take turns from one
// operation to the next, so each comes back to another place than the lane before it left from, and a processor that
// predicts returns by the latest calls is wrong every time. So emu_warp_operation returns by a jump, which is predicted
// from what was executed before.
#pragma once

typedef void (*WarpOp)(void** arguments, u32 lanes);
typedef struct Shuffle { u32 value, out, from; } Shuffle;  // from: 64 where that lane takes no part
typedef struct Vote { u32 predicate, out; } Vote;

#pragma GCC visibility push(default)
EMU_BEGIN
// The last of the lanes in `mask` to arrive computes `op` for all of them; see the head of sync.cpp.
void emu_warp_operation(u32 mask, WarpOp op, void* argument, u32 site, bool orders_memory, bool aligned);
void emu_shuffle_op(void** arguments, u32 lanes);
void emu_vote_op(void** arguments, u32 lanes);
EMU_NORETURN void emu_shuffle_fault(u32 from, u32 mask, u32 site);
u32 emu_match(u32 all, u64 value, u32 mask, bool* predicate, u32 site);
u32 emu_reduce(u32 kind, u32 is_signed, u32 value, u32 mask, u32 site);
u32 emu_elect(u32 mask, u32 site);
u32 emu_born(void);
EMU_END
#pragma GCC visibility pop

EMU_INLINE void emu_warp_sync(u32 mask, u32 site) { emu_warp_operation(mask, nullptr, nullptr, site, true, false); }
EMU_INLINE u32 emu_ballot(u32 mask, u32 predicate, u32 site) {
  Vote v;
  v.predicate = predicate, v.out = 0;
  emu_warp_operation(mask, emu_vote_op, &v, site, false, false);
  return v.out;
}
EMU_INLINE u32 emu_shuffle(const Thread* self, u32 mode, u32 value, u32 b, u32 c, u32 mask, bool* in_range, u32 site) {
  const u32 lane = self->lane, segment = c >> 8 & 31, top = (lane & segment) | (c & 31 & ~segment), n = b & 31;
  const u32 from = mode == 0 ? lane ^ n : mode == 1 ? lane - n : mode == 2 ? lane + n : (lane & segment) | (n & ~segment);  // bfly up down idx
  Shuffle s;
  *in_range = mode == 1 ? (s32)from >= (s32)top : from <= top;
  s.value = value, s.out = 0, s.from = *in_range ? from : lane;
  emu_warp_operation(mask, emu_shuffle_op, &s, site, false, false);
  if (s.from == 64) emu_shuffle_fault(from, mask, site);
  return s.out;
}
