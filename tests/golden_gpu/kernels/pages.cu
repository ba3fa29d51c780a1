// pages.cuh: pages of every kind of runs copied between pools and within one, and what tells where their pieces are.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/cache/pages.cuh"

// 2 layers of pages: of 68 bytes in two runs, of whole pieces, of 3 halves a token.
constexpr uint32_t kLayers = 2, kPages = 7, kOpenTokens = 701;
template <uint32_t kPage, uint32_t kWhich, uint64_t kSize, uint32_t kMultiple, bool kByToken>
struct Bytes {
  static constexpr uint32_t kPointer = kPage, kId = kWhich, kAlign = kMultiple;
  static constexpr uint64_t kBytes = kSize;
  static constexpr bool kOpen = kByToken;
};
using Small = PageRuns<Bytes<0, 0, 48, 4, false>, Bytes<1, 0, 20, 4, false>>;
using Large = PageRuns<Bytes<0, 0, 20480, 16, false>>;
using Open = PageRuns<Bytes<0, 0, 6, 2, true>>;
struct Apart : Bytes<1, 0, 96, 16, false> {
  static constexpr uint64_t kStrip = 32, kStep = 80;
};
using Stripped = PageRuns<Bytes<0, 0, 20, 4, false>, Apart>;  // the second with other bytes in between
using Other = PageRuns<Bytes<0, 0, 40, 4, false>, Bytes<1, 1, 28, 4, false>>;  // the second by an id of its own

template <typename R, uint32_t kTogether, uint32_t kFrom = 1, uint32_t kTo = 1>
struct Pages {
  using Runs = R;
  static constexpr uint32_t kUnits = kTogether, kFromScale = kFrom, kToScale = kTo;
};
using SmallPages = Pages<Small, 4>;
using LargePages = Pages<Large, 1, 2, 3>;
using OpenPages = Pages<Open, 1>;

template <uint32_t kBytes, uint32_t kSecond>
__device__ __forceinline__ PageAddresses<2, kLayers> pool_of(uint8_t* p, uint32_t tokens) {
  uint8_t* one = p + kPages * kBytes;
  return {{{p, one}, {p + kSecond, one + kSecond}}, {kBytes, kBytes}, kLayers, kPages, kPages, tokens};
}

// Lists of pairs one after the other; the last tile belongs to none.
extern "C" __global__ void __launch_bounds__(kCopyThreads) pages_copy(
    const int32_t* pairs, const uint32_t* scaled, const int64_t* open_pairs, const int32_t* live, const uint8_t* small, const uint8_t* large,
    const uint8_t* open, uint8_t* small_to, uint8_t* large_to, uint8_t* open_to, uint64_t* errors) {
  const auto a = pool_of<68, 48>((uint8_t*)small, 1), b = pool_of<68, 48>(small_to, 1);
  uint32_t block = blockIdx.x;
  if (has_tile<SmallPages>(block, 6, 1)) return store_pairs<SmallPages>(a, b, kPages, kPages, pairs, live, 6, block, errors);
  const auto c = pool_of<20480, 0>((uint8_t*)large, 1), d = pool_of<20480, 0>(large_to, 1);
  if (has_tile<LargePages>(block, 4, 1)) {
    return store_pairs<LargePages>(c, d, kPages, kPages, scaled, (const uint32_t*)nullptr, 4, block, errors + 1);
  }
  const auto e = pool_of<4208, 0>((uint8_t*)open, kOpenTokens), f = pool_of<4208, 0>(open_to, kOpenTokens);
  if (has_tile<OpenPages>(block, 4, kOpenTokens)) {
    return store_pairs<OpenPages>(e, f, kPages, kPages, open_pairs, (const int64_t*)nullptr, 4, block, errors + 2);
  }
  if (threadIdx.x == 0 && blockIdx.y == 0) report(errors + 3, Fault::none, block, block);
}

// Within one pool; all four pairs by one block.
extern "C" __global__ void __launch_bounds__(kCopyThreads) pages_within(const int32_t* pairs, uint8_t* small, uint64_t* errors) {
  const auto pool = pool_of<68, 48>(small, 1);
  store_pairs<Pages<Small, 8>>(pool, pool, kPages, kPages, pairs, (const int32_t*)nullptr, 4, blockIdx.x, errors);
}

// Runs with ids of their own, of a page's middle pieces; a page that goes nowhere.
extern "C" __global__ void __launch_bounds__(kCopyThreads) pages_tile(const uint8_t* from, uint8_t* to) {
  __shared__ Ends ends[2][Other::kRuns];
  if (threadIdx.x == 0) {
    const uint64_t source[2] = {1, 4}, target[2] = {6, 2};
    place<Other>(ends[0], pool_of<68, 40>((uint8_t*)from, 1), pool_of<68, 40>(to, 1), 1, source, target);
    place_nothing(ends[1]);
  }
  __syncthreads();
  store_tile<Other>(ends, 2, 1, 3, 1);
}

// Pages of zeros: lists one after the other, and pieces 1 to 3 of a page and of none.
extern "C" __global__ void __launch_bounds__(kCopyThreads) pages_zero(const int32_t* ids, const int64_t* open_ids, const int32_t* live, uint8_t* small,
                                                                      uint8_t* open, uint8_t* piece, uint64_t* errors) {
  uint32_t block = blockIdx.x;
  if (has_tile<SmallPages>(block, 6, 1)) return store_zeros<SmallPages>(pool_of<68, 48>(small, 1), kPages, ids, live, 6, block, errors);
  if (has_tile<OpenPages>(block, 3, kOpenTokens)) {
    return store_zeros<OpenPages>(pool_of<4208, 0>(open, kOpenTokens), kPages, open_ids, (const int64_t*)nullptr, 3, block, errors + 1);
  }
  __shared__ uint8_t* runs[2][Small::kRuns];
  if (blockIdx.y > 0) return;
  if (threadIdx.x == 0) runs[0][0] = piece, runs[0][1] = piece + 48, runs[1][0] = runs[1][1] = nullptr;
  __syncthreads();
  const auto tile = tile_at<SmallPages>(1, 6, 1);
  store_zero_tile<Small>(runs, tile.units, 1, 3, 1);
}

// Of each piece its run, first byte and bytes, of neighbouring pages and of one in strips; where each byte of strips is; numbers of pages
// and pairs.
extern "C" __global__ void pages_numbers(const int32_t* pairs, uint32_t* found, uint32_t* stripped, uint64_t* places, uint64_t* numbers) {
  const uint32_t i = threadIdx.x;
  const auto put = [](uint32_t* to, uint32_t run, uint64_t begin, uint32_t nbytes) { to[0] = run, to[1] = (uint32_t)begin, to[2] = nbytes; };
  places[2 * i] = Strips<Bytes<0, 0, 96, 16, false>>::at(i);
  places[2 * i + 1] = Strips<Apart>::at(i);
  if (i < 8) Stripped::find(i, 1, [&](uint32_t run, uint64_t begin, uint32_t nbytes) { put(stripped + 3 * i, run, begin, nbytes); });
  if (i >= 5) return;
  Small::find(i, 1, [&](uint32_t run, uint64_t begin, uint32_t nbytes) { put(found + 3 * i, run, begin, nbytes); });
  numbers += 16 * i;
  *numbers++ = Small::pieces(i);
  *numbers++ = Open::pieces(i);
  *numbers++ = Run<Bytes<0, 0, 6, 2, true>>::bytes(i);
  *numbers++ = Small::align() << 8 | Open::align() << 4 | Large::align() >> 4;
  uint64_t all = 0;
  Small::each([&](uint32_t number, auto run) { all += (number + 1) * decltype(run)::bytes(1); });
  *numbers++ = all;
  *numbers++ = least(i, 3);
  *numbers++ = skips(pairs, i);
  *numbers++ = page_in<2>(pairs, i, kPages);
  *numbers++ = pairs_of(pairs + i, 3);
  *numbers++ = pairs_of((const int32_t*)nullptr, i);
  *numbers++ = tiles_of<Small, 4>(i, 1);
  *numbers++ = tiles_of<Large, 1>(i, 1);
  *numbers++ = tiles_of<Open, 1>(i, 40000);
  *numbers++ = bad_count(pairs + i);
}
