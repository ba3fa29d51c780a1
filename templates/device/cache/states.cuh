// States by id, for operations of one layer that copy them to or from the caller's rows; the copies are device/cache/pages.cuh's.
#pragma once

// State ids[i] of a list of n, of which so many count as `live` says: `state`, kNoPage where there is none; `none`, an entry of
// -1; `wrong`, to be reported: an id outside the pool, or, of the first entry, a count that is none.
struct StateId {
  uint64_t state;
  bool counts, none, wrong;
};
template <typename Index>
__device__ __forceinline__ StateId load_state_id(const Index* ids, const Index* live, uint32_t n, uint32_t i, uint32_t num_states) {
  const uint64_t state = page_in<1>(ids, i, num_states);
  const bool none = skips(ids, i), counts = i < pairs_of(live, n);
  return {state, counts, none, counts ? !none && state == kNoPage : i == 0 && bad_count(live)};
}

// A row that is filled with one word, null: nothing to do.
struct FilledRow {
  uint8_t* to;
  uint32_t word;
};

// Stores the words to pieces [first, first + count) of each of `units` rows of kBytes; units * count fit a tile. All threads call
// it.
template <typename Runs, uint64_t kBytes, uint32_t kUnits>
__device__ __forceinline__ void store_filled_tile(const FilledRow (&rows)[kUnits], uint32_t units, typename Runs::Count first, uint32_t count) {
  using Narrow = typename Unit<Runs::align()>::type;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < units * count; i += kCopyThreads) {
    const FilledRow row = rows[kUnits == 1 ? 0 : i / count];
    if (row.to == nullptr) continue;
    const uint64_t begin = (uint64_t)(first + (kUnits == 1 ? i : i % count)) * 16;
    const uint32_t bytes = kBytes - begin < 16 ? (uint32_t)(kBytes - begin) : 16;
    const Vec<uint32_t, 4> value{row.word, row.word, row.word, row.word};
#pragma unroll 1
    for (uint32_t j = 0; j < bytes; j += sizeof(Narrow)) *(Narrow*)in_global(row.to + begin + j) = *(const Narrow*)&value;
  }
}
