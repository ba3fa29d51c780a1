// The columns of an attention block, the positions of their rows, and the results of their sums.
//
// A column is a query row of the chunk with one of the kGroup query heads that share the kv head.
//
// The online softmax of all attention kernels: scores are base 2, and P = 2^(score - row_max). row_max starts at -inf. It rises
// if a score passes it, in a kernel with a kSlack by more than kSlack; the sums so far are then multiplied by 2^(old - new).
// row_sum and the sums of P V are f32; row_sum adds P before P is rounded to an operand. Each thread adds the P of its own
// tokens; the threads of a column add their parts at the end of a chunk.
//
// Masks: tokens outside the chunk, and list entries of -1 or past a list's length, have zeros for K and V and the score -inf.
// A token that a row does not see has the score -inf; where its V is not finite, the product with it is left out (0 * NaN is
// NaN).
//
// Padding: a row that belongs to no request gets 0 in out and -inf in LSE, and a request without tokens does too. A row of a
// faulty request gets NaN in both.
#pragma once

#include "../plan/split_kv.cuh"

struct Column {
  uint32_t i, q_head;  // the row among the chunk's, the query head
  bool live;           // the chunk has such a row
};

// The columns of a block from `first` on, of kv head `head`: neighbouring columns are query heads of one row. With kHeads kv
// heads from `head` on: all columns of the first head, then all columns of the next.
template <uint32_t kGroup, uint32_t kHeads = 1>
struct BlockColumns {
  uint32_t head, first;

  __device__ __forceinline__ Column of(uint32_t col, uint32_t rows) const {
    if constexpr (kHeads > 1) {
      const uint32_t each = rows * kGroup, n = col / each;
      Column column = of_head(n).of(col - n * each, rows);
      column.live &= n < kHeads;
      return column;
    }
    const uint32_t i = (first + col) / kGroup;
    return {min(i, rows - 1), head * kGroup + (first + col) % kGroup, i < rows};
  }
  // The columns of head n of the block.
  __device__ __forceinline__ BlockColumns<kGroup> of_head(uint32_t n) const { return {head + n, first}; }
};

// The tokens [begin, end); the range may be empty.
struct TokenRange {
  uint32_t begin, end;

  // True if the token, or [token, token + count), lies in the range.
  __device__ __forceinline__ bool has(uint32_t token) const { return token >= begin && token < end; }
  __device__ __forceinline__ bool has(uint32_t token, uint32_t count) const { return token >= begin && token < end && end - token >= count; }
};

// Where the rows of a chunk stand: row i at position tokens - rows + i, so the last one at the last token. `Mask` says which
// tokens a row can see: [first(position), last(position, tokens)), neither of which decreases with the position. A request may
// have more rows than tokens: its early rows stand before the first token, and see nothing or, with kEarlyRowsSee, the tokens of
// a row at the first token.
template <typename Mask>
struct RowPositions {
  const KvChunk& chunk;

  // Row i's position; early rows' wraps at 2^32.
  __device__ __forceinline__ bool early(uint32_t i) const { return chunk.tokens + i < chunk.rows; }
  __device__ __forceinline__ uint32_t position(uint32_t i) const { return chunk.tokens - chunk.rows + i; }

  // The chunk's tokens that row i sees, and those that every row sees.
  __device__ __forceinline__ TokenRange seen_by(uint32_t i) const {
    const uint32_t at = early(i) ? 0 : position(i);
    const bool sees = Mask::kEarlyRowsSee || !early(i);
    return {max(chunk.begin, Mask::first(at)), sees ? min(chunk.end, Mask::last(at, chunk.tokens)) : 0};
  }
  __device__ __forceinline__ TokenRange seen_by_all() const { return {seen_by(chunk.rows - 1).begin, seen_by(0).end}; }
  // The arguments of masks and scores. `clamped`: early rows stand at the first token.
  __device__ __forceinline__ At at(const Column& column, uint32_t token) const {
    return {chunk.b, chunk.row + column.i, column.q_head, column.i, position(column.i), token, chunk.tokens};
  }
  __device__ __forceinline__ At clamped(const Column& column, uint32_t token) const {
    return {chunk.b, chunk.row + column.i, column.q_head, column.i, early(column.i) ? 0 : position(column.i), token, chunk.tokens};
  }
};

// Factor that turns sums relative to `from` into sums relative to `to`; no tokens yet: 0.
__device__ __forceinline__ float rescale(float from, float to) { return from == -infinity() ? 0.0f : exp2_approx(from - to); }

// A column's sums over some tokens: of P = 2^(score - row_max), and of P times N dims of V. `failed`: its request failed.
template <uint32_t N>
struct ColumnSums {
  float row_max, row_sum;
  Vec<float, N> out;
  bool failed;

  __device__ __forceinline__ bool empty() const { return row_max == -infinity() && row_sum == 0.0f && !failed; }  // no token seen
  // Base 2 and natural LSE; `none` where no token was seen, NaN where the request failed.
  __device__ __forceinline__ float lse_base2(float none = -infinity()) const {
    return failed ? nan_f32() : empty() ? none : row_max + log2_approx(row_sum);
  }
  __device__ __forceinline__ float lse(float none = -infinity()) const {
    return failed ? nan_f32() : empty() ? none : (row_max + log2_approx(row_sum)) * kLn2;
  }
};

// The sums over no token.
template <uint32_t N>
__device__ __forceinline__ ColumnSums<N> no_sums(bool failed) {
  return {-infinity(), 0.0f, {}, failed};
}

// The sums with the sink of a query head: a key of score `sink` without a value. A column that saw no token gets no sink.
template <uint32_t N>
__device__ __forceinline__ ColumnSums<N> with_sink(const ColumnSums<N>& sums, float sink) {
  if (sums.empty()) return sums;
  const float row_max = fmaxf(sums.row_max, sink * kLog2e), shrink = rescale(sums.row_max, row_max);
  ColumnSums<N> all = {row_max, sums.row_sum * shrink + exp2_approx(sink * kLog2e - row_max), sums.out, sums.failed};
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) all.out.e[n] *= shrink;
  return all;
}

// Sums divided by row_sum, times `factor`, to `to`: 0 where no token was seen, NaN where the request failed.
template <typename T, uint32_t N>
__device__ __forceinline__ void store_output(T* to, const ColumnSums<N>& sums, float factor = 1.0f) {
  float x[N];
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    const float mean = __fdividef(sums.out.e[n], sums.row_sum) * factor;
    x[n] = sums.failed ? nan_f32() : sums.empty() ? 0.0f : mean;
  }
  Raw<T, N> rounded;
  pack<T>(rounded, x);
  if constexpr (sizeof(rounded) == 8) *(uint64_t*)in_global(to) = *(const uint64_t*)&rounded;  // one store
  else *(Raw<T, N>*)in_global(to) = rounded;
}

// The columns of a row that no request claims, by all threads: finish(chunk, col, dim, sums) of no tokens, or of a failed
// request.
template <typename Out, typename Finish>
__device__ __forceinline__ void finish_unclaimed(uint32_t row, RowKind kind, const Finish& finish) {
  constexpr uint32_t kVecs = Out::kDim / Out::kVec;
  for (uint32_t i = threadIdx.x; i < Out::kCols * kVecs; i += Out::kThreads)
    finish(KvChunk::unclaimed(row), i / kVecs, i % kVecs * Out::kVec, no_sums<Out::kVec>(kind == RowKind::orphan));
}
