// Merging attention over disjoint sets of keys by their log-sum-exps: the states that a call brings, and a running merge of a
// thread's dims of one head. The kernel defines its log-sum-exp:
//
//   struct Lse {
//     static float to_base_two(float lse);   // and from_base_two
//     static bool saw_none(float lse);       // the state saw no key
//     static float of_none();                // of a result that saw none
//   };
#pragma once

// Rows of many states: row t of state s begins s * state + t * row elements on.
template <typename T>
struct ManyStates {
  const T* first;
  int64_t state, row;
  __device__ __forceinline__ const T* at(int64_t s, int64_t t) const { return first + s * state + t * row; }
};

// Rows of two, which are arrays of their own.
template <typename T>
struct TwoStates {
  const T *a, *b;
  int64_t a_row, b_row;
  __device__ __forceinline__ const T* at(int64_t s, int64_t t) const { return s == 0 ? a + t * a_row : b + t * b_row; }
};

// An active thread's values of states begin, begin + 1, ... below `count`: elements from `place` on of row t.
template <uint32_t kChunk, uint32_t kWidth, typename T, typename States>
__device__ __forceinline__ void load_states(Vec<T, kWidth> (&values)[kChunk], const States& states, int64_t t, uint32_t place, bool active,
                                            uint32_t begin, uint32_t count) {
#pragma unroll
  for (uint32_t u = 0; u < kChunk; ++u) {
    const uint32_t s = begin + u;
    if (active && s < count) load<kWidth>(values[u], states.at(s, t) + place);
  }
}

// The log-sum-exps of these states to shared memory, [state][head], of `rows` heads from `first` on, counted through all rows of
// kHeads; -inf where a state saw no key, or is none. All threads call it, neighbours read neighbours.
template <typename Lse, uint32_t kThreads, uint32_t kHeads, uint32_t kChunk, uint32_t kRows, typename States>
__device__ __forceinline__ void hold_lses(float (&held)[kChunk][kRows], const States& lses, uint64_t first, uint32_t rows, uint32_t begin,
                                          uint32_t count) {
  constexpr uint32_t kFetches = (kChunk * kRows + kThreads - 1) / kThreads;
#pragma unroll
  for (uint32_t f = 0; f < kFetches; ++f) {
    const uint32_t i = threadIdx.x + f * kThreads, r = i % kRows, s = begin + i / kRows;
    const int64_t t = (first + r) / kHeads;
    float found = -infinity();
    if (s < count && r < rows && i < kChunk * kRows) found = lses.at(s, t)[(first + r) % kHeads];
    if (i < kChunk * kRows) held[i / kRows][r] = Lse::saw_none(found) ? -infinity() : found;
  }
}

// A thread's dims of a head over the states so far: weights are relative to the largest log-sum-exp among them, `max`.
template <typename Lse, uint32_t kWidth>
struct StateSums {
  float max, sum, acc[kWidth];

  __device__ __forceinline__ void clear() {
    max = -infinity(), sum = 0.0f;
#pragma unroll
    for (uint32_t e = 0; e < kWidth; ++e) acc[e] = 0.0f;
  }

  // Rescales what there is for a new largest log-sum-exp, whose weights are relative to `base`.
  __device__ __forceinline__ void rescale(float base) {
    const float factor = exp2_approx(Lse::to_base_two(max - base));
    sum *= factor;
#pragma unroll
    for (uint32_t e = 0; e < kWidth; ++e) acc[e] *= factor;
  }

  // Adds states in their order; `held` has their log-sum-exps, of every head, `row` is this one's. `later`: not the first ones.
  template <uint32_t kChunk, uint32_t kRows, typename T>
  __device__ __forceinline__ void add(const Vec<T, kWidth> (&values)[kChunk], const float (&held)[kChunk][kRows], uint32_t row, bool later) {
    float higher = max;
#pragma unroll
    for (uint32_t u = 0; u < kChunk; ++u) higher = max_nan(higher, held[u][row]);
    const float base = higher == -infinity() ? 0.0f : higher;
    if (later) rescale(base);
#pragma unroll
    for (uint32_t u = 0; u < kChunk; ++u) {
      if (held[u][row] == -infinity()) continue;  // its values may be anything
      const float weight = exp2_approx(Lse::to_base_two(held[u][row] - base));
      sum += weight;
      float x[kWidth];
      unpack<T>(x, values[u]);
#pragma unroll
      for (uint32_t e = 0; e < kWidth; ++e) acc[e] = __fmaf_rn(weight, x[e], acc[e]);
    }
    max = higher;
  }

  // Divides by the sum of the weights: 0 where no state saw a key.
  __device__ __forceinline__ void normalize() {
    const float inverse = max == -infinity() ? 0.0f : 1.0f / sum;
#pragma unroll
    for (uint32_t e = 0; e < kWidth; ++e) acc[e] *= inverse;
  }

  __device__ __forceinline__ float lse() const {
    return max == -infinity() ? Lse::of_none() : max + Lse::from_base_two(log2_approx(sum));
  }
};
