// calls.h - what functions need beyond the entry's own code: local arrays, parameters, pointers to functions, printf.
#pragma once

// Local arrays of the running thread form a chain, innermost function first. A function gives up its own when it returns.
typedef struct LocalArray {
  const struct LocalArray* outer;
  const u8* base;
  u64 bytes;
} LocalArray;
typedef struct FunctionInfo {  // what a function pointer points to
  void (*code)(Thread*, const u8* params, u8* results);
  u32 param_bytes, result_bytes;
} FunctionInfo;

#pragma GCC visibility push(default)
EMU_BEGIN
void emu_check_stack(u64 bytes, u32 site);  // that a frame of so many still fits
const FunctionInfo* emu_function(u64 address, const FunctionInfo* table, u32 count, u32 param_bytes, u32 result_bytes, u32 site);
EMU_NORETURN void emu_bad_call(u64 address, u32 site);
EMU_NORETURN void emu_local_fault(u64 address, u32 bytes, u32 site);
EMU_NORETURN void emu_param_fault(u64 offset, u32 bytes, u64 size, u32 site);
void emu_vprintf(const u8* params, u8* results, u32 site);
EMU_NORETURN void emu_assert_failed(const u8* params, u8* results, u32 site);
EMU_END
#pragma GCC visibility pop

EMU_INLINE bool is_local(const Thread* self, u64 a) {
  const LocalArray* l;
  for (l = self->locals; l; l = l->outer)
    if (a - (u64)l->base < l->bytes) return true;
  return false;
}
#if EMU_CHECK
EMU_INLINE u8* at_local(const Thread* self, u64 address, u32 n, u32 site) {
  const u64 a = generic_from_local(self, address);
  const LocalArray* l;
  for (l = self->locals; l; l = l->outer) {
    const u64 o = a - (u64)l->base;
    if (o <= l->bytes && o + n <= l->bytes && a % n == 0) return (u8*)a;
  }
  emu_local_fault(a, n, site);
}
EMU_INLINE const u8* at_param(const Thread* self, u64 address, u32 n, const u8* params, u64 size, u32 site) {
  const u64 a = generic_from_param(self, address), o = a - (u64)params;
  if (o > size || o + n > size || a % n) emu_param_fault(o, n, size, site);
  return (const u8*)a;
}
#else
EMU_INLINE u8* at_local(const Thread* self, u64 a, u32 n, u32 site) { return (u8*)generic_from_local(self, a); }
EMU_INLINE const u8* at_param(const Thread* self, u64 a, u32 n, const u8* params, u64 size, u32 site) { return (const u8*)generic_from_param(self, a); }
#endif
