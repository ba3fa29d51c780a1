// merge_states.cuh: states that are merged, by log-sum-exps to base 2; those that saw no key have an infinite one.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/attention/common/merge_states.cuh"

constexpr uint32_t kThreads = 32, kHeads = 3, kDim = 16, kWidth = 4, kChunk = 3, kRows = 8;
struct Lse {
  __device__ static float to_base_two(float lse) { return lse; }
  __device__ static float from_base_two(float lse) { return lse; }
  __device__ static bool saw_none(float lse) { return lse == infinity() || lse == -infinity(); }
  __device__ static float of_none() { return infinity(); }
};

// Heads of a block, 4 threads each, counted through all rows; the last block has fewer.
template <typename Values, typename Lses>
__device__ __forceinline__ void merge(const Values& values, const Lses& logs, uint32_t count, uint32_t num_rows, float* out, float* lse) {
  __shared__ float held[kChunk][kRows];
  const uint32_t first = blockIdx.x * kRows, rows = min(kRows, num_rows * kHeads - first);
  const uint32_t row = min(threadIdx.x / 4, rows - 1), dim = threadIdx.x % 4 * kWidth, head = first + row;
  const bool active = threadIdx.x / 4 < rows;
  StateSums<Lse, kWidth> sums;
  sums.clear();
  for (uint32_t begin = 0; begin < count; begin += kChunk) {
    Vec<float, kWidth> states[kChunk];
    load_states(states, values, head / kHeads, head % kHeads * kDim + dim, active, begin, count);
    __syncthreads();
    hold_lses<Lse, kThreads, kHeads>(held, logs, first, rows, begin, count);
    __syncthreads();
    sums.add(states, held, row, begin > 0);
  }
  if (!active) return;
  float rescaled = sums.sum;  // for weights relative to twice the base
  if (sums.max > -infinity()) {
    StateSums<Lse, kWidth> halved = sums;
    halved.rescale(sums.max + 1.0f);
    rescaled = halved.sum;
  }
  sums.normalize();
  for (uint32_t e = 0; e < kWidth; ++e) out[(uint64_t)head * kDim + dim + e] = sums.acc[e];
  if (dim == 0) lse[3 * head] = sums.lse(), lse[3 * head + 1] = rescaled, lse[3 * head + 2] = logs.at(1, head / kHeads)[head % kHeads];
}
extern "C" __global__ void states_many(const float* outs, const float* lses, float* out, float* lse) {
  merge(ManyStates<float>{outs, 5 * kHeads * kDim, kHeads * kDim}, ManyStates<float>{lses, 5 * kHeads, kHeads}, 7, 5, out, lse);
}
extern "C" __global__ void states_two(const float* outs, const float* lses, float* out, float* lse) {
  const float* second = outs + 5 * kHeads * kDim;
  merge(TwoStates<float>{outs, second, kHeads * kDim, kHeads * kDim}, TwoStates<float>{lses, lses + 5 * kHeads, kHeads, kHeads}, 2, 5, out, lse);
}
