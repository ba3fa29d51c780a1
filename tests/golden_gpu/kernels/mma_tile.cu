// mma_tile.cuh, tile_tables.cuh and tile_copy.cuh: attention of a warp over a chunk of tokens in pages of 8, with each kind of elements and scales.
#include "tiles.cuh"
#include "../../../templates/device/attention/common/tile_tables.cuh"

// A block a chunk, of the second kv head, Q in registers (kHeld) or in shared memory: maxima, sums and sums of V of its columns, and whether it failed.
template <typename Tile, typename Mask, Scaled kScaled, bool kHeld>
__device__ __forceinline__ void attend(const Cache<typename Tile::K, typename Tile::V>& cache, const KvChunk* chunks, const bf16* q, float* max, float* sum,
                                       float* out, uint32_t* failures, uint64_t* errors) {
  using K = typename Tile::K;
  using V = typename Tile::V;
  constexpr uint32_t kCols = 8 * Tile::kN, kT = Tile::kTokens, kScalesAt = kT * (Tile::kKeyPitch + Tile::kValuePitch);
  constexpr bool kGrouped = kScaled == Scaled::groups || kScaled == Scaled::tables;
  constexpr bool kTokenScales = kScaled == Scaled::tokens || kScaled == Scaled::zeros;
  constexpr ScaleUse kKeyUse = kTokenScales ? ScaleUse::token : kGrouped ? ScaleUse::key_groups : ScaleUse::none;
  constexpr ScaleUse kValueUse = kKeyUse == ScaleUse::key_groups ? ScaleUse::value_groups : kKeyUse;
  constexpr uint32_t kRows = Tile::kRun > 0 ? Tile::kRun : 1, kCopiers = Tile::kRun > 0 ? TileCopies<Tile>::kThreads : 1;
  using KeyScales = TileScales<K, ScaleTile<kKeyUse, kT, kScaled == Scaled::groups || kScaled == Scaled::zeros ? 2 : 1, kRows, kCopiers>>;
  using ValueScales = TileScales<V, ScaleTile<kValueUse, kT, kScaled == Scaled::zeros ? 2 : 1, kRows, kCopiers>>;
  using Scales = StageScales<KeyScales, ValueScales>;
  struct Merged {
    float max[2][kCols], sum[2][kCols], out[2][kCols][kDims + 4];
  };
  __shared__ alignas(16) uint8_t stage[kScalesAt + Scales::kStageBytes], expanded[Scales::kExpandedBytes + 16];
  __shared__ typename TileShape<Tile>::Query shared_query;
  __shared__ float qk_scales[kCols], sums_of_queries[kCols][1];
  __shared__ Merged merged;
  const uint32_t lane = threadIdx.x, at = matrix_address(stage);
  const BlockColumns<kGroup> columns = {kHead, 0};
  const KvChunk chunk = chunks[blockIdx.x];
  clear_shared<32>(stage);  // what rows have past their dims
  __syncwarp();

#pragma unroll 1
  for (uint32_t col = 0; col < kCols; ++col) {
    const Column column = columns.of(col, chunk.rows);
    float qk_scale = 0.5f * kLog2e;
    QueryColumn<Tile> x;
    x.load(q + ((chunk.row + column.i) * kQHeads + column.q_head) * kDims, column.live);
    if constexpr (kScaled == Scaled::channels) qk_scale *= x.multiply_scales(cache, kHead);
    if constexpr (kScaled != Scaled::never) {
      qk_scale *= TileShape<Tile>::Keys::kFactor;
      x.normalize(qk_scale);
    }
    x.store(shared_query, col);
    x.store_sums(sums_of_queries[col]);
    if (lane == 0) qk_scales[col] = qk_scale;
  }
  __syncwarp();
  auto query = [&] {
    if constexpr (kHeld) return HeldQuery<Tile>(shared_query, 0);
    else return SharedQuery<Tile>(shared_query, 0);
  }();
  WarpSums<Tile> sums;
  const ColumnFactors<Tile> qk_scale(qk_scales);
  auto units = ValueUnits<Tile>();
  const auto query_sums = QuerySums<Tile>(sums_of_queries, 0);
  const RowPositions<Mask> positions{chunk};
  bool failed = false;
  typename Scales::Loaded loaded(cache, at + kScalesAt);
  const Scales scales = {at + kScalesAt, &loaded};
  const FetchedTiles tiles = {(chunk.begin + kT - 1) / kT, chunk.end / kT, kU32Max};

#pragma unroll 1
  for (uint32_t tile = chunk.begin / kT; tile * kT < chunk.end; ++tile) {
    const PageIds ids = look_up_page<Tile>(cache, cache.page_list(chunk.b), chunk, tile, lane);
    if constexpr (Tile::kRun > 0) copy_runs_async<Tile>(failed, at, cache, ids, chunk, tiles, tile, kHead, lane, errors + blockIdx.x, scales);
    else copy_tokens_async<Tile>(failed, at, cache, ids, chunk, tiles, tile, kHead, lane, errors + blockIdx.x, scales);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    if constexpr (Scales::kExpandedBytes > 0) {
      if (lane < kT) Scales::expand(expanded, stage + kScalesAt, 0, lane, (tile * kT + lane) % kTokens, kHead);
      __syncwarp();
    }
    const uint8_t* key_scales = stage + kScalesAt;

    Scores<Tile> s;
    if constexpr (kScaled == Scaled::tables) {
      multiply_qk(s, at, query, KeyProducts<Tile, KeyScales>{expanded});
    } else if constexpr (kScaled == Scaled::groups) {
      multiply_qk(s, at, query, KeyGroupScales<Tile, KeyScales>{expanded});
    } else if constexpr (kBeginsAtZero<typename Tile::KeyCode> || kTokenScales) {
      GroupProducts<Tile> products = {};
      if constexpr (kScaled == Scaled::channels) move_back<Tile>(products, query_sums);
      multiply_qk<Tile>(products, at, query);
      if constexpr (kTokenScales) scale_scores(s, products, query_sums, LaneScales<KeyScales>(key_scales, cache, tile * kT, 0, kHead));
      else take_products(s, products);
    } else {
      multiply_qk(s, at, query);
    }
    for_each_score(s, [&](uint32_t token, uint32_t col, float& x) {
      if (!positions.seen_by(columns.of(col, chunk.rows).i).has(tile * kT + token)) x = -infinity();
    });
    float high[Tile::kN][2];
    const bool rises = tile_max(high, s, sums);
    ScaledWeights<Tile> p;
    const auto v_scales = [&] {
      if constexpr (kTokenScales) return LaneScales<ValueScales>(key_scales + KeyScales::kStageBytes, cache, tile * kT, 0, kHead);
      else return NoGroupScales{};
    }();
    if constexpr (kTokenScales) {
      if (__any_sync(~0u, rises)) raise_max(sums, units, high, qk_scale);
      float sum[Tile::kN][2];
      if (__all_sync(~0u, weigh<true>(p, sum, s, units, v_scales, qk_scale))) add_sums(sums, sum, units);
      else weigh_and_move<true>(p, sums, s, units, v_scales, qk_scale);
    } else {
      if (__any_sync(~0u, rises)) raise_max(sums, high, qk_scale);
    }
#pragma unroll
    for (uint32_t m = 0; m < kT / 16; ++m) {
      uint32_t weights[1][Tile::kN][2];
      if constexpr (kTokenScales) round_weights<true>(weights, sums, p, s, m, v_scales);
      else exponentiate(weights, sums, s, m, qk_scale);
      if constexpr (kGrouped) {
        const auto groups = [&] {
          if constexpr (kScaled == Scaled::tables) return ValueProducts<Tile, ValueScales>{expanded + KeyScales::kExpandedBytes};
          else return ValueGroupScales<Tile, ValueScales>{expanded + KeyScales::kExpandedBytes};
        }();
        if (__any_sync(~0u, has_special_values<Tile>(at, m, groups))) multiply_pv_by_column(sums, at, weights, m, s, groups);
        else multiply_pv(sums, at, weights, m, groups);
      } else if (__any_sync(~0u, has_special_values<Tile>(at, m))) {
        multiply_pv_by_column(sums, at, weights, m, s);
      } else {
        multiply_pv(sums, at, weights, m);
      }
    }
    __syncwarp();
  }

  if constexpr (kTokenScales) apply_units(sums, units);
  if constexpr (kBeginsAtZero<typename Tile::ValueCode>) move_back(sums);
  if constexpr (kScaled == Scaled::channels) store_team_sums(merged, 1, 0, sums, ChannelScales<V, Cache<K, V>>{cache, kHead});
  else if constexpr (kScaled == Scaled::tokens || kScaled == Scaled::tables) store_team_sums(merged, 1, 0, sums, OneFactor{TileShape<Tile>::Values::kFactor});
  else store_team_sums(merged, 1, 0, sums);
  __syncwarp();
  for (uint32_t i = lane; i < kCols; i += 32) max[blockIdx.x * kCols + i] = merged.max[1][i], sum[blockIdx.x * kCols + i] = merged.sum[1][i];
  for (uint32_t i = lane; i < kCols * kDims; i += 32) out[blockIdx.x * kCols * kDims + i] = merged.out[1][i / kDims][i % kDims];
  failed = __any_sync(~0u, failed);
  if (lane == 0) failures[blockIdx.x] = failed;
}

using Tile8 = TileOf<PlainK<bf16>, PlainV<bf16>, 32, 8, 1>;
using Tile16 = TileOf<PlainK<bf16>, PlainV<bf16>, 16, 0, 2>;
using TileTokens = TileOf<KeyRun<e4m3, float, Recipe::amax, kDims>, ValueRun<e4m3, float, Recipe::amax, kDims>, 32, 8, 1>;
using TileGroups = TileOf<KeyRun<int8_t, f16, Recipe::amax, 20>, ValueRun<int8_t, f16, Recipe::amax, 20>, 16, 8, 2>;
using TileTables = TileOf<KeyRun<e2m1x2, e4m3, Recipe::nvfp4_max, 16>, ValueRun<e2m1x2, e4m3, Recipe::nvfp4_max, 16>, 32, 8, 1>;
using TileChannels = TileOf<ChannelRun<int8_t, false>, ChannelRun<int8_t, true>, 32, 0, 1, 1, FromZero>;
using TileZeros = TileOf<KeyRun<uint8_t, f16, Recipe::amax, kDims, true>, ValueRun<uint8_t, f16, Recipe::amax, kDims, true>, 16, 8, 2, 1, FromZero>;

#define ATTEND(name, Tile, Mask, how, kHeld)                                                                                                      \
  extern "C" __global__ void name(uint8_t* keys, uint8_t* values, Tile::K::Scale* scales, const uint32_t* table, const KvChunk* chunks,           \
                                  const bf16* q, float* max, float* sum, float* out, uint32_t* failures, uint64_t* errors) {                     \
    attend<Tile, Mask, how, kHeld>({keys, values, scales, table}, chunks, q, max, sum, out, failures, errors);                              \
  }
ATTEND(tile_plain, Tile8, CausalMask, Scaled::never, true)
ATTEND(tile_special, Tile16, WindowMask<9>, Scaled::never, false)
ATTEND(tile_tokens, TileTokens, CausalMask, Scaled::tokens, true)
ATTEND(tile_groups, TileGroups, FullMask, Scaled::groups, false)
ATTEND(tile_tables, TileTables, CausalMask, Scaled::tables, true)
ATTEND(tile_channels, TileChannels, WindowMask<20>, Scaled::channels, true)
ATTEND(tile_zeros, TileZeros, CausalMask, Scaled::zeros, true)

// What these are made of. The dims of a lane's pairs of q, [kind][pair][lane][element], one more, 0 where it has no such pair; a query in
// shared memory, [step][lane][register].
template <typename Tile>
__device__ __forceinline__ void pairs(uint32_t* to) {
  using Column = QueryColumn<Tile>;
#pragma unroll
  for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) to[(n * 32 + threadIdx.x) * 2 + e] = n < Column::kEach && Column::has(n) ? 1 + Column::dim(n, e) : 0;
}
extern "C" __global__ void tile_queries(const uint32_t* in, uint32_t* dims, uint32_t* out) {
  __shared__ TileShape<Tile16>::Query query;
  const uint32_t lane = threadIdx.x;
  pairs<Tile8>(dims);
  pairs<TileTokens>(dims + 128);
  for (uint32_t i = lane; i < sizeof(query) / 4; i += 32) ((uint32_t*)query)[i] = in[i];
  __syncwarp();
#pragma unroll
  for (uint32_t step = 0; step < 3; ++step)
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
      uint32_t both[2];
      read_query<Tile16>(both, query, step, n);
      for (uint32_t half = 0; half < 2; ++half) out[((step * 2 + n) * 32 + lane) * 2 + half] = both[half];
    }
}

// The largest of a column; factors; weights, before there is a maximum and relative to one; sums that are rescaled, [tile][element].
extern "C" __global__ void tile_numbers(const float* in, float* largest, float* factors, float* weights, float* rescaled) {
  __shared__ float ones[8];
  const uint32_t lane = threadIdx.x;
  if (lane < 8) ones[lane] = 1.0f + lane;
  __syncwarp();
  const float x = in[lane];
  ColumnFactors<Tile8> each(ones);
  largest[lane] = column_max(x);
  const float factor = each.e[0][1];
  each.e[0][1] = x;
  factors[2 * lane] = factor_of(each, 0, 1);
  each.e[0][1] = factor;
  factors[2 * lane + 1] = factor_of(0.5f + lane, 0, 1);
  auto sums = WarpSums<Tile8>();
  weights[3 * lane] = weight_of(sums, -infinity(), 0, 0, each);
  sums.row_max[0][1] = 3.0f;
  weights[3 * lane + 1] = weight_of(sums, x, 0, 1, 0.25f);
  weights[3 * lane + 2] = weight_of(sums, x, 0, 1, each);
#pragma unroll
  for (uint32_t t = 0; t < 3; ++t)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) sums.out[t][0][r] = 1.0f + t * 4 + r;
  sums.rescale_out(0, 1, x);
#pragma unroll
  for (uint32_t t = 0; t < 3; ++t)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) rescaled[(lane * 3 + t) * 4 + r] = sums.out[t][0][r];
}

// Ones times the scales of 4 groups of 16 dims of 16 tokens, two heads a token: [K or V][step or tile][register][lane].
struct ByteScales : Run<e2m1x2, e4m3, Recipe::amax, false, 1, 16> {
  static constexpr uint32_t kSize = 64;
};
struct TileBytes : TileOf<PlainK<f16>, PlainV<f16>, 16, 8, 1> {
  using K = ByteScales;
  using V = ByteScales;
  using KeyCode = e2m1x2;
  using ValueCode = e2m1x2;
};
extern "C" __global__ void tile_bytes(const uint32_t* scales, uint32_t* out) {
  using Bytes = GroupBytes<TileScales<ByteScales, ScaleTile<ScaleUse::key_groups, 16, 4, 8, 32, 2, true>>>;
  __shared__ alignas(16) uint32_t stage[32];
  const uint32_t lane = threadIdx.x;
  stage[lane] = scales[lane];
  __syncwarp();
  const auto keys = KeyByteScales<TileBytes, Bytes>((const uint8_t*)stage, 1);
  const auto values = ValueByteScales<TileBytes, Bytes>((const uint8_t*)stage, 1);
  uint32_t a[2][4][4], first[2];
#pragma unroll
  for (uint32_t i = 0; i < 32; ++i) a[i / 16][i / 4 % 4][i % 4] = 0x3c003c00u;
  keys(a[0], 0, 0);
  values(a[1], 0, 0);
#pragma unroll
  for (uint32_t i = 0; i < 32; ++i) out[i * 32 + lane] = a[i / 16][i / 4 % 4][i % 4];
  Bytes::halves(first, Bytes::of((const uint8_t*)stage, 0, lane / 2).e[0]);
  out[32 * 32 + lane] = first[lane % 2];
}

// Units that follow row_max and what they are moved to, and what was summed, by columns; weights of tokens that move what was summed.
extern "C" __global__ void tile_units(const float* in, float* out) {
  using Shape = TileShape<TileZeros>;
  WarpSums<TileZeros> sums;
  ValueUnits<TileZeros> units;
  float *to = out + threadIdx.x * 8, shrink = 0.0f;
  const float x = in[threadIdx.x];
  static_assert(Shape::key_group(2) == 0 && Shape::value_group(1) == 0);
  to[0] = raise_row_max(shrink, sums, x - 100.0f, 0, 1, 0.5f);
  to[1] = raise_row_max(shrink, sums, x, 0, 1, 0.5f);
  to[2] = shrink;
  sums.out[1][0][3] = 1.0f;
  sums.back[0][0][1] = 3.0f;
  units.relate(sums, 0, 0, 1);
  to[3] = units.unit[0][0][1];
  to[4] = sums.row_max[0][0] == WarpSums<TileZeros>::lowest();
  sums.out[1][0][3] = 1.0f;
  units.move(sums, 0, 0, 1, units.from[0][0][1] + x);
  to[5] = sums.out[1][0][3];
  sums.rescale_group(0, 0, 1, 8.0f);
  to[6] = sums.out[1][0][3];
  WarpSums<TileChannels> moved;
  const uint32_t weights[1][1][2] = {{{0x3c003c00u, 0x40004000u}}};  // 1, 2
  add_moved(moved, weights);
  to[7] = moved.back[0][0][threadIdx.x % 4];
}

// Scores of 32 tokens and 16 columns times their column's factor, [tile of tokens, tile of columns, lane, register].
extern "C" __global__ void tile_columns(const float* in, const float* factors, float* out) {
  using Tile = TileOf<PlainK<bf16>, PlainV<bf16>, 32, 8, 2>;
  const uint32_t at = threadIdx.x * 4;
  Scores<Tile> s;
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) s.e[i / 8][i / 4 % 2][i % 4] = in[i / 4 * 128 + at + i % 4];
  multiply_columns(s, ColumnFactors<Tile>(factors + 3));
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) out[i / 4 * 128 + at + i % 4] = s.e[i / 8][i / 4 % 2][i % 4];
}

// Fragments of K, and of V, of tokens 16 to 31, [block][lane][register], of a stage of words that are their numbers; where lanes' rows of V begin.
extern "C" __global__ void tile_values(uint32_t* keys, uint32_t* rows, uint32_t* out) {
  __shared__ alignas(16) uint32_t stage[32 * (Tile8::kKeyPitch + Tile8::kValuePitch) / 4];
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = lane; i < sizeof(stage) / 4; i += 32) stage[i] = 2 * i | 2 * i + 1 << 16;
  __syncwarp();
#pragma unroll
  for (uint32_t block = 0; block < 3; ++block) {
    uint32_t a[1][4] = {}, b[1][4] = {};
    rows[block * 32 + lane] = values_at<Tile8>(0, block, 1);
    load_keys<Tile8>(b, matrix_address(stage) + KeyFragments<bf16>::offset(lane, Tile8::kKeyPitch) + 16 * Tile8::kKeyPitch + block * 32, block, 1, NoGroupScales{});
    load_values<Tile8>(a, matrix_address(stage), block, 1, NoGroupScales{});
    for (uint32_t r = 0; r < 4; ++r) keys[(block * 32 + lane) * 4 + r] = b[0][r];
    for (uint32_t r = 0; r < 4; ++r) out[(block * 32 + lane) * 4 + r] = a[0][r];
  }
}

// The first tile of each block's chunk as it comes into a stage of 0xee, by runs and token by token.
template <typename Tile>
__device__ __forceinline__ void staged(const Cache<typename Tile::K, typename Tile::V>& cache, const KvChunk& chunk, uint32_t* out) {
  constexpr uint32_t kWords = Tile::kTokens * (Tile::kKeyPitch + Tile::kValuePitch) / 4;
  __shared__ alignas(16) uint32_t stage[kWords];
  const uint32_t tile = chunk.begin / Tile::kTokens;
  bool failed = false;
  for (uint32_t i = threadIdx.x; i < kWords; i += 32) stage[i] = 0xeeeeeeeeu;
  __syncwarp();
  const uint32_t token = tile * Tile::kTokens + TileCopies<Tile>::token(threadIdx.x);
  const PageIds ids = cache.page_ids(cache.page_list(chunk.b), token < chunk.end ? max(token, chunk.begin) / kTokens : kU32Max);
  const FetchedTiles tiles = {(chunk.begin + Tile::kTokens - 1) / Tile::kTokens, chunk.end / Tile::kTokens, kU32Max};
  if constexpr (Tile::kRun > 0) copy_runs_async<Tile>(failed, matrix_address(stage), cache, ids, chunk, tiles, tile, kHead, threadIdx.x, nullptr);
  else copy_tokens_async<Tile>(failed, matrix_address(stage), cache, ids, chunk, tiles, tile, kHead, threadIdx.x, nullptr);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  for (uint32_t i = threadIdx.x; i < kWords; i += 32) out[blockIdx.x * kWords + i] = stage[i];
}
extern "C" __global__ void tile_stages(uint8_t* keys, uint8_t* values, f16* scales, const uint32_t* table, const KvChunk* chunks, uint32_t* runs, uint32_t* tokens) {
  staged<Tile8>({keys, values, scales, table}, chunks[blockIdx.x], runs);
  staged<Tile16>({keys, values, scales, table}, chunks[blockIdx.x], tokens);
}
