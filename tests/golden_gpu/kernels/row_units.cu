// row_units.cuh, and RoundedTiles of latent_sources.cuh: tiles of two lists of rows, 32 e4m3 with a scale each 16 and 16 bf16, as
// bf16; and the units of one row by hand.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/launch.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/latent_sources.cuh"
#include "../../../templates/device/attention/mla/row_units.cuh"

constexpr uint32_t kRowBytes = 64, kPageTokens = 4;
struct PageRef {
  uint8_t* codes;
  float* scales;
  bool valid;
};
struct Cache {
  static constexpr uint32_t page_tokens = kPageTokens;
  uint8_t* codes;
  float* scales;
  uint32_t num_pages;

  __device__ PageRef page_at(uint32_t id) const {
    const bool valid = id < num_pages;
    return {valid ? codes + id * kPageTokens * kRowBytes : nullptr, valid ? scales + id * kPageTokens * 2 : nullptr, valid};
  }
};
struct Coded {
  using Compute = bf16;
  using Element = e4m3;
  using Scale = float;
  using ScalePointer = float*;
  static constexpr Recipe kRecipe = Recipe::amax;
  static constexpr bool kZero = false;
  static constexpr uint32_t kBegin = 0, kSize = 32, kVector = 16, kScaleVector = 1, kBlockHeads = 1, kBlockDims = 16, kResidual = 0;
  __device__ static e4m3* base(const PageRef& page) { return (e4m3*)page.codes; }
  __device__ static constexpr uint32_t offset(uint32_t token, uint32_t, uint32_t dim) { return token * kRowBytes + dim; }
  __device__ static float* scales(const Cache&, const PageRef& page) { return page.scales; }
  __device__ static constexpr uint32_t scale_offset(uint32_t token, uint32_t, uint32_t dim) { return token * 2 + dim / 16; }
};
struct Plain {
  using Compute = bf16;
  using Element = bf16;
  using Scale = float;
  using ScalePointer = float*;
  static constexpr Recipe kRecipe = Recipe::none;
  static constexpr bool kZero = false;
  static constexpr uint32_t kBegin = 32, kSize = 16, kVector = 8, kScaleVector = 1, kBlockHeads = 1, kBlockDims = 1, kResidual = 0;
  __device__ static bf16* base(const PageRef& page) { return (bf16*)(page.codes + 32); }
  __device__ static constexpr uint32_t offset(uint32_t token, uint32_t, uint32_t dim) { return token * (kRowBytes / 2) + dim; }
};
struct KeyRole {
  using Main = Coded;
  using Rope = Plain;
};

struct Tile {
  using Element = bf16;
  static constexpr uint32_t kThreads = 64, kTokens = 32, kStages = 2, kPitch = 112, kRowUnits = 3;
};
extern "C" __global__ void __launch_bounds__(64) row_units_tiles(const int32_t* first, const int32_t* second, uint8_t* codes, float* scales, uint32_t* tiles,
                                                                 uint32_t* lists_of, uint32_t* entries_of, bf16* units) {
  using Units = TileUnits<Tile>;
  __shared__ KeyList lists[2];
  __shared__ uint32_t entries[2][32];
  __shared__ alignas(16) uint8_t rows[2][32 * 112];
  const Cache cache = {codes, scales, 5};
  const uint32_t i = threadIdx.x, count = 3;
  if (i == 0) lists[0] = {first, 5, 0};
  if (i == 0) lists[1] = {second, 33, 1};
  for (uint32_t n = i; n < 2 * 32 * 28; n += 64) ((uint32_t*)rows)[n] = 0;  // also between rows
  __syncthreads();
  Units units_of_tile;
  const auto look_up = [&](uint32_t tile, uint32_t token) { return listed_entry<Tile>(lists, tile, token); };
  const auto place = [&](uint32_t stage, uint32_t tile, uint32_t token, int32_t found) {
    entries_of[tile * 32 + token] = entries[stage][token] = (uint32_t)found;
  };
  const auto load = [&](uint32_t tile) { load_units<KeyRole>(units_of_tile, cache, entries[tile % 2]); };
  const auto store = [&](uint32_t tile) { store_units<KeyRole>(rows[tile % 2], units_of_tile, cache); };
  auto source = rounded_tiles<Tile>(count, look_up, place, load, store);
  source.sync_begin();
  for (uint32_t tile = 0; tile < count; ++tile) {
    const uint32_t stage = source.sync_tile(tile);
    if (i == 0) lists_of[tile] = list_of(lists, tile);
    for (uint32_t n = i; n < 32 * 28; n += 64) tiles[tile * 32 * 28 + n] = ((const uint32_t*)rows[stage])[n];
    source.place_next(tile);
  }
  // Thread i as unit i of a tile: where it lies, and 16 dims of row `token` of page 2.
  const uint32_t token = Units::token(0) % kPageTokens, dim = Units::dim(0);
  const PageRef page = cache.page_at(2);
  RowUnit unit;
  Vec<bf16, 16> values;
  if (!Units::has(0)) return;
  if (dim < 32) {
    load_unit<Coded>(unit, cache, page, token, dim);
    widen_unit<Coded>(values, unit, cache);
  } else {
    Stored<Plain, 16> stored;
    load_stored(stored, cache, page, token, 0, dim - 32);
    dequantize_stored(values, stored, 1.0f);
  }
  for (uint32_t n = 0; n < 16; ++n) units[i * 16 + n] = values.e[n];
}
