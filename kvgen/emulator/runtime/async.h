// async.h - asynchronous memory as a translated kernel calls it. Included by device.h.
//
// Shared memory is named by its shared::cluster address; reductions by operation | element type << 8.
#pragma once

EMU_ENUM(u32) { MB_RELAXED = 1, MB_DROP = 2, MB_KEEPS_PHASE = 4, MB_PARITY = 8, MB_SUSPENDS = 16 };
EMU_ENUM(u32) { PROXY_SHARED = 1, PROXY_GLOBAL = 2, PROXY_INIT = 4 };  // what a proxy fence makes visible
EMU_ENUM(u32) { TENSOR_TILE, TENSOR_ROWS };                            // ROWS: gather4 and scatter4
EMU_ENUM(u32) { E_U8, E_U16, E_U32, E_S32, E_U64, E_S64, E_F16, E_F32, E_F64, E_BF16, ELEMENT_TYPES };
EMU_ENUM(u32) { NO_REDUCTION = 0xff };

#pragma GCC visibility push(default)
EMU_BEGIN
u32 emu_shared_address(u64 generic, u32 site);
void emu_mbarrier_init(u32 address, u32 count, u32 site);
void emu_mbarrier_invalidate(u32 address, u32 site);
u64 emu_mbarrier_arrive(u32 address, u32 count, u32 bytes, u32 flags, u32 site);  // the state before
void emu_mbarrier_expect(u32 address, u32 bytes, u32 site);
void emu_mbarrier_complete(u32 address, u32 bytes, u32 site);
bool emu_mbarrier_wait(u32 address, u64 phase, u32 flags, u32 site);  // phase: a state or a parity
u32 emu_mbarrier_pending(u64 state);
void emu_cp_async(u32 destination, u64 source, u32 bytes, u32 source_bytes, u32 site);
void emu_cp_async_commit(void);
void emu_cp_async_wait(u32 keep);
void emu_cp_async_arrive(u32 mbarrier, u32 counts, u32 site);  // counts: the arrival is one that the mbarrier expects anyway
void emu_bulk_load(u32 to, u64 from, u32 bytes, u32 mbarrier, u32 blocks, u32 site);  // blocks: multicast mask, 0: where `to` is
void emu_bulk_store(u64 to, u32 from, u32 bytes, u32 byte_mask, u32 reduction, u32 site);
void emu_bulk_between(u32 to, u32 from, u32 bytes, u32 mbarrier, u32 reduction, u32 site);
void emu_bulk_value(u32 to, const void* value, u32 bytes, u32 mbarrier, u32 reduction, u32 site);  // st.async, red.async
void emu_bulk_prefetch(u64 from, u32 bytes, u32 site);
void emu_bulk_commit(void);
void emu_bulk_wait(u32 keep, u32 only_read);
void emu_tensor_load(u32 to, u64 map, u32 rank, const s32* at, u32 mode, u32 mbarrier, u32 blocks, u32 site);
void emu_tensor_store(u64 map, u32 rank, const s32* at, u32 mode, u32 from, u32 operation, u32 site);
void emu_tensor_prefetch(u64 map, u32 rank, const s32* at, u32 mode, u32 site);
void emu_tensor_map_prefetch(u64 map, u32 site);
void emu_proxy_fence(u32 covers, u32 site);
EMU_END
#pragma GCC visibility pop
