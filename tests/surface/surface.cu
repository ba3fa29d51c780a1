#include "cache.cuh"

// Trivially copyable, as kernels' parameters and copies of them are.
static_assert(__is_trivially_copyable(Cache) && __is_trivially_copyable(KeyCache));

template <typename R>
__device__ void probe_role(const KVCache<R, Cache>& c, const void* base, uint32_t b, uint32_t token, uint32_t head,
                           uint32_t dim, uint64_t* n, float* f, bool stores) {
  using C = KVCache<R, Cache>;
  static_assert(kSame<typename C::device_type, C> && kSame<typename KVCacheMHAOperand<C>::device_type, KVCacheMHAOperand<C>>);
  static_assert(kSame<typename C::dtype, typename R::Element> && kSame<typename C::scale_dtype, typename R::Scale>);
  uint32_t at = 0;
  n[at++] = c.cache_length(b);
#if HAS_LENGTHS
  n[at++] = (uint64_t)c.cache_lengths_nd();
#else
  n[at++] = 0;
#endif
  n[at++] = c.empty_cache();
  n[at++] = c.max_prompt_length();
  n[at++] = c.max_context_length();
  n[at++] = (uint64_t)(int64_t)C::max_tile_size();
  const KVCoords coords = c.kv_tma_coords(b, token);
  n[at++] = coords.row_in_block;
  n[at++] = coords.block;
  n[at++] = coords.valid;
  const KVCacheMHAOperand<C> op{c};
  using Op = KVCacheMHAOperand<C>;
  bool same = op.cache_length(b) == c.cache_length(b) && op.max_context_length() == c.max_context_length();
  same = same && op.template block_paged_ptr<1>(b, token, head, dim) == c.template block_paged_ptr<1>(b, token, head, dim);
  const auto* first = c.template block_paged_ptr<1>(b, token, head);  // of dim 0
  same = same && first == c.template block_paged_ptr<1>(b, token, head, 0);
  if (first != nullptr) same = same && first == c.template block_paged_ptr<1>(c.page(b, token), head, token % c.cache.page_tokens);
  same = same && op.scales_block_paged_ptr(b, token, head, dim) == c.scales_block_paged_ptr(b, token, head, dim);
  same = same && op.scales_raw_ptr() == c.scales_raw_ptr();
  same = same && to_f32(op.template load_scale<1>(b, token, head, dim).e[0]) == to_f32(c.template load_scale<1>(b, head, token, dim).e[0]);
  static_assert(kSame<typename Op::dtype, typename C::dtype> && kSame<typename Op::scale_dtype, typename C::scale_dtype>);
  static_assert(Op::page_size == C::page_size_ && Op::quantization_enabled == C::quantization_enabled);
  static_assert(Op::quantization_granularity == C::quantization_granularity);
  same = same && Op::get_type_name()[7] == 'M';  // KVCacheMHAOperand
  if constexpr (R::kRow > 0) {
    const int32_t encoded = (int32_t)(b * 1000 + token);
    n[at++] = c.row_idx(b, token);
    n[at++] = c.col_idx(head);
    n[at++] = c.num_kv_rows();
    n[at++] = (uint64_t)c.get_tma_row(encoded);
    same = same && op.row_idx(b, token) == c.row_idx(b, token) && op.num_kv_rows() == c.num_kv_rows();
    same = same && op.get_tma_row(encoded) == c.get_tma_row(encoded) && op.get_tma_row(-1) == -1;
    same = same && op.template populate<8, 8>(b, token / 8 * 8).rows[0] == c.template populate<8, 8>(b, token / 8 * 8).rows[0];
  } else {
    at += 4;
  }
  if constexpr (R::kScaleRow > 0) {
    n[at++] = c.scale_row_idx(b, token);
    n[at++] = c.num_scale_rows();
    const KVCacheScalesMHAOperand<C> of{c};
    static_assert(kSame<typename KVCacheScalesMHAOperand<C>::dtype, typename C::scale_dtype>);
    static_assert(KVCacheScalesMHAOperand<C>::quantization_granularity == R::kDim);
    same = same && op.scale_row_idx(b, token) == c.scale_row_idx(b, token);
    same = same && of.row_idx(b, token) == c.scale_row_idx(b, token) && of.num_kv_rows() == c.num_scale_rows();
    same = same && of.template block_paged_ptr<1>(b, token, head, dim) == c.scales_block_paged_ptr(b, token, head, dim);
    same = same && of.cache_length(b) == c.cache_length(b) && of.scales_raw_ptr() == c.scales_raw_ptr();
    const uint64_t row = of.row_idx(b, token / 8 * 8);
    same = same && of.template populate<8, 8>(b, token / 8 * 8).rows[0] == (row < kNoRow ? (uint32_t)row : kNoRow);
    same = same && of.get_type_name()[7] == 'S' && of.max_context_length() == c.max_context_length();
  } else {
    at += 2;
  }
  n[at++] = (uint64_t)c.template block_paged_ptr<1>(b, token, head, dim);
  n[at++] = (uint64_t)c.scales_block_paged_ptr(b, token, head, dim);
  n[at++] = (uint64_t)c.scales_raw_ptr();
  n[at++] = C::kv_params.num_heads;
  n[at++] = C::kv_params.head_size;
  n[at++] = C::kv_params.is_mla;
  n[at++] = C::page_size_;
  n[at++] = C::quantization_enabled;
  n[at++] = C::quantization_granularity;
  n[at++] = C::head_dim_granularity;
  n[at++] = C::get_type_name()[0];
  n[at++] = same;
  const typename C::device_type copy = c;
  n[at++] = sizeof(copy) == sizeof(Cache);
  n[at++] = copy.template block_paged_ptr<1>(b, token, head, dim) == c.template block_paged_ptr<1>(b, token, head, dim);
  n[at++] = (uint64_t)base;

  const Vec<float, 2> values = c.template load<2, float>(b, head, token, dim);
  f[0] = values.e[0];
  f[1] = values.e[1];
  const typename C::Page page = c.page(b, token);
  Vec<float, 2> again = {};
  if (page.valid) again = c.template load<2, float>(page, head, token % c.cache.page_tokens, dim);
  f[2] = again.e[0];
  f[3] = again.e[1];
  const auto raw = c.template load_quantized<2>(b, head, token, dim);
  float codes[2];
  unpack<typename C::dtype>(codes, raw);
  f[4] = codes[0];
  f[5] = codes[1];
  f[6] = to_f32(c.template load_scale<1>(b, head, token, dim).e[0]);
  f[7] = to_f32(c.load_zero(b, head, token, dim));

  if (!stores) return;
  Raw<typename C::dtype, 2> elements;
  const float ones[2] = {1.0f, 2.0f};
  pack<typename C::dtype>(elements, ones);
  c.template store<2>(b, head, token, dim, elements);
  if constexpr (R::Main::kRecipe != Recipe::given) {
    Vec<typename C::scale_dtype, 1> scale;
    scale.e[0] = from_f32<typename C::scale_dtype>(4.0f);
    c.template store_scale<1>(b, head, token, dim, scale);
  }
}

extern "C" __global__ void probe(const __grid_constant__ Cache cache, const uint32_t* queries, uint64_t* numbers, float* floats,
                                 uint32_t count, uint32_t stores) {
  pdl_wait();
  const uint32_t i = blockIdx.x * 32 + threadIdx.x;
  if (i >= count) return;
  const uint32_t* q = queries + i * 4;
  const KeyCache k = get_key_cache(cache);
  probe_role<KeyRole>(k, cache.k, q[0], q[1], q[2], q[3], numbers + i * 60, floats + i * 16, stores);
#if HAS_V
  const ValueCache v = get_value_cache(cache);
  probe_role<ValueRole>(v, cache.v, q[0], q[1], q[2], q[3], numbers + i * 60 + 30, floats + i * 16 + 8, stores);
#endif
}
