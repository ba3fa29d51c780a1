// Runs of dims by hand, for probes of segment.cuh: what cache.cuh says of a segment, over pages of 8 tokens and 2 heads of 40 dims.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"

constexpr uint32_t kTokens = 8, kHeads = 2, kDims = 40, kInPage = kTokens * kHeads * kDims;

// One page; the tail is its request's, and `sealed` counts from its first token.
struct PageRef {
  uint8_t* codes;
  void* scales;
  const bf16* tail;
  uint32_t sealed;
  Fault fault;
  bool valid;
  bf16* plain = nullptr;  // V, where it lies elsewhere

  __device__ bool found() const { return codes != nullptr; }
};
__device__ __forceinline__ PageRef no_page(Fault fault) { return {nullptr, nullptr, nullptr, kU32Max, fault, false}; }

// Values of E under scales S of kH heads and kD dims each.
template <typename E, typename S, Recipe kHow, bool kWithZero = false, uint32_t kH = 1, uint32_t kD = 16, uint32_t kWaiting = 0, uint32_t kWidest = 8>
struct Run {
  using Compute = bf16;
  using Element = E;
  using Scale = S;
  using ScalePointer = S*;
  static constexpr Recipe kRecipe = kHow;
  static constexpr bool kZero = kWithZero;
  static constexpr uint32_t kBegin = 0, kSize = kDims, kVector = kWidest, kBlockHeads = kH, kBlockDims = kD;
  static constexpr uint32_t kScalePad = 0;
  static constexpr uint32_t kDimBlocks = (kDims + kD - 1) / kD, kScaleRow = kHeads / kH * kDimBlocks * (1 + kZero);
  static constexpr uint32_t kNeighbours = kDimBlocks * (1 + kZero), kScaleVector = kNeighbours & (~kNeighbours + 1);
  __device__ static bool found(const PageRef& page) { return page.found(); }
  __device__ static E* base(const PageRef& page) { return (E*)page.codes; }
  static constexpr uint32_t kStep = kElementBits<E> == 3 ? 3 : 1;  // from an element to the next, as offsets count
  __device__ static constexpr uint32_t offset(uint32_t token, uint32_t head, uint32_t dim) {
    constexpr uint32_t kEach = kPlacesEach<E>, kRow = kDims / kEach;
    if constexpr (kStrided<E>) dim = dim % kRow * kEach + dim / kRow;
    return ((token * kHeads + head) * kDims + dim) * kStep;
  }
  template <typename C>
  __device__ static S* scales(const C& cache, const PageRef& page) {
    return (S*)page.scales;
  }
  __device__ static constexpr uint32_t scale_offset(uint32_t token, uint32_t head, uint32_t dim) {
    return token * kScaleRow + (head / kH * kDimBlocks + dim / kD) * (1 + kZero);
  }
  template <typename C>
  __device__ static float global_scale(const C& cache) {
    return cache.global;
  }
  static constexpr uint32_t kResidual = kWaiting, kTailVector = 8;
  __device__ static const bf16* tail(const PageRef& page) { return page.tail; }
  __device__ static uint32_t sealed(const PageRef& page) { return page.sealed; }
  __device__ static constexpr uint32_t tail_offset(uint32_t slot, uint32_t head, uint32_t dim) { return (slot * kHeads + head) * kDims + dim; }
};
