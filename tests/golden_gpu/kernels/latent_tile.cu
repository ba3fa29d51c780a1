// latent_tile.cuh, and CopiedTiles of latent_sources.cuh: attention of a block over chunks of latent rows: of 16 bits, of 8 bits with
// scales of groups in each row, and with one scale a token beside the rows; and the pieces that those are made of.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/base/scan.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/latent_sources.cuh"

constexpr uint32_t kMost = 128, kStages = 3, kRowsOfColumns = 4;  // tokens of a chunk, tiles of the ring, query rows of a block

template <typename E, uint32_t kB, uint32_t kFrom, uint32_t kStep>
struct Part {
  using Element = E;
  static constexpr uint32_t kBlocks = kB, kAt = kFrom, kFirstStep = kStep;
};
template <uint32_t kG, uint32_t kDims, uint32_t kFrom, uint32_t kBytes>
struct ScalesOf {
  static constexpr uint32_t kGroups = kG, kGroupDims = kDims, kAt = kFrom, kPitch = kBytes;
};
// V of kV dims, Q of kS steps, and the copies of a row.
template <typename E, uint32_t kC, uint32_t kP, uint32_t kS, uint32_t kV, uint32_t kM, uint32_t kN, uint32_t kK, uint32_t kPiecesOf, uint32_t kLanesOf,
          uint32_t kTogetherOf>
struct TileOf {
  using Element = E;
  using QueryElement = bf16;
  static constexpr uint32_t kThreads = 128, kCols = kC, kTokens = 32, kStages = ::kStages, kPitch = kP, kSteps = kS, kValueDims = kV;
  static constexpr uint32_t kWarpsM = kM, kWarpsN = kN, kWarpsK = kK, kPieces = kPiecesOf, kLanes = kLanesOf, kTogether = kTogetherOf;
  static constexpr float kSlack = 8.0f;
};
// 80 dims of 16 bits: 5 blocks of two warps each, 3 of V of four warps.
struct Plain : TileOf<bf16, 8, 176, 5, 48, 2, 1, 2, 10, 4, 1> {
  using Key = Part<bf16, 5, 0, 0>;
  using Rope = void;
  using Scales = ScalesOf<1, 48, 0, 0>;
  static constexpr bool kScaled = false, kBeside = false;
};
// 128 codes, two scales, 48 dims of 16 bits.
struct Groups : TileOf<e4m3, 16, 240, 11, 128, 2, 2, 1, 15, 16, 2> {
  using Key = Part<e4m3, 4, 0, 0>;
  using Rope = Part<bf16, 3, 144, 8>;
  using Scales = ScalesOf<2, 64, 128, 240>;
  static constexpr bool kScaled = true, kBeside = false;
};
// The same with a token's only scale in a pool of their own.
struct Beside : TileOf<e4m3, 16, 240, 11, 128, 2, 1, 2, 14, 8, 1> {
  using Key = Part<e4m3, 4, 0, 0>;
  using Rope = Part<bf16, 3, 128, 8>;
  using Scales = ScalesOf<1, 128, 32 * 240, 4>;
  static constexpr bool kScaled = true, kBeside = true;
};

template <typename Tile>
struct Merged {
  float max[1][Tile::kCols], sum[1][Tile::kCols], out[1][Tile::kCols][Tile::kValueDims + 4];
};

// A block's chunk; its token n is row places[n] of the pool, of no row where that is negative.
template <typename Tile, typename Query>
__device__ __forceinline__ void attend(const uint8_t* pool, const float* scales, const int32_t* places, const KvChunk* chunks, const bf16* q, float* max,
                                       float* sum, float* out) {
  using Shape = LatentShape<Tile>;
  using Scales = typename Tile::Scales;
  using Softmax = ColumnThreads<Tile::kThreads, Tile::kCols, Tile::kTokens>;
  constexpr uint32_t kT = Tile::kTokens, kStageBytes = kT * (Tile::kPitch + 4), kCols = Tile::kCols, kGroup = kCols / kRowsOfColumns, kDims = Tile::kSteps * 16;
  __shared__ alignas(16) uint8_t ring[kStages][kStageBytes];
  __shared__ alignas(16) typename Shape::Query queries;
  __shared__ alignas(16) typename Shape::Scores scores;
  __shared__ Weights<kCols, kT> weights;
  __shared__ const uint8_t *rows[kStages][kT], *scale_rows[kStages][kT];
  __shared__ alignas(16) float qk_scales[kCols], shrinks[kCols], largest_scales[Tile::kWarpsM][Scales::kGroups];
  __shared__ Merged<Tile> merged;
  const KvChunk chunk = chunks[blockIdx.x];
  const uint32_t thread = threadIdx.x, warp = thread / 32, at_ring = matrix_address(ring), count = chunk.end - chunk.begin, tiles = (count + kT - 1) / kT;
  for (uint32_t i = thread; i < sizeof(ring) / 4; i += Tile::kThreads) ((uint32_t*)ring)[i] = 0xffffffffu;  // NaN, if anything reads them
  __syncthreads();
  const auto look_up = [&](uint32_t tile, uint32_t token) {
    const uint32_t n = tile * kT + token;
    return n < count ? places[blockIdx.x * kMost + n] : -1;
  };
  const auto place = [&](uint32_t stage, uint32_t, uint32_t token, int32_t found) {
    rows[stage][token] = found < 0 ? nullptr : pool + found * Tile::kPieces * 16;
    scale_rows[stage][token] = found < 0 ? nullptr : (const uint8_t*)(scales + found * Scales::kGroups);
  };
  const auto fetch = [&](uint32_t tile, uint32_t stage) {
    if (tile < tiles) {
      copy_rows_async<Tile>(at_ring + stage * kStageBytes, rows[stage]);
      if constexpr (Tile::kBeside) copy_scales_async<Tile, Scales>(at_ring + stage * kStageBytes + Scales::kAt, scale_rows[stage]);
    }
    cp_async_commit();
  };
  auto source = copied_tiles<Tile>(look_up, place, fetch);
  source.sync_begin();
  for (uint32_t col = warp; col < kCols; col += 4) {
    QueryColumn<Tile, typename Tile::Key> x;
    x.load(q + ((chunk.row + min(col / kGroup, chunk.rows - 1)) * kGroup + col % kGroup) * kDims, col / kGroup < chunk.rows);
    float qk_scale = 0.25f;
    if constexpr (Tile::kScaled) {
      const float down = x.normalize(qk_scale);
      x.store(queries, col, down);
    } else {
      x.store(queries, col);
    }
    if (thread % 32 == 0) qk_scales[col] = qk_scale;
  }
  __syncthreads();
  const Query query(queries);

  const uint32_t col = Softmax::col(), seen = tokens_seen(chunk, min(col / kGroup, chunk.rows - 1));
  const uint32_t group = value_group<Tile, Scales>();
  ColumnSoftmax sums;
  ValueSums<Tile> out_sums;
  ScaleUnit unit;
#pragma unroll 1
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    const uint32_t stage = source.sync_tile(tile), at = at_ring + stage * kStageBytes;
    Products<Tile> s;
    if constexpr (Tile::kScaled) {
      multiply_scaled_qk<Scales>(s, largest_scales, at, ring[stage], query);
      add_rope_qk(s, at, SharedQuery<Tile, typename Tile::Rope>(queries));
    } else {
      multiply_qk(s, at, query);
    }
    store_products(scores, s);
    __syncthreads();

    const uint32_t some_see = ::max(tile * kT, count - min(count, chunk.rows - 1)), until = min(count, (tile + 1) * kT);
    if (some_see < until) {
      clear_special_values<Tile>(ring[stage], some_see - tile * kT, until - tile * kT);
      if constexpr (Tile::kScaled) clear_special_scales<Tile, Scales>(ring[stage], some_see - tile * kT, until - tile * kT);
    }
    float x[Softmax::kEach], shrink;
    Softmax::read(x, scores);
    scale_and_hide<Softmax>(x, qk_scales[col], [&](uint32_t token) { return tile * kT + token < seen; });
    const bool rises = raise_max<Tile, Softmax>(sums, shrink, x);
    exponentiate<Softmax>(x, sums);
    weights.template store<typename Shape::Operand, Softmax>(x);
    if (Softmax::member() == 0) shrinks[col] = shrink;
    if (__syncthreads_or(rises)) out_sums.multiply_columns(shrinks);
    if constexpr (Tile::kScaled) {
      const float largest = largest_scale(largest_scales, group);
      if (unit.below(largest)) out_sums.multiply(unit.raise(largest));
    }
    source.place_next(tile);
#pragma unroll
    for (uint32_t k = 0; k < kT / 16; ++k) {
      uint32_t operands[kCols / 8][2];
      weights.load(operands, k, thread % 32);
      if constexpr (Tile::kScaled) scale_weights<Scales>(operands, ring[stage], k, group, unit);
      multiply_pv(out_sums, at, operands, k);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  if constexpr (Tile::kScaled) store_sums<Softmax>(merged, sums, out_sums, unit.value);
  else store_sums<Softmax>(merged, sums, out_sums);
  __syncthreads();
  if (thread < kCols) max[blockIdx.x * kCols + thread] = merged.max[0][thread], sum[blockIdx.x * kCols + thread] = merged.sum[0][thread];
  constexpr uint32_t kV = Tile::kValueDims;
  for (uint32_t i = thread; i < kCols * kV; i += Tile::kThreads) out[blockIdx.x * kCols * kV + i] = merged.out[0][i / kV][i % kV];
}

using PlainQuery = HeldQuery<Plain, Plain::Key>;
using GroupsQuery = SharedQuery<Groups, Groups::Key, 2>;
using BesideQuery = HeldQuery<Beside, Beside::Key>;
#define ATTEND(name, Tile)                                                                                                                      \
  extern "C" __global__ void name(const uint8_t* pool, const float* scales, const int32_t* places, const KvChunk* chunks, const bf16* q, float* max, \
                                  float* sum, float* out) {                                                                                     \
    attend<Tile, Tile##Query>(pool, scales, places, chunks, q, max, sum, out);                                                                  \
  }
ATTEND(latent_tile_plain, Plain)
ATTEND(latent_tile_groups, Groups)
ATTEND(latent_tile_beside, Beside)

// Which part of the work is whose, [thread][what]; the tokens that rows of chunks see, [chunk][row].
extern "C" __global__ void latent_tile_places(const KvChunk* chunks, uint32_t* out, uint32_t* seen) {
  using Blocks = WarpBlocks<Plain, Plain::Key, 1>;
  using InGroups = WarpBlocks<Groups, Groups::Key, 2>;
  using Shape = LatentShape<Plain>;
  const uint32_t i = threadIdx.x;
  uint32_t* to = out + 18 * i;
  to[0] = Shape::warp_m();
  to[1] = Shape::warp_n();
  to[2] = Shape::warp_k();
  to[3] = LatentShape<Groups>::warp_n();
  for (uint32_t n = 0; n < 3; ++n) to[4 + n] = Blocks::has(n) ? 1 + Blocks::block(0, n) : 0;
  to[7] = InGroups::query_step(1, 1, 1);
  to[8] = warp_keys<Plain, KeyFragments<bf16>>(1000);
  to[9] = value_group<Groups, Groups::Scales>();
  for (uint32_t n = 0; n < 6; ++n) to[10 + n] = ring_at<3>(n % 3, n / 2 + 1);
  const float found[2][2] = {{1.0f * i, 100.0f}, {64.0f, 128.0f - i}};  // scales, as two warps along tokens have found them
  for (uint32_t n = 0; n < 2; ++n) to[16 + n] = (uint32_t)largest_scale(found, n);
  if (i < 24 && i % 4 < chunks[i / 4].rows) seen[i] = tokens_seen(chunks[i / 4], i % 4);
}

// Columns of q as operands, [step][lane][register], what they are multiplied by and their scales; and products of both groups with
// codes, [group][column][token].
extern "C" __global__ void latent_tile_products(const uint32_t* codes, const bf16* q, uint32_t* operands, uint32_t* same, float* factors, float* out) {
  using Shape = LatentShape<Groups>;
  __shared__ alignas(16) uint32_t stage[32 * Groups::kPitch / 4];
  __shared__ alignas(16) Shape::Query queries;
  __shared__ alignas(16) Shape::Scores scores;
  const uint32_t i = threadIdx.x, lane = i % 32;
  for (uint32_t n = i; n < sizeof(stage) / 4; n += 128) stage[n] = codes[n];
  for (uint32_t col = i / 32; col < 16; col += 4) {
    QueryColumn<Groups, Groups::Key> x;
    x.load(q + col * 176, col != 5);
    float scale = 3.0f;
    const float down = x.normalize(scale);
    x.store(queries, col, down);
    if (lane == 0) factors[2 * col] = down, factors[2 * col + 1] = scale;
  }
  __syncthreads();
  const auto held = HeldQuery<Groups, Groups::Key, 2>(queries);
  const auto shared = SharedQuery<Groups, Groups::Key, 2>(queries);
  if (Shape::warp_m() == 0) {
    const uint32_t n = Shape::warp_n();
#pragma unroll
    for (uint32_t step = 0; step < Groups::kSteps; ++step) {
      const QueryFragment<Groups> b = read_query<Groups>(queries, step);
      for (uint32_t half = 0; half < 2; ++half) operands[((step * 2 + n) * 32 + lane) * 2 + half] = b.e[0][half];
    }
#pragma unroll
    for (uint32_t step = 0; step < 8; ++step) {
      const QueryFragment<Groups> a = held.at(step / 4, step / 2 % 2, step % 2), b = shared.at(step / 4, step / 2 % 2, step % 2);
      same[((step * 2 + n) * 32 + lane) * 2] = a.e[0][0];
      same[((step * 2 + n) * 32 + lane) * 2 + 1] = b.e[0][1];
    }
  }
#pragma unroll
  for (uint32_t group = 0; group < 2; ++group) {
    Products<Groups> s;
    multiply_group(s, matrix_address(stage), held, group);
    store_products(scores, s);
    __syncthreads();
    for (uint32_t n = i; n < 16 * 32; n += 128) out[group * 512 + n] = scores[0][n / 32][n % 32];
    __syncthreads();
  }
}
