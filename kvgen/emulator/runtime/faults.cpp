// faults.cpp - what is wrong, where, and what every warp was doing.
#include "runtime.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char* shared_place(u32 o, u32* offset) {
  for (u32 i = 0; i < kernel->shared_count; i++)
    if (o >= kernel->shared[i].offset && o < kernel->shared[i].offset + kernel->shared[i].bytes) {
      *offset = o - kernel->shared[i].offset;
      return kernel->shared[i].name;
    }
  *offset = o - kernel->dynamic_offset;
  return "dynamic shared memory";
}
static State state_of(const Fiber& f) { return can_run(f) ? RUNNING : f.state; }
static size_t describe_fibers(char* out, size_t size, const Fiber* fibers, const Barrier* barriers, u32 todo) {
  size_t n = 0;
  while (todo && n + 400 < size) {
    const Fiber& f = fibers[lowest(todo)];
    const State state = state_of(f);
    u32 same = 0;
    for (u32 m = todo; m; m &= m - 1) {
      const Fiber& o = fibers[lowest(m)];
      if (state_of(o) == state && (state == EXITED || o.site == f.site) && (state != AT_WARP_OP || o.mask == f.mask) && (state != AT_MBARRIER || o.barrier == f.barrier)) same |= 1u << o.lane;
    }
    todo &= ~same;
    const char* op = f.site == NO_SITE ? "" : emu_sites[f.site].op;
    const char* where = f.site == NO_SITE ? "" : emu_sites[f.site].where;
    int first = (int)strcspn(where, "|");
    switch (state) {
      case RUNNING: n += (size_t)snprintf(out + n, size - n, " lanes %08x running or spinning;", same); break;
      case EXITED: n += (size_t)snprintf(out + n, size - n, " lanes %08x exited;", same); break;
      case AT_CLUSTER: n += (size_t)snprintf(out + n, size - n, " lanes %08x wait at the cluster's barrier (%u of %u arrived) at %.*s;", same, worker->cluster_arrived, worker->alive, first, where); break;
      case AT_WARP_OP:
        if (const u32 registers = awaited_registers(*f.block, f.warp)) {
          n += (size_t)snprintf(out + n, size - n, " lanes %08x wait for %u more registers of the warpgroup, %u are free, in %s at %.*s;", same, registers, f.block->free_registers, op, first, where);
          break;
        }
        n += (size_t)snprintf(out + n, size - n, " lanes %08x wait in %s (mask %08x) at %.*s;", same, op, f.mask, first, where);
        break;
      case AT_MBARRIER:
        n += (size_t)snprintf(out + n, size - n, " lanes %08x wait at mbarrier ", same);
        n += describe_mbarrier(out + n, size - n, *f.block, f.barrier);
        n += (size_t)snprintf(out + n, size - n, ", in %s at %.*s;", op, first, where);
        break;
      case AT_BARRIER:
        if (f.own_warp->gathered >> f.lane & 1) {
          n += (size_t)snprintf(out + n, size - n, " lanes %08x wait for the rest of their warp at barrier %u in %s at %.*s;", same, f.barrier, op, first, where);
          break;
        }
        n += (size_t)snprintf(out + n, size - n, " lanes %08x wait at barrier %u (%u of %u arrived) in %s at %.*s;", same, f.barrier, barriers[f.barrier].arrived, barriers[f.barrier].expected, op, first,
                              where);
        break;
    }
  }
  return n;
}
static const char* all_states() {
  char (&text)[sizeof worker->states] = worker->states;
  size_t n = 0;
  text[0] = 0;
  for (u32 b = 0; b < cluster_size; b++) {
    Block& block = worker->blocks[b];
    for (u32 w = 0; w * 32 < thread_count && n + 400 < sizeof text; w++) {
      if (cluster_size > 1) n += (size_t)snprintf(text + n, sizeof text - n, "\n  block %u of the cluster, warp %u:", b, w);
      else n += (size_t)snprintf(text + n, sizeof text - n, "\n  warp %u:", w);
      n += describe_fibers(text + n, sizeof text - n, block.fibers + w * 32, block.barriers, block.warps[w].born);
    }
  }
  return text;
}
static void describe(FaultRecord& record, const char* kind, u32 site, const char* buffer, const char* format, va_list list) {
  Fiber* current = worker->current;
  record.set = 1;
  record.has_thread = current != nullptr;
  for (int i = 0; i < 3 && current; i++) record.block[i] = current->ctaid[i], record.thread[i] = current->tid[i];
  snprintf(record.kind, sizeof record.kind, "%s", kind);
  snprintf(record.where, sizeof record.where, "%s", site == NO_SITE ? "" : emu_sites[site].where);
  snprintf(record.op, sizeof record.op, "%s", site == NO_SITE ? "" : emu_sites[site].op);
  snprintf(record.buffer, sizeof record.buffer, "%s", buffer ? buffer : "");
  vsnprintf(record.detail, sizeof record.detail, format, list);
  record.level = worker->level;
}
void fault(const char* kind, u32 site, const char* buffer, const char* format, ...) {
  va_list list;
  va_start(list, format);
  describe(worker->record, kind, site, buffer, format, list);
  va_end(list);
  switch_to(worker->current, nullptr);
  __builtin_trap();
}
void suspect(const char* kind, u32 site, const char* buffer, const char* format, ...) {
  if (worker->suspicion.set) return;
  va_list list;
  va_start(list, format);
  describe(worker->suspicion, kind, site, buffer, format, list);
  va_end(list);
}
void deadlock(const char* why) {
  const Fiber* me = worker->current;
  fault("deadlock", me->state == EXITED ? NO_SITE : me->site, nullptr, "%s; state of every warp:%s", why, all_states());
}
void fault_with_states(const char* kind, u32 site, const char* why) { fault(kind, site, nullptr, "%s; state of every warp:%s", why, all_states()); }
void emu_trap(u32 site) { fault("trap", site, nullptr, "the kernel executed a trap instruction"); }
void emu_runaway(u32 site) { fault("runaway", site, nullptr, "the thread ran one basic block %u times: an endless loop", RUNAWAY); }
void emu_arithmetic_fault(u32 site, const char* what) { fault("arithmetic", site, nullptr, "%s", what); }
