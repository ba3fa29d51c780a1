// Tokens pooled into entries of the cache: a softmax over an entry's tokens, channel by channel, by the scores of a gate.
//
// Entry j has tokens [j * kRate, (j + 1) * kRate), and with kOverlap those of entry j - 1 before them: of their rows the first
// kDim columns count, of its own tokens' the second kDim. Tokens before 0 do not count. A row is kv and score, kColumns f32 each:
// of tokens of this step the call's arrays have it, of earlier ones a state page of kTokens rows.
//
// A ring has one page a request, and token p its row p % kTokens. A step of more rows than the ring has leaves no order between
// blocks in which one reads old rows and others store new ones there: the block that emits the step's first entry, the only
// reader of them, then stores those rows as well (defers), and the second entry, which reads some of the same rows, is emitted by
// it, too.
//
// P, spelled out in the kernel, has those numbers; kGroups groups of kDim / 4 threads, kBatch tokens of a group in flight;
// kDrafts, the last tokens of a step that a later one may take back; kRowStride, f32 from a row of a page to the next one.
#pragma once

#include "heads.cuh"
#include "new_rows.cuh"

template <typename P>
struct PoolSizes {
  static constexpr uint32_t kSpan = P::kOverlap ? 2 * P::kRate : P::kRate;          // tokens of a softmax
  static constexpr uint32_t kColumns = P::kOverlap ? 2 * P::kDim : P::kDim;         // of kv, and of scores
  static constexpr uint32_t kThreads = P::kDim / 4;                                 // of a group
  static constexpr uint32_t kEach = kSpan / P::kGroups;                             // tokens of a group
  static constexpr uint32_t kPages = P::kRing ? 1 : (kSpan - 1) / P::kTokens + 2;   // that an entry's tokens may lie in
  static_assert(kSpan % P::kGroups == 0 && kEach % P::kBatch == 0 && P::kDim % 4 == 0);

  // The first token of an entry's softmax.
  __device__ static __forceinline__ uint32_t first_token(uint32_t entry) {
    return (P::kOverlap && entry > 0 ? entry - 1 : entry) * P::kRate;
  }
  // The first token whose row a later step may read, where this one ends before token `end`.
  __device__ static __forceinline__ uint32_t kept_from(uint32_t end) {
    return first_token((end > P::kDrafts ? end - P::kDrafts : 0) / P::kRate);
  }
};

// A state page: where its first row's kv and scores lie; null: a page that there is not.
struct StatePage {
  float *kv, *score;
};

// Page `id` of `count`, pages `strides` f32 apart.
__device__ __forceinline__ StatePage state_page(float* kv, int64_t kv_stride, float* score, int64_t score_stride, uint32_t count, uint32_t id) {
  if (id >= count) return {nullptr, nullptr};
  return {kv + (int64_t)id * kv_stride, score + (int64_t)id * score_stride};
}

// A block's task for its token `position` of request b. Tokens [begin, end) are this step's; token `begin` is row `row`. The
// block stores `entries` entries from `entry` on and, if `keeps`, the token's row. `missing`: a state page that an entry needs is
// missing.
struct PoolTask {
  uint32_t b, position, begin, end, row, entry, entries, from;
  bool known, emits, keeps, missing;
};

// The task of token row.position; nothing where the row is unknown or padding.
template <typename P>
__device__ __forceinline__ PoolTask pool_task(const NewRow& row, const RowRange& range, uint32_t own_row) {
  using S = PoolSizes<P>;
  PoolTask task = {};
  if (row.state != RowState::known) return task;
  task.known = true;
  task.b = row.b, task.position = row.position, task.row = range.begin;
  task.begin = row.position - (own_row - range.begin), task.end = row.last + 1;
  task.emits = (row.position + 1) % P::kRate == 0;
  task.entry = row.position / P::kRate, task.entries = task.emits;
  task.keeps = row.position >= S::kept_from(task.end);
  task.from = task.emits ? S::first_token(task.entry) : row.position;
  return task;
}

// True if this step stores rows where it reads others.
template <typename P>
__device__ __forceinline__ bool laps(const PoolTask& task) {
  const uint32_t first = task.begin / P::kRate;
  return P::kRing && task.end / P::kRate > first && task.end - PoolSizes<P>::first_token(first) > P::kTokens;
}

// True if the row of token `q` of this step goes where an older row is read.
template <typename P>
__device__ __forceinline__ bool defers(const PoolTask& task, uint32_t q) {
  const uint32_t from = PoolSizes<P>::first_token(task.begin / P::kRate);
  return laps<P>(task) && (q - from) % P::kTokens < task.begin - from;
}

// The entries of a block, where one emits the first two.
template <typename P>
__device__ __forceinline__ void share_entries(PoolTask& task) {
  if (!P::kOverlap || !task.emits || !laps<P>(task)) return;
  const uint32_t first = task.begin / P::kRate;
  if (task.entry == first) task.entries = task.end / P::kRate > first + 1 ? 2 : 1;
  if (task.entry == first + 1) task.entries = 0;
}

// True if a block reads or stores rows in its page `i`, counted from the one of token `from`; in a ring there is one.
template <typename P>
__device__ __forceinline__ bool reads_page(const PoolTask& task, uint32_t i) {
  if (!task.emits || task.from >= task.begin) return false;
  return P::kRing ? i == 0 : task.from / P::kTokens + i <= (task.begin - 1) / P::kTokens;
}
template <typename P>
__device__ __forceinline__ bool keeps_in_page(const PoolTask& task, uint32_t i) {
  return task.keeps && (P::kRing ? i == 0 : task.from / P::kTokens + i == task.position / P::kTokens);
}
template <typename P>
__device__ __forceinline__ bool uses_page(const PoolTask& task, uint32_t i) {
  return reads_page<P>(task, i) || keeps_in_page<P>(task, i);
}

// The row of a token in the pages of a task: f32 from a page's first, and the page.
template <typename P>
__device__ __forceinline__ uint32_t page_of_token(uint32_t from, uint32_t token) {
  return P::kRing ? 0 : token / P::kTokens - from / P::kTokens;
}
template <typename P>
__device__ __forceinline__ uint32_t row_in_page(uint32_t token) {
  return token % P::kTokens * P::kRowStride;
}

// The call's rows of kv and of the gate.
template <typename T>
struct PoolRows {
  const T *kv, *gate;
  int64_t kv_stride, gate_stride;
};

// Columns [column, column + 4) of a new row: kv, and the gate plus what positions add (`added`, kColumns a token of an entry, or
// null).
template <typename P, typename T>
__device__ __forceinline__ void load_new(Vec<float, 4>& kv, Vec<float, 4>& score, const PoolRows<T>& in, const float* added, uint32_t row,
                                         uint32_t token, uint32_t column) {
  float x[4], gate[4];
  read(x, in.kv + (int64_t)row * in.kv_stride + column);
  read(gate, in.gate + (int64_t)row * in.gate_stride + column);
  Vec<float, 4> more = {};
  if (added != nullptr) load<4>(more, added + token % P::kRate * PoolSizes<P>::kColumns + column);
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) kv.e[j] = x[j], score.e[j] = added == nullptr ? gate[j] : __fadd_rn(gate[j], more.e[j]);
}

// Columns [column, column + 4) of a row, into its place in `page`.
template <typename P>
__device__ __forceinline__ void store_columns(const StatePage& page, uint32_t token, uint32_t column, const Vec<float, 4>& kv, const Vec<float, 4>& score) {
  store<4>(in_global(page.kv) + row_in_page<P>(token) + column, kv);
  store<4>(in_global(page.score) + row_in_page<P>(token) + column, score);
}

// The row of the block's token into its place in `pages`.
template <typename P, uint32_t kThreads, typename T>
__device__ __forceinline__ void store_state_row(const PoolRows<T>& in, const float* added, const StatePage* pages, const PoolTask& task) {
  const StatePage& page = pages[page_of_token<P>(task.from, task.position)];
#pragma unroll 1
  for (uint32_t column = threadIdx.x * 4; column < PoolSizes<P>::kColumns; column += kThreads * 4) {
    Vec<float, 4> kv, score;
    load_new<P>(kv, score, in, added, task.row + (task.position - task.begin), task.position, column);
    store_columns<P>(page, task.position, column, kv, score);
  }
}

// The rows that were deferred: of the places of old rows that this step reads, the last token that goes to each. Four accesses a
// thread are under way at once.
template <typename P, uint32_t kThreads, typename T>
__device__ __forceinline__ void store_deferred_rows(const PoolRows<T>& in, const float* added, const StatePage* pages, const PoolTask& task) {
  constexpr uint32_t kVectors = PoolSizes<P>::kColumns / 4;
  const uint32_t from = PoolSizes<P>::first_token(task.begin / P::kRate), least = max(task.begin, PoolSizes<P>::kept_from(task.end));
  const uint32_t count = (task.begin - from) * kVectors;
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < count; base += 4 * kThreads) {
    Vec<float, 4> kv[4], score[4];
    uint32_t token[4];
#pragma unroll
    for (uint32_t u = 0; u < 4; ++u) {
      const uint32_t i = base + u * kThreads, old = from + i / kVectors;
      token[u] = i < count ? old + (task.end - 1 - old) / P::kTokens * P::kTokens : 0;
      if (token[u] >= least) load_new<P>(kv[u], score[u], in, added, task.row + (token[u] - task.begin), token[u], i % kVectors * 4);
    }
#pragma unroll
    for (uint32_t u = 0; u < 4; ++u)
      if (token[u] >= least) store_columns<P>(pages[0], token[u], (base + u * kThreads) % kVectors * 4, kv[u], score[u]);
  }
}

// e^(x - max); 0 for -inf, also where max is.
__device__ __forceinline__ float pool_weight(float x, float max) { return x == -infinity() ? 0.0f : exp2_approx((x - max) * kLog2e); }

// Four channels of some tokens of an entry on their way: all loads are under way before any of them is waited for.
template <typename P, typename T>
struct PoolBatch {
  using S = PoolSizes<P>;
  static constexpr bool kSameType = kSame<T, float>;
  Vec<float, 4> kv[P::kBatch], score[P::kBatch], more[P::kBatch];  // of this step's rows first as T, in the first words
  bool counts[P::kBatch], fresh[P::kBatch];

  // Tokens k0, k0 + 1, ... of entry `entry`, counted from the first one of its softmax. In place of one before token 0 another is
  // read.
  __device__ __forceinline__ void load_tokens(const PoolRows<T>& in, const float* added, const StatePage* pages, const PoolTask& task,
                                              uint32_t entry, uint32_t k0, uint32_t dim) {
#pragma unroll
    for (uint32_t u = 0; u < P::kBatch; ++u) {
      constexpr uint32_t kBefore = S::kSpan - P::kRate;
      const uint32_t k = k0 + u, column = (P::kOverlap && k >= kBefore ? P::kDim : 0) + dim;
      counts[u] = k >= kBefore || entry > 0;
      const uint32_t token = entry * P::kRate + k - (counts[u] ? kBefore : 0);
      fresh[u] = token >= task.begin;
      const uint32_t row = task.row + (token - task.begin), at = row_in_page<P>(token) + column;
      const StatePage& page = pages[page_of_token<P>(task.from, token)];
      if constexpr (kSameType) {
        load<4>(kv[u], in_global(fresh[u] ? in.kv + (int64_t)row * in.kv_stride + column : page.kv + at));
        load<4>(score[u], in_global(fresh[u] ? in.gate + (int64_t)row * in.gate_stride + column : page.score + at));
      } else if (fresh[u]) {
        load<4>(*(Vec<T, 4>*)&kv[u], in.kv + (int64_t)row * in.kv_stride + column);
        load<4>(*(Vec<T, 4>*)&score[u], in.gate + (int64_t)row * in.gate_stride + column);
      } else {
        load<4>(kv[u], in_global(page.kv) + at);
        load<4>(score[u], in_global(page.score) + at);
      }
      if (added != nullptr && fresh[u]) load<4>(more[u], added + token % P::kRate * S::kColumns + column);
    }
  }

  // This step's rows as the state would have them, f32 and what positions add in the scores; no weight for tokens before 0.
  __device__ __forceinline__ void finish(const float* added) {
#pragma unroll
    for (uint32_t u = 0; u < P::kBatch; ++u)
#pragma unroll
      for (uint32_t j = 4; j-- > 0;) {  // from behind: an element of T lies before its f32
        if constexpr (!kSameType) {
          if (fresh[u]) kv[u].e[j] = to_f32(((const Vec<T, 4>*)&kv[u])->e[j]), score[u].e[j] = to_f32(((const Vec<T, 4>*)&score[u])->e[j]);
        }
        if (added != nullptr && fresh[u]) score[u].e[j] = __fadd_rn(score[u].e[j], more[u].e[j]);
        if (P::kOverlap && !counts[u]) kv[u].e[j] = 0.0f, score[u].e[j] = -infinity();
      }
  }
};

// A thread's sums of four channels: the largest score, the sum of the weights relative to it, and the sum of the weighted kv.
struct PoolSums {
  float max[4], sum[4], kv[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) max[j] = -infinity(), sum[j] = 0.0f, kv[j] = 0.0f;
  }

  // Some tokens more.
  template <uint32_t kBatch>
  __device__ __forceinline__ void add(const Vec<float, 4> (&more)[kBatch], const Vec<float, 4> (&score)[kBatch]) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      float most = max[j];
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u) most = fmaxf(most, score[u].e[j]);
      const float less = pool_weight(max[j], most);
      max[j] = most, sum[j] *= less, kv[j] *= less;
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u) {
        const float weight = pool_weight(score[u].e[j], most);
        sum[j] += weight, kv[j] = fmaf(weight, more[u].e[j], kv[j]);
      }
    }
  }
};

// Rows of earlier steps alone, of tokens token, token + 1, ...: all loads are under way at once.
template <typename P, uint32_t kCount>
__device__ __forceinline__ void load_old(Vec<float, 4> (&kv)[kCount], Vec<float, 4> (&score)[kCount], const StatePage* pages, uint32_t from,
                                         uint32_t token, uint32_t column) {
#pragma unroll
  for (uint32_t u = 0; u < kCount; ++u) {
    const StatePage& page = pages[page_of_token<P>(from, token + u)];
    load<4>(kv[u], in_global(page.kv) + row_in_page<P>(token + u) + column);
    load<4>(score[u], in_global(page.score) + row_in_page<P>(token + u) + column);
  }
}

// The sums of the thread's group over its tokens of an entry, four channels from `dim` on. Two batches at a time where they are
// all rows of earlier steps, as in a step of a token.
template <typename P, typename T>
__device__ __forceinline__ void pool_tokens(PoolSums& out, const PoolRows<T>& in, const float* added, const StatePage* pages, const PoolTask& task,
                                            uint32_t entry, uint32_t group, uint32_t dim) {
  using S = PoolSizes<P>;
  constexpr uint32_t kBoth = 2 * P::kBatch;
  constexpr bool kTwice = !P::kOverlap && S::kEach % kBoth == 0;
  out.clear();
#pragma unroll 1
  for (uint32_t k = group * S::kEach; k < (group + 1) * S::kEach;) {
    if constexpr (kTwice) {
      const uint32_t token = entry * P::kRate + k;
      if (token + kBoth <= task.begin) {
        Vec<float, 4> kv[2][P::kBatch], score[2][P::kBatch];
        load_old<P>(kv[0], score[0], pages, task.from, token, dim);
        load_old<P>(kv[1], score[1], pages, task.from, token + P::kBatch, dim);
        out.add(kv[0], score[0]);
        out.add(kv[1], score[1]);
        k += kBoth;
        continue;
      }
    }
    PoolBatch<P, T> batch;
    batch.load_tokens(in, added, pages, task, entry, k, dim);
    batch.finish(added);
    out.add(batch.kv, batch.score);
    k += P::kBatch;
  }
}

// The weighted means of a thread's channels.
__device__ __forceinline__ void weighted_means(float (&mean)[4], const PoolSums& all) {
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) mean[j] = all.kv[j] / all.sum[j];
}

// The sums of groups 1, 2 ... as they wait for group 0: the three numbers of every channel.
template <typename P>
struct GroupSums {
  float max[P::kGroups > 1 ? P::kGroups - 1 : 1][P::kDim], sum[P::kGroups > 1 ? P::kGroups - 1 : 1][P::kDim], kv[P::kGroups > 1 ? P::kGroups - 1 : 1][P::kDim];
};
template <typename P>
__device__ __forceinline__ void store_sums(GroupSums<P>& held, const PoolSums& mine, uint32_t group, uint32_t dim) {
  if (group == 0) return;
  store<4>(&held.max[group - 1][dim], *(const Vec<float, 4>*)mine.max);
  store<4>(&held.sum[group - 1][dim], *(const Vec<float, 4>*)mine.sum);
  store<4>(&held.kv[group - 1][dim], *(const Vec<float, 4>*)mine.kv);
}

// The weighted means of four channels from `dim` on, of all groups' sums.
template <typename P>
__device__ __forceinline__ void merge_sums(float (&mean)[4], PoolSums& all, const GroupSums<P>& held, uint32_t dim) {
#pragma unroll
  for (uint32_t g = 0; g + 1 < P::kGroups; ++g) {
    Vec<float, 4> max, sum, kv;
    load<4>(max, &held.max[g][dim]);
    load<4>(sum, &held.sum[g][dim]);
    load<4>(kv, &held.kv[g][dim]);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const float most = fmaxf(all.max[j], max.e[j]);
      const float mine = pool_weight(all.max[j], most), theirs = pool_weight(max.e[j], most);
      all.max[j] = most;
      all.sum[j] = fmaf(all.sum[j], mine, sum.e[j] * theirs);
      all.kv[j] = fmaf(all.kv[j], mine, kv.e[j] * theirs);
    }
  }
  weighted_means(mean, all);
}

// The squares of a warp's channels, `x` of each of its lanes.
__device__ __forceinline__ float warp_squares(const float (&x)[4]) {
  return reduce_sum<32>(fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], x[0] * x[0]))), 0xffffffffu);
}

// The factor of RMS norm of a row of `count` channels; `squares` has the sum of each of kWarps warps.
template <uint32_t kWarps>
__device__ __forceinline__ float channels_factor(const float (&squares)[kWarps], float count, float eps) {
  float sum = squares[0];
#pragma unroll
  for (uint32_t w = 1; w < kWarps; ++w) sum += squares[w];
  return rms_factor(sum, count, eps);
}

// Four channels times `factor`.
__device__ __forceinline__ void scale_channels(float (&x)[4], float factor) {
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) x[j] *= factor;
}

// RMS norm of four channels, times `weight`. N as for Head::norm.
template <typename N>
__device__ __forceinline__ void norm_channels(float (&x)[4], float factor, const float (&weight)[4]) {
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) {
    const float y = x[j] * factor;
    x[j] = (kSame<typename N::Cast, float> ? y : to_f32(from_f32<typename N::Cast>(y))) * (weight[j] + N::kOffset);
  }
}

// Four channels rounded to T.
template <typename T>
__device__ __forceinline__ void round_channels(float (&x)[4]) {
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) x[j] = to_f32(from_f32<T>(x[j]));
}

// A head rounded to T.
template <typename T, typename H>
__device__ __forceinline__ void round_head(Head<H>& x, uint32_t lane) {
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] = to_f32(from_f32<T>(at[j]));
  });
}

// An entry as a row that is stored: at the position of its first token.
template <typename P>
__device__ __forceinline__ NewRow row_of_entry(const PoolTask& task, uint32_t entry) {
  return {task.b, entry * P::kRate, task.end - 1, RowState::known};
}

// The row of the call whose token emits an entry.
template <typename P>
__device__ __forceinline__ uint32_t last_row(const PoolTask& task, uint32_t entry) {
  return task.row + (entry * P::kRate + (P::kRate - 1) - task.begin);
}

// NaN in four channels, of an entry that is not known.
template <typename T>
__device__ __forceinline__ void store_unknown(T* to) {
  const float unknown[4] = {nan_f32(), nan_f32(), nan_f32(), nan_f32()};
  write(to, unknown);
}
