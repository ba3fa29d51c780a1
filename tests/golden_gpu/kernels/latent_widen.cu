// latent_widen.cuh: halves of tiles of 64 latent rows of several records, as they come to shared memory; and the pieces that they are made of.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"
#include "../../../templates/device/base/scan.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/latent_widen.cuh"

struct PageRef {
  uint8_t* bytes;
  bool valid;
};
constexpr uint32_t kPages = 24;
// Pages of 4 rows of kRow bytes; their scales begin kScalesAt bytes into a page and lie kScaleStep bytes apart.
template <typename E, typename S, uint32_t kDims, uint32_t kD, uint32_t kRow, uint32_t kWidest = 16, uint32_t kScalesAt = 0, uint32_t kStep = 0>
struct Codes {
  using Compute = bf16;
  using Element = E;
  using Scale = S;
  using ScalePointer = S*;
  static constexpr Recipe kRecipe = kSame<E, bf16> ? Recipe::none : Recipe::amax;
  static constexpr bool kZero = false;
  static constexpr uint32_t kBegin = 0, kSize = kDims, kVector = kWidest * kPerElement<E> / sizeof(E), kScaleVector = 1, kBlockHeads = 1, kBlockDims = kD, kResidual = 0;
  __device__ static E* base(const PageRef& page) { return (E*)page.bytes; }
  __device__ static constexpr uint32_t offset(uint32_t token, uint32_t, uint32_t dim) { return token * (kRow / sizeof(E) * kPerElement<E>) + dim; }
  template <typename C>
  __device__ static S* scales(const C&, const PageRef& page) {
    return (S*)(page.bytes + kScalesAt);
  }
  __device__ static constexpr uint32_t scale_offset(uint32_t token, uint32_t, uint32_t dim) { return token * (kStep / sizeof(S)) + dim / kD; }
};

// 448 e4m3 and 64 bf16; behind the rows of a page 7 e8m0 and a byte that is none for each.
struct Tails {
  using Codes = ::Codes<e4m3, e8m0, 448, 64, 576, 16, 4 * 576, 8>;
  static constexpr uint32_t kPlainPanel = 7, kPlainAt = 448, kScaleBytes = 4, kScaleAccess = 4, kScaleStep = 4, kPageBytes = 4 * 584;
};
// 512 e4m3 and 16 e8m0 in 532 bytes.
struct Fine {
  using Codes = ::Codes<e4m3, e8m0, 512, 32, 532, 4, 512, 532>;
  static constexpr uint32_t kPlainPanel = 8, kPlainAt = 0, kScaleBytes = 8, kScaleAccess = 4, kScaleStep = 8, kPageBytes = 4 * 532;
};
// 512 e2m1 and 32 e4m3.
struct Fours {
  using Codes = ::Codes<e2m1x2, e4m3, 512, 16, 288, 16, 256, 288>;
  static constexpr uint32_t kPlainPanel = 8, kPlainAt = 0, kScaleBytes = 16, kScaleAccess = 16, kScaleStep = 16, kPageBytes = 4 * 288;
};
// 512 i8, 4 f32, 64 bf16.
struct Integers {
  using Codes = ::Codes<int8_t, float, 512, 128, 656, 16, 512, 656>;
  static constexpr uint32_t kPlainPanel = 8, kPlainAt = 528, kScaleBytes = 8, kScaleAccess = 8, kScaleStep = 8, kPageBytes = 4 * 656;
};
// Of 16 bits throughout.
template <uint32_t kDims>
struct Whole {
  using Codes = ::Codes<bf16, float, kDims, 1, 2 * kDims>;
  static constexpr uint32_t kPlainPanel = 0, kPlainAt = 0, kScaleBytes = 0, kScaleAccess = 1, kScaleStep = 0, kPageBytes = 4 * 2 * kDims;
};

template <typename Record>
struct Pool {
  static constexpr uint32_t page_tokens = 4;
  uint8_t* bytes;

  __device__ PageRef page_at(uint32_t id) const { return {id < kPages ? bytes + id * Record::kPageBytes : nullptr, id < kPages}; }
};
template <typename Record>
struct RoleOf {
  using Main = typename Record::Codes;
};
// Where row `entry` of a pool lies; -1: of none.
template <typename Record>
__device__ __forceinline__ RowPlace place_in(uint8_t* bytes, int32_t entry) {
  const Pool<Record> pool = {bytes};
  const uint32_t row = entry;
  if (entry == -1) return {};
  return row_place<RoleOf<Record>>(pool, pool.page_at(row / pool.page_tokens), row % pool.page_tokens);
}

template <typename E, uint32_t kMineOf, uint32_t kRope>
struct TileOf {
  using Element = E;
  static constexpr uint32_t kCols = 64, kTokens = 64, kMine = kMineOf, kRopePanels = kRope, kPanels = 2 * kMine + kRope;
  static constexpr uint32_t kPanelBytes = kTokens * 128, kQueryPanelBytes = kCols * 128;
};

// A tile of the rows at place(), as eight warps fill it, half by half; [half][thread] whether a scale is NaN; a bit for each token that is there.
template <typename Tile, typename... Records, typename Place>
__device__ __forceinline__ void widen(uint32_t* out, uint32_t* nans, uint8_t* live, const Place& place_of) {
  using Left = HalfRow<Tile, 0, Records...>;
  using Right = HalfRow<Tile, 1, Records...>;
  extern __shared__ __align__(1024) uint8_t stage[];
  __shared__ uint64_t full[2];
  constexpr uint32_t kWords = Tile::kPanels * Tile::kPanelBytes / 4;
  const uint32_t thread = threadIdx.x;
  for (uint32_t i = thread; i < kWords; i += 256) ((uint32_t*)stage)[i] = 0xeeeeeeeeu;
  if (thread < 2) mbarrier_init(&full[thread], Left::kArrivals);
  __syncthreads();
  const RowPlace place = place_of(thread / 4);
  Left left;
  Right right;
  left.load(place);
  live[thread / 32] = live_tokens(place.live);
  nans[thread] = left.await();
  right.load(place);
  left.store(stage, full[0]);
  nans[256 + thread] = right.await();
  right.store(stage, full[1]);
  mbarrier_wait(&full[0], 0);
  mbarrier_wait(&full[1], 0);
  for (uint32_t i = thread; i < kWords; i += 256) out[i] = ((const uint32_t*)stage)[i];
}
// Token n is row entries[n] of the only pool.
template <typename Tile, typename Record>
__device__ __forceinline__ void widen_pool(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen<Tile, Record>(out, nans, live, [&](uint32_t token) { return place_in<Record>(pool, entries[token]); });
}
using Short = TileOf<bf16, 4, 0>;
using Long = TileOf<bf16, 4, 1>;
extern "C" __global__ void __launch_bounds__(256) latent_widen_tails(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen_pool<Short, Tails>(pool, entries, out, nans, live);
}
extern "C" __global__ void __launch_bounds__(256) latent_widen_halves(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen_pool<TileOf<f16, 4, 0>, Tails>(pool, entries, out, nans, live);
}
extern "C" __global__ void __launch_bounds__(256) latent_widen_fine(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen_pool<Short, Fine>(pool, entries, out, nans, live);
}
extern "C" __global__ void __launch_bounds__(256) latent_widen_fours(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen_pool<Short, Fours>(pool, entries, out, nans, live);
}
extern "C" __global__ void __launch_bounds__(256) latent_widen_integers(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen_pool<Long, Integers>(pool, entries, out, nans, live);
}
extern "C" __global__ void __launch_bounds__(256) latent_widen_whole(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen_pool<Long, Whole<576>>(pool, entries, out, nans, live);
}
// Every second warp's rows are of another pool, which lies behind the first one.
extern "C" __global__ void __launch_bounds__(256) latent_widen_mixed(uint8_t* pool, const int32_t* entries, uint32_t* out, uint32_t* nans, uint8_t* live) {
  widen<Short, Tails, Whole<512>>(out, nans, live, [&](uint32_t token) {
    const uint32_t record = token / 8 % 2;
    RowPlace place = record == 0 ? place_in<Tails>(pool, entries[token]) : place_in<Whole<512>>(pool + kPages * Tails::kPageBytes, entries[token]);
    place.record = record;
    return place;
  });
}

// Of each thread's four words as scales of a half: what its 16 dims of each panel are multiplied by, as a pattern.
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
template <typename S>
__device__ __forceinline__ uint32_t bits_of(S x) {
  return x.bits;
}
template <typename Half>
__device__ __forceinline__ void scales_of(const uint32_t (&words)[4], uint32_t* out) {
#pragma unroll
  for (uint32_t n = 0; n < Half::kCoded; ++n) out[n] = bits_of(Half::scale_of(words, n));
}
// e4m3 of which more than a panel have an e8m0: half a row has less than one, or not all dims of its last one.
template <uint32_t kDims, uint32_t kD>
struct Coarse {
  using Codes = ::Codes<e4m3, e8m0, kDims, kD, 576>;
  static constexpr uint32_t kPlainPanel = kDims / 64;
};
// 256 i8, of which each 16 have an f16: those of a panel are two words.
struct Wide {
  using Codes = ::Codes<int8_t, f16, 256, 16, 288>;
  static constexpr uint32_t kPlainPanel = 4;
};
extern "C" __global__ void __launch_bounds__(256) latent_widen_scales(const uint32_t* in, uint32_t* tails, uint32_t* fine, uint32_t* fours, uint32_t* integers, uint32_t* wide,
                                                                      uint32_t* nans, uint32_t* told) {
  const uint32_t i = threadIdx.x, words[4] = {in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]};
  scales_of<HalfOf<Short, 1, Tails>>(words, tails + 3 * i);
  scales_of<HalfOf<Short, 1, Fine>>(words, fine + 4 * i);
  scales_of<HalfOf<Short, 0, Fours>>(words, fours + 4 * i);
  scales_of<HalfOf<Long, 1, Integers>>(words, integers + 4 * i);
  scales_of<HalfOf<TileOf<bf16, 2, 0>, 1, Wide>>(words, wide + 2 * i);
  // Whether one of the first 1, 2, 3, 4, 7, 8 and 16 e8m0 is NaN.
  nans[i] = has_nan<1>(words) | has_nan<2>(words) << 1 | has_nan<3>(words) << 2 | has_nan<4>(words) << 3 | has_nan<7>(words) << 4 | has_nan<8>(words) << 5 |
            has_nan<16>(words) << 6;
  // Whether a lane of the warp has one among those of a half: 3, 2 of 128 dims, one of 256, one of 512.
  told[i] = HalfOf<Short, 1, Tails>::await(words) | HalfOf<Short, 1, Coarse<448, 128>>::await(words) << 1 | HalfOf<Short, 1, Coarse<448, 256>>::await(words) << 2 |
            HalfOf<Short, 0, Coarse<512, 512>>::await(words) << 3;
}

// All e4m3 under all e8m0: thread i's scale is i.
extern "C" __global__ void __launch_bounds__(256) latent_widen_powers(const uint32_t* codes, Vec<bf16, 16>* out) {
#pragma unroll 1
  for (uint32_t n = 0; n < 16; ++n) {
    const uint32_t words[8] = {codes[4 * n], codes[4 * n + 1], codes[4 * n + 2], codes[4 * n + 3]};
    HalfOf<Short, 0, Tails>::widen_powers(out[threadIdx.x * 16 + n], words, {(uint8_t)threadIdx.x});
  }
}

// Where in a panel a lane's dims lie; of rows that are copied, its first chunk; how far from a row's first dims those without scales, of the last
// panels of the second half; then rows of 128 dims to two panels, where every third one is not there; which tokens of a warp are there, of all of their sets.
extern "C" __global__ void __launch_bounds__(256) latent_widen_places(const uint8_t* rows, uint32_t* places, uint32_t* copied, uint8_t* live) {
  using Narrow = TileOf<bf16, 1, 0>;
  using First = HalfOf<Narrow, 0, Whole<128>>;
  using Second = HalfOf<Narrow, 1, Whole<128>>;
  __shared__ __align__(1024) uint8_t stage[2 * Narrow::kPanelBytes];
  const uint32_t i = threadIdx.x, token = i / 4, j = i % 4;
  const RowPlace of_codes = {rows + j * 16, nullptr, true, 0};
  const uint32_t found[4] = {HalfOf<Short, 0, Tails>::lane_place(), HalfOf<Long, 0, Whole<576>>::copied_chunk(), (uint32_t)(HalfOf<Short, 1, Tails>::plain_dims(of_codes, 3) - rows),
                             (uint32_t)(HalfOf<Long, 1, Integers>::plain_dims(of_codes, 4) - rows)};
  for (uint32_t n = 0; n < 4; ++n) places[4 * i + n] = found[n];
  const RowPlace place = {token % 3 == 1 ? nullptr : rows + token * 256 + j * 32, nullptr, token % 3 != 1, 0};
  First::copy_async(stage, place);
  Second::copy_async(stage, place);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (uint32_t n = i; n < sizeof(stage) / 4; n += 256) copied[n] = ((const uint32_t*)stage)[n];
  for (uint32_t set = i / 32; set < 256; set += 8) live[set * 32 + i % 32] = live_tokens(set >> i % 32 / 4 & 1);
}
