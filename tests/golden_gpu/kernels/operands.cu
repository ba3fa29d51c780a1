// operands.cuh: a cache, its scales, a contiguous tensor and ragged rows, all asked the same.
#include "paged.cuh"
#include "../../../templates/device/cache/operands.cuh"

template <bool kRows, typename Op>
__device__ __forceinline__ void ask(const Op& op, const void* base, const void* scales, const uint32_t* q, uint64_t* n) {
  const uint32_t b = q[0], token = q[1], head = q[2], dim = q[3];
  const auto rows = op.template populate<16, 8>(b, token / 8 * 8);
  const auto pair = op.template populate<4, 4, true, false>(b, token / 4 * 4);
  *n++ = distance(op.template block_paged_ptr<4>(b, token, head, dim), base);
  *n++ = distance(op.scales_block_paged_ptr(b, token, head, dim), scales);
  *n++ = __float_as_uint(to_f32(op.template load_scale<1>(b, token, head, dim).e[0]));
  *n++ = op.cache_length(b);
  *n++ = op.max_context_length();
  *n++ = op.num_kv_rows();
  *n++ = op.row_idx(b, token);
  *n++ = op.scale_row_idx(b, token);
  *n++ = distance(op.scales_raw_ptr(), scales);
  *n++ = sizeof(rows.rows) / 4;
  *n++ = rows.rows[0];
  *n++ = rows.rows[sizeof(rows.rows) / 4 - 1];
  *n++ = pair.get_k_row(1);
  *n++ = hash(Op::get_type_name());
  *n++ = Op::page_size << 16 | Op::quantization_granularity << 1 | Op::quantization_enabled;
  if constexpr (kRows) *n++ = (uint64_t)op.get_tma_row((int32_t)(token - 3));
}
extern "C" __global__ void operands_ask(const uint32_t* queries, uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths,
                                        const uint32_t* table, e2m1x2* tensor, float* factors, bf16* ragged, f16* small, const int32_t* offsets,
                                        uint64_t* numbers) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, *q = queries + 4 * i;
  uint64_t* out = numbers + 64 * i;
  const KeyCache k{cache_of(codes, scales, values, lengths, table)};
  ask<true>(KVCacheMHAOperand<KeyCache>{k}, codes, scales, q, out);
  ask<false>(KVCacheScalesMHAOperand<KeyCache>{k}, scales, scales, q, out + 16);
  ask<true>(LayoutTensorMHAOperand<e2m1x2, kHeads, kDims, float, 3>{tensor, 2, 30, factors}, tensor, factors, q, out + 32);
  ask<true>(RaggedMHAOperand<bf16, kHeads, kDims, int32_t, f16, 2>{ragged, offsets, kBatch, 40, 21, small}, ragged, small, q, out + 48);
}
