// Lists of keys: the entries of its request that a row of the step sees, one after another, as rows of the pool or of a buffer.
// An entry stands for kRate tokens (1: it is one); lanes of a row take neighbouring entries and have several of them on their way
// at once.
#pragma once

#include "../rows/new_rows.cuh"
#include "page_lists.cuh"

// The entries [first, first + count) of request b; `last`: its last token of this step. Not valid: what the row sees is unknown.
struct KeyRun {
  uint32_t b, first, count, last;
  bool valid;
};

// The entries that a new row sees: all tokens of each are at its position or before; of these the newest kWindow (0: all).
template <uint32_t kRate, uint32_t kWindow>
__device__ __forceinline__ KeyRun keys_seen(const NewRow& row) {
  if (row.state != RowState::known) return {row.b, 0, 0, 0, row.state == RowState::padding};
  const uint32_t end = (row.position + 1) / kRate, first = kWindow > 0 && end > kWindow ? end - kWindow : 0;
  return {row.b, first, end - first, row.last, true};
}

// A run of more entries than a list has room for is reported, and not valid.
__device__ __forceinline__ void require_room(KeyRun& run, uint32_t columns, uint64_t* errors) {
  if (run.count <= columns) return;
  report(errors, Fault::length, run.b, run.count);
  run = {run.b, 0, 0, 0, false};
}

// Stores the run's rows in the pool to to[0, columns), -1 behind them, lane `lane` of kLanes its part; whether one could not be
// had, in place of which there is -1, and a report. A ring has lost what the step's later tokens took over.
template <uint32_t kLanes, uint32_t kBatch, typename Cache>
__device__ __forceinline__ bool store_key_rows(int32_t* to, const Cache& cache, const KeyRun& run, uint32_t columns, uint32_t lane, uint64_t* errors) {
  const auto list = run.count > 0 ? cache.page_list(run.b) : Cache::no_list(Fault::none);
  bool lost = false;
  for (uint32_t base = lane; base < columns; base += kLanes * kBatch) {
    decltype(cache.page_ids(list, 0)) ids[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = base + u * kLanes, entry = run.first + i;
      ids[u] = Cache::no_ids(i < run.count ? Fault::position : Fault::none);
      if (i < run.count && cache.keeps(entry, run.last)) ids[u] = cache.page_ids(list, entry / cache.page_tokens);
    }
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = base + u * kLanes;
      if (i >= columns) continue;
      const int32_t row = i < run.count ? pool_row(cache, ids[u], run.b, run.first + i, errors) : -1;
      lost |= row < 0 && i < run.count;
      to[i] = row;
    }
  }
  return lost;
}

// Entries that a row does not see yet, from `end` on, become -1.
template <uint32_t kBatch>
__device__ __forceinline__ void hide_unseen(int32_t (&entries)[kBatch], uint32_t end) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u)
    if (entries[u] >= 0 && (uint32_t)entries[u] >= end) entries[u] = -1;
}

// A lane's part of a stored list: the end of the entries that have a row in the pool; `lost`: some entry should have one and has
// none.
struct Listed {
  uint32_t end;
  bool lost;
};

// store_pool_rows, which keeps account in `listed`.
template <uint32_t kBatch, typename Cache, typename PageIds>
__device__ __forceinline__ void store_listed_rows(int32_t* to, const Cache& cache, const PageIds (&ids)[kBatch], uint32_t b, bool owned,
                                                  const int32_t (&entries)[kBatch], uint32_t i, uint32_t end, Listed& listed, uint64_t* errors) {
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    const uint32_t at = i + u * 32;
    if (at >= end) continue;
    int32_t row = entries[u];
    if (owned && row >= 0) {
      row = pool_row(cache, ids[u], b, row, errors);
      listed.lost |= row < 0;
      if (row >= 0) listed.end = at + 1;
    }
    to[at] = row < 0 || owned ? row : -1;
  }
}

// The count of a row's list from its warp's lanes; -1 if an entry is lost.
__device__ __forceinline__ int32_t count_of(const Listed& listed) {
  const uint32_t end = __reduce_max_sync(~0u, listed.end);
  return __any_sync(~0u, listed.lost) ? -1 : (int32_t)end;
}

// Where a request lies in a buffer of `rows` rows: the row that has its entry 0, and the one that its token 0 would have.
struct BufferPlace {
  int64_t entries, tokens;
  uint32_t rows;
};

// Row `first + i` of the buffer; -1, and a report at number i of request b, where the buffer has no such row.
__device__ __forceinline__ int32_t buffer_row(const BufferPlace& place, int64_t first, uint32_t i, uint32_t b, uint64_t* errors) {
  const uint64_t row = (uint64_t)first + i;
  if (row < place.rows && row <= 0x7fffffffu) return (int32_t)row;
  report(errors, Fault::slot, b, i);
  return -1;
}

// Stores a row's list in the buffer to to[0, columns), a lane of a warp every 32nd column: entries, those that `picked` names of
// the first `entries.count` columns (null: all, in order), then the tokens of `tokens`, then -1. A pick that is no entry the row
// sees is -1. Whether one of the others lies outside the buffer, in place of which there is -1, and a report.
__device__ __forceinline__ bool store_buffer_rows(int32_t* to, const int32_t* picked, const KeyRun& entries, uint32_t seen, const KeyRun& tokens,
                                                  const BufferPlace& place, uint32_t columns, uint64_t* errors) {
  bool lost = false;
  for (uint32_t i = threadIdx.x % 32; i < columns; i += 32) {
    int32_t row = -1;
    if (i < entries.count) {
      const int32_t entry = picked == nullptr ? (int32_t)i : picked[i];
      if (entry >= 0 && (uint32_t)entry < seen) {
        row = buffer_row(place, place.entries, (uint32_t)entry, entries.b, errors);
        lost |= row < 0;
      }
    } else if (i - entries.count < tokens.count) {
      row = buffer_row(place, place.tokens, tokens.first + (i - entries.count), tokens.b, errors);
      lost |= row < 0;
    }
    to[i] = row;
  }
  return lost;
}
