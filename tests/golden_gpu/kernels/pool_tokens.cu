// pool_tokens.cuh: what a step's tokens do, where their rows wait, softmax sums of two groups of threads, norms of channels.
#include "runs.cuh"
#include "../../../templates/device/rows/pool_tokens.cuh"

struct Overlap {
  static constexpr uint32_t kRate = 4, kDim = 32, kGroups = 2, kBatch = 2, kTokens = 16, kDrafts = 3, kRowStride = 128;
  static constexpr bool kOverlap = true, kRing = true;
};
struct Paged {
  static constexpr uint32_t kRate = 4, kDim = 32, kGroups = 2, kBatch = 2, kTokens = 3, kDrafts = 0, kRowStride = 64;
  static constexpr bool kOverlap = false, kRing = false;
};
struct Row {
  static constexpr uint32_t kDim = 128, kWidth = 2, kLanes = 32, kRotaryBegin = 0, kRotaryDim = 0;
  static constexpr bool kNeox = false;
};
struct Norm {
  using Cast = bf16;
  static constexpr float kOffset = 1.0f;
};

// A step [begin, end) of request 1 whose token `begin` is row 10, and the task of its token `position`.
template <typename P>
__device__ __forceinline__ void put_task(uint32_t begin, uint32_t end, uint32_t position, uint32_t* out) {
  const NewRow row = {1, position, end - 1, RowState::known};
  const RowRange range = {1, 10, 10 + (end - begin), false, true};
  PoolTask task = pool_task<P>(row, range, 10 + (position - begin));
  uint32_t reads = 0, keeps = 0, uses = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    reads |= (uint32_t)reads_page<P>(task, i) << i;
    keeps |= (uint32_t)keeps_in_page<P>(task, i) << i;
    uses |= (uint32_t)uses_page<P>(task, i) << i;
  }
  out[0] = task.entry, out[1] = task.from, out[2] = task.keeps, out[3] = laps<P>(task), out[4] = defers<P>(task, position);
  out[5] = reads, out[6] = keeps, out[7] = uses;
  share_entries<P>(task);
  out[8] = task.entries, out[9] = page_of_token<P>(task.from, position), out[10] = row_in_page<P>(position);
  out[11] = row_of_entry<P>(task, task.entry).position, out[12] = last_row<P>(task, task.entry);
  out[13] = PoolSizes<P>::first_token(task.entry), out[14] = PoolSizes<P>::kept_from(end);
  const StatePage page = state_page((float*)out, 8, (float*)out + 4, 16, 4, position % 5);
  out[15] = page.kv == nullptr ? 99 : (uint32_t)((page.kv - (float*)out) * 100 + (page.score - (float*)out));
}
extern "C" __global__ void pool_tasks(const uint32_t* steps, uint32_t* ring, uint32_t* paged) {
  const uint32_t i = threadIdx.x;
  put_task<Overlap>(steps[i * 3], steps[i * 3 + 1], steps[i * 3 + 2], ring + i * 16);
  put_task<Paged>(steps[i * 3], steps[i * 3 + 1], steps[i * 3 + 2], paged + i * 16);
}

// Tokens [5, 27) of a request, token 5 being row 2 of x: the last two stored, then those that were deferred; and a row as it is loaded.
extern "C" __global__ void pool_state(const float* x, const float* ape, float* state, float* row) {
  const PoolRows<float> in = {x, x + 64, 128, 128};
  const StatePage pages[1] = {{state, state + 64}};
  PoolTask task = {};
  task.begin = 5, task.end = 27, task.row = 2, task.known = true;
  for (task.position = 25; task.position < 27; ++task.position) store_state_row<Overlap, 32>(in, ape, pages, task);
  store_deferred_rows<Overlap, 32>(in, ape, pages, task);
  if (threadIdx.x < 16) {
    Vec<float, 4> kv, score;
    load_new<Overlap>(kv, score, in, ape, 7, 10, threadIdx.x * 4);
    store<4>(row + threadIdx.x * 4, kv);
    store<4>(row + 64 + threadIdx.x * 4, score);
    store_columns<Overlap>({row + 128, row + 192}, 16, threadIdx.x * 4, kv, score);
  }
}

// Entry 2 of a step that begins at token 10, bf16 rows from row 1 on: two groups of 8 threads.
extern "C" __global__ void pool_sums(const bf16* x, const float* ape, const float* state, float* mean, float* one, float* first, float* old,
                                     float* weights) {
  const PoolRows<bf16> in = {x, x + 64, 128, 128};
  const StatePage pages[1] = {{(float*)state, (float*)state + 64}};
  PoolTask task = {};
  task.begin = 10, task.end = 12, task.row = 1, task.from = 4, task.known = true;
  const uint32_t group = threadIdx.x / 8, dim = threadIdx.x % 8 * 4;
  __shared__ alignas(16) GroupSums<Overlap> held;
  PoolSums sums;
  pool_tokens<Overlap>(sums, in, ape, pages, task, 2, group, dim);
  float x4[4];
  weighted_means(x4, sums);
  for (uint32_t j = 0; j < 4; ++j) one[group * 32 + dim + j] = x4[j];
  store_sums<Overlap>(held, sums, group, dim);
  __syncthreads();
  if (group == 0) {
    merge_sums<Overlap>(x4, sums, held, dim);
    for (uint32_t j = 0; j < 4; ++j) mean[dim + j] = x4[j];
  }
  // The last two tokens, one of a state, one of this step; then both as two batches of which the second has a weight of 0.
  PoolBatch<Overlap, bf16> batch;
  batch.load_tokens(in, ape, pages, task, 2, 5, dim);
  batch.finish(ape);
  if (group == 0) {
    sums.clear();
    sums.add(batch.kv, batch.score);
    for (uint32_t j = 0; j < 4; ++j) first[dim + j] = batch.kv[0].e[j], first[32 + dim + j] = batch.score[1].e[j], first[64 + dim + j] = sums.max[j];
  }
  Vec<float, 4> kv[2], score[2];
  load_old<Overlap>(kv, score, pages, 4, 15, dim);  // tokens 15 and 16
  for (uint32_t j = 0; j < 4; ++j) old[dim + j] = kv[0].e[j], old[32 + dim + j] = score[0].e[j], old[64 + dim + j] = kv[1].e[j];
  if (threadIdx.x < 4) weights[threadIdx.x] = pool_weight(threadIdx.x == 3 ? -infinity() : -(float)threadIdx.x, threadIdx.x == 2 ? -2.0f : 0.0f);
}

// A row of 128 channels on a warp, weights one by one.
extern "C" __global__ void pool_norms(const float* x, const float* weight, float* normed, float* scaled, float* rounded, float* head, float* unknown) {
  __shared__ float squares[1];
  const uint32_t at = threadIdx.x * 4;
  float y[4], w[4], z[4];
  read(y, x + at);
  read(w, weight + at);
  read(z, x + at);
  const float sum = warp_squares(y);
  if (threadIdx.x == 0) squares[0] = sum;
  __syncthreads();
  const float factor = channels_factor(squares, 128.0f, 0.0625f);
  norm_channels<Norm>(y, factor, w);
  write(normed + at, y);
  read(y, x + at);
  scale_channels(y, factor);
  write(scaled + at, y);
  round_channels<bf16>(z);
  write(rounded + at, z);
  Head<Row> whole;
  whole.load(x, threadIdx.x);
  round_head<bf16>(whole, threadIdx.x);
  whole.vectors(threadIdx.x, [&](float (&v)[Row::kWidth], uint32_t e) { write(head + e, v); });
  if (threadIdx.x % 2 == 0) write(unknown + at, z);
  else store_unknown(unknown + at);
}
