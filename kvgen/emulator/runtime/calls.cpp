// calls.cpp - the stack that calls take, and what can be wrong with local memory, parameters and function pointers.
#include "runtime.h"

void emu_check_stack(u64 bytes, u32 site) {
  constexpr u64 RUNTIME = 16u << 10;  // for what the runtime itself does on a fiber's stack
  const Fiber* f = worker->current;
  const u64 left = (u64)__builtin_frame_address(0) - (u64)f->stack;
  if (left > stack_bytes || bytes > stack_bytes || left < 2 * bytes + RUNTIME)
    fault("stack_overflow", site, nullptr, "%llu bytes of stack are needed, and of the %llu that a thread has here %llu are left", (unsigned long long)bytes, (unsigned long long)stack_bytes,
          (unsigned long long)(left > stack_bytes ? 0 : left));
}
void emu_bad_call(u64 address, u32 site) { fault("bad_call", site, nullptr, "a call through %#llx, which is none of the functions it may reach", (unsigned long long)address); }
const FunctionInfo* emu_function(u64 address, const FunctionInfo* table, u32 count, u32 param_bytes, u32 result_bytes, u32 site) {
  const u64 o = address - (u64)table;
  if (o >= count * sizeof(FunctionInfo) || o % sizeof(FunctionInfo)) emu_bad_call(address, site);
  const FunctionInfo* f = (const FunctionInfo*)address;
  if (f->param_bytes != param_bytes || f->result_bytes != result_bytes)
    fault("bad_call", site, nullptr, "a call with %u bytes of parameters and %u of results to a function that takes %u and gives %u", param_bytes, result_bytes, f->param_bytes, f->result_bytes);
  return f;
}
void emu_local_fault(u64 address, u32 bytes, u32 site) {
  const LocalArray* nearest = nullptr;
  u64 best = ~0ull;
  for (const LocalArray* l = worker->current->locals; l; l = l->outer) {
    const u64 low = (u64)l->base, distance = address < low ? low - address : address >= low + l->bytes ? address - low - l->bytes + 1 : 0;
    if (distance < best) best = distance, nearest = l;
  }
  if (!nearest) fault("local_out_of_bounds", site, "local memory", "access of %u bytes at %#llx: the thread has no local array", bytes, (unsigned long long)address);
  const u64 o = address - (u64)nearest->base;
  if (o <= nearest->bytes && o + bytes <= nearest->bytes) fault("misaligned", site, "local memory", "access of %u bytes at byte %llu of local memory is misaligned", bytes, (unsigned long long)o);
  fault("local_out_of_bounds", site, "local memory", "access of %u bytes at byte %lld of the thread's %llu bytes of local memory", bytes, (long long)o, (unsigned long long)nearest->bytes);
}
void emu_param_fault(u64 offset, u32 bytes, u64 size, u32 site) {
  if (offset <= size && offset + bytes <= size) fault("misaligned", site, "parameters", "access of %u bytes at byte %llu of the parameters is misaligned", bytes, (unsigned long long)offset);
  fault("param_out_of_bounds", site, "parameters", "access of %u bytes at byte %lld of the function's %llu bytes of parameters", bytes, (long long)offset, (unsigned long long)size);
}
