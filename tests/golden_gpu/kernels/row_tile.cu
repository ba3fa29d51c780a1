// row_tile.cuh, and the copies of extend_tiles.cuh: attention of a block's warps over their columns and a chunk of tokens in pages of 8, with each
// kind of elements and scales; and what it is made of.
#include "tiles.cuh"
#include "../../../templates/device/attention/extend/extend_tiles.cuh"

// A block a tile of columns, of the second kv head, Q in registers (kHeld) or in shared memory: maxima, sums and sums of V of its columns, zeros of
// warps without any, and whether it failed.
template <typename Tile, typename Mask, Scaled kScaled, bool kHeld>
__device__ __forceinline__ void attend(const Cache<typename Tile::K, typename Tile::V>& cache, const KvChunk* chunks, const bf16* q, float* max, float* sum,
                                       float* out, uint32_t* failures, uint64_t* errors) {
  using K = typename Tile::K;
  using V = typename Tile::V;
  using CacheOf = Cache<K, V>;
  constexpr uint32_t kThreads = 32 * Tile::kTeamWarps, kCols = 8 * Tile::kN * Tile::kTeamWarps, kT = Tile::kTokens;
  constexpr uint32_t kScalesAt = kT * (Tile::kKeyPitch + Tile::kValuePitch), kRows = Tile::kRun > 0 ? Tile::kRun : 1;
  constexpr bool kGrouped = kScaled == Scaled::groups, kByToken = kScaled == Scaled::tokens;
  constexpr ScaleUse kKeyUse = kByToken ? ScaleUse::token : kGrouped ? ScaleUse::key_groups : ScaleUse::none;
  constexpr ScaleUse kValueUse = kGrouped ? ScaleUse::value_groups : kKeyUse;
  constexpr uint32_t kCopiers = [] { if constexpr (Tile::kRun > 0) return RunCopies<Tile>::kThreads; else return 1u; }();
  using KeyScales = TileScales<K, ScaleTile<kKeyUse, kT, kGrouped ? 2 : 1, kRows, kCopiers>>;
  using ValueScales = TileScales<V, ScaleTile<kValueUse, kT, 1, kRows, kCopiers>>;
  using Scales = StageScales<KeyScales, ValueScales>;
  struct Merged {
    float max[1][kCols], sum[1][kCols], out[1][kCols][kDims + 4];
  };
  __shared__ alignas(16) uint8_t stage[kScalesAt + Scales::kStageBytes], expanded[Scales::kExpandedBytes + 16];
  __shared__ alignas(16) typename RowShape<Tile>::Query shared_query;
  __shared__ float qk_scales[kCols];
  __shared__ alignas(16) Merged merged;
  const uint32_t thread = threadIdx.x, warp = thread / 32, warp_col = warp * 8 * Tile::kN, at = matrix_address(stage);
  const KvChunk chunk = chunks[blockIdx.x];
  const BlockColumns<kGroup> columns = {kHead, chunk.first};
  const bool live = warp_col < chunk.rows * kGroup - chunk.first;
  clear_shared<kThreads>(stage);  // what rows have past their dims
  clear_shared<kThreads>(merged);

#pragma unroll 1
  for (uint32_t col = warp; col < kCols; col += Tile::kTeamWarps) {
    const Column column = columns.of(col, chunk.rows);
    float qk_scale = 0.5f * kLog2e;
    QueryColumn<Tile> x;
    x.load(q + ((chunk.row + column.i) * kQHeads + column.q_head) * kDims, column.live);
    if constexpr (kScaled == Scaled::channels) qk_scale *= x.multiply_scales(cache, kHead);
    if constexpr (kScaled != Scaled::never) {
      qk_scale *= TileShape<Tile>::Keys::kFactor;
      x.normalize(qk_scale);
    }
    store_query_column(shared_query, x, col);
    if (thread % 32 == 0) qk_scales[col] = qk_scale;
  }
  __syncthreads();
  auto query = [&] {
    if constexpr (kHeld) return HeldQueryRows<Tile>(shared_query, warp_col / 16, live);
    else return SharedQueryRows<Tile>(shared_query, warp_col / 16);
  }();
  const auto qk_scale = [&] {
    if constexpr (kScaled != Scaled::never) return RowFactors<Tile>(qk_scales + warp_col, live);
    else return 0.5f * kLog2e;
  }();
  RowSums<Tile> sums;
  RowUnit<Tile> unit;
  const RowPositions<Mask> positions{chunk};
  TokenRange seen[Tile::kN];
#pragma unroll
  for (uint32_t n = 0; n < Tile::kN; ++n) seen[n] = positions.seen_by(columns.of(warp_col + 8 * n + thread % 32 / 4, chunk.rows).i);
  bool failed = false;

#pragma unroll 1
  for (uint32_t tile = chunk.begin / kT; tile * kT < chunk.end; ++tile) {
    const PageList pages = cache.page_list(chunk.b);
    const Scales scales = {at + kScalesAt};
    if constexpr (Tile::kRun > 0) {
      copy_run_async<Tile>(failed, at, cache, look_up_run<Tile>(cache, pages, chunk, tile), chunk, tile, kHead, errors + blockIdx.x, scales);
    } else {
      const FetchedTiles tiles = {0, 0, kU32Max};
      copy_tokens_async<Tile>(failed, at, cache, look_up_page<Tile>(cache, pages, chunk, tile, thread), chunk, tiles, tile, kHead, thread, errors + blockIdx.x, scales);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (Scales::kExpandedBytes > 0) {
      if (thread < kT) Scales::expand(expanded, stage + kScalesAt, 0, thread, (tile * kT + thread) % kTokens, kHead);
      __syncthreads();
    }
    const TokenScales<KeyScales, CacheOf> k_scales = {stage + kScalesAt, cache, tile * kT, 0, kHead};
    const TokenScales<ValueScales, CacheOf> v_scales = {stage + kScalesAt + KeyScales::kStageBytes, cache, tile * kT, 0, kHead};
    const auto groups = [&] {
      if constexpr (kGrouped) return ValueGroupScales<Tile, ValueScales>{expanded + KeyScales::kExpandedBytes};
      else return NoGroupScales{};
    }();

    RowScores<Tile> s;
    if constexpr (kGrouped) multiply_qk(s, at, query, KeyGroupScales<Tile, KeyScales>{expanded});
    else multiply_qk(s, at, query);
    if constexpr (kByToken) scale_scores(s, k_scales);
    for_each_score(s, [&](uint32_t token, uint32_t m, uint32_t h, float& x) {
      if (!seen[2 * m + h].has(tile * kT + token)) x = -infinity();
    });
    float high[RowShape<Tile>::kM][2];
    const bool rises = tile_max(high, s, sums, qk_scale);
    if constexpr (kByToken) {
      if (__any_sync(~0u, rises)) raise_max(sums, unit, high);
      const bool grows = weigh_by_value_scales(high, s, sums, unit, v_scales, qk_scale);
      if (__any_sync(~0u, grows)) raise_unit(sums, unit, high);
    } else {
      if (__any_sync(~0u, rises)) raise_max(sums, high);
    }
    const SeenTokens<Tile> seen_tokens(s, kByToken ? 0.0f : -infinity());
    RowWeights<Tile> weights;
#pragma unroll
    for (uint32_t t = 0; t < kT / 16; ++t) {
      if constexpr (kByToken) round_weights(weights.e[t], s, unit, t);
      else exponentiate(weights.e[t], sums, s, t, qk_scale);
    }
    if (__any_sync(~0u, has_special_tile<Tile>(at, groups))) {
      multiply_pv_by_column(sums, at, weights, seen_tokens, groups);
    } else {
#pragma unroll
      for (uint32_t t = 0; t < kT / 16; ++t) multiply_pv(sums, at, weights.e[t], t, groups);
    }
    __syncthreads();
  }

  if constexpr (kByToken) apply_unit(sums, unit);
  const float factor = TileShape<Tile>::Values::kFactor;
  if (live) {
    if constexpr (kScaled == Scaled::channels) store_row_sums<Tile>(merged, warp_col, sums, ChannelScales<V, CacheOf>{cache, kHead});
    else store_row_sums<Tile>(merged, warp_col, sums, OneFactor{kByToken ? factor : 1.0f});
  }
  failed = __syncthreads_or(failed);
  for (uint32_t i = thread; i < kCols; i += kThreads) max[blockIdx.x * kCols + i] = merged.max[0][i], sum[blockIdx.x * kCols + i] = merged.sum[0][i];
  for (uint32_t i = thread; i < kCols * kDims; i += kThreads) out[blockIdx.x * kCols * kDims + i] = merged.out[0][i / kDims][i % kDims];
  if (thread == 0) failures[blockIdx.x] = failed;
}

using Tile32 = TileOf<PlainK<bf16>, PlainV<bf16>, 32, 8, 2, 2>;
using TileScattered = TileOf<PlainK<bf16>, PlainV<bf16>, 32, 0, 4>;
using TileTokens = TileOf<KeyRun<e4m3, float, Recipe::amax, kDims>, ValueRun<e4m3, float, Recipe::amax, kDims>, 32, 8, 2, 2>;
using TileGroups = TileOf<KeyRun<int8_t, f16, Recipe::amax, 20>, ValueRun<int8_t, f16, Recipe::amax, 20>, 16, 8, 2, 2>;
using TileChannels = TileOf<ChannelRun<int8_t, false>, ChannelRun<int8_t, true>, 32, 0, 2, 2>;

#define ATTEND(name, Tile, Mask, how, kHeld)                                                                                                      \
  extern "C" __global__ void name(uint8_t* keys, uint8_t* values, Tile::K::Scale* scales, const uint32_t* table, const KvChunk* chunks,           \
                                  const bf16* q, float* max, float* sum, float* out, uint32_t* failures, uint64_t* errors) {                     \
    attend<Tile, Mask, how, kHeld>({keys, values, scales, table}, chunks, q, max, sum, out, failures, errors);                              \
  }
ATTEND(rows_plain, Tile32, CausalMask, Scaled::never, true)
ATTEND(rows_special, TileScattered, WindowMask<9>, Scaled::never, false)
ATTEND(rows_tokens, TileTokens, CausalMask, Scaled::tokens, true)
ATTEND(rows_groups, TileGroups, FullMask, Scaled::groups, false)
ATTEND(rows_channels, TileChannels, WindowMask<20>, Scaled::channels, true)

// Q's operands of 16 columns, [step][lane][register]: as they lie in shared memory, as a warp holds them, and read block by block.
extern "C" __global__ void rows_queries(const bf16* in, uint32_t* read, uint32_t* held, uint32_t* shared) {
  __shared__ alignas(16) RowShape<Tile32>::Query query;
  const uint32_t lane = threadIdx.x;
  for (uint32_t col = 0; col < 16; ++col) {
    QueryColumn<Tile32> x;
    x.load(in + col * kDims, true);
    store_query_column(query, x, 16 + col);  // of the second warp
  }
  __syncwarp();
  const auto all = HeldQueryRows<Tile32>(query, 1, true), none = HeldQueryRows<Tile32>(query, 1, false);
  auto each = SharedQueryRows<Tile32>(query, 1);
#pragma unroll
  for (uint32_t step = 0; step < 3; ++step) {
    uint32_t a[4];
    read_query_rows<Tile32>(a, query, step, 1);
    each.load(step);  // a block is a step
    for (uint32_t r = 0; r < 4; ++r) {
      const uint32_t to = (step * 32 + lane) * 4 + r;
      read[to] = a[r];
      held[to] = all.at(step, 0, 0)[r] + none.at(step, 0, 0)[r];  // of a warp without columns zeros
      shared[to] = each.at(step, 0, 0)[r];
    }
  }
}

// Operands of K, and of V, of tokens 16 to 31, [block][lane][of 8 tokens, or dims][register], of a stage of words that are their numbers.
extern "C" __global__ void rows_operands(uint32_t* keys, uint32_t* values) {
  __shared__ alignas(16) uint32_t stage[32 * (Tile32::kKeyPitch + Tile32::kValuePitch) / 4];
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = lane; i < sizeof(stage) / 4; i += 32) stage[i] = 2 * i | 2 * i + 1 << 16;
  __syncwarp();
#pragma unroll
  for (uint32_t block = 0; block < 3; ++block) {
    uint32_t k[1][2][2], v[1][2][2];
    load_key_operands<Tile32>(k, matrix_address(stage), block, 1, NoGroupScales{});
    load_value_operands<Tile32>(v, matrix_address(stage), block, 1, NoGroupScales{});
    for (uint32_t r = 0; r < 4; ++r) keys[(block * 32 + lane) * 4 + r] = k[0][r / 2][r % 2], values[(block * 32 + lane) * 4 + r] = v[0][r / 2][r % 2];
  }
}

// The largest of a column; factors, of a warp without columns too; weights, before there is a maximum and relative to one; sums that are
// rescaled, [tile][element].
extern "C" __global__ void rows_numbers(const float* in, float* largest, float* factors, float* weights, float* rescaled) {
  __shared__ float ones[16];
  const uint32_t lane = threadIdx.x;
  if (lane < 16) ones[lane] = 1.0f + lane;
  __syncwarp();
  const float x = in[lane];
  largest[lane] = row_maximum(x);
  const auto each = RowFactors<Tile32>(ones, true), none = RowFactors<Tile32>(ones, false);
  factors[3 * lane] = factor_of(each, 0, 1);
  factors[3 * lane + 1] = factor_of(none, 0, 1);
  factors[3 * lane + 2] = factor_of(0.5f + lane, 0, 1);
  auto sums = RowSums<Tile32>();
  weights[3 * lane] = weight_of(sums, -infinity(), 0, 0, each);
  weights[3 * lane + 1] = weight_of(sums, x, 0, 0, 0.25f);
  sums.row_max[0][1] = 3.0f;
  weights[3 * lane + 2] = weight_of(sums, x, 0, 1, each);
#pragma unroll
  for (uint32_t i = 0; i < 24; ++i) sums.out[0][i / 4][i % 4] = 1.0f + i;
  sums.rescale_out(0, 1, x);
#pragma unroll
  for (uint32_t i = 0; i < 24; ++i) rescaled[lane * 24 + i] = sums.out[0][i / 4][i % 4];
}

// Of each lane whether it stores heads, then dims of its tiles' two elements, [tile][element].
extern "C" __global__ void rows_dims(uint32_t* heads, uint32_t* dims) {
  using Shape = RowShape<Tile32>;
  heads[threadIdx.x] = Shape::has_heads();
  for (uint32_t i = 0; i < 12; ++i) dims[threadIdx.x * 12 + i] = Shape::dim(i / 2, i % 2);
}

// Scores of 32 columns and 32 tokens, [16 columns][8 tokens][lane][element]: which are seen.
extern "C" __global__ void rows_seen(const float* in, uint32_t* out) {
  RowScores<TileScattered> s;
#pragma unroll
  for (uint32_t i = 0; i < 32; ++i) s.e[i / 16][i / 4 % 4][i % 4] = in[(i / 4 * 32 + threadIdx.x) * 4 + i % 4];
  const auto seen = SeenTokens<TileScattered>(s, -infinity());
  for (uint32_t m = 0; m < 2; ++m) out[m * 32 + threadIdx.x] = seen.e[m];
}

// Results of 16 columns, [what][lane][element], where a block's columns lie side by side: of the second 16.
extern "C" __global__ void rows_stores(const float* in, float* max, float* sum, float* out) {
  struct Merged {
    float max[1][32], sum[1][32], out[1][32][kDims];
  };
  __shared__ alignas(16) Merged merged;
  const uint32_t lane = threadIdx.x;
  clear_shared<32>(merged);
  __syncwarp();
  const float* own = in + 4 * lane;
  store_row_heads<Tile32>(merged, 16, {own[0], own[1]}, {own[2], own[3]});
#pragma unroll
  for (uint32_t d = 0; d < 6; ++d) {
    const float* x = own + 128 * (1 + d);
    store_row_dims<Tile32>(merged, 16, d, {x[0], x[1], x[2], x[3]}, [](uint32_t dim) { return 1.0f + dim; });
  }
  __syncwarp();
  max[lane] = merged.max[0][lane], sum[lane] = merged.sum[0][lane];
  for (uint32_t i = lane; i < 32 * kDims; i += 32) out[i] = merged.out[0][i / kDims][i % kDims];
}

// The first tile of each block's chunk as its runs come into a stage of 0xee.
extern "C" __global__ void rows_stages(uint8_t* keys, uint8_t* values, f16* scales, const uint32_t* table, const KvChunk* chunks, uint32_t* out) {
  using CacheOf = Cache<Tile32::K, Tile32::V>;
  constexpr uint32_t kThreads = 64, kWords = Tile32::kTokens * (Tile32::kKeyPitch + Tile32::kValuePitch) / 4;
  __shared__ alignas(16) uint32_t stage[kWords];
  const CacheOf cache = {keys, values, scales, table};
  const KvChunk chunk = chunks[blockIdx.x];
  const uint32_t tile = chunk.begin / Tile32::kTokens;
  bool failed = false;
  for (uint32_t i = threadIdx.x; i < kWords; i += kThreads) stage[i] = 0xeeeeeeeeu;
  __syncthreads();
  const PageIds ids = look_up_run<Tile32>(cache, cache.page_list(chunk.b), chunk, tile);
  copy_run_async<Tile32>(failed, matrix_address(stage), cache, ids, chunk, tile, kHead, nullptr);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kWords; i += kThreads) out[blockIdx.x * kWords + i] = stage[i];
}
