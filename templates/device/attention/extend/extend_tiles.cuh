// The part of a block of extend in a plan: tiles of a request's columns, with the keys that they see or a part of the keys.
#pragma once

#include "../common/merge.cuh"
#include "row_tile.cuh"
#include "../common/tile_copy.cuh"

struct HeadOfEntry {
  uint32_t entry, head;
};

// The entries of a plan, and the rows of no request: [0, first_row) and [end_row, num_rows).
struct RowPlan {
  uint32_t stamp, count, heads_together;
  uint32_t first_row, end_row;
  bool orphans;  // those rows become NaN

  // The entry and the kv head of a work. Works are `heads_together` heads of every entry, then the next heads of every entry:
  // blocks that run at once share K and V.
  __device__ __forceinline__ HeadOfEntry head_of(uint32_t work) const {
    const uint32_t section = work / (count * heads_together), in_section = work % (count * heads_together);
    return {in_section / heads_together, section * heads_together + in_section % heads_together};
  }
};

// The plan for this call. A plan of another call, or garbage, is Fault::plan, and all rows then belong to no request.
template <uint32_t kHeads>
__device__ __forceinline__ RowPlan read_row_plan(uint8_t* workspace, const PlanSizes& sizes, uint64_t digest, uint32_t batch, uint32_t num_rows, uint64_t* errors) {
  const Plan plan = plan_in(workspace, sizes, kHeads);
  const PlanHeader header = *plan.header;
  const bool good = header.is_for(digest, batch, num_rows, sizes) && header.nobodys == header.sum() && header.first_row <= header.end_row && header.end_row <= num_rows && header.heads_together > 0 &&
                    kHeads % header.heads_together == 0;
  if (threadIdx.x == 0 && !good) report(errors, Fault::plan, 0, 0);
  if (threadIdx.x == 0 && good && header.wrong_total) report(errors, Fault::row_offsets, batch - 1, num_rows);
  if (!good) return {0, 0, 1, 0, 0, true};
  return {header.stamp, header.num_chunks, header.heads_together, header.first_row, header.end_row, header.wrong_total != 0};
}

// Entry `i` of the plan; an entry of another plan is Fault::plan, without rows.
template <uint32_t kGroup>
__device__ __forceinline__ KvChunk read_row_tile(const Plan& plan, uint32_t stamp, uint32_t i, uint32_t batch, uint32_t num_rows, uint32_t max_slots) {
  KvChunk tile = read_chunk<kU32Max>(plan, stamp, i, batch, num_rows, max_slots);
  if (tile.first >= (uint64_t)tile.rows * kGroup) tile.rows = 0, tile.fault = Fault::plan;
  return tile;
}

// A block's sums as partial results: every thread stores and reads its own sums.
template <typename Tile>
struct RowPartial {
  static constexpr uint32_t kThreads = 32 * Tile::kTeamWarps, kM = RowShape<Tile>::kM;
  static constexpr uint32_t kFloats = kM * kThreads * (4 * RowShape<Tile>::kDimTiles + 4);

  // Every four floats of a thread lie together, those of neighbouring threads side by side.
  __device__ static __forceinline__ Vec<float, 4>* at(float* slot, uint32_t m, uint32_t n) { return (Vec<float, 4>*)slot + (m * (RowShape<Tile>::kDimTiles + 1) + n) * kThreads + threadIdx.x; }

  __device__ static __forceinline__ void store(float* slot, const RowSums<Tile>& sums, bool failed) {
#pragma unroll
    for (uint32_t m = 0; m < kM; ++m) {
      const Vec<float, 4> head = {sums.row_max[m][0], sums.row_max[m][1], failed ? nan_f32() : sums.row_sum[m][0], failed ? nan_f32() : sums.row_sum[m][1]};
      *at(slot, m, 0) = head;
#pragma unroll
      for (uint32_t d = 0; d < RowShape<Tile>::kDimTiles; ++d) *at(slot, m, d + 1) = {sums.out[m][d][0], sums.out[m][d][1], sums.out[m][d][2], sums.out[m][d][3]};
    }
  }

  // Factors of two results, one of earlier tokens and one of later tokens; `max` becomes the maximum of both.
  struct Factors {
    float early[2], late[2];

    __device__ __forceinline__ Factors(const float (&early_max)[2], const float (&late_max)[2], float (&max)[2]) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const float high = fmaxf(early_max[h], late_max[h]);
        early[h] = rescale(early_max[h], high);
        late[h] = rescale(late_max[h], high);
        max[h] = high;
      }
    }
    // Explicit rounding: two results give the same bits wherever they are added.
    __device__ __forceinline__ float join(float earlier, float later, uint32_t h) const { return __fmaf_rn(earlier, early[h], __fmul_rn(later, late[h])); }
  };

  // Adds the sums at `slot`, of earlier tokens, to `sums`.
  __device__ static __forceinline__ void merge_before(RowSums<Tile>& sums, float* slot) {
#pragma unroll
    for (uint32_t m = 0; m < kM; ++m) {
      Vec<float, 4> head;
      load_partials(head, (const float*)at(slot, m, 0));
      const Factors factors({head.e[0], head.e[1]}, sums.row_max[m], sums.row_max[m]);
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) sums.row_sum[m][h] = factors.join(head.e[2 + h], sums.row_sum[m][h], h);
#pragma unroll
      for (uint32_t d = 0; d < RowShape<Tile>::kDimTiles; ++d) {
        if (d % 4 == 0) __syncwarp();  // or the compiler loads all of it ahead, for which there are no registers
        Vec<float, 4> x;
        load_partials(x, (const float*)at(slot, m, d + 1));
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) sums.out[m][d][r] = factors.join(x.e[r], sums.out[m][d][r], r / 2);
      }
    }
  }

  // The `count` results from `slot` on, `step` floats apart, together, in their order; of the warp's columns, which begin at
  // `first`, to `merged` in shared memory. A few dims at a time, because it rarely runs and registers are few.
  template <typename Merged, typename Factor>
  __device__ static __forceinline__ void merge(Merged& merged, uint32_t first, float* slot, uint64_t step, uint32_t count, const Factor& factor) {
    constexpr uint32_t kEach = RowShape<Tile>::kDimTiles % 4 == 0 ? 4 : 2;
#pragma unroll
    for (uint32_t m = 0; m < kM; ++m) {
#pragma unroll 1
      for (uint32_t base = 0; base < RowShape<Tile>::kDimTiles; base += kEach) {
        float max[2] = {-infinity(), -infinity()}, sum[2], x[kEach][4];
#pragma unroll 1
        for (uint32_t i = 0; i < count; ++i) {
          Vec<float, 4> head, more[kEach];
          load_partials(head, (const float*)at(slot + i * step, m, 0));
#pragma unroll
          for (uint32_t d = 0; d < kEach; ++d) load_partials(more[d], (const float*)at(slot + i * step, m, base + d + 1));
          const Factors factors(max, {head.e[0], head.e[1]}, max);
#pragma unroll
          for (uint32_t r = 0; r < 4; ++r) {
            const uint32_t h = r / 2;
            if (r % 2 == 0) sum[h] = i == 0 ? head.e[2 + h] : factors.join(sum[h], head.e[2 + h], h);
#pragma unroll
            for (uint32_t d = 0; d < kEach; ++d) x[d][r] = i == 0 ? more[d].e[r] : factors.join(x[d][r], more[d].e[r], h);
            if (i == 0) max[h] = head.e[h];
          }
        }
        if (base == 0) store_row_heads<Tile>(merged, first + 16 * m, max, sum);
#pragma unroll
        for (uint32_t d = 0; d < kEach; ++d) store_row_dims<Tile>(merged, first + 16 * m, base + d, x[d], factor);
      }
    }
  }
};

// The partial results of the blocks of one kv head, and the counters of blocks that share a tile.
template <typename Tile, uint32_t kHeads>
struct RowSlots {
  static constexpr uint64_t kStep = (uint64_t)kHeads * RowPartial<Tile>::kFloats;  // floats from a slot to the next
  float* first;
  uint32_t* counters;

  __device__ __forceinline__ RowSlots(const Plan& plan, uint32_t head) : first(plan.partials + (uint64_t)head * RowPartial<Tile>::kFloats), counters(plan.counters + head) {}
  __device__ __forceinline__ float* at(uint32_t slot) const { return first + slot * kStep; }
  __device__ __forceinline__ uint32_t* counter(uint32_t slot) const { return counters + (uint64_t)slot * kHeads; }
};

// A tile's runs of kRun tokens are shared out: kThreads neighbouring threads copy one run.
template <typename Tile>
struct RunCopies {
  static constexpr uint32_t kRuns = Tile::kTokens / Tile::kRun, kThreads = 32 * Tile::kTeamWarps / kRuns;
  using Keys = TileCopy<Tile::kKeyBytes, Tile::kKeyAccess, Tile::kKeyPitch, Tile::kRun, kThreads>;
  using Values = TileCopy<Tile::kValueBytes, Tile::kValueAccess, Tile::kValuePitch, Tile::kRun, kThreads>;
};

// The page ids of this thread's run of tile `tile`; a run behind the chunk has no ids and reads nothing.
template <typename Tile, typename Cache>
__device__ __forceinline__ PageIds look_up_run(const Cache& cache, const PageList& pages, const KvChunk& chunk, uint32_t tile) {
  const uint32_t token = tile * Tile::kTokens + threadIdx.x / RunCopies<Tile>::kThreads * Tile::kRun;
  return cache.page_ids(pages, token < chunk.end ? max(token, chunk.begin) / cache.page_tokens : kU32Max);
}

// Starts the copies of the tile's rows of head `head` to `stage`, a run from one address. `failed` becomes true if a page of
// the chunk's tokens is not found, which is reported.
template <typename Tile, typename Cache, typename Scales = NoTileScales>
__device__ __forceinline__ void copy_run_async(bool& failed, uint32_t stage, const Cache& cache, const PageIds& id, const KvChunk& chunk, uint32_t tile,
                                               uint32_t head, uint64_t* errors, const Scales& scales = {}) {
  using Copies = RunCopies<Tile>;
  const uint32_t run = threadIdx.x / Copies::kThreads, thread = threadIdx.x % Copies::kThreads;
  const auto page = cache.page(id);
  const uint32_t base = tile * Tile::kTokens + run * Tile::kRun, offset = base % cache.page_tokens;
  const uint32_t k_to = stage + run * Tile::kRun * Tile::kKeyPitch, v_to = stage + Tile::kTokens * Tile::kKeyPitch + run * Tile::kRun * Tile::kValuePitch;
  const uint8_t* keys = (const uint8_t*)element_at<typename Tile::K>(page, offset, head, 0);
  const uint8_t* values = (const uint8_t*)element_at<typename Tile::V>(page, offset, head, 0);
  bool whole = base >= chunk.begin && base < chunk.end && chunk.end - base >= Tile::kRun && page.valid;
  if constexpr (Scales::kStageBytes > 0) whole = whole && scales.aligned(cache);
  if (whole) {
    Copies::Keys::template all<Tile::kKeyStep>(k_to, keys, thread);
    Copies::Values::template all<Tile::kValueStep>(v_to, values, thread);
    if constexpr (Scales::kStageBytes > 0) scales.copy_run(cache, page, thread, run * Tile::kRun, offset, head);
  } else {  // a run that the chunk has a part of, or none, or that has no page, or of a pool with unaligned scales
    const uint32_t from = chunk.begin > base ? chunk.begin - base : 0, until = page.valid && chunk.end > base ? chunk.end - base : 0;
    Copies::Keys::template some<Tile::kKeyStep>(k_to, keys, thread, from, until);
    Copies::Values::template some<Tile::kValueStep>(v_to, values, thread, from, until);
    if constexpr (Scales::kStageBytes > 0) scales.fetch(cache, page, thread, run * Tile::kRun, offset, head, from, until);
    const bool wrong = !page.valid && base < chunk.end && (base >= chunk.begin || chunk.begin - base < Tile::kRun);
    if (wrong && thread == 0) report(errors, page.fault, chunk.b, max(base, chunk.begin));
    failed |= wrong;
  }
}
