// Products of a warpgroup over tiles of a cache that tensor copies brought: S = Q K^T and O = P V, once for each plan and shape.
#include "device/base/types.cuh"
#include "device/memory/mbarrier.cuh"
#include "device/memory/cp_async.cuh"
#include "device/tma/tma.cuh"
#include "device/tma/tma_tile.cuh"
#include "device/mma/wgmma.cuh"

enum class Plan { groups, chunks, rows };

// A tile of kTokens x kDims at `to` from pages of kIssue tokens; of rows, `pages` are tokens of the pool at `rows`, `pitch` heads apart.
template <Plan kPlan, uint32_t kTokens, uint32_t kDims, uint32_t kIssue, typename T>
__device__ void load(uint8_t* to, const TensorMap* map, uint64_t* bar, const uint32_t* pages, const uint32_t* tokens, const T* rows, int64_t pitch,
                     uint32_t head_chunk, uint32_t head_group, uint32_t head) {
  if constexpr (kPlan == Plan::rows) {
    for (uint32_t i = threadIdx.x; i < kTokens * kDims / 8; i += 128) {
      const uint32_t token = i / (kDims / 8), dim = i % (kDims / 8) * 8;
      cp_async<16>(shared_address(to + row_major_offset<T, 128, kDims, 64>(token, dim)), (const uint8_t*)(rows + (pages[token] * pitch + head) * kDims + dim), true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
  } else if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(bar, kTokens * kDims * 2);
    for (uint32_t i = 0; i < kTokens / kIssue; ++i) {
      if constexpr (kPlan == Plan::groups) {
        tma_load_groups(to + i * kIssue * kDims * 2, map, bar, head_chunk, head_group + tokens[i] / 8, pages[i]);
      } else {
        for (uint32_t j = 0; j < kDims / 64; ++j)
          tma_load((T*)to + (j * kTokens + i * kIssue) * 64, map, bar, CacheHint::normal, (int32_t)(j * 64), (int32_t)head, (int32_t)tokens[i], tma_row(pages[i]));
      }
    }
  }
}

template <Plan kPlan, uint32_t kTokens, uint32_t kKeyDims, uint32_t kDims, uint32_t kIssue, typename T>
__device__ void multiply(const TensorMap* k_map, const TensorMap* v_map, const T* q, const T* p, float* s_out, float* o_out, const uint32_t* pages,
                         const uint32_t* tokens, const T* k_rows, const T* v_rows, int64_t pitch, uint32_t k_chunk, uint32_t v_chunk, uint32_t group, uint32_t head) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ uint64_t bars[2];
  uint8_t *keys = dynamic, *values = keys + kTokens * kKeyDims * 2, *query = values + kTokens * kDims * 2;
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  if (threadIdx.x == 0) {
    mbarrier_init(&bars[0], 1);
    mbarrier_init(&bars[1], 1);
    fence_mbarrier_init();
  }
  for (uint32_t i = threadIdx.x; i < 64 * kKeyDims; i += 128) *(T*)(query + row_major_offset<T, 128, kKeyDims, 64>(i / kKeyDims, i % kKeyDims)) = q[i];
  fence_async_shared();
  __syncthreads();
  load<kPlan, kTokens, kKeyDims, kIssue>(keys, k_map, &bars[0], pages, tokens, k_rows, pitch, k_chunk, group * head, head);
  load<kPlan, kTokens, kDims, kIssue>(values, v_map, &bars[1], pages, tokens, v_rows, pitch, v_chunk, group * head, head);
  if (kPlan != Plan::rows) mbarrier_wait(&bars[0], 0), mbarrier_wait(&bars[1], 0);
  __syncthreads();
  constexpr bool kChunks = kPlan == Plan::chunks;
  constexpr uint32_t kKeyPanel = kChunks ? kTokens * 128 : 1024, kPanel = kChunks ? kTokens * 128 : 1024;
  constexpr uint32_t kKeyGroup = kChunks ? 1024 : kKeyDims * 16, kGroup = kChunks ? 1024 : kDims * 16;
  const uint64_t k = swizzled_tile(shared_address(keys), 16, kKeyGroup), v = swizzled_tile(shared_address(values), kPanel, kGroup);
  const uint64_t a = swizzled_tile(shared_address(query), 16, kKeyDims * 16);
  float s[kTokens / 2] = {}, o[kDims / 2] = {};
  wgmma_fence();
#pragma unroll
  for (uint32_t i = 0; i < kKeyDims / 16; ++i)
    multiply_keys<T>(s, a + (i / 4 * 1024 + i % 4 * 32) / 16, k + (i / 4 * kKeyPanel + i % 4 * 32) / 16, i > 0);
#pragma unroll
  for (uint32_t i = 0; i < kTokens / 16; ++i) {
    uint32_t weights[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) weights[j] = *(const uint32_t*)&p[(row + j % 2 * 8) * kTokens + i * 16 + j / 2 * 8 + lane % 4 * 2];
    multiply_values<T>(o, weights, v + i * (2 * kGroup / 16), i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (uint32_t n = 0; n < kTokens / 2; ++n) s_out[(row + n / 2 % 2 * 8) * kTokens + n / 4 * 8 + lane % 4 * 2 + n % 2] = s[n];
#pragma unroll
  for (uint32_t n = 0; n < kDims / 2; ++n) o_out[(row + n / 2 % 2 * 8) * kDims + n / 4 * 8 + lane % 4 * 2 + n % 2] = o[n];
}
