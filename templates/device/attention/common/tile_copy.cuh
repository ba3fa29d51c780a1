// Tiles of K and V on their way from pages into a stage of a ring, by the threads of a team.
//
// Besides the names that mma_tile.cuh reads, `Tile` names kRun, the tokens of a tile that surely lie in one page (0: none), the
// bytes of one copy (kKeyAccess) and those from a token's row to the next in a page (kKeyStep), and the same of V; kHeads are the
// neighbouring kv heads of a tile, whose rows lie side by side. Tile n of a request has its tokens from n * kTokens on. Rows
// outside the chunk become zeros, and so do rows of pages that are not found. `scales` are copied with the rows.
//
// Each run is copied by threads of its own, so that a thread needs one page whatever a page's size is.
#pragma once

#include "../../memory/ring.cuh"
#include "mma_tile.cuh"

template <typename Tile>
struct TileCopies {
  static constexpr uint32_t kTeam = 32 * Tile::kTeamWarps, kRows = Tile::kRun ? Tile::kRun : Tile::kTokens, kRuns = Tile::kTokens / kRows;
  static constexpr uint32_t kThreads = kTeam / kRuns;  // of a run
  using Keys = TileCopy<Tile::kHeads * Tile::kKeyBytes, Tile::kKeyAccess, Tile::kKeyPitch, kRows, kThreads>;
  using Values = TileCopy<Tile::kHeads * Tile::kValueBytes, Tile::kValueAccess, Tile::kValuePitch, kRows, kThreads>;

  // The token of a tile whose page a thread of the team looks up: the first of its run, or number `lane`.
  __device__ static __forceinline__ uint32_t token(uint32_t thread) {
    if constexpr (Tile::kRun == 0) return thread % 32 % Tile::kTokens;
    else return kRuns == 1 ? 0 : thread / kThreads * kRows;
  }
};

struct NoTileScales {
  static constexpr uint32_t kStageBytes = 0;
};

// Tiles of a request that a team fetches: tiles before `end`; the chunk has tiles [whole, whole_end) in full.
struct FetchedTiles {
  uint32_t whole, whole_end, end;
};

// The ids of the page that thread `thread` of the team copies from; tokens behind the chunk have no ids and read nothing.
template <typename Tile, typename Cache>
__device__ __forceinline__ PageIds look_up_page(const Cache& cache, const PageList& pages, const KvChunk& chunk, uint32_t tile, uint32_t thread) {
  const uint32_t token = tile * Tile::kTokens + TileCopies<Tile>::token(thread);
  return cache.page_ids(pages, token < chunk.end ? max(token, chunk.begin) / cache.page_tokens : kU32Max);
}

// Starts the copies of a tile's rows of the heads from `head` on to `stage`, each run's from one address, by thread `thread` of
// the team. `ids` belong to its run's page. `failed` becomes true if a page of the chunk's tokens is not found, which is
// reported. A tile behind the last is not copied.
template <typename Tile, typename Cache, typename Scales = NoTileScales>
__device__ __forceinline__ void copy_runs_async(bool& failed, uint32_t stage, const Cache& cache, const PageIds& ids, const KvChunk& chunk,
                                                const FetchedTiles& tiles, uint32_t tile, uint32_t head, uint32_t thread, uint64_t* errors, const Scales& scales = {}) {
  using Copies = TileCopies<Tile>;
  const uint32_t first = tile * Tile::kTokens, run = Copies::token(thread), row = thread % Copies::kThreads;
  const uint32_t base = first + run, offset = base % cache.page_tokens;
  const uint32_t k_to = stage + run * Tile::kKeyPitch, v_to = stage + Tile::kTokens * Tile::kKeyPitch + run * Tile::kValuePitch;
  if (tile >= tiles.whole && tile < tiles.whole_end && cache.has_page(ids)) {
    const auto page = cache.page(ids);
    Copies::Keys::template all<Tile::kKeyStep>(k_to, (const uint8_t*)element_at<typename Tile::K>(page, offset, head, 0), row);
    Copies::Values::template all<Tile::kValueStep>(v_to, (const uint8_t*)element_at<typename Tile::V>(page, offset, head, 0), row);
    if constexpr (Scales::kStageBytes > 0) scales.copy_run(cache, page, row, run, offset, head);
  } else if (tile < tiles.end) {  // the chunk has a part of the tile, or the run has no page
    const auto page = cache.page(ids);
    const uint32_t from = chunk.begin > base ? chunk.begin - base : 0, until = page.valid && chunk.end > base ? chunk.end - base : 0;
    Copies::Keys::template some<Tile::kKeyStep>(k_to, (const uint8_t*)element_at<typename Tile::K>(page, offset, head, 0), row, from, until);
    Copies::Values::template some<Tile::kValueStep>(v_to, (const uint8_t*)element_at<typename Tile::V>(page, offset, head, 0), row, from, until);
    if constexpr (Scales::kStageBytes > 0) scales.fetch(cache, page, row, run, offset, head, from, until);
    const bool wrong = !page.valid && base < chunk.end && (base >= chunk.begin || chunk.begin - base < Copies::kRows);
    if (wrong && row == 0) report(errors, page.fault, chunk.b, max(base, chunk.begin));
    failed |= wrong;
  }
}

// copy_runs_async if every token may lie in another page: `ids` belong to the page of token `lane`.
template <typename Tile, typename Cache, typename Scales = NoTileScales>
__device__ __forceinline__ void copy_tokens_async(bool& failed, uint32_t stage, const Cache& cache, const PageIds& ids, const KvChunk& chunk,
                                                  const FetchedTiles& tiles, uint32_t tile, uint32_t head, uint32_t thread, uint64_t* errors, const Scales& scales = {}) {
  using Copies = TileCopies<Tile>;
  if (tile >= tiles.end && !cache.has_page(ids)) return;  // has_page() before other loads are issued
  const auto page = cache.page(ids);
  const uint32_t token = tile * Tile::kTokens + Copies::token(thread), offset = token % cache.page_tokens;
  const bool live = token >= chunk.begin && token < chunk.end, good = live && page.valid;
  Copies::Keys::scattered(stage, good ? (const uint8_t*)element_at<typename Tile::K>(page, offset, head, 0) : nullptr, thread);
  Copies::Values::scattered(stage + Tile::kTokens * Tile::kKeyPitch, good ? (const uint8_t*)element_at<typename Tile::V>(page, offset, head, 0) : nullptr, thread);
  if constexpr (Scales::kStageBytes > 0)
    if (thread < Tile::kTokens) scales.fetch(cache, page, 0, thread, offset, head, 0, good);
  if (live && !page.valid) report(errors, page.fault, chunk.b, token);
  failed |= live && !page.valid;
}
