// Rows of latent caches of any element type, on their way into tiles of latent_wgmma.cuh: warps load 16 neighbouring dims of a
// token at a time to registers, codes and scales, and dequantize them when they store them.
//
// A tile has 64 tokens, and is filled in two halves: 256 dims of V each, the second with the dims of K alone. Warp w has tokens
// 8w to 8w + 7; lane 4g + j has token g of them, of each panel of 64 dims the 16 from 16j on. So four lanes read 64 dims of a row
// together, and eight lanes that store meet no bank twice.
//
// `Tile` is the Tile of latent_wgmma.cuh. A `Record` is the layout of rows of some caches:
//
//   struct Record {
//     using Codes = Key;                                          // segment of the dims with scales; without scales, of all dims
//     static constexpr uint32_t kPlainPanel = 7, kPlainAt = 448;  // first panel of 16-bit dims; its byte in a row
//     static constexpr uint32_t kScaleBytes = 4, kScaleAccess = 4;  // scales of half of V's dims (0: none); so many at once
//     static constexpr uint32_t kScaleStep = 4;                     // bytes from them to the other half's scales
//   };
#pragma once

#include "latent_wgmma.cuh"

// The address of a token's row, from the lane's first dims on; a row that is not `live` becomes zeros.
struct RowPlace {
  const uint8_t *codes, *scales;
  bool live;
  uint32_t record;  // which one of the kernel's; all lanes of a warp have the same
};
// Bytes of 16 dims of a segment.
template <typename S>
constexpr uint32_t kUnitBytes = sizeof(typename S::Element) * 16 / kPerElement<typename S::Element>;

// The address of token `offset` of a page; `Role` is the KeyRole of its cache.
template <typename Role, typename Cache, typename Page>
__device__ __forceinline__ RowPlace row_place(const Cache& cache, const Page& page, uint32_t offset) {
  using Codes = typename Role::Main;
  RowPlace place = {};
  place.live = page.valid;
  place.codes = (const uint8_t*)element_at<Codes>(page, offset, 0, 0) + threadIdx.x % 4 * kUnitBytes<Codes>;
  if constexpr (Codes::kRecipe != Recipe::none) place.scales = (const uint8_t*)scale_at<Codes>(cache, page, offset, 0, 0);
  return place;
}

// True if one of kCount e8m0 scales is NaN. Bytes of the last word past kCount are not scales.
template <uint32_t kCount, uint32_t N>
__device__ __forceinline__ bool has_nan(const uint32_t (&scales)[N]) {
  static_assert(kCount <= 4 * N);
  uint32_t found = 0;
#pragma unroll
  for (uint32_t w = 0; w < (kCount + 3) / 4; ++w) {
    const uint32_t nan = (scales[w] & ~kByteSigns) + 0x01010101u & scales[w];
    found |= 4 * w + 4 <= kCount ? nan : nan & (1u << kCount % 4 * 8) - 1;
  }
  return (found & kByteSigns) != 0;
}

// A lane's part of half a tile with rows of layout `Record`: 16 dims of each panel of its token, and their scales. Rows of 16-bit
// elements alone are copied, and no register holds them.
template <typename Tile, uint32_t kHalf, typename Record>
struct HalfOf {
  using S = typename Record::Codes;
  using E = typename Tile::Element;
  static constexpr uint32_t kFirst = kHalf * Tile::kMine, kPanels = kHalf == 0 ? Tile::kMine : Tile::kMine + Tile::kRopePanels;
  static constexpr bool kCopied = Record::kPlainPanel == 0;
  static constexpr bool kPowers = kSame<typename S::Element, e4m3> && kSame<typename S::Scale, e8m0> && kSame<E, bf16>;
  // Panels of codes in the half; the count of their scales, the last of which may belong to the other half as well.
  static constexpr uint32_t kRest = Record::kPlainPanel > kFirst ? Record::kPlainPanel - kFirst : 0, kCoded = kRest < Tile::kMine ? kRest : Tile::kMine;
  static constexpr uint32_t kScales = (kCoded * 64 + S::kBlockDims - 1) / S::kBlockDims;
  using Words = uint32_t[kPanels][8];
  using Scales = uint32_t[4];

  // Where the lane's dims lie in panel n of those without scales; and in the tile at `stage`, its second 8 dims at ^ 16. L1 has
  // the other half of a sector when it is asked for.
  __device__ static __forceinline__ const uint8_t* plain_dims(const RowPlace& place, uint32_t n) {
    return place.codes + threadIdx.x % 4 * (32 - kUnitBytes<S>) + (Record::kPlainAt + (kFirst + n - Record::kPlainPanel) * 128);
  }
  __device__ static __forceinline__ uint32_t lane_place() {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    return (threadIdx.x / 32 % 8 * 8 + g) * 128 + (lane % 4 * 2 ^ g) * 16;
  }
  // Copies go past L1. A lane copies two chunks of 8 dims of each panel: this one, and the one with number ^ 2. So two lanes read
  // a sector together, and lanes of neighbouring tokens write to different banks.
  __device__ static __forceinline__ uint32_t copied_chunk() {
    const uint32_t lane = threadIdx.x % 32;
    return lane % 2 + lane / 2 % 2 * 4 + lane / 4 % 2 * 2;
  }

  // Starts the loads.
  __device__ static __forceinline__ void load(Words& words, Scales& scales, const RowPlace& place) {
    if constexpr (!kCopied) {
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) scales[w] = 0;
#pragma unroll
      for (uint32_t at = 0; at < Record::kScaleBytes; at += Record::kScaleAccess)
        load_live<Record::kScaleAccess>(&scales[at / 4], place.scales + kHalf * Record::kScaleStep + at, place.live);
#pragma unroll
      for (uint32_t n = 0; n < kPanels; ++n) {
        const uint32_t panel = kFirst + n;
#pragma unroll
        for (uint32_t w = 0; w < 8; ++w) words[n][w] = 0;
        if (panel < Record::kPlainPanel) {
          constexpr uint32_t kBytes = kUnitBytes<S>, kRun = sizeof(typename S::Element) * S::kVector / kPerElement<typename S::Element>;
          constexpr uint32_t kAccess = kRun < kBytes ? kRun : kBytes;
          static_assert(kAccess >= 4, "a load writes whole words");
#pragma unroll
          for (uint32_t at = 0; at < kBytes; at += kAccess) load_live<kAccess>(&words[n][at / 4], place.codes + panel * (4 * kBytes) + at, place.live);
        } else {
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) load_live<16>(&words[n][i * 4], plain_dims(place, n) + i * 16, place.live);
        }
      }
    }
  }

  // Waits for the loads; returns true if a scale of the warp's rows is NaN.
  __device__ static __forceinline__ bool await(const Scales& scales) {
    if constexpr (kPowers) return __any_sync(~0u, has_nan<kScales>(scales));
    return false;
  }

  // The scale of the lane's dims of panel n: of the half's scales the panel's first one is known, those of blocks within a panel
  // follow from the lane.
  __device__ static __forceinline__ typename S::Scale scale_of(const Scales& scales, uint32_t n) {
    using Scale = typename S::Scale;
    static_assert(S::kBlockDims % 16 == 0 && !S::kZero);
    constexpr uint32_t kEach = sizeof(Scale), kLanes = S::kBlockDims < 64 ? S::kBlockDims / 16 : 4;  // lanes that share a scale
    const uint32_t first = n % Tile::kMine * 64 / S::kBlockDims * kEach, byte = first + threadIdx.x % 4 / kLanes * kEach;
    uint32_t bits = scales[first / 4];
    if constexpr (kLanes < 4 && kEach * (4 / kLanes) > 4) bits = byte / 4 == first / 4 ? bits : scales[first / 4 + 1];
    if constexpr (kEach < 4) bits >>= byte % 4 * 8;
    return *(const Scale*)&bits;
  }

  // Codes under a power of two: exact in bf16, code and product. 2^-127 counts as 0, and NaN as infinity.
  __device__ static __forceinline__ void widen_powers(Vec<bf16, 16>& values, const uint32_t (&words)[8], typename S::Scale scale) {
    float x[16];
    Raw<typename S::Element, 16> raw;
#pragma unroll
    for (uint32_t w = 0; w < sizeof(raw) / 4; ++w) ((uint32_t*)&raw)[w] = words[w];
    unpack<typename S::Element>(x, raw);
    pack<bf16>(values, x);
#pragma unroll
    for (uint32_t w = 0; w < 8; ++w) {
      uint32_t& pair = ((uint32_t*)&values)[w];
      asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(scale.bits * 0x800080u), "r"(0x80008000u));
    }
  }

  // Starts the copies of rows that no register holds to the tile at `stage`.
  __device__ static __forceinline__ void copy_async(uint8_t* stage, const RowPlace& place) {
    const uint32_t token = threadIdx.x / 4 % Tile::kTokens, chunk = copied_chunk();
    const uint32_t to = matrix_address(stage) + kFirst * Tile::kPanelBytes + token * 128 + (chunk ^ token % 8) * 16;
    const uint8_t* row = place.codes - threadIdx.x % 4 * kUnitBytes<S> + kFirst * 128;
#pragma unroll
    for (uint32_t n = 0; n < kPanels; ++n) {
      cp_async<16>(to + n * Tile::kPanelBytes, row + n * 128 + chunk * 16, place.live);
      cp_async<16>((to ^ 32) + n * Tile::kPanelBytes, row + n * 128 + (chunk ^ 2) * 16, place.live);
    }
  }

  // Dequantizes and stores them to the tile at `stage`.
  __device__ static __forceinline__ void store(uint8_t* stage, const Words& words, const Scales& scales) {
    const uint32_t at = lane_place();
#pragma unroll
    for (uint32_t n = 0; n < kPanels; ++n) {
      Vec<E, 16> values;
      if (kFirst + n >= Record::kPlainPanel) {
#pragma unroll
        for (uint32_t w = 0; w < 8; ++w) ((uint32_t*)&values)[w] = words[n][w];
      } else if constexpr (kPowers) {
        widen_powers(values, words[n], scale_of(scales, n));
      } else {
        Stored<S, 16> stored;
#pragma unroll
        for (uint32_t w = 0; w < sizeof(stored.raw) / 4; ++w) ((uint32_t*)&stored.raw)[w] = words[n][w];
        if constexpr (Record::kScaleBytes > 0) stored.scales.e[0] = scale_of(scales, n);
        dequantize_stored(values, stored, 1.0f);
      }
      uint8_t* to = stage + (kFirst + n) * Tile::kPanelBytes;
      *(Vec<E, 8>*)(to + at) = *(const Vec<E, 8>*)&values.e[0];
      *(Vec<E, 8>*)(to + (at ^ 16)) = *(const Vec<E, 8>*)&values.e[8];
      __syncwarp();  // for the compiler, which would widen all panels at once: there are no registers for that
    }
  }
};

// HalfOf for rows of one of several records.
template <typename Tile, uint32_t kHalf, typename... Records>
struct HalfRow {
  template <typename Record>
  using Of = HalfOf<Tile, kHalf, Record>;
  static constexpr bool kOne = sizeof...(Records) == 1;
  static constexpr bool kCopies = (Of<Records>::kCopied || ...);
  static constexpr uint32_t kArrivals = kCopies ? 256 + 8 : 8;  // arrivals at a half's mbarrier: warps, copying threads
  uint32_t words[Tile::kMine + kHalf * Tile::kRopePanels][8], scales[4];
  RowPlace place;

  __device__ __forceinline__ void load(const RowPlace& from) {
    place = from;
    uint32_t n = 0;
    ((kOne || place.record == n++ ? Of<Records>::load(words, scales, from) : void()), ...);
  }
  __device__ __forceinline__ bool await() const {
    bool found = false;
    uint32_t n = 0;
    ((kOne || place.record == n++ ? void(found = Of<Records>::await(scales)) : void()), ...);
    return found;
  }
  // Stores the rows to the tile at `stage`, or lets their copies land there; arrives at `full` when the lane's part is there.
  // Stored dims have their fence for products here. Copies land later: with kCopies, a thread that has waited for `full` needs a
  // fence.
  __device__ __forceinline__ void store(uint8_t* stage, uint64_t& full) const {
    uint32_t n = 0;
    ((kOne || place.record == n++ ? store_as<Records>(stage, full) : void()), ...);
  }

 private:
  template <typename Record>
  __device__ __forceinline__ void store_as(uint8_t* stage, uint64_t& full) const {
    if constexpr (Of<Record>::kCopied) Of<Record>::copy_async(stage, place);
    else Of<Record>::store(stage, words, scales);
    if constexpr (kCopies) cp_async_arrive(&full);
    if constexpr (!Of<Record>::kCopied) fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&full);
  }
};

// Bits of a warp's 8 tokens that are live, in the order of tokens; each lane gives the bit of its own token. All lanes call it.
__device__ __forceinline__ uint8_t live_tokens(bool live) {
  uint32_t x = __ballot_sync(~0u, live) & 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000f000fu;
  return (uint8_t)(x | x >> 12);
}
