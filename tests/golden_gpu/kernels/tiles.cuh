// Tiles of K and V by hand, for probes of attention over pages of 8 tokens: what cache.cuh says of a pool, and a kernel of its tiles.
#include "runs.cuh"
#include "../../../templates/device/base/fault.cuh"

struct PageIds {
  uint32_t id;
  Fault fault;
};

struct PageList {
  uint32_t first;
};

#include "../../../templates/device/attention/common/tile_copy.cuh"
#include "../../../templates/device/attention/common/tile_scales.cuh"

constexpr uint32_t kPages = 14, kTable = 8, kGroup = 2, kQHeads = kHeads * kGroup, kHead = 1;

// What K and V of a page have of scales: none, those of V's tokens behind those of K's, or none but those of a head's dims.
template <typename E, typename S, Recipe kHow, uint32_t kD, bool kWithZero = false>
struct KeyRun : Run<E, S, kHow, kWithZero, 1, kD> {};
template <typename E, typename S, Recipe kHow, uint32_t kD, bool kWithZero = false>
struct ValueRun : Run<E, S, kHow, kWithZero, 1, kD> {
  using Base = Run<E, S, kHow, kWithZero, 1, kD>;
  __device__ static E* base(const PageRef& page) { return (E*)page.plain; }
  template <typename C>
  __device__ static S* scales(const C& cache, const PageRef& page) {
    return (S*)page.scales + kTokens * Base::kScaleRow;
  }
};
template <typename E, bool kIsV>
struct ChannelRun : Run<E, f16, Recipe::amax, false, 1, 1> {
  __device__ static E* base(const PageRef& page) { return kIsV ? (E*)page.plain : (E*)page.codes; }
  template <typename C>
  __device__ static f16* scales(const C& cache, const PageRef&) {
    return (f16*)cache.scales + kIsV * kHeads * kDims;
  }
};

template <typename K, typename V>
struct Cache {
  static constexpr uint32_t page_tokens = kTokens;
  uint8_t *keys, *values;
  typename K::Scale* scales;
  const uint32_t* table;

  __device__ PageList page_list(uint32_t b) const { return {b * kTable}; }
  __device__ PageIds page_ids(const PageList& list, uint32_t i) const {
    if (i >= kTable) return {kU32Max, Fault::position};
    return {table[list.first + i], Fault::none};
  }
  __device__ bool has_page(const PageIds& ids) const { return ids.id < kPages; }
  __device__ PageRef nth_page(uint32_t n) const { return page({n, Fault::none}); }
  __device__ PageRef page(const PageIds& ids) const {
    if (ids.id >= kPages) return no_page(ids.fault == Fault::none ? Fault::page_id : ids.fault);
    constexpr uint32_t kBytes = kInPage / kPerElement<typename K::Element> * sizeof(typename K::Element);
    PageRef page = {keys + ids.id * kBytes, scales + ids.id * 2 * kTokens * K::kScaleRow, nullptr, kU32Max, Fault::none, true};
    page.plain = (bf16*)(values + ids.id * kBytes);
    return page;
  }
};

enum class Scaled { never, tokens, groups, tables, channels, zeros };

template <typename E>
using Itself = E;
template <typename KeyRunOf, typename ValueRunOf, uint32_t kT, uint32_t kRunOf, uint32_t kNOf, uint32_t kWarps = 1, template <typename> class CodeOf = Itself>
struct TileOf {
  using K = KeyRunOf;
  using V = ValueRunOf;
  static constexpr uint32_t kTokens = kT, kTeamWarps = kWarps, kHeads = 1, kN = kNOf, kRun = kRunOf;
  static constexpr uint32_t kRow = kDims / kPerElement<typename K::Element> * sizeof(typename K::Element), kPitch = (kRow + 15) / 16 * 16;
  static constexpr uint32_t kKeyBytes = kRow, kKeyPitch = kPitch, kKeyAccess = kRow % 16 == 0 ? 16 : kRow % 8 == 0 ? 8 : 4, kKeyStep = ::kHeads * kRow;
  static constexpr uint32_t kValueBytes = kRow, kValuePitch = kPitch, kValueAccess = kKeyAccess, kValueStep = kKeyStep;
  static constexpr float kSlack = 8.0f;
  using KeyCode = CodeOf<typename K::Element>;
  using ValueCode = CodeOf<typename V::Element>;
  static constexpr uint32_t kKeyGroups = 1, kValueGroups = 1;
};

template <typename E>
using PlainK = KeyRun<E, f16, Recipe::none, 16>;
template <typename E>
using PlainV = ValueRun<E, f16, Recipe::none, 16>;
