// new_rows.cuh: where the rows of a step go, by lengths that count them or do not, in a ring too.
#include "runs.cuh"
#include "../../../templates/device/rows/new_rows.cuh"

constexpr uint32_t kColumns = 4, kPages = 6;

// Pages of 8 tokens, 4 a request; kRing: tokens up to `last` take over the pages of those 32 before them.
template <bool kRing>
struct Cache {
  using Page = PageRef;
  static constexpr uint32_t page_tokens = kTokens;
  const int32_t* lengths;
  const uint32_t* table;
  uint8_t* codes;
  uint32_t batch;

  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool keeps(uint32_t token, uint32_t last) const { return !kRing || last / kTokens - token / kTokens < kColumns; }
  __device__ PageRef page(uint32_t b, uint32_t i) const {
    if (!kRing && i >= kColumns) return no_page(Fault::position);
    const uint32_t id = load_index(table, b * kColumns + i % kColumns);
    if (id >= kPages) return no_page(Fault::page_id);
    return {codes + id, nullptr, nullptr, kU32Max, Fault::none, true};
  }
};

// 32 rows a block; of each its request, position and whether it is live, the page and the token's place in it.
template <bool kAfter, bool kRing, uint32_t kSearchLanes>
__device__ __forceinline__ void slots(const int32_t* offsets, const int32_t* lengths, const uint32_t* table, uint64_t* errors, uint32_t* out) {
  using C = Cache<kRing>;
  const C cache = {lengths, table, (uint8_t*)out, 6};
  const uint32_t first = blockIdx.x * 32, rows = min(32u, 80 - first);
  __shared__ TokenSlot<C> found[32];
  locate_rows<kSearchLanes>(found, rows, errors, [&](uint32_t row, uint32_t lane, uint32_t mask, uint64_t* to) {
    const RowRange range = range_of<kSearchLanes>(offsets, 6, first + row, 80, lane, mask);
    const NewRow mine = new_row<kAfter>(cache, range, first + row, to);
    uint32_t* at = out + (first + row) * 5;
    if (lane == 0) at[0] = mine.b, at[1] = mine.position, at[2] = mine.live;
    return slot_of(cache, mine, to);
  });
  __syncthreads();
  for (uint32_t row = threadIdx.x; row < rows; row += blockDim.x) {
    const bool valid = found[row].page.found();
    out[(first + row) * 5 + 3] = valid ? (uint32_t)(found[row].page.codes - (uint8_t*)out) : kU32Max;
    out[(first + row) * 5 + 4] = valid ? found[row].token : kU32Max;
  }
}
#define SLOTS(name, ...)                                                                                                        \
  extern "C" __global__ void name(const int32_t* offsets, const int32_t* lengths, const uint32_t* table, uint64_t* errors, uint32_t* out) { \
    slots<__VA_ARGS__>(offsets, lengths, table, errors, out);                                                                   \
  }
SLOTS(rows_before, false, false, 2)
SLOTS(rows_after, true, false, 4)
SLOTS(rows_ring, false, true, 8)
SLOTS(rows_ring_after, true, true, 2)
