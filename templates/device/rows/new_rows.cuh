// Whose a row of this step's tokens is, and where in the cache it goes.
#pragma once

// A new row: token `position` of request b. Not `live`: it goes nowhere, and what is wrong has been reported.
struct NewRow {
  uint32_t b, position;
  bool live;
};

// The row that `range` (range_of) found a request for. kAfter: lengths count this step's rows. In a ring a row whose page a
// later row of the step takes over goes nowhere.
template <bool kAfter, typename Cache>
__device__ __forceinline__ NewRow new_row(const Cache& cache, const RowRange& range, uint32_t row, uint64_t* errors) {
  const uint32_t b = range.b;
  if (range.padding) return {b, 0, false};
  if (!range.valid) {
    report(errors, Fault::row_offsets, b, row);
    return {b, 0, false};
  }
  const uint32_t length = cache.length(b), new_rows = range.end - range.begin;
  if (bad_length<kAfter>(length, new_rows)) {
    report(errors, Fault::length, b, row - range.begin);
    return {b, 0, false};
  }
  const uint32_t before = kAfter ? length - new_rows : length;
  const uint32_t position = before + (row - range.begin);
  return {b, position, cache.keeps(position, before + new_rows - 1)};
}

// The slot of a token, in registers or shared memory; a page without pointers: nowhere.
template <typename Cache>
struct TokenSlot {
  typename Cache::Page page;
  uint32_t token;
};

// The slot of a new row; a page that cannot be had is reported.
template <typename Cache>
__device__ __forceinline__ TokenSlot<Cache> slot_of(const Cache& cache, const NewRow& row, uint64_t* errors) {
  if (!row.live) return {no_page(Fault::none), 0};
  const auto page = cache.page(row.b, row.position / cache.page_tokens);
  if (page.fault != Fault::none) report(errors, page.fault, row.b, row.position);
  return {page, row.position % cache.page_tokens};
}

// The slots of a block's rows: kSearchLanes neighbouring lanes, all of `mask`, have a row and call
// locate_row(row, lane, mask, errors), of which the first one may report. Threads past the rows' do nothing.
template <uint32_t kSearchLanes, typename Cache, typename Locate>
__device__ __forceinline__ void locate_rows(TokenSlot<Cache>* cache_slots, uint32_t rows, uint64_t* errors, const Locate& locate_row) {
  const uint32_t row = threadIdx.x / kSearchLanes, lane = threadIdx.x % kSearchLanes;
  if (row >= rows) return;
  const TokenSlot<Cache> found = locate_row(row, lane, 0xffffffffu >> (32 - kSearchLanes) << (threadIdx.x % 32 - lane), lane == 0 ? errors : nullptr);
  if (lane == 0) cache_slots[row] = found;
}
