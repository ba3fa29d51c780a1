// Attention of a tile of tokens by a warpgroup over its 64 columns (sm_90a): S = Q K^T, softmax, O += P V, out of shared memory.
//
// Rows of Q, K and V lie in groups of 8: 8 rows of 64 dims are a swizzled pattern of 1024 bytes (device/mma/wgmma.cuh), the
// group's other dims follow, then the next group (tma_load_groups). So a tile of any pages has one distance from group to group.
//
// Sums and scores are those of row_tile.cuh for 16 columns a warp, and lie in registers as products leave them: thread 4g + j of
// a warp has columns g and g + 8, tokens or dims 8n + 2j and 8n + 2j + 1. `Tile` is as row_tile.cuh has it, kN = 2; kKeyDims and
// kValueDims are multiples of 64.
#pragma once

#include "../common/merge.cuh"
#include "row_tile.cuh"
#include "../../mma/wgmma.cuh"

// Bytes of a group of 8 rows.
template <uint32_t kDims>
constexpr uint32_t kGroupBytes = 16 * kDims;

// The place of 8 dims of a row.
template <uint32_t kDims>
__device__ __forceinline__ uint32_t group_offset(uint32_t row, uint32_t dim) {
  return row / 8 * kGroupBytes<kDims> + dim / 64 * 1024 + row % 8 * 128 + (dim % 64 / 8 ^ row % 8) * 16;
}
// Operands: rows along the sum of Q K^T; of P V the rows are the sum.
template <uint32_t kDims>
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) { return swizzled_tile(address, 16, kGroupBytes<kDims>); }
template <uint32_t kDims>
__device__ __forceinline__ uint64_t values_operand(uint32_t address) { return swizzled_tile(address, 1024, kGroupBytes<kDims>); }

// Eight codes of q at `row`, as operands, to 16 bytes of shared memory; zeros where it is not `live`.
template <typename Tile>
__device__ __forceinline__ void store_query_codes(uint8_t* to, const e4m3* row, bool live) {
  using T = typename Tile::Operand;
  Raw<e4m3, 8> codes;
  fill(codes, e4m3{});
  if (live) load<8>(codes, row);
  float x[8];
  unpack<e4m3>(x, codes);
  Raw<T, 8> widened;
  pack<T>(widened, x);
  *(Vec<uint32_t, 4>*)to = *(const Vec<uint32_t, 4>*)&widened;
}

// ---- Products, which are asynchronous: a kernel fences before them, commits and waits after them

template <typename Tile>
__device__ __forceinline__ float (&flat(RowScores<Tile>& s))[Tile::kTokens / 2] { return *(float(*)[Tile::kTokens / 2])s.e; }
template <typename Tile>
__device__ __forceinline__ float (&flat(RowSums<Tile>& sums))[Tile::kValueDims / 2] { return *(float(*)[Tile::kValueDims / 2])sums.out; }

// S = Q K^T.
template <typename Tile>
__device__ __forceinline__ void begin_qk(RowScores<Tile>& s, uint64_t query, uint64_t keys) {
  const uint64_t a = fresh_address(query), b = fresh_address(keys);
#pragma unroll
  for (uint32_t k = 0; k < Tile::kKeyDims / 16; ++k) {
    const uint32_t n = k / 4 * 64 + k % 4 * 2;
    multiply_keys<typename Tile::Operand>(flat(s), tile_at(a, n), tile_at(b, n), k > 0);
  }
}

// Weights of a tile as operands: of 16 tokens each.
template <typename Tile>
struct TileWeights {
  uint32_t e[Tile::kTokens / 16][4];
};

// O += P V.
template <typename Tile>
__device__ __forceinline__ void begin_pv(RowSums<Tile>& sums, const TileWeights<Tile>& weights, uint64_t values) {
  const uint64_t b = fresh_address(values);
#pragma unroll
  for (uint32_t k = 0; k < Tile::kTokens / 16; ++k) multiply_values<typename Tile::Operand>(flat(sums), weights.e[k], tile_at(b, k * (2 * kGroupBytes<Tile::kValueDims> / 16)), true);
}

// ---- Softmax

// Raises maxima that a score passes by more than Tile::kSlack; `shrink` becomes the factor of `out`.
// True if a maximum of one of the warp's columns has risen.
template <typename Tile, typename Factor>
__device__ __forceinline__ bool raise_max(float (&shrink)[2], RowSums<Tile>& sums, const RowScores<Tile>& s, const Factor& factor) {
  float high[1][2];
  shrink[0] = shrink[1] = 1.0f;
  if (!__any_sync(~0u, tile_max(high, s, sums, factor))) return false;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    high[0][h] = row_maximum(high[0][h]);
    const bool higher = high[0][h] > sums.row_max[0][h] + Tile::kSlack;
    shrink[h] = higher ? rescale(sums.row_max[0][h], high[0][h]) : 1.0f;
    sums.row_max[0][h] = higher ? high[0][h] : sums.row_max[0][h];
    sums.row_sum[0][h] *= shrink[h];
  }
  return true;
}
template <typename Tile>
__device__ __forceinline__ void rescale_out(RowSums<Tile>& sums, const float (&shrink)[2]) {
  sums.rescale_out(0, 0, shrink[0]);
  sums.rescale_out(0, 1, shrink[1]);
}

// Scores become weights 2^(score - row_max), added to row_sum in f32. kMarks: weights of tokens that the column does not see
// become -0.
template <bool kMarks, typename Tile, typename Factor>
__device__ __forceinline__ void exponentiate(RowScores<Tile>& s, RowSums<Tile>& sums, const Factor& factor) {
  const float from[2] = {sums.row_max[0][0] == -infinity() ? 0.0f : sums.row_max[0][0], sums.row_max[0][1] == -infinity() ? 0.0f : sums.row_max[0][1]};
#pragma unroll
  for (uint32_t n = 0; n < Tile::kTokens / 8; ++n)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      float& x = s.e[0][n][r];
      const bool hidden = kMarks && x == -infinity();
      x = exp2_approx(x * factor_of(factor, 0, r / 2) - from[r / 2]);
      if (hidden) x = -0.0f;
      sums.row_sum[0][r / 2] += x;
    }
}
// Each of a column's four lanes has a part of its sum; afterwards all have the whole sum.
template <typename Tile>
__device__ __forceinline__ void add_lanes(RowSums<Tile>& sums) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    sums.row_sum[0][h] += __shfl_xor_sync(~0u, sums.row_sum[0][h], 1);
    sums.row_sum[0][h] += __shfl_xor_sync(~0u, sums.row_sum[0][h], 2);
  }
}
template <typename Tile>
__device__ __forceinline__ void round_weights(TileWeights<Tile>& weights, const RowScores<Tile>& s) {
#pragma unroll
  for (uint32_t n = 0; n < Tile::kTokens / 8; ++n)
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) pack_pair((typename Tile::Operand*)&weights.e[n / 2][n % 2 * 2 + h], s.e[0][n][2 * h], s.e[0][n][2 * h + 1]);
}

// ---- Infinities and NaN in V of tokens that not all columns see: 0 times them is NaN

// True if the tile has one.
template <typename Tile>
__device__ __forceinline__ bool has_special_values(const uint8_t* values) {
  bool special = false;
#pragma unroll 2
  for (uint32_t i = threadIdx.x % 128; i < Tile::kTokens * Tile::kValueDims / 8; i += 128) {
    const Vec<uint32_t, 4> x = *(const Vec<uint32_t, 4>*)(values + i * 16);
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) special |= has_special<typename Tile::Operand>(x.e[n]);
  }
  return special;
}

// Adds them to the columns that see their token, that is, whose weight is not -0. Weights rotate through the registers once, two
// registers at a time.
template <typename Tile>
__device__ __forceinline__ void add_special_values(RowSums<Tile>& sums, TileWeights<Tile>& weights, const uint8_t* values) {
  using T = typename Tile::Operand;
  uint32_t(&w)[Tile::kTokens / 4] = *(uint32_t(*)[Tile::kTokens / 4])weights.e;
  const uint32_t j = threadIdx.x % 4;
#pragma unroll 1
  for (uint32_t token = 0; token < Tile::kTokens; ++token) {
    const uint32_t from = token % 8 / 2, half = token % 2 * 16;  // the lane of four that has its weights, and where
    uint32_t bits[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) bits[h] = __shfl_sync(~0u, w[h], (threadIdx.x % 32 & ~3u) + from) >> half & 0xffff;
#pragma unroll
    for (uint32_t n = 0; n < Tile::kValueDims / 8; ++n) {
      const uint32_t pair = *(const uint32_t*)(values + group_offset<Tile::kValueDims>(token, 8 * n) + 4 * j);
      if (!has_special<T>(pair)) continue;
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t v = pair >> 16 * e & 0xffff;
        if ((v & kExponent<T>) != kExponent<T>) continue;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h)
          if (bits[h] != 0x8000) sums.out[0][n][2 * h + e] += to_f32(T{(uint16_t)bits[h]}) * to_f32(T{(uint16_t)v});
      }
    }
    if (token % 8 < 7) continue;
    const uint32_t first[2] = {w[0], w[1]};
#pragma unroll
    for (uint32_t i = 0; i + 2 < Tile::kTokens / 4; ++i) w[i] = w[i + 2];
    w[Tile::kTokens / 4 - 2] = first[0];
    w[Tile::kTokens / 4 - 1] = first[1];
  }
}

// Turns them into zeros, by `threads` threads; this one is number `thread`.
template <typename Tile>
__device__ __forceinline__ void clear_special_values(uint8_t* values, uint32_t thread, uint32_t threads) {
  using T = typename Tile::Operand;
#pragma unroll 1
  for (uint32_t i = thread; i < Tile::kTokens * Tile::kValueDims / 2; i += threads) {
    uint32_t& pair = ((uint32_t*)values)[i];
    const uint32_t x = pair;
    const uint32_t low = (x & kExponent<T>) == kExponent<T> ? 0 : x & 0xffff, high = (x >> 16 & kExponent<T>) == kExponent<T> ? 0 : x & 0xffff0000u;
    if ((low | high) != x) pair = low | high;
  }
}

// ---- Results

// each(...) for all of the thread's sums, eight at a time.
template <typename Tile, typename Each>
__device__ __forceinline__ void for_each_eight(const RowSums<Tile>& sums, const Each& each) {
#pragma unroll
  for (uint32_t first = 0; first < Tile::kValueDims / 8; first += 4) for_each_eight(*(const float(*)[4][4])sums.out[0][first], first, each);
}

// Adds the sums of two warpgroups over the same columns, in the one of the earlier tokens. The `later` one stores its sums over Q
// (kRoom dims of 128 columns), as many dims at a time as fit, and its maxima and row sums to `heads`. Threads of both call
// it, `threads` together, and meet at barrier `id`; Q has been read by then.
template <uint32_t kRoom, typename Tile>
__device__ __forceinline__ void sync_merge_sums(uint32_t id, uint32_t threads, RowSums<Tile>& sums, bool later, bool failed, uint8_t* room, Vec<float, 4>* heads) {
  constexpr uint32_t kTiles = RowShape<Tile>::kDimTiles, kEach = kRoom / 8 < kTiles ? kRoom / 8 : kTiles;  // tiles of 8 dims
  const uint32_t thread = threadIdx.x % 128;
  if (later && thread % 4 == 0) heads[thread / 4] = {sums.row_max[0][0], sums.row_max[0][1], failed ? nan_f32() : sums.row_sum[0][0], failed ? nan_f32() : sums.row_sum[0][1]};
  named_barrier(id, threads);  // products with Q are done
  const Vec<float, 4> head = heads[thread / 4];
  const typename RowPartial<Tile>::Factors factors(sums.row_max[0], {head.e[0], head.e[1]}, sums.row_max[0]);
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) sums.row_sum[0][h] = factors.join(sums.row_sum[0][h], head.e[2 + h], h);
#pragma unroll
  for (uint32_t first = 0; first < kTiles; first += kEach) {
    Vec<float, 4>* at = (Vec<float, 4>*)room + thread;
    if (first > 0) named_barrier(id, threads);  // the dims before these have been read
    if (later) {
#pragma unroll
      for (uint32_t d = 0; d < kEach && first + d < kTiles; ++d) at[d * 128] = *(const Vec<float, 4>*)sums.out[0][first + d];
    }
    named_barrier(id, threads);  // they are there
    if (!later) {
#pragma unroll
      for (uint32_t d = 0; d < kEach && first + d < kTiles; ++d) {
        const Vec<float, 4> x = at[d * 128];
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) sums.out[0][first + d][r] = factors.join(sums.out[0][first + d][r], x.e[r], r / 2);
      }
    }
  }
}

// Joins `count` partial results (RowPartial), `step` floats apart and in their order: row_max, row_sum, and 4 tiles of 8 dims
// from `first` on.
template <typename Parts>
__device__ __forceinline__ void merge_four(float (&row_max)[2], float (&row_sum)[2], float (&out)[4][4], float* slot, uint64_t step, uint32_t count, uint32_t first) {
  row_max[0] = row_max[1] = -infinity();
  row_sum[0] = row_sum[1] = -0.0f;  // to which anything is added without a change
#pragma unroll
  for (uint32_t n = 0; n < 16; ++n) out[n / 4][n % 4] = -0.0f;
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) {
    Vec<float, 4> head, more[4];
    load_partials(head, (const float*)Parts::at(slot + i * step, 0, 0));
#pragma unroll
    for (uint32_t d = 0; d < 4; ++d) load_partials(more[d], (const float*)Parts::at(slot + i * step, 0, first + d + 1));
    const typename Parts::Factors factors(row_max, {head.e[0], head.e[1]}, row_max);
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) row_sum[h] = factors.join(row_sum[h], head.e[2 + h], h);
#pragma unroll
    for (uint32_t n = 0; n < 16; ++n) out[n / 4][n % 4] = factors.join(out[n / 4][n % 4], more[n / 4].e[n % 4], n % 4 / 2);
  }
}

// Returns the same pointer, opaque to the compiler, which otherwise keeps sums of it and offsets in registers.
template <typename T>
__device__ __forceinline__ T* fresh(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// ---- Warpgroups of a block that have different tasks

// A tile's place in a ring of N stages, and the parity of its mbarriers' phase there.
template <uint32_t N>
struct RingPlace {
  uint32_t stage = 0, parity = 0;
  // By N at most.
  __device__ __forceinline__ void advance(uint32_t n) {
    stage += n;
    if (stage < N) return;
    stage -= N;
    parity ^= 1;
  }
};

// sync_finish_among (merge.cuh) of the first `threads` threads of the block, which meet at barrier `id`; `answer` is theirs.
__device__ __forceinline__ Finished sync_finish_of(uint32_t id, uint32_t threads, uint32_t* counter, uint32_t blocks, uint32_t& answer) {
  __threadfence();
  named_barrier(id, threads);
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    before -= kIdle;
    if (before == blocks - 1) *counter = kIdle;
    answer = before;
  }
  named_barrier(id, threads);
  const uint32_t before = answer;
  __threadfence();
  return before < blocks - 1 ? Finished::early : before == blocks - 1 ? Finished::last : Finished::miscounted;
}

// The next work of a block. `failed`: the counter was overwritten, and the works of other blocks are unknown; each block then
// goes on by its place in the grid, and its works have no result. `stale`: the request has another length than the planned one.
struct Work {
  uint32_t index;
  bool failed, stale;
};
constexpr uint32_t kNoWork = kU32Max;  // index: no work is left

// The works of a block: first the work of its place in the grid, then the next work of the list that no block has. One warp (warp
// 8) takes the next work, one ahead, and publishes it. If each warp read the request's length itself and it changed meanwhile,
// copying and multiplying warps could wait for each other forever.
struct WorkRing {
  uint64_t full[2], empty[2];
  Work work[2];

  // One thread; `warps` call await_work().
  __device__ __forceinline__ void init(uint32_t warps) {
    for (uint32_t i = 0; i < 2; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], warps);
    }
  }
  // Work number `round` of this block; there are `blocks` blocks and `works` works. `counter` is idle_works() of the plan before
  // and after the launch, because the count of requests for work is fixed, requests without result included. If there is a work,
  // one thread evaluates is_stale(index).
  template <typename IsStale>
  __device__ __forceinline__ Work await_work(uint32_t round, bool asks, unsigned long long* counter, uint32_t stamp, uint32_t blocks, uint32_t works, uint64_t* errors, const IsStale& is_stale) {
    const uint32_t place = round % 2, lane = threadIdx.x % 32;
    if (asks) {
      mbarrier_wait(&empty[place], round / 2 & 1 ^ 1);
      if (lane == 0) {
        Work next = {round * blocks + blockIdx.x, round > 0 && work[1 - place].failed, false};
        if (round > 0 && !next.failed) {
          const unsigned long long asked = atomicAdd(counter, kOneWork);
          next.failed = asked - idle_works(stamp) != (uint32_t)asked * kOneWork || (uint32_t)asked >= works;
          if (next.failed) report(errors, Fault::plan, 0, 0);
          else if ((uint32_t)asked == works - 1) atomicExch(counter, idle_works(stamp));
          if (!next.failed) next.index = blocks + (uint32_t)asked;
        }
        if (next.index < works) next.stale = is_stale(next.index);
        else next.index = kNoWork;
        work[place] = next;
        mbarrier_arrive(&full[place]);
      }
    }
    mbarrier_wait(&full[place], round / 2 & 1);
    const Work found = work[place];
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&empty[place]);
    return found;
  }
};
