// copies.cpp - cp.async: a thread's own small copies, in groups, and arrivals on an mbarrier once they are done.
#include "transfers.h"
#include <stdlib.h>
#include <string.h>

static void enqueue(CopyQueue& q, const CopyOp& op) {
  if (q.count == q.capacity) {
    q.capacity = q.capacity ? q.capacity * 2 : 16;
    q.ops = (CopyOp*)realloc(q.ops, q.capacity * sizeof(CopyOp));
  }
  q.ops[q.count++] = op;
  q.issued++;
}
static void perform_first(Fiber& f, u32 n) {  // the bytes move only here: a missing wait leaves the 0xFF pattern
  CopyQueue& q = f.copies;
  for (u32 i = 0; i < n; i++) {
    const CopyOp& op = q.ops[i];
    if (op.arrives_in) {
      const SharedByte mbarrier{op.arrives_in, op.destination};
      mbarrier_forget(mbarrier, &f, op.serial);
      check_copies_arrive(f, mbarrier);
      mbarrier_count(mbarrier, 1, 0, op.site);
      continue;
    }
    u32 next = i + 1;
    while (next < q.count && !q.ops[next].arrives_in) next++;
    const SharedByte mbarrier = next < q.count ? SharedByte{q.ops[next].arrives_in, q.ops[next].destination} : SharedByte{};
    u8* to = f.shared + (op.destination - SHARED_ORIGIN);
    check_copy_landed(f, op, mbarrier.block ? &mbarrier : nullptr);
    if (op.source_bytes) memcpy(to, (const void*)op.source, op.source_bytes);
    if (op.source_bytes < op.bytes) memset(to + op.source_bytes, 0, op.bytes - op.source_bytes);
  }
  q.count -= n;
  memmove(q.ops, q.ops + n, q.count * sizeof(CopyOp));
}
void perform_copies(Fiber& f, u64 until) {
  u32 n = 0;
  while (n < f.copies.count && f.copies.ops[n].serial < until) n++;
  perform_first(f, n);
}
void copies_thread_exits(Fiber& f) {  // what an mbarrier was promised still happens
  for (u32 i = f.copies.count; i--;)
    if (f.copies.ops[i].arrives_in) return perform_first(f, i + 1);
}

void emu_cp_async(u32 destination, u64 source, u32 bytes, u32 source_bytes, u32 site) {
  CopyQueue& q = worker->current->copies;
  if (source_bytes > bytes) fault("bad_copy", site, nullptr, "cp.async: source size %u is larger than the copy of %u bytes", source_bytes, bytes);
  const CopyOp op{destination, bytes, source_bytes, site, q.next_group, source, q.issued, nullptr};
  check_copy_issue(op);
  enqueue(q, op);
}
void emu_cp_async_commit() { worker->current->copies.next_group++; }
void emu_cp_async_wait(u32 keep) {
  CopyQueue& q = worker->current->copies;
  const u32 limit = q.next_group > keep ? q.next_group - keep : 0;
  u32 n = 0;
  while (n < q.count && q.ops[n].group < limit) n++;
  perform_first(*worker->current, n);
}
void emu_cp_async_arrive(u32 mbarrier, u32 counts, u32 site) {
  const SharedByte p = shared_byte(mbarrier, 8, 8, site);
  check_mbarrier_use(*p.block, find_mbarrier(p, site), false, site);
  if (!counts) mbarrier_expect_arrival(p, site);
  CopyQueue& q = worker->current->copies;
  const u64 serial = q.issued;
  enqueue(q, {p.offset, 0, 0, site, q.next_group, 0, serial, p.block});
  mbarrier_add_due(p, {nullptr, worker->current, serial}, site);
}
