// kv_cache.cuh over the cache of paged.cuh: what it answers about a token, what it reads and writes there, rows of tiles.
#include "paged.cuh"

// Numbers, then floats, of one (b, token, head, dim).
template <typename C>
__device__ __forceinline__ void ask(const C& c, const void* base, const uint32_t* q, uint64_t* n, float* f) {
  const uint32_t b = q[0], token = q[1], head = q[2], dim = C::quantization_enabled ? q[3] : q[3] % kDims;
  const KVCoords at = c.kv_tma_coords(b, token);
  Cache none = c.cache;
  none.max_cache_length = 0;
  *n++ = c.cache_length(b);
  *n++ = distance(c.cache_lengths_nd(), c.cache.lengths);
  *n++ = (uint64_t)c.empty_cache() << 1 | C{none}.empty_cache();
  *n++ = c.max_prompt_length();
  *n++ = c.max_context_length();
  *n++ = (uint64_t)(int64_t)C::max_tile_size();
  *n++ = (uint64_t)at.block << 32 | at.row_in_block << 1 | at.valid;
  *n++ = c.page_rows();
  *n++ = c.num_kv_rows();
  *n++ = c.row_idx(b, token);
  *n++ = C::col_idx(head);
  *n++ = (uint64_t)c.get_tma_row((int32_t)(token - 3));
  *n++ = distance(c.template block_paged_ptr<4>(b, token, head, dim), base);
  *n++ = distance(c.scales_block_paged_ptr(b, token, head, dim), c.cache.scales);
  *n++ = distance(c.scales_raw_ptr(), c.cache.scales);
  *n++ = hash(C::get_type_name());
  *n++ = low_bit(token);
  *n++ = (uint64_t)C::kv_params.num_heads << 32 | C::kv_params.head_size << 1 | C::kv_params.is_mla;
  *n++ = C::page_size_ << 16 | C::quantization_granularity << 8 | C::head_dim_granularity << 1 | C::quantization_enabled;
  if constexpr (C::quantization_enabled) {
    *n++ = c.num_scale_rows();
    *n++ = c.scale_row_idx(b, token);
  } else {
    *n++ = 0, *n++ = 0;
  }
  const typename C::Page page = c.page(b, token);
  *n++ = (uint64_t)c.sealed(page, token % kTokens) << 9 | (uint64_t)page.valid << 8 | (uint64_t)page.fault;

  const auto two = c.template load<2, float>(b, head, token, dim);
  const auto own = c.template load<4>(b, head, token, dim / 4 * 4);
  Vec<float, 2> again = {};
  if (page.valid) again = c.template load<2, float>(page, head, token % kTokens, dim);
  const auto raw = c.template load_quantized<2>(b, head, token, dim);
  const auto scales = c.template load_scale<2>(b, head, token, dim % 24);
  float codes[2];
  unpack<typename C::dtype>(codes, raw);
  const float found[] = {two.e[0], two.e[1], to_f32(own.e[0]), to_f32(own.e[3]), again.e[0], again.e[1], codes[0], codes[1],
                         to_f32(scales.e[0]), to_f32(scales.e[1]), to_f32(c.load_zero(b, head, token, dim))};
#pragma unroll
  for (uint32_t i = 0; i < sizeof(found) / sizeof(found[0]); ++i) f[i] = found[i];
}
extern "C" __global__ void kv_cache_ask(const uint32_t* queries, uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths,
                                        const uint32_t* table, uint64_t* numbers, float* floats) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const Cache cache = cache_of(codes, scales, values, lengths, table);
  ask(KeyCache{cache}, codes, queries + 4 * i, numbers + 44 * i, floats + 24 * i);
  ask(ValueCache{cache}, values, queries + 4 * i, numbers + 44 * i + 22, floats + 24 * i + 12);
}

// Eight numbers to each (b, token, head, dim): codes, RoPE part, a scale; V.
extern "C" __global__ void kv_cache_store(const uint32_t* queries, const float* in, uint8_t* codes, f16* scales, bf16* values,
                                          const int32_t* lengths, const uint32_t* table) {
  const uint32_t i = threadIdx.x, *q = queries + 4 * i;
  const Cache cache = cache_of(codes, scales, values, lengths, table);
  float x[8];
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) x[j] = in[8 * i + j];
  Raw<uint8_t, 8> raw;
  Vec<bf16, 8> plain;
  pack<uint8_t>(raw, x);
  pack<bf16>(plain, x);
  const KeyCache k{cache};
  k.store<8>(q[0], q[2], q[1], q[3], raw);
  if (q[3] == 0) k.store_rope<8>(q[0], q[2], q[1], kDims, plain);
  if (q[3] == 16) k.store_scale<1>(q[0], q[2], q[1], q[3], {{from_f32<f16>(x[0])}});
  ValueCache{cache}.store<8>(q[0], q[2], q[1], q[3], plain);
}

// A tile's rows of each (b, tile), and the rows of some of its tokens; 16 numbers a form.
template <uint32_t BN, uint32_t kAlign, bool kPair, bool kLeader, typename C>
__device__ __forceinline__ void tile(const C& c, const uint32_t* place, uint32_t* out) {
  const auto found = c.template populate<BN, kAlign, kPair, kLeader>(place[0], place[1] * kAlign);
  constexpr uint32_t kCount = sizeof(found.rows) / 4;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) out[i] = found.rows[i];
  out[8] = kCount;
  out[9] = found.get_row(0);
  out[10] = found.get_row(BN - 1);
  out[11] = found.get_row(BN / 2 + 1);
  out[12] = found.get_k_row(0);
  out[13] = found.get_k_row(BN / 2 - 1);
}
extern "C" __global__ void kv_cache_populate(const uint32_t* places, uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths,
                                             const uint32_t* table, uint32_t* rows) {
  const uint32_t i = threadIdx.x;
  const Cache cache = cache_of(codes, scales, values, lengths, table);
  const uint32_t* place = places + 2 * i;
  uint32_t* out = rows + 64 * i;
  tile<64, 64, false, true>(KeyCache{cache}, place, out);
  tile<32, 16, true, false>(KeyCache{cache}, place, out + 16);
  tile<16, 8, true, true>(ValueCache{cache}, place, out + 32);
  tile<4, 4, true, false>(ValueCache{cache}, place, out + 48);
}
