// Rows of requests that begin anywhere: request b has rows [begins[b], begins[b] + counts[b]), with gaps between them. Begins
// ascend.
#pragma once

#include "copy_rows.cuh"

// The request that row `row` belongs to. Padding: a row of none. Not valid: a run that reaches into the next one or past the
// rows, or begins that decrease.
template <typename Index>
__device__ __forceinline__ RowRange run_of(const Index* begins, const Index* counts, uint32_t batch, uint32_t row, uint32_t num_rows) {
  if (batch == 0 || row < load_index(begins, 0)) return {0, 0, 0, true, true};
  const uint32_t b = request_of(begins, batch, row), begin = load_index(begins, b);
  const uint64_t end = (uint64_t)begin + load_index(counts, b);
  const uint64_t before = b > 0 ? (uint64_t)load_index(begins, b - 1) + load_index(counts, b - 1) : 0;
  const uint32_t next = b + 1 < batch ? min(load_index(begins, b + 1), num_rows) : num_rows;
  const bool valid = before <= begin && end <= next;
  return {b, begin, (uint32_t)min(end, (uint64_t)kU32Max), valid && row >= end, valid};
}

// Row `row` as token starts[b] + (row - begins[b]) of the request b whose run it is in.
template <typename Cache, typename Index>
__device__ StoredToken find_run_token(const Cache& cache, const Index* begins, const Index* counts, const Index* starts, uint32_t row,
                                      uint32_t num_rows, uint64_t* errors) {
  return token_of_row(cache, run_of(begins, counts, cache.batch, row, num_rows), starts, row, errors);
}

// Reports a last run that passes the rows.
template <typename Index>
__device__ __forceinline__ void report_bad_runs(const Index* begins, const Index* counts, uint32_t batch, uint32_t num_rows, uint64_t* errors) {
  if (batch == 0) return;
  const uint64_t end = (uint64_t)load_index(begins, batch - 1) + load_index(counts, batch - 1);
  if (end > num_rows) report(errors, Fault::row_offsets, batch - 1, num_rows);
}
