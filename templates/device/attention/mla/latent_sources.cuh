// Sources of a block's tiles of latent rows (ops/mla_mma.cu.j2): two policies with the same functions, called by all threads.
//
//   CopiedTiles    a ring of kStages tiles: cp.async copies rows as they are stored, kStages - 1 ahead of the one that is read
//   RoundedTiles   two tiles: a tile's rows wait in registers for a trip, and become Tile::Element when they are stored
//
//   sync_begin()   places the rows of the first tiles; a barrier; then the first copies or loads begin
//   sync_tile(t)   a barrier, behind which tile t is in shared memory; copies or loads of a later tile begin. Returns t's stage
//   place_next(t)  places the rows of tile t + kStages in the slot of tile t, which nobody reads any more
//
// The kernel says how: look_up(tile, token) loads the page ids or the list entry of a token; place(stage, tile, token, found)
// stores where the token's row lies to the slot of a stage; fetch(tile, stage) is one group of copies; load(tile) brings a tile
// to registers, and store(tile) from there to its stage. `Tile` names kStages and kTokens.
#pragma once

#include "latent_tile.cuh"

template <typename Tile, typename LookUp, typename Place, typename Fetch>
struct CopiedTiles {
  static constexpr uint32_t kStages = Tile::kStages, kTokens = Tile::kTokens;
  LookUp look_up;
  Place place;
  Fetch fetch;
  uint32_t stage = kStages - 1;         // of the tile that is read
  decltype(look_up(0u, 0u)) next = {};  // of the tile that is placed next

  __device__ __forceinline__ void sync_begin() {
    const uint32_t tile = threadIdx.x / kTokens, token = threadIdx.x % kTokens;
    if (tile < kStages) place(tile, tile, token, look_up(tile, token));
    next = look_up(kStages, token);
    __syncthreads();  // places are there
#pragma unroll 1
    for (uint32_t n = 0; n + 1 < kStages; ++n) fetch(n, n);
  }
  __device__ __forceinline__ uint32_t sync_tile(uint32_t tile) {
    cp_async_wait<kStages - 2>();  // this thread's copies of the tile have landed
    __syncthreads();               // all copies have landed; no warp reads the tile before any more; later places are there
    fetch(tile + kStages - 1, stage);
    stage = ring_at<kStages>(stage, 1);
    return stage;
  }
  __device__ __forceinline__ void place_next(uint32_t tile) {
    if (threadIdx.x < kTokens) {
      place(stage, tile + kStages, threadIdx.x, next);
      next = look_up(tile + kStages + 1, threadIdx.x);
    }
  }
};
template <typename Tile, typename LookUp, typename Place, typename Fetch>
__device__ __forceinline__ auto copied_tiles(const LookUp& look_up, const Place& place, const Fetch& fetch) {
  return CopiedTiles<Tile, LookUp, Place, Fetch>{look_up, place, fetch};
}

template <typename Tile, typename LookUp, typename Place, typename Load, typename Store>
struct RoundedTiles {
  static constexpr uint32_t kStages = Tile::kStages, kTokens = Tile::kTokens;
  static_assert(kStages == 2);
  const uint32_t& tiles;
  LookUp look_up;
  Place place;
  Load load;
  Store store;
  decltype(look_up(0u, 0u)) next = {};  // of the tile that is placed next

  __device__ __forceinline__ void sync_begin() {
    const uint32_t tile = threadIdx.x / kTokens, token = threadIdx.x % kTokens;
    if (tile < kStages && tile < tiles) place(tile, tile, token, look_up(tile, token));
    next = look_up(kStages, token);
    __syncthreads();  // places are there
    if (tiles > 0) load(0);
  }
  __device__ __forceinline__ uint32_t sync_tile(uint32_t tile) {
    store(tile);
    __syncthreads();  // the tile is in shared memory, and the places of the next one; no warp reads the tile before any more
    if (tile + 1 < tiles) load(tile + 1);
    return tile % kStages;
  }
  __device__ __forceinline__ void place_next(uint32_t tile) {
    if (threadIdx.x < kTokens && tile + kStages < tiles) {
      place(tile % kStages, tile + kStages, threadIdx.x, next);
      next = look_up(tile + kStages + 1, threadIdx.x);
    }
  }
};
template <typename Tile, typename LookUp, typename Place, typename Load, typename Store>
__device__ __forceinline__ auto rounded_tiles(const uint32_t& tiles, const LookUp& look_up, const Place& place, const Load& load,
                                              const Store& store) {
  return RoundedTiles<Tile, LookUp, Place, Load, Store>{tiles, look_up, place, load, store};
}
