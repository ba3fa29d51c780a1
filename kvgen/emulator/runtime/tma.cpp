// tma.cpp - tensor copies: a tile of a tensor that a tensor map describes.
#include "transfers.h"
#include <string.h>

// The rules of the map were checked when it was encoded; its bytes may have been anything else since.
static void read_map(Transfer& t, u64 address, u32 rank, u32 mode) {
  const char* op = op_text(t.site);
  if (address % 64) fault("misaligned", t.site, nullptr, "%s: the tensor map at %#llx needs an alignment of 64", op, (unsigned long long)address);
  check_tensor_map(address, t.site);
  memcpy(&t.map, (const void*)address, sizeof t.map);
  const TensorMap& m = t.map;
  if (m.magic != TENSOR_MAP_MAGIC) fault("bad_tensor_map", t.site, nullptr, "%s: the 128 bytes at %#llx are no tensor map", op, (unsigned long long)address);
  if (m.type >= ELEMENT_TYPES || m.rank < 1 || m.rank > 5 || m.swizzle > 3) fault("bad_tensor_map", t.site, nullptr, "%s: the tensor map at %#llx has been overwritten", op, (unsigned long long)address);
  const u32 needed = mode == TENSOR_ROWS ? 2 : rank;
  if (m.rank != needed) fault("bad_tensor_map", t.site, nullptr, "%s needs a tensor map of rank %u, this one has rank %u", op, needed, m.rank);
  if (mode == TENSOR_ROWS && m.box[1] != 1) fault("bad_tensor_map", t.site, nullptr, "%s needs a box of one row, this tensor map has %u", op, m.box[1]);
}
static Transfer tensor(Direction direction, u64 map, u32 rank, const s32* at, u32 mode, u32 site) {
  Transfer t{direction};
  t.is_tensor = true, t.mode = mode, t.site = site;
  memcpy(t.at, at, sizeof(s32) * (mode == TENSOR_ROWS ? 5 : rank));
  read_map(t, map, rank, mode);
  t.bytes = tile_bytes(t);
  return t;
}
static u32 reduction_of(const Transfer& t, u32 operation) {
  // Elements: bit sets of the types each operation exists for, by E_ number.
  constexpr u32 words = 1 << E_U32 | 1 << E_S32 | 1 << E_U64 | 1 << E_S64, halves = 1 << E_F16 | 1 << E_BF16;
  u32 types = words;
  if (operation == T_ADD) types = 1 << E_U32 | 1 << E_S32 | 1 << E_U64 | 1 << E_F32 | 1 << E_F64 | halves;
  if (operation == T_MIN || operation == T_MAX) types = words | halves;
  if (operation == T_INC || operation == T_DEC) types = 1 << E_U32;
  if (!(types >> t.map.type & 1)) fault("bad_tensor_map", t.site, nullptr, "%s: this reduction does not exist for the tensor map's element type", op_text(t.site));
  return operation | (u32)t.map.type << 8;
}

void emu_tensor_load(u32 to, u64 map, u32 rank, const s32* at, u32 mode, u32 mbarrier, u32 blocks, u32 site) {
  const Transfer t = tensor(TO_SHARED, map, rank, at, mode, site);
  issue_loads(t, to, mbarrier, blocks, 128);
}
void emu_tensor_store(u64 map, u32 rank, const s32* at, u32 mode, u32 from, u32 operation, u32 site) {
  Transfer t = tensor(TO_GLOBAL, map, rank, at, mode, site);
  if (operation != NO_REDUCTION) t.reduction = reduction_of(t, operation);
  t.shared = shared_byte(from, t.bytes, 128, site);
  issue(t);
}
void emu_tensor_prefetch(u64 map, u32 rank, const s32* at, u32 mode, u32 site) { check_prefetch(tensor(TO_SHARED, map, rank, at, mode, site)); }
void emu_tensor_map_prefetch(u64 map, u32 site) {
  Transfer t{TO_SHARED};
  t.site = site;
  check_tensor_map(map, site);
  memcpy(&t.map, (const void*)map, sizeof t.map);
  if (t.map.magic != TENSOR_MAP_MAGIC) fault("bad_tensor_map", site, nullptr, "%s: the 128 bytes at %#llx are no tensor map", op_text(site), (unsigned long long)map);
}
