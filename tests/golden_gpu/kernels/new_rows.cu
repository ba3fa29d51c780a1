// new_rows.cuh: where the rows of a step go, by lengths that count them or do not, in a ring too; padded rows, named slots, tails.
// entries.cuh: the rows that are entries of 3 tokens.
#include "runs.cuh"
#include "../../../templates/device/rows/entries.cuh"
#include "../../../templates/device/rows/new_rows.cuh"

constexpr uint32_t kColumns = 4, kPages = 6;

// Pages of 8 tokens, 4 a request; kRing: tokens up to `last` take over the pages of those 32 before them.
template <bool kRing>
struct Cache {
  using Page = PageRef;
  static constexpr uint32_t page_tokens = kTokens, kRate = 3;
  const int32_t* lengths;
  const uint32_t* table;
  uint8_t* codes;
  uint32_t batch;

  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool keeps(uint32_t token, uint32_t last) const { return !kRing || last / kTokens - token / kTokens < kColumns; }
  __device__ PageRef page_at(uint64_t id) const {
    if (id >= kPages) return no_page(Fault::page_id);
    return {codes + id, nullptr, nullptr, kU32Max, Fault::none, true};
  }
  __device__ PageRef page(uint32_t b, uint32_t i) const {
    if (!kRing && i >= kColumns) return no_page(Fault::position);
    return page_at(load_index(table, b * kColumns + i % kColumns));
  }
  __device__ PageRef page_values(uint32_t b, uint32_t i) const { return page(b, i); }
};

// The page's number and the token's place in it.
template <typename Slot>
__device__ __forceinline__ void put(const Slot& slot, const uint8_t* codes, uint32_t* out) {
  out[0] = slot.page.found() ? (uint32_t)(slot.page.codes - codes) : kU32Max;
  out[1] = slot.page.found() ? slot.token : kU32Max;
}

// 32 rows a block; of each its request, position, state and the request's last position, the page and the token's place in it.
template <bool kAfter, bool kRing, uint32_t kSearchLanes>
__device__ __forceinline__ void slots(const int32_t* offsets, const int32_t* lengths, const uint32_t* table, uint64_t* errors, uint32_t* out) {
  using C = Cache<kRing>;
  const C cache = {lengths, table, (uint8_t*)out, 6};
  const uint32_t first = blockIdx.x * 32, rows = min(32u, 80 - first);
  __shared__ TokenSlot<PageRef> found[32];
  const SearchLane my = search_lane<kSearchLanes>();
  if (my.row < rows) {
    const uint32_t at = first + my.row;
    const RowRange range = range_of<kSearchLanes>(offsets, 6, at, 80, my.lane, my.mask);
    if (my.lane == 0) {
      const NewRow row = row_in_range<kAfter>(cache, range, at, errors);
      out[at * 6] = row.b, out[at * 6 + 1] = row.position, out[at * 6 + 2] = (uint32_t)row.state, out[at * 6 + 3] = row.last;
      found[my.row] = slot_of(cache, row, errors);
    }
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) report_bad_total(offsets, 6, 80, errors + 1);
  for (uint32_t row = threadIdx.x; row < rows; row += blockDim.x) put(found[row], (uint8_t*)out, out + (first + row) * 6 + 4);
}
#define SLOTS(name, ...)                                                                                                        \
  extern "C" __global__ void name(const int32_t* offsets, const int32_t* lengths, const uint32_t* table, uint64_t* errors, uint32_t* out) { \
    slots<__VA_ARGS__>(offsets, lengths, table, errors, out);                                                                   \
  }
SLOTS(rows_before, false, false, 2)
SLOTS(rows_after, true, false, 4)
SLOTS(rows_ring, false, true, 8)
SLOTS(rows_ring_after, true, true, 2)

struct Key {
  static constexpr uint32_t kResidual = 4;
};

// A thread a row, 12 of each request; two positions a row, which have angles below 100. A word of faults for each way.
extern "C" __global__ void rows_padded(const int32_t* valid, const int32_t* lengths, const uint32_t* table, const int32_t* positions,
                                       const int64_t* named, uint64_t* errors, uint32_t* padded, uint32_t* slots, uint32_t* tails, uint32_t* known) {
  const Cache<false> cache = {lengths, table, (uint8_t*)padded, 6};
  const uint32_t i = threadIdx.x;
  if (i >= 72) return;
  NewRow row = padded_row<false>(cache, valid, 12, i, errors);
  require_angle(row, positions_below<2>(positions, i, 72, 100), errors);
  const RowSlot<PageRef> to = row_slot_of(cache, row, errors);
  padded[4 * i] = (uint32_t)to.state, padded[4 * i + 1] = to.position;
  put(to, (uint8_t*)padded, padded + 4 * i + 2);

  const RowState state = positions_below<1>(positions, i, 72, 100) ? RowState::known : RowState::unknown;
  put(named_slot(cache, named, i, state, errors + 1), (uint8_t*)padded, slots + 2 * i);

  const NewRow mine = row_of_request<true>(cache, i / 12, i % 12, 12, errors + 2);
  known[4 * i] = mine.b, known[4 * i + 1] = mine.position, known[4 * i + 2] = mine.last, known[4 * i + 3] = (uint32_t)mine.state;
  const auto waits = tail_slot_of<Key>(cache, mine, errors + 3);
  tails[4 * i] = (uint32_t)waits.state, tails[4 * i + 1] = waits.tail;
  put(waits, (uint8_t*)padded, tails + 4 * i + 2);
}

// A thread a row, 12 of each request, before lengths count them: state and position, then the slots by both functions.
extern "C" __global__ void rows_entries(const int32_t* lengths, const uint32_t* table, uint64_t* errors, uint32_t* out) {
  const Cache<false> cache = {lengths, table, (uint8_t*)out, 6};
  const uint32_t i = threadIdx.x;
  if (i >= 72) return;
  const NewRow row = entry_of<Cache<false>>(row_of_request<false>(cache, i / 12, i % 12, 12, errors));
  const RowSlot<PageRef> to = entry_row_slot_of(cache, row, errors + 1);
  out[6 * i] = (uint32_t)to.state, out[6 * i + 1] = to.position;
  put(to, (uint8_t*)out, out + 6 * i + 2);
  put(entry_slot_of(cache, row, errors + 2), (uint8_t*)out, out + 6 * i + 4);
}
