// Whole pages as bytes: what operations that move pages between places of a pool, or between pools, are made of.
//
// A page of a layer consists of runs, one behind each page pointer, of neighbouring bytes. They are copied in pieces of 16 bytes,
// counted through all runs of a page; a block copies a tile of them, so many neighbouring pieces that each of its threads has
// four on their way at once.
#pragma once

#include "page_addresses.cuh"

constexpr uint32_t kCopyThreads = 256;
constexpr uint32_t kInFlight = 4;
constexpr uint32_t kTile = kCopyThreads * kInFlight;

// The run behind a page pointer, as the kernel spells it out; address, stride and size are multiples of kAlign:
//
//   struct KRun {
//     static constexpr uint32_t kPointer = 0, kId = 0, kAlign = 16;  // which page pointer; which id finds the page; in bytes
//     static constexpr uint64_t kBytes = 32768;                      // of a page, or, kOpen, of a token
//     static constexpr bool kOpen = false;
//     static constexpr uint64_t kStrip = 1024, kStep = 32768;        // only if other pages or layers lie in between: bytes that
//   };                                                               // are neighbours, a multiple of 16; step to the next bytes
template <typename R, typename = const uint64_t>
struct Strips {
  __device__ static constexpr uint64_t at(uint64_t begin) { return begin; }
};
template <typename R>
struct Strips<R, decltype(R::kStep)> {
  __device__ static constexpr uint64_t at(uint64_t begin) { return begin / R::kStrip * R::kStep + begin % R::kStrip; }
};

template <typename R>
struct Run {
  static constexpr uint32_t kPointer = R::kPointer, kId = R::kId;
  static constexpr uint64_t kPieces = (R::kBytes + 15) / 16;  // where the size is known
  static constexpr bool kWhole = R::kAlign == 16 && R::kBytes % 16 == 0;
  __device__ static constexpr uint64_t bytes(uint32_t tokens) { return R::kOpen ? R::kBytes * tokens : R::kBytes; }
  __device__ static constexpr uint64_t pieces(uint32_t tokens) { return (bytes(tokens) + 15) / 16; }
};

template <bool kFirst, typename A, typename B>
struct Either {
  using type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
  using type = B;
};

// An unsigned number of so many bytes: the widest access to what is aligned like that.
template <uint32_t kBytes>
struct Unit {
  using type = Vec<uint32_t, kBytes / 4>;
};
template <>
struct Unit<1> {
  using type = uint8_t;
};
template <>
struct Unit<2> {
  using type = uint16_t;
};

__device__ constexpr uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The runs of a page.
template <typename... R>
struct PageRuns {
  static constexpr uint32_t kRuns = sizeof...(R);
  static constexpr bool kOpen = (R::kOpen || ...);
  static constexpr bool kWhole = (Run<R>::kWhole && ...);  // 16 bytes at once, everywhere
  static constexpr uint64_t kPieces = (Run<R>::kPieces + ...);
  using Count = typename Either<!kOpen && kPieces<kU32Max, uint32_t, uint64_t>::type;

  __device__ static constexpr Count pieces(uint32_t tokens) { return (Count)(Run<R>::pieces(tokens) + ...); }

  // Where piece i of the page is: `visit(run, begin, bytes)`, its run, its first byte from the run's on, and how many it has.
  template <typename Visit>
  __device__ static __forceinline__ void find(Count i, uint32_t tokens, const Visit& visit) {
    uint32_t run = 0;
    uint64_t begin = 0, bytes = 0;
    bool found = false;
    const auto ask = [&](auto r, uint32_t number, Count pieces, uint64_t nbytes) {
      if (found) return;
      run = number;
      begin = Strips<decltype(r)>::at((uint64_t)i * 16);
      bytes = nbytes - (uint64_t)i * 16;
      found = i < pieces;
      if (!found) i -= pieces;
    };
    uint32_t number = 0;
    (ask(R{}, number++, (Count)Run<R>::pieces(tokens), Run<R>::bytes(tokens)), ...);
    visit(run, begin, bytes < 16 ? (uint32_t)bytes : 16);
  }

  __device__ static constexpr uint32_t align() {
    uint32_t found = 16;
    ((found = least(found, R::kAlign)), ...);
    return found;
  }

  // f(number, Run<R>{}) for every run.
  template <typename F>
  __device__ static __forceinline__ void each(const F& f) {
    uint32_t number = 0;
    (f(number++, Run<R>{}), ...);
  }
};

// One run of one page on its way; null: nothing to copy.
struct Ends {
  const uint8_t* from;
  uint8_t* to;
};

// Copies pieces [first, first + count) of each of `units` pages; units * count fit a tile. All threads call it.
template <typename Runs, uint32_t kUnits>
__device__ __forceinline__ void store_tile(const Ends (&ends)[kUnits][Runs::kRuns], uint32_t units, typename Runs::Count first,
                                           uint32_t count, uint32_t tokens) {
  using Wide = Vec<uint32_t, 4>;
  using Narrow = typename Unit<Runs::align()>::type;
  Wide value[kInFlight];
  const uint8_t* from[kInFlight];
  uint8_t* to[kInFlight];
  uint32_t bytes[kInFlight];  // of the piece
#pragma unroll
  for (uint32_t u = 0; u < kInFlight; ++u) {
    const uint32_t i = threadIdx.x + u * kCopyThreads;
    from[u] = nullptr;
    to[u] = nullptr;
    bytes[u] = 0;
    if (i >= units * count) continue;
    const uint32_t unit = kUnits == 1 ? 0 : i / count;
    Runs::find(first + (kUnits == 1 ? i : i % count), tokens, [&](uint32_t run, uint64_t begin, uint32_t nbytes) {
      const Ends& e = ends[unit][run];
      if (e.from == nullptr) return;
      from[u] = in_global(e.from) + begin;
      to[u] = in_global(e.to) + begin;
      bytes[u] = nbytes;
    });
    if (from[u] == nullptr) continue;
    if (!Runs::kWhole && (bytes[u] < 16 || (((uint64_t)from[u] | (uint64_t)to[u]) & 15) != 0)) continue;
    value[u] = *(const Wide*)in_global(from[u]);
    bytes[u] = 0;
  }
#pragma unroll
  for (uint32_t u = 0; u < kInFlight; ++u) {
    if (from[u] == nullptr) continue;
    if (Runs::kWhole || bytes[u] == 0) *(Wide*)in_global(to[u]) = value[u];
    if constexpr (!Runs::kWhole) {
#pragma unroll 1
      for (uint32_t j = 0; j < bytes[u]; j += sizeof(Narrow)) *(Narrow*)(in_global(to[u]) + j) = *(const Narrow*)(in_global(from[u]) + j);
    }
  }
}

// The runs of page from_ids of a layer, and where they go: page to_ids of another pool, or of the same.
template <typename Runs, uint32_t kIds, typename From, typename To>
__device__ __forceinline__ void place(Ends (&ends)[Runs::kRuns], const From& from, const To& to, uint32_t layer,
                                      const uint64_t (&from_ids)[kIds], const uint64_t (&to_ids)[kIds]) {
  Runs::each([&](uint32_t number, auto r) {
    using R = decltype(r);
    static_assert(R::kId < kIds);
    ends[number].from = from.first[R::kPointer][layer] + (int64_t)from_ids[R::kId] * from.stride[R::kPointer];
    ends[number].to = to.first[R::kPointer][layer] + (int64_t)to_ids[R::kId] * to.stride[R::kPointer];
  });
}

template <uint32_t kRuns>
__device__ __forceinline__ void place_nothing(Ends (&ends)[kRuns]) {
#pragma unroll
  for (uint32_t r = 0; r < kRuns; ++r) ends[r] = {nullptr, nullptr};
}

// An index that is skipped: -1, in unsigned arrays the largest number.
template <typename Index>
__device__ __forceinline__ bool skips(const Index* p, uint64_t i) {
  return p[i] == (Index)-1;
}

// Page `pages[i]` of a pool of num_pages, in ids of kScale pages; kNoPage where it is outside the pool.
constexpr uint64_t kNoPage = ~0ull;
template <uint32_t kScale, typename Index>
__device__ __forceinline__ uint64_t page_in(const Index* pages, uint64_t i, uint32_t num_pages) {
  const uint64_t id = (uint64_t)load_index(pages, i) * kScale;
  return id < num_pages ? id : kNoPage;
}

// True if the device's count is none: negative, or past every index.
template <typename Index>
__device__ __forceinline__ bool bad_count(const Index* live) {
  return live != nullptr && load_index(live, 0) == kU32Max;
}

// How many of n pairs count: all of them, or as many as the device says; of a count that is none, no pair does.
template <typename Index>
__device__ __forceinline__ uint32_t pairs_of(const Index* live, uint32_t n) {
  return live == nullptr ? n : bad_count(live) ? 0 : min(n, load_index(live, 0));
}

// Tiles that so many pages have, kUnits small ones or a part of a large one each.
template <typename Runs, uint32_t kUnits>
__device__ __forceinline__ uint32_t tiles_of(uint32_t num_pages, uint32_t page_tokens) {
  if (kUnits > 1) return num_pages / kUnits + (num_pages % kUnits != 0);
  return (uint32_t)(num_pages * ((Runs::pieces(page_tokens) + kTile - 1) / kTile));
}

// A list of pages, described by a struct of the kernel:
//
//   struct Pages {
//     using Runs = PageRuns<...>;
//     static constexpr uint32_t kUnits = 1;                    // pages of a tile, or 1 for a part of a large page
//     static constexpr uint32_t kFromScale = 1, kToScale = 1;  // pages of an entry, in the source and in the target
//   };
//
// The pages of tile `block` of a list, and their pieces: [first, first + units), pieces [begin, begin + count).
template <typename Count>
struct PageTile {
  uint32_t first, units;
  Count begin;
  uint32_t count;
};
template <typename Pages>
__device__ __forceinline__ PageTile<typename Pages::Runs::Count> tile_at(uint32_t block, uint32_t num_pages, uint32_t page_tokens) {
  using Count = typename Pages::Runs::Count;
  const Count pieces = Pages::Runs::pieces(page_tokens), chunks = (pieces + kTile - 1) / kTile;
  const Count chunk = Pages::kUnits == 1 ? (Count)block % chunks : 0;
  const uint32_t first = Pages::kUnits == 1 ? (uint32_t)((Count)block / chunks) : block * Pages::kUnits;
  const Count begin = chunk * kTile;
  return {first, min(Pages::kUnits, num_pages - first), begin, pieces - begin < kTile ? (uint32_t)(pieces - begin) : kTile};
}

// True if tile `block` is one of this list's; else takes the list's tiles off `block`.
template <typename Pages>
__device__ __forceinline__ bool has_tile(uint32_t& block, uint32_t num_pages, uint32_t page_tokens) {
  const uint32_t tiles = tiles_of<typename Pages::Runs, Pages::kUnits>(num_pages, page_tokens);
  if (block < tiles) return true;
  block -= tiles;
  return false;
}

// Copies, in layer blockIdx.y, page pairs[2 i] of `from` to page pairs[2 i + 1] of `to`, for the pairs i of tile `block`: kUnits
// small pages, or part of a large one. Pairs from live[0] on do not count (null: all do). A pair of -1 is skipped, one outside
// its pool is reported and skipped. All threads call it; it has a barrier.
template <typename Pages, typename From, typename To, typename Index>
__device__ __forceinline__ void store_pairs(const From& from, const To& to, uint32_t from_pages, uint32_t to_pages, const Index* pairs,
                                            const Index* live, uint32_t num_pairs, uint32_t block, uint64_t* errors) {
  using Runs = typename Pages::Runs;
  __shared__ Ends ends[Pages::kUnits][Runs::kRuns];
  const auto tile = tile_at<Pages>(block, num_pairs, from.page_tokens);
  if (threadIdx.x < tile.units) {
    const uint64_t i = tile.first + threadIdx.x;
    const uint32_t count = pairs_of(live, num_pairs);  // on its way together with the pair
    const uint64_t source[1] = {page_in<Pages::kFromScale>(pairs, 2 * i, from_pages)};
    const uint64_t target[1] = {page_in<Pages::kToScale>(pairs, 2 * i + 1, to_pages)};
    const bool skip = skips(pairs, 2 * i) | skips(pairs, 2 * i + 1) | (i >= count);
    const bool bad = source[0] == kNoPage || target[0] == kNoPage;
    const bool wrong = skip ? i == 0 && bad_count(live) : bad;
    if (wrong && blockIdx.y == 0 && tile.begin == 0) report(errors, Fault::pair, (uint32_t)i, (uint32_t)i);
    place_nothing(ends[threadIdx.x]);
    if (!skip && !bad) place<Runs>(ends[threadIdx.x], from, to, blockIdx.y, source, target);
    // A page onto itself.
    if (ends[threadIdx.x][0].from == ends[threadIdx.x][0].to) place_nothing(ends[threadIdx.x]);
  }
  __syncthreads();
  store_tile<Runs>(ends, tile.units, tile.begin, tile.count, from.page_tokens);
}

// Stores zeros to pieces [first, first + count) of each of `units` pages, whose runs begin at `runs`, null: nothing to do;
// units * count fit a tile. All threads call it.
template <typename Runs, uint32_t kUnits>
__device__ __forceinline__ void store_zero_tile(uint8_t* const (&runs)[kUnits][Runs::kRuns], uint32_t units, typename Runs::Count first,
                                                uint32_t count, uint32_t tokens) {
  using Wide = Vec<uint32_t, 4>;
  using Narrow = typename Unit<Runs::align()>::type;
#pragma unroll
  for (uint32_t u = 0; u < kInFlight; ++u) {
    const uint32_t i = threadIdx.x + u * kCopyThreads;
    if (i >= units * count) return;
    const uint32_t unit = kUnits == 1 ? 0 : i / count;
    Runs::find(first + (kUnits == 1 ? i : i % count), tokens, [&](uint32_t run, uint64_t begin, uint32_t nbytes) {
      if (runs[unit][run] == nullptr) return;
      uint8_t* to = in_global(runs[unit][run]) + begin;
      if (Runs::kWhole || (nbytes == 16 && ((uint64_t)to & 15) == 0)) {
        *(Wide*)in_global(to) = Wide{};
        return;
      }
      if constexpr (!Runs::kWhole) {
#pragma unroll 1
        for (uint32_t j = 0; j < nbytes; j += sizeof(Narrow)) *(Narrow*)(in_global(to) + j) = Narrow{};
      }
    });
  }
}

// Stores zeros, in layer blockIdx.y, to the pages ids[i] of tile `block`. Ids from live[0] on do not count (null: all do). An id
// of -1 is skipped, one outside the pool is reported and skipped. All threads call it; it has a barrier.
template <typename Pages, typename Pool, typename Index>
__device__ __forceinline__ void store_zeros(const Pool& pool, uint32_t num_pages, const Index* ids, const Index* live, uint32_t num_ids,
                                            uint32_t block, uint64_t* errors) {
  using Runs = typename Pages::Runs;
  __shared__ uint8_t* runs[Pages::kUnits][Runs::kRuns];
  const auto tile = tile_at<Pages>(block, num_ids, pool.page_tokens);
  if (threadIdx.x < tile.units) {
    const uint64_t i = tile.first + threadIdx.x;
    const uint32_t count = pairs_of(live, num_ids);  // on its way together with the id
    const uint64_t page = page_in<Pages::kToScale>(ids, i, num_pages);
    const bool skip = skips(ids, i) | (i >= count), outside = page == kNoPage;
    const bool wrong = skip ? i == 0 && bad_count(live) : outside;
    if (wrong && blockIdx.y == 0 && tile.begin == 0) report(errors, Fault::pair, (uint32_t)i, (uint32_t)i);
    Runs::each([&](uint32_t number, auto r) {
      constexpr uint32_t kPointer = decltype(r)::kPointer;
      uint8_t* const begin = pool.first[kPointer][blockIdx.y] + (int64_t)page * pool.stride[kPointer];
      runs[threadIdx.x][number] = skip || outside ? nullptr : begin;
    });
  }
  __syncthreads();
  store_zero_tile<Runs>(runs, tile.units, tile.begin, tile.count, pool.page_tokens);
}
