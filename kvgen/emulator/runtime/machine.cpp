// machine.cpp - what a kernel can ask of the machine: its clocks, and which state space an address lies in.
#include "runtime.h"

// Advances whenever threads take turns or look at it, so that a loop that waits for a time ends. Differences within a
// block are the same in every run of a schedule.
u64 emu_clock() {
  static __thread u64 readings;
  return 32 * (worker->switches + ++readings);
}
bool emu_is_constant(u64 address) {
  for (u32 i = 0; i < kernel->global_count; i++)
    if (!kernel->globals[i].writable && within(address, kernel->globals[i].address, kernel->globals[i].bytes)) return true;
  return false;
}
bool emu_is_parameter(u64 address) { return within(address, launch->params, kernel->param_bytes); }
