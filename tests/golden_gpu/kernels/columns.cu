// columns.cuh: columns of blocks, which of their rows see what, and what becomes of a column's sums.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/attention/common/columns.cuh"

// A thread a column, a block a kv head, its first column and its chunk's rows.
extern "C" __global__ void columns_of(const uint32_t* in, uint32_t* out) {
  const uint32_t* own = in + 3 * blockIdx.x;
  const BlockColumns<3> columns = {own[0], own[1]};
  const Column column = columns.of_head(0).of(threadIdx.x, own[2]);
  const BlockColumns<3, 2> heads = {own[0], 0};
  const Column of_two = heads.of(threadIdx.x, own[2]);
  uint32_t* to = out + (blockIdx.x * blockDim.x + threadIdx.x) * 6;
  to[0] = column.i, to[1] = column.q_head, to[2] = column.live;
  to[3] = of_two.i, to[4] = of_two.q_head, to[5] = of_two.live;
}

// A block a chunk, a thread a token: bits of the rows that see it, then whether all rows see 1, 3 and 16 tokens from it on.
template <typename Mask>
__device__ __forceinline__ uint32_t seen(const KvChunk& chunk) {
  const RowPositions<Mask> positions{chunk};
  const TokenRange all = positions.seen_by_all();
  uint32_t found = 0;
  for (uint32_t i = 0; i < chunk.rows; ++i) found |= positions.seen_by(i).has(threadIdx.x) << i;
  return found | all.has(threadIdx.x, 1) << 8 | all.has(threadIdx.x, 3) << 9 | all.has(threadIdx.x, 16) << 10;
}
__device__ __forceinline__ void put(uint32_t* to, const At& at) {
  to[0] = at.b, to[1] = at.row, to[2] = at.q_head, to[3] = at.i, to[4] = at.position, to[5] = at.token, to[6] = at.tokens;
}
// Of the first threads, a row each: whether it is early, its position, and where the scores of column 1 stand.
extern "C" __global__ void columns_positions(const KvChunk* chunks, uint32_t* see, uint32_t* rows) {
  const KvChunk chunk = chunks[blockIdx.x];
  uint32_t* to = see + (blockIdx.x * blockDim.x + threadIdx.x) * 3;
  to[0] = seen<CausalMask>(chunk), to[1] = seen<WindowMask<4>>(chunk), to[2] = seen<FullMask>(chunk);
  if (threadIdx.x >= chunk.rows) return;
  const RowPositions<CausalMask> positions{chunk};
  const Column column = {threadIdx.x, 5 + threadIdx.x, true};
  uint32_t* row = rows + (blockIdx.x * 6 + threadIdx.x) * 16;
  row[0] = positions.early(threadIdx.x), row[1] = positions.position(threadIdx.x);
  put(row + 2, positions.at(column, 3 * threadIdx.x));
  put(row + 9, positions.clamped(column, 3 * threadIdx.x + 1));
}

// A thread a column's sums: both kinds of LSE, as they are and with a number for no token; the same with a sink.
__device__ __forceinline__ void logs(const ColumnSums<4>& sums, float* to) {
  to[0] = sums.lse_base2(), to[1] = sums.lse(), to[2] = sums.lse_base2(-3.0f), to[3] = sums.lse(7.0f);
}
extern "C" __global__ void columns_sums(const float* in, float* lse, float* with, float* wide, bf16* narrow, uint32_t* empty) {
  const uint32_t i = threadIdx.x;
  const float* own = in + 8 * i;
  ColumnSums<4> sums = no_sums<4>(own[7] != 0.0f);
  if (own[1] != 0.0f) sums = {own[0], own[1], {own[2], own[3], own[4], own[5]}, own[7] != 0.0f};
  empty[2 * i] = sums.empty();
  logs(sums, lse + 8 * i);
  store_output(wide + 4 * i, sums);
  store_output(narrow + 4 * i, sums, 2.0f);
  const ColumnSums<4> all = with_sink(sums, own[6]);
  logs(all, lse + 8 * i + 4);
  with[8 * i] = all.row_max, with[8 * i + 1] = all.row_sum;
  for (uint32_t n = 0; n < 4; ++n) with[8 * i + 2 + n] = all.out.e[n];
  with[8 * i + 6] = all.failed;
  empty[2 * i + 1] = all.empty();
}

// The scale that thread i has been given, and that of a call without any.
extern "C" __global__ void columns_scales(const float* in, float* out) {
  out[2 * threadIdx.x] = given_scale(in + threadIdx.x);
  out[2 * threadIdx.x + 1] = given_scale(nullptr);
}

struct Out {
  static constexpr uint32_t kThreads = 64, kCols = 3, kDim = 40, kVec = 4;
};
// A block a row of no request, of each kind in turn.
extern "C" __global__ void columns_unclaimed(float* out, float* lse, uint32_t* times) {
  finish_unclaimed<Out>(7 + blockIdx.x, (RowKind)blockIdx.x, [&](const KvChunk& chunk, uint32_t col, uint32_t dim, const ColumnSums<4>& sums) {
    const uint32_t at = (chunk.row - 7) * 3 + col;
    store_output(out + at * 40 + dim, sums);
    if (dim == 0) lse[at] = sums.lse();
    atomicAdd(&times[at * 10 + dim / 4], chunk.rows + chunk.tokens + chunk.end);
  });
}
