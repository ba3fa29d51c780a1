// stored.cuh over the cache of paged.cuh: whole rows of tokens, read and written as values, codes and scales.
#include "paged.cuh"
#include "../../../templates/device/cache/stored.cuh"

using Keys = Values<Key, float>;

// kCount elements of a token, N at a time; what is missing where there is no page.
template <uint32_t N, uint32_t kCount, typename View>
__device__ __forceinline__ void row(const View& view, const Cache& cache, const PageRef& page, uint32_t token, typename View::Type missing,
                                    typename View::Type* out) {
  for (uint32_t i = 0; i < kCount; i += N) {
    Vec<typename View::Type, N> some;
#pragma unroll
    for (uint32_t j = 0; j < N; ++j) some.e[j] = missing;
    if (page.valid) view.template load<N>(some, cache, page, token, i);
#pragma unroll
    for (uint32_t j = 0; j < N; ++j) out[i + j] = some.e[j];
  }
}
extern "C" __global__ void stored_load(const uint32_t* queries, uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths,
                                       const uint32_t* table, float* k, float* dims, bf16* v, uint8_t* k_codes, bf16* v_codes, f16* k_scales,
                                       f16* fourth) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, b = queries[4 * i], token = queries[4 * i + 1], at = token % kTokens;
  const Cache cache = cache_of(codes, scales, values, lengths, table);
  const PageRef page = cache.page_of(b, token);
  using Scales = ScaleRow<Key, 2>;
  row<4, 80>(Values<Key, float>(cache), cache, page, at, Keys::missing(), k + 80 * i);
  row<4, 32>(RoleValues<Role<Key, RopePart, false>, float, 32, 16>(cache), cache, page, at, nan_f32(), dims + 32 * i);
  row<8, 80>(Values<Value, bf16>(cache), cache, page, at, Values<Value, bf16>::missing(), v + 80 * i);
  row<8, 80>(Codes<Key>(cache), cache, page, at, Codes<Key>::missing(), k_codes + 80 * i);
  row<2, 80>(Codes<Value>(cache), cache, page, at, missing_code<bf16>(), v_codes + 80 * i);
  row<4, 12>(ScaleRow<Key, 2>(cache), cache, page, at, Scales::missing(), k_scales + 12 * i);
  fourth[i] = page.valid ? *Scales::at(cache, page, at, 9) : Scales::missing();
}

// All tokens of the first request.
template <uint32_t N, uint32_t kCount, typename View>
__device__ __forceinline__ void put(const View& view, const Cache& cache, const PageRef& page, uint32_t token, const typename View::Type* in) {
  for (uint32_t i = 0; i < kCount; i += N) {
    Vec<typename View::Type, N> some;
#pragma unroll
    for (uint32_t j = 0; j < N; ++j) some.e[j] = in[i + j];
    view.template store<N>(cache, page, token, i, some);
  }
}
extern "C" __global__ void stored_store(const uint32_t* table, const uint8_t* k_codes, const f16* k_scales, const bf16* v, uint8_t* codes, f16* scales,
                                        bf16* values) {
  const uint32_t i = threadIdx.x, at = i % kTokens;
  const Cache cache = cache_of(codes, scales, values, nullptr, table);
  const PageRef page = cache.page_of(0, i);
  put<8, 80>(Codes<Key>(cache), cache, page, at, k_codes + 80 * i);
  put<4, 12>(ScaleRow<Key, 2>(cache), cache, page, at, k_scales + 12 * i);
  put<4, 80>(Values<Value, bf16>(cache), cache, page, at, v + 80 * i);
}
