// Tiles of K and V on their way from pages into a stage of a ring, by the threads of a team.
//
// Besides what mma_tile.cuh asks of it `Tile` names kRun, the tokens of a tile that surely lie in one page (0: none), the bytes of
// one copy (kKeyAccess) and those from a token's row to the next in a page (kKeyStep), and the same of V; kHeads are the neighbouring kv
// heads of a tile, whose rows lie side by side. Tile n of a request has its tokens from n * kTokens on. Rows outside the chunk become
// zeros, and so do rows of pages that are not found. `scales` are copied with the rows.
#pragma once

#include "../memory/ring.cuh"
#include "mma_tile.cuh"

template <typename Tile>
struct TileCopies {
  static constexpr uint32_t kThreads = 32 * Tile::kTeamWarps, kRows = Tile::kRun ? Tile::kRun : Tile::kTokens;
  using Keys = TileCopy<Tile::kHeads * Tile::kKeyBytes, Tile::kKeyAccess, Tile::kKeyPitch, kRows, kThreads>;
  using Values = TileCopy<Tile::kHeads * Tile::kValueBytes, Tile::kValueAccess, Tile::kValuePitch, kRows, kThreads>;
};

struct NoTileScales {
  static constexpr uint32_t kStageBytes = 0;
};

// The page ids of a tile's runs of kRun tokens; of runs behind the chunk none, which reads nothing.
template <typename Tile, typename Cache, uint32_t kRuns>
__device__ __forceinline__ void look_up_runs(PageIds (&ids)[kRuns], const Cache& cache, const PageList& pages, const KvChunk& chunk, uint32_t tile) {
#pragma unroll
  for (uint32_t r = 0; r < kRuns; ++r) {
    const uint32_t token = tile * Tile::kTokens + r * Tile::kRun;
    ids[r] = cache.page_ids(pages, token < chunk.end ? max(token, chunk.begin) / cache.page_tokens : kU32Max);
  }
}
// The page ids of the tile's token number `lane`.
template <typename Tile, typename Cache>
__device__ __forceinline__ PageIds look_up_token(const Cache& cache, const PageList& pages, const KvChunk& chunk, uint32_t tile) {
  const uint32_t token = tile * Tile::kTokens + threadIdx.x % 32 % Tile::kTokens;
  return cache.page_ids(pages, token < chunk.end ? max(token, chunk.begin) / cache.page_tokens : kU32Max);
}

// Starts the copies of a tile's rows of the heads from `head` on to `stage`, a run from one address, by thread `thread` of the team.
// `failed` becomes true where a page of the chunk's tokens is not found, which is reported.
template <typename Tile, typename Cache, uint32_t kRuns, typename Scales = NoTileScales>
__device__ __forceinline__ void copy_runs_async(bool& failed, uint32_t stage, const Cache& cache, const PageIds (&ids)[kRuns], const KvChunk& chunk,
                                                uint32_t tile, uint32_t head, uint32_t thread, uint64_t* errors, const Scales& scales = {}) {
  using Copies = TileCopies<Tile>;
#pragma unroll
  for (uint32_t r = 0; r < kRuns; ++r) {
    const PageRef page = cache.page(ids[r]);
    const uint32_t base = tile * Tile::kTokens + r * Tile::kRun, offset = base % cache.page_tokens;
    const uint32_t k_to = stage + r * Tile::kRun * Tile::kKeyPitch, v_to = stage + Tile::kTokens * Tile::kKeyPitch + r * Tile::kRun * Tile::kValuePitch;
    const uint8_t* keys = (const uint8_t*)element_at<typename Tile::K>(page, offset, head, 0);
    const uint8_t* values = (const uint8_t*)element_at<typename Tile::V>(page, offset, head, 0);
    bool whole = base >= chunk.begin && base < chunk.end && chunk.end - base >= Tile::kRun && page.valid;
    if constexpr (Scales::kStageBytes > 0) whole = whole && scales.aligned(cache, page);
    if (whole) {
      Copies::Keys::template all<Tile::kKeyStep>(k_to, keys, thread);
      Copies::Values::template all<Tile::kValueStep>(v_to, values, thread);
      if constexpr (Scales::kStageBytes > 0) scales.template copy_run<Copies::kThreads, Tile::kRun>(cache, page, thread, r * Tile::kRun, offset, head);
    } else {  // a run that the chunk has a part of, or none, or that has no page or one with unaligned scales
      const uint32_t from = chunk.begin > base ? chunk.begin - base : 0, until = page.valid && chunk.end > base ? chunk.end - base : 0;
      Copies::Keys::template some<Tile::kKeyStep>(k_to, keys, thread, from, until);
      Copies::Values::template some<Tile::kValueStep>(v_to, values, thread, from, until);
      if constexpr (Scales::kStageBytes > 0) scales.template copy_any<Copies::kThreads, Tile::kRun>(cache, page, thread, r * Tile::kRun, offset, head, from, until);
      const bool wrong = !page.valid && base < chunk.end && (base >= chunk.begin || chunk.begin - base < Tile::kRun);
      if (wrong && thread == 0) report(errors, page.fault, chunk.b, max(base, chunk.begin));
      failed |= wrong;
    }
  }
}

// The same where every token may lie in another page: `id` is that of the tile's token number `lane`.
template <typename Tile, typename Cache, typename Scales = NoTileScales>
__device__ __forceinline__ void copy_tokens_async(bool& failed, uint32_t stage, const Cache& cache, const PageIds& id, const KvChunk& chunk,
                                                  uint32_t tile, uint32_t head, uint32_t thread, uint64_t* errors, const Scales& scales = {}) {
  using Copies = TileCopies<Tile>;
  const PageRef page = cache.page(id);
  const uint32_t token = tile * Tile::kTokens + threadIdx.x % 32 % Tile::kTokens, offset = token % cache.page_tokens;
  const bool live = token >= chunk.begin && token < chunk.end, good = live && page.valid;
  Copies::Keys::scattered(stage, good ? (const uint8_t*)element_at<typename Tile::K>(page, offset, head, 0) : nullptr, thread);
  Copies::Values::scattered(stage + Tile::kTokens * Tile::kKeyPitch, good ? (const uint8_t*)element_at<typename Tile::V>(page, offset, head, 0) : nullptr, thread);
  if constexpr (Scales::kStageBytes > 0)
    if (thread < Tile::kTokens) scales.template copy_any<1, 1>(cache, page, 0, thread, offset, head, 0, good);
  if (live && !page.valid) report(errors, page.fault, chunk.b, token);
  failed |= live && !page.valid;
}
