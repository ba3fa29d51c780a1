// simt_tokens.cuh: attention of two warps over a chunk of tokens in pages of 8; groups of 8 lanes share a token, and half a warp. K and V
// are bf16 and int8, or both codes of 3 bits under norms that readers correct.
#include "runs.cuh"
#include "../../../templates/device/quant/codebook.cuh"
#include "../../../templates/device/attention/decode/simt_tokens.cuh"

constexpr uint32_t kPages = 6, kTable = 6, kGroup = 2, kQHeads = kHeads * kGroup, kHead = 1, kCols = 6;

using Keys = Run<bf16, f16, Recipe::none>;
struct Values : Run<int8_t, f16, Recipe::amax, false, 1, 20> {
  __device__ static int8_t* base(const PageRef& page) { return (int8_t*)page.plain; }
};

__device__ const float kBookValues[] = {-2.5f, -1.25f, -0.5f, -0.25f, 0.125f, 0.75f, 1.5f, 3.0f};
struct Book {
  static constexpr float kLargest = 3.0f, kSquareBase = 32.0f, kNormUnit = 0.001953125f;
  __device__ static float value(uint32_t code) { return kBookValues[code]; }
};
using Directions = Run<Coded<u3, Book>, f16, Recipe::norm_corrected, false, 1, kDims>;
constexpr uint32_t kDirectionBytes = kInPage * 3 / 8;
struct CodedKeys : Directions {
  template <typename C>
  __device__ static f16* scales(const C&, const PageRef& page) {
    return (f16*)page.tail;
  }
};
struct CodedValues : Directions {
  __device__ static Coded<u3, Book>* base(const PageRef& page) { return (Coded<u3, Book>*)page.plain; }
};

struct Cache {
  uint8_t* keys;
  int8_t* values;
  f16* scales;
  const uint32_t* table;
  f16* norms = nullptr;  // of coded keys

  __device__ PageRef page(uint32_t b, uint32_t i) const {
    const uint32_t id = table[b * kTable + i];
    if (norms != nullptr) {
      const uint32_t first = id * kTokens * kHeads;
      return {keys + id * kDirectionBytes, scales + first, (const bf16*)(norms + first), kU32Max, Fault::none, true, (bf16*)(values + id * kDirectionBytes)};
    }
    PageRef page = {keys + id * kInPage * 2, scales + id * kTokens * Values::kScaleRow, nullptr, kU32Max, Fault::none, true};
    page.plain = (bf16*)(values + id * kInPage);
    return page;
  }
};
template <uint32_t kL, uint32_t kW, typename Key = Keys, typename Value = Values>
struct LanesOf {
  using K = Key;
  using V = Value;
  static constexpr uint32_t kCols = ::kCols, kLanes = kL, kWidth = kW, kChunks = (kDims + kL * kW - 1) / (kL * kW);
  static constexpr uint32_t kKeyChunks = kChunks, kValueChunks = kChunks;
};
struct Merged {
  float max[2][kCols], sum[2][kCols], out[2][kCols][kDims];
};

// [warp][column] maxima and sums, [warp][column][dim] sums of V. Tokens go round the warps' groups of lanes.
template <typename Lanes>
__device__ __forceinline__ void attend(const Cache& cache, const KvChunk& chunk, const bf16* q, float* max, float* sum, float* out) {
  __shared__ Merged merged;
  constexpr uint32_t kAtOnce = 32 / Lanes::kLanes;
  const BlockColumns<kGroup> columns = {kHead, 0};
  const uint32_t warp = threadIdx.x / 32, first = warp * kAtOnce + threadIdx.x % 32 / Lanes::kLanes;
  const RowPositions<WindowMask<12>> positions{chunk};
  LaneQuery<Lanes> query;
#pragma unroll
  for (uint32_t col = 0; col < kCols; ++col) {
    const Column column = columns.of(col, chunk.rows);
    query.template load<4>(col, q + ((chunk.row + column.i) * kQHeads + column.q_head) * kDims, column.live);
    query.multiply(col, 0.5f);
    query.multiply(col, kLog2e);
  }
  auto sums = LaneSums<Lanes>();
#pragma unroll 1
  for (uint32_t base = chunk.begin; base < chunk.end; base += 2 * kAtOnce) {
    const uint32_t token = base + first;
    const bool live = token < chunk.end;
    const PageRef page = live ? cache.page(chunk.b, token / kTokens) : no_page(Fault::none);
    float score[kCols] = {};
    multiply_qk<Lanes>(score, query, cache, page, token % kTokens, kHead, live, 1.0f);
    if (!live) continue;
#pragma unroll
    for (uint32_t col = 0; col < kCols; ++col) {
      if (!positions.seen_by(columns.of(col, chunk.rows).i).has(token)) score[col] = -infinity();
      exponentiate<Lanes>(sums, score[col], col);
    }
    multiply_pv<Lanes>(sums, score, cache, page, token % kTokens, kHead, 1.0f);
  }
  __syncwarp();
  merge_lanes<Lanes>(sums);
  store_team_sums<Lanes>(merged, warp, sums);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < 2 * kCols; i += 64) max[i] = merged.max[i / kCols][i % kCols], sum[i] = merged.sum[i / kCols][i % kCols];
  for (uint32_t i = threadIdx.x; i < 2 * kCols * kDims; i += 64) out[i] = merged.out[i / kDims / kCols][i / kDims % kCols][i % kDims];
}

// A block a chunk.
template <typename Lanes>
__device__ __forceinline__ void chunk_of_block(const Cache& cache, const KvChunk* chunks, const bf16* q, float* max, float* sum, float* out) {
  const uint32_t at = blockIdx.x * 2 * kCols;
  attend<Lanes>(cache, chunks[blockIdx.x], q, max + at, sum + at, out + at * kDims);
}
extern "C" __global__ void simt_eighths(uint8_t* keys, int8_t* values, f16* scales, const uint32_t* table, const KvChunk* chunks, const bf16* q, float* max,
                                        float* sum, float* out) {
  chunk_of_block<LanesOf<8, 4>>({keys, values, scales, table}, chunks, q, max, sum, out);
}
extern "C" __global__ void simt_halves(uint8_t* keys, int8_t* values, f16* scales, const uint32_t* table, const KvChunk* chunks, const bf16* q, float* max,
                                       float* sum, float* out) {
  chunk_of_block<LanesOf<16, 4>>({keys, values, scales, table}, chunks, q, max, sum, out);
}
extern "C" __global__ void simt_corrected(uint8_t* keys, int8_t* values, f16* scales, const uint32_t* table, const KvChunk* chunks, const bf16* q, float* max,
                                          float* sum, float* out, f16* norms, uint32_t* masks) {
  using Lanes = LanesOf<8, 8, CodedKeys, CodedValues>;
  if (blockIdx.x == 0) masks[threadIdx.x] = lanes_of<Lanes>();
  chunk_of_block<Lanes>({keys, values, scales, table, norms}, chunks, q, max, sum, out);
}
