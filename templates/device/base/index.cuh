// Untrusted indices: lengths, offsets, page ids, slots. Whatever they hold, they end up in range or at kU32Max.
#pragma once

// Entry i as an unsigned 32-bit number; negative or larger values become kU32Max, which no bound admits.
__device__ __forceinline__ uint32_t load_index(const uint32_t* p, uint64_t i) { return p[i]; }
__device__ __forceinline__ uint32_t load_index(const int32_t* p, uint64_t i) { return p[i] < 0 ? kU32Max : (uint32_t)p[i]; }
__device__ __forceinline__ uint32_t load_index(const int64_t* p, uint64_t i) {
  const int64_t x = p[i];
  return x < 0 || x > (int64_t)kU32Max ? kU32Max : (uint32_t)x;
}

// Entry i as the id of a page. Negative ones of 32 bits count as 2^31 and more, which no pool has whose ids are signed: no test
// of the sign waits for the load.
template <typename Id>
__device__ __forceinline__ uint32_t load_page_id(const Id* p, uint64_t i) {
  if constexpr (sizeof(Id) == 4) return (uint32_t)p[i];
  else return load_index(p, i);
}

// The request b with offsets[b] <= row < offsets[b + 1], by halving; any offsets give some b < batch.
template <typename Index>
__device__ __forceinline__ uint32_t request_of(const Index* offsets, uint32_t batch, uint32_t row) {
  uint32_t low = 0, high = batch;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (load_index(offsets, middle) <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// request_of by the kLanes lanes of `mask`, which all get the answer: they read the entries of the next few halvings at once.
template <uint32_t kLanes, typename Index>
__device__ __forceinline__ uint32_t request_of(const Index* offsets, uint32_t batch, uint32_t row, uint32_t lane, uint32_t mask) {
  static_assert(kLanes > 1 && kLanes <= 32);
  uint32_t low = 0, high = batch;
  while (high - low > 1) {
    // Lane n - 1 has node n of the tree of halvings: its way down are the bits of n below the first.
    const uint32_t node = lane + 1;
    uint32_t l = low, h = high;
    for (uint32_t bit = 1u << (31 - __clz(node)) >> 1; bit > 0 && h - l > 1; bit >>= 1) {
      const uint32_t middle = l + (h - l) / 2;
      if (node & bit) l = middle; else h = middle;
    }
    const bool up = lane + 1 < kLanes && h - l > 1 && load_index(offsets, l + (h - l) / 2) <= row;
    const uint32_t ups = __ballot_sync(mask, up) >> (__ffs(mask) - 1);
    for (uint32_t n = 1; n < kLanes && high - low > 1;) {
      const uint32_t middle = low + (high - low) / 2, bit = ups >> (n - 1) & 1;
      if (bit) low = middle; else high = middle;
      n = 2 * n + bit;
    }
  }
  return low;
}

// Request b and its rows [begin, end), or no request (padding). `valid` is false where the offsets around b decrease or
// pass the rows: then the row's request is unknown.
struct RowRange {
  uint32_t b, begin, end;
  bool padding, valid;
};

template <typename Index>
__device__ __forceinline__ RowRange range_at(const Index* offsets, uint32_t batch, uint32_t b, uint32_t row, uint32_t num_rows) {
  const uint32_t begin = load_index(offsets, b), end = load_index(offsets, b + 1);
  const uint32_t before = b > 0 ? load_index(offsets, b - 1) : 0;
  const uint32_t after = b + 2 <= batch ? load_index(offsets, b + 2) : end;
  const bool sorted = before <= begin && begin <= end && end <= after;
  const bool leading = b == 0 && row < begin && begin <= end;
  return {b, begin, end, leading, sorted && begin <= row && row < end && end <= num_rows};
}

template <typename Index>
__device__ __forceinline__ RowRange range_of(const Index* offsets, uint32_t batch, uint32_t row, uint32_t num_rows) {
  if (batch == 0 || row >= load_index(offsets, batch)) return {0, 0, 0, true, true};
  return range_at(offsets, batch, request_of(offsets, batch, row), row, num_rows);
}

// range_of by the kLanes lanes of `mask`.
template <uint32_t kLanes, typename Index>
__device__ __forceinline__ RowRange range_of(const Index* offsets, uint32_t batch, uint32_t row, uint32_t num_rows, uint32_t lane,
                                             uint32_t mask) {
  if (batch == 0 || row >= load_index(offsets, batch)) return {0, 0, 0, true, true};
  return range_at(offsets, batch, request_of<kLanes>(offsets, batch, row, lane, mask), row, num_rows);
}

// True if a request cannot have this length and so many new rows. kAfter: the length counts them. Either way the tokens with this
// step's included are the next step's length.
template <bool kAfter>
__device__ __forceinline__ bool bad_length(uint32_t length, uint32_t new_rows) {
  return kAfter ? length < new_rows || length == kU32Max : length >= kU32Max - new_rows;
}

// True if a run of tokens from `start` on ends past every length.
__device__ __forceinline__ bool bad_run(uint32_t start, uint32_t count) { return start >= kU32Max - count; }

// True if the last offset is wrong, which makes padding of rows, or rows of padding.
template <typename Index>
__device__ __forceinline__ bool bad_total(const Index* offsets, uint32_t batch, uint32_t num_rows) {
  if (batch == 0) return false;
  const uint32_t total = load_index(offsets, batch);
  return total > num_rows || total < load_index(offsets, batch - 1);
}

// Reports a last offset that is wrong, as of the last request.
template <typename Index>
__device__ __forceinline__ void report_bad_total(const Index* offsets, uint32_t batch, uint32_t num_rows, uint64_t* errors) {
  if (bad_total(offsets, batch, num_rows)) report(errors, Fault::row_offsets, batch - 1, num_rows);
}
