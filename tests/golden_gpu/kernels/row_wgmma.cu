// row_wgmma.cuh and row_copies.cuh: attention of a warpgroup over tiles of rows of 16 bits, how rows come there, and how warpgroups of a
// block share registers and meet.
#include "runs.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"

struct PageIds {};
struct PageList {};

#include "../../../templates/device/attention/extend/extend_tiles.cuh"
#include "../../../templates/device/attention/extend/row_copies.cuh"

constexpr uint32_t kCols = 64, kMost = 96;  // columns; tokens

template <typename T, uint32_t kKeys, uint32_t kValues>
struct TileOf {
  struct K {
    using Element = T;
    static constexpr Recipe kRecipe = Recipe::none;
    static constexpr bool kZero = false;
  };
  using V = K;
  using KeyCode = T;
  using ValueCode = T;
  static constexpr uint32_t kKeyGroups = 1, kValueGroups = 1;
  using Operand = T;
  static constexpr uint32_t kTokens = 32, kTeamWarps = 4, kN = 2, kKeyDims = kKeys, kValueDims = kValues;
  static constexpr uint32_t kKeyBytes = 2 * kKeys, kKeyPitch = kKeyBytes, kValueBytes = 2 * kValues, kValuePitch = kValueBytes;
  static constexpr float kSlack = 8.0f;
};

// Rows of kDims to shared memory, 8 dims at a time.
template <uint32_t kDims, typename T>
__device__ __forceinline__ void put(uint8_t* to, const T* rows, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < count * kDims / 8; i += 128) {
    const uint32_t row = i / (kDims / 8), dim = i % (kDims / 8) * 8;
    *(Vec<uint32_t, 4>*)(to + group_offset<kDims>(row, dim)) = *(const Vec<uint32_t, 4>*)(rows + row * kDims + dim);
  }
}

// Each column sees the tokens before its limit: maxima, sums and sums of V; of each tile, whether its V has infinities or NaN.
template <typename Tile, typename T>
__device__ __forceinline__ void attend(const T* q, const T* k, const T* v, const uint32_t* limits, float* max, float* sum, float* out, uint32_t* special) {
  constexpr uint32_t kTokens = Tile::kTokens, kKeyDims = Tile::kKeyDims, kValueDims = Tile::kValueDims;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  uint8_t *query = dynamic, *keys = query + kCols * kKeyDims * 2, *values = keys + kTokens * kKeyDims * 2;
  const uint32_t first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const uint32_t seen[2] = {limits[first], limits[first + 8]};
  put<kKeyDims>(query, q, kCols);
  RowSums<Tile> sums;
#pragma unroll 1
  for (uint32_t base = 0; base < kMost; base += kTokens) {
    put<kKeyDims>(keys, k + base * kKeyDims, kTokens);
    put<kValueDims>(values, v + base * kValueDims, kTokens);
    fence_async_shared();
    __syncthreads();
    RowScores<Tile> s;
    wgmma_fence();
    begin_qk(s, rows_operand<kKeyDims>(shared_address(query)), rows_operand<kKeyDims>(shared_address(keys)));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(flat(s));
    for_each_score(s, [&](uint32_t token, uint32_t, uint32_t h, float& x) {
      if (base + token >= seen[h]) x = -infinity();
    });
    float shrink[2];
    if (raise_max(shrink, sums, s, 0.25f * kLog2e)) rescale_out(sums, shrink);
    exponentiate<true>(s, sums, 0.25f * kLog2e);
    TileWeights<Tile> weights;
    round_weights(weights, s);
    const bool any = any_of_group(1, has_special_values<Tile>(values));
    if (threadIdx.x == 0) special[base / kTokens] = any;
    if (any) {
      add_special_values(sums, weights, values);
      __syncthreads();
      clear_special_values<Tile>(values, threadIdx.x, 128);
      fence_async_shared();
      __syncthreads();
    }
    wgmma_fence();
    begin_pv(sums, weights, values_operand<kValueDims>(shared_address(values)));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(flat(sums));
    __syncthreads();
  }
  add_lanes(sums);
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h)
    if (threadIdx.x % 4 == 0) max[first + 8 * h] = sums.row_max[0][h], sum[first + 8 * h] = sums.row_sum[0][h];
  for_each_eight(sums, [&](uint32_t dim, uint32_t h, const Vec<float, 8>& x) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) out[(first + 8 * h) * kValueDims + dim + i] = x.e[i];
  });
}
#define ATTEND(name, T, kKeys, kValues)                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(128) name(const T* q, const T* k, const T* v, const uint32_t* limits, float* max, float* sum, float* out,     \
                                                         uint32_t* special) {                                                                                \
    attend<TileOf<T, kKeys, kValues>>(q, k, v, limits, max, sum, out, special);                                                                              \
  }
ATTEND(row_wgmma_bf16, bf16, 128, 64)
ATTEND(row_wgmma_f16, f16, 64, 128)

// The last warpgroup of three gives registers away, which the others take.
extern "C" __global__ void __launch_bounds__(384, 1) row_wgmma_registers(const uint32_t* in, uint32_t* out) {
  const uint32_t i = threadIdx.x;
  if (i >= 256) {
    release_registers<40>();
    out[i] = in[i] + 1;
  } else {
    take_registers<232>();
    out[i] = 3 * in[i];
  }
}

// Votes of each of two warpgroups; then groups of 3 blocks, of `blocks` that share a counter: how often each of 128 threads came out how.
extern "C" __global__ void row_wgmma_meetings(const uint32_t* flags, uint32_t* votes, uint32_t* counters, const uint32_t* blocks, uint32_t* times) {
  __shared__ uint32_t answer;
  const uint32_t i = blockIdx.x * 256 + threadIdx.x, group = blockIdx.x / 3;
  votes[i] = any_of_group(1 + threadIdx.x / 128, flags[i] != 0);
  if (threadIdx.x >= 128) return;
  const Finished finished = sync_finish_of(3, 128, counters + group, blocks[group], answer);
  atomicAdd(&times[3 * group + (uint32_t)finished], 1);
}

// Sums of a warpgroup, [result][thread][maxima, sums, sums of V], as partial results, and these together, 32 dims at a time.
extern "C" __global__ void __launch_bounds__(128) row_wgmma_merge(const float* in, float* slots, float* heads, float* out) {
  using Tile = TileOf<bf16, 128, 64>;
  using Parts = RowPartial<Tile>;
  constexpr uint32_t kResults = 3, kOut = Tile::kValueDims / 2, kEach = 4 + kOut;
  const uint32_t thread = threadIdx.x, first_col = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll 1
  for (uint32_t i = 0; i < kResults; ++i) {
    const float* own = in + (i * 128 + thread) * kEach;
    RowSums<Tile> sums;
    for (uint32_t h = 0; h < 2; ++h) sums.row_max[0][h] = own[h], sums.row_sum[0][h] = own[2 + h];
#pragma unroll
    for (uint32_t n = 0; n < kOut; ++n) flat(sums)[n] = own[4 + n];
    Parts::store(fresh(slots + i * Parts::kFloats), sums, false);
  }
#pragma unroll 1
  for (uint32_t first = 0; first < Tile::kValueDims / 8; first += 4) {
    float max[2], sum[2], four[4][4];
    merge_four<Parts>(max, sum, four, slots, Parts::kFloats, kResults, first);
    float* to = heads + (first / 4 * 128 + thread) * 4;
    for (uint32_t h = 0; h < 2; ++h) to[h] = max[h], to[2 + h] = sum[h];
    for_each_eight(four, first, [&](uint32_t dim, uint32_t h, const Vec<float, 8>& x) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) out[(first_col + 8 * h) * Tile::kValueDims + dim + i] = x.e[i];
    });
  }
}

// Groups of 4 blocks of 3 warps, whose works are `works`, by the counter of a plan: how often each was had, and how often in doubt.
extern "C" __global__ void __launch_bounds__(96) row_wgmma_works(uint32_t* workspaces, uint32_t* had, uint32_t stamp, uint32_t works) {
  __shared__ WorkRing ring;
  const uint32_t group = blockIdx.y;
  Plan plan;
  plan.starts = workspaces + 4 * group;
  if (threadIdx.x == 0) ring.init(3);
  __syncthreads();
  for (uint32_t round = 0;; ++round) {
    const Work work = ring.await_work(round, threadIdx.x / 32 == 1, asked_works(plan), stamp, gridDim.x, works, nullptr, [](uint32_t) { return false; });
    if (work.index == kNoWork) break;
    if (threadIdx.x % 32 == 0) atomicAdd(&had[2 * (group * works + work.index) + work.failed], 1);
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) workspaces[4 * group + 2] = idle_works(stamp) >> 32;
}

// Two warpgroups' sums of the same columns, [warpgroup][thread][maxima, sums, sums of V], as the earlier one has them together; the later
// one of block 1 has failed. Half of the dims find room at a time.
extern "C" __global__ void __launch_bounds__(256) row_wgmma_halves(const float* in, float* out) {
  using Tile = TileOf<bf16, 128, 64>;
  constexpr uint32_t kOut = Tile::kValueDims / 2, kEach = 4 + kOut, kRoom = Tile::kValueDims / 2;
  __shared__ __align__(16) uint8_t room[kRoom * 128 * 2];
  __shared__ Vec<float, 4> heads[32];
  const bool later = threadIdx.x >= 128;
  const float* own = in + (blockIdx.x * 256 + threadIdx.x) * kEach;
  RowSums<Tile> sums;
  for (uint32_t h = 0; h < 2; ++h) sums.row_max[0][h] = own[h], sums.row_sum[0][h] = own[2 + h];
#pragma unroll
  for (uint32_t n = 0; n < kOut; ++n) flat(sums)[n] = own[4 + n];
  add_lanes(sums);
  sync_merge_sums<kRoom>(4, 256, sums, later, blockIdx.x == 1, room, heads);
  if (later) return;
  float* to = out + (blockIdx.x * 128 + threadIdx.x) * kEach;
  for (uint32_t h = 0; h < 2; ++h) to[h] = sums.row_max[0][h], to[2 + h] = sums.row_sum[0][h];
#pragma unroll
  for (uint32_t n = 0; n < kOut; ++n) to[4 + n] = flat(sums)[n];
}

// Codes of q as either operand, eight a lane; every fifth lane's row is not live.
extern "C" __global__ void row_wgmma_codes(const e4m3* q, uint8_t* halves, uint8_t* bf16s) {
  const uint32_t lane = threadIdx.x;
  const bool live = lane % 5 != 3;
  store_query_codes<TileOf<f16, 64, 64>>(halves + 16 * lane, q + 8 * lane, live);
  store_query_codes<TileOf<bf16, 64, 64>>(bf16s + 16 * lane, q + 8 * lane, live);
}

// A way of each lane through a ring of 3 stages: stage and parity behind each step.
extern "C" __global__ void row_wgmma_ring(const uint32_t* steps, uint32_t* out) {
  RingPlace<3> place;
#pragma unroll 1
  for (uint32_t i = threadIdx.x * 8; i < threadIdx.x * 8 + 8; ++i) {
    place.advance(steps[i]);
    out[2 * i] = place.stage;
    out[2 * i + 1] = place.parity;
  }
}

// Rows of a warp, 32 of 128 dims and 8 of 64 dims, to shared memory by the rows of `from`, of which ~0 is none; all of that memory once they
// have landed, and what each lane's pointer leads to at lane 31 - n.
extern "C" __global__ void row_wgmma_copies(const bf16* rows, const uint32_t* from, uint32_t* wide, uint32_t* narrow, uint32_t* lanes) {
  constexpr uint32_t kRows = 48;
  __shared__ __align__(1024) uint8_t to[kRows * 256], more[kRows * 128];
  __shared__ uint64_t landed;
  const uint32_t lane = threadIdx.x, row = from[lane];
  for (uint32_t i = lane; i < kRows * 64; i += 32) ((uint32_t*)to)[i] = 0xeeeeeeeeu;
  for (uint32_t i = lane; i < kRows * 32; i += 32) ((uint32_t*)more)[i] = 0xeeeeeeeeu;
  if (lane == 0) mbarrier_init(&landed, 32);
  __syncwarp();
  const bf16* own = row == kU32Max ? nullptr : rows + row * 128;
  copy_rows_async<128, 32>(to, 8, own);
  copy_rows_async<64, 8>(more, 40, own);
  cp_async_arrive(&landed);
  mbarrier_wait(&landed, 0);
  for (uint32_t i = lane; i < kRows * 64; i += 32) wide[i] = ((const uint32_t*)to)[i];
  for (uint32_t i = lane; i < kRows * 32; i += 32) narrow[i] = ((const uint32_t*)more)[i];
  lanes[lane] = *pointer_of_lane(from + lane, 31 - lane);
}
