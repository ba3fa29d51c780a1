// The step's new rows: the request and the position of each, and its slot in the cache.
//
// A fault (bad offsets, a length that the step cannot have, a position without an angle, a bad page id) is reported once a row,
// and the row is then not stored: its slot has a page with null pointers.
#pragma once

// padding: a row of no request. unknown: a row whose request or position is wrong, which was reported. known: all others, also
// rows whose page is bad, and rows that a ring does not keep.
enum class RowState : uint32_t { padding, unknown, known };

// A new row: token `position` of request b, whose last row of this step is token `last`.
struct NewRow {
  uint32_t b, position, last;
  RowState state;
};

// The slot of a token, in registers or shared memory: its page (null pointers: the token is not stored) and its place in it.
template <typename Page>
struct TokenSlot {
  Page page;
  uint32_t token;
};

// The slot of a row of q and K, which RoPE rotates by `position`.
template <typename Page>
struct RowSlot {
  Page page;
  uint32_t token;
  RowState state;
  uint32_t position;
};

// The slot of a row in a cache with a residual: K waits in the tail of request `tail` until seal quantizes it; kU32Max: it did.
template <typename Page>
struct TailSlot {
  Page page;
  uint32_t token;
  RowState state;
  uint32_t tail;
};

// A thread's part in the search for rows of a block: kLanes neighbouring lanes, all of `mask`, look for the request of row `row`.
struct SearchLane {
  uint32_t row, lane, mask;
};
template <uint32_t kLanes>
__device__ __forceinline__ SearchLane search_lane() {
  const uint32_t lane = threadIdx.x % kLanes;
  return {threadIdx.x / kLanes, lane, 0xffffffffu >> (32 - kLanes) << (threadIdx.x % 32 - lane)};
}

// Row t of the new_rows new rows of request b; a `fault`, found at `place`, makes it unknown. kAfter: the length counts the new
// rows, else it does not.
template <bool kAfter, typename Cache>
__device__ __forceinline__ NewRow row_of_request(const Cache& cache, uint32_t b, uint32_t t, uint32_t new_rows, uint64_t* errors,
                                                 Fault fault = Fault::none, uint32_t place = 0) {
  const uint32_t length = fault == Fault::none ? cache.length(b) : 0;
  if (fault == Fault::none && bad_length<kAfter>(length, new_rows)) fault = Fault::length, place = t;
  if (fault != Fault::none) {
    report(errors, fault, b, place);
    return {b, 0, 0, RowState::unknown};
  }
  const uint32_t begin = kAfter ? length - new_rows : length;
  return {b, begin + t, begin + new_rows - 1, RowState::known};
}

// Row `row` of a batch whose row_offsets gave `range` (range_of).
template <bool kAfter, typename Cache>
__device__ __forceinline__ NewRow row_in_range(const Cache& cache, const RowRange& range, uint32_t row, uint64_t* errors) {
  if (range.padding) return {range.b, 0, 0, RowState::padding};
  const Fault fault = range.valid ? Fault::none : Fault::row_offsets;
  return row_of_request<kAfter>(cache, range.b, row - range.begin, range.end - range.begin, errors, fault, row);
}

// Row `row` where every request has padded_rows rows, the first valid_lengths[b] of them new.
template <bool kAfter, typename Cache, typename Index>
__device__ __forceinline__ NewRow padded_row(const Cache& cache, const Index* valid_lengths, uint32_t padded_rows, uint32_t row,
                                             uint64_t* errors) {
  const uint32_t b = row / padded_rows, t = row % padded_rows, new_rows = load_index(valid_lengths, b);
  if (t >= new_rows) return {b, 0, 0, RowState::padding};
  const Fault fault = new_rows <= padded_rows ? Fault::none : Fault::row_offsets;
  return row_of_request<kAfter>(cache, b, t, new_rows, errors, fault, row);
}

// True if row `row` has a position below `limit` in each of kSections arrays [num_rows].
template <uint32_t kSections, typename Index>
__device__ __forceinline__ bool positions_below(const Index* positions, uint32_t row, uint32_t num_rows, uint32_t limit) {
#pragma unroll
  for (uint32_t s = 0; s < kSections; ++s)
    if (load_index(positions, s * (uint64_t)num_rows + row) >= limit) return false;
  return true;
}

// A row without an angle: reported, and unknown from here on.
__device__ __forceinline__ void require_angle(NewRow& row, bool has_angle, uint64_t* errors) {
  if (row.state != RowState::known || has_angle) return;
  report(errors, Fault::position, row.b, row.position);
  row = {row.b, 0, 0, RowState::unknown};
}

// The slot of a new row. A ring has no slot for a row whose page a later row of the step takes over.
template <typename Cache>
__device__ __forceinline__ TokenSlot<typename Cache::Page> slot_of(const Cache& cache, const NewRow& row, uint64_t* errors) {
  if (row.state != RowState::known || !cache.keeps(row.position, row.last)) return {};
  const auto page = cache.page(row.b, row.position / cache.page_tokens);
  if (!page.valid) report(errors, page.fault, row.b, row.position);
  return {page, row.position % cache.page_tokens};
}

// slot_of with the row's state and position, which RoPE and q_out need.
template <typename Cache>
__device__ __forceinline__ RowSlot<typename Cache::Page> row_slot_of(const Cache& cache, const NewRow& row, uint64_t* errors) {
  const auto to = slot_of(cache, row, errors);
  return {to.page, to.token, row.state, row.position};
}

// slot_of in a cache with a residual, whose groups have S::kResidual tokens. page() is not used: another block of seal may set
// k_sealed.
template <typename S, typename Cache>
__device__ __forceinline__ auto tail_slot_of(const Cache& cache, const NewRow& row, uint64_t* errors)
    -> TailSlot<decltype(cache.page_values(0, 0))> {
  if (row.state != RowState::known || !cache.keeps(row.position, row.last)) return {{}, 0, row.state, kU32Max};
  const auto page = cache.page_values(row.b, row.position / cache.page_tokens);
  if (page.fault != Fault::none) report(errors, page.fault, row.b, row.position);
  const bool sealed = row.position < (row.last + 1) / S::kResidual * S::kResidual;
  return {page, row.position % cache.page_tokens, row.state, sealed ? kU32Max : row.b};
}

// The slot that slots[row] names, page * page_tokens + token; none for -1, and where the row is unknown.
template <typename Cache, typename Index>
__device__ __forceinline__ TokenSlot<typename Cache::Page> named_slot(const Cache& cache, const Index* slots, uint32_t row, RowState state,
                                                                      uint64_t* errors) {
  const int64_t slot = slots[row];
  if (state == RowState::unknown && slot != -1) report(errors, Fault::position, row, row);
  if (slot == -1 || state == RowState::unknown) return {};
  const auto page = cache.page_at((uint64_t)slot / cache.page_tokens);
  if (page.fault != Fault::none) report(errors, Fault::slot, row, row);
  return {page, (uint32_t)((uint64_t)slot % cache.page_tokens)};
}
