// New rows of a cache whose entries stand for Cache::kRate tokens each: the row of an entry's last token is the entry's.
//
// A fault of an entry is reported once, at the position of its first token; the entry is then not stored.
#pragma once

#include "new_rows.cuh"

// The row as its entry's, at the position of the entry's first token; a row whose token ends no entry is padding from here on.
template <typename Cache>
__device__ __forceinline__ NewRow entry_of(const NewRow& row) {
  if (row.state != RowState::known) return row;
  if ((row.position + 1) % Cache::kRate != 0) return {row.b, 0, 0, RowState::padding};
  return {row.b, row.position + 1 - Cache::kRate, row.last, RowState::known};
}

// The slot of an entry whose first token is row.position.
template <typename Cache>
__device__ __forceinline__ TokenSlot<typename Cache::Page> entry_slot_of(const Cache& cache, const NewRow& row, uint64_t* errors) {
  if (row.state != RowState::known) return {};
  const uint32_t entry = row.position / Cache::kRate;
  const auto page = cache.page(row.b, entry / cache.page_tokens);
  if (!page.valid) report(errors, page.fault, row.b, row.position);
  return {page, entry % cache.page_tokens};
}

// entry_slot_of with the row's state and position, which RoPE needs.
template <typename Cache>
__device__ __forceinline__ RowSlot<typename Cache::Page> entry_row_slot_of(const Cache& cache, const NewRow& row, uint64_t* errors) {
  const auto to = entry_slot_of(cache, row, errors);
  return {to.page, to.token, row.state, row.position};
}
