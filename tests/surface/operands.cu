#include "cache.cuh"

constexpr uint32_t kHeads = 3, kDepth = 24, kGroups = 2;

// The whole surface of an operand without a cache; `n` is ~0 where an address is null, else counted from the first element.
template <typename Op, typename T>
__device__ void say(const Op& op, const T* first, const float* scales, uint32_t b, uint32_t token, uint32_t head, uint32_t dim,
                    uint64_t* n) {
  static_assert(kSame<typename Op::device_type, Op> && kSame<typename Op::dtype, T> && kSame<typename Op::scale_dtype, float>);
  static_assert(Op::page_size == 0 && Op::quantization_enabled && Op::quantization_granularity == 12);
  const T* p = op.template block_paged_ptr<16>(b, token, head, dim);
  const float* s = op.scales_block_paged_ptr(b, token, head, dim);
  n[0] = p == nullptr ? ~0ull : (uint64_t)(p - first);
  n[1] = s == nullptr ? ~0ull : (uint64_t)(s - scales);
  n[2] = __float_as_uint(op.template load_scale<1>(b, token, head, dim).e[0]);
  n[3] = op.cache_length(b);
  n[4] = op.max_context_length();
  n[5] = op.num_kv_rows();
  n[6] = op.row_idx(b, token);
  n[7] = op.scale_row_idx(b, token);
  n[8] = (uint64_t)op.get_tma_row((int32_t)token - 5);
  n[9] = (uint64_t)(op.scales_raw_ptr() - scales);
  const auto rows = op.template populate<32, 8, true, false>(b, token);
  n[10] = rows.rows[0];
  n[11] = rows.get_k_row(1);
  n[12] = Op::get_type_name()[0];
  n[13] = p == nullptr ? 0 : p->bits;
}

extern "C" __global__ void operands(const __grid_constant__ Cache cache, bf16* tensor, float* scales, const OFFSET* offsets,
                                    const uint32_t* queries, uint64_t* numbers, uint32_t tensors, uint32_t tokens,
                                    uint32_t requests, uint32_t count) {
  pdl_wait();
  const uint32_t i = blockIdx.x * 32 + threadIdx.x;
  if (i >= count) return;
  const uint32_t b = queries[4 * i], token = queries[4 * i + 1], head = queries[4 * i + 2], dim = queries[4 * i + 3];
  const LayoutTensorMHAOperand<bf16, kHeads, kDepth, float, kGroups> dense{tensor, tensors, tokens, scales};
  const RaggedMHAOperand<bf16, kHeads, kDepth, OFFSET, float, kGroups> ragged{tensor, offsets, requests, tensors * tokens, 77, scales};
  say(dense, tensor, scales, b, token, head, dim, numbers + i * 32);
  say(ragged, tensor, scales, b, token, head, dim, numbers + i * 32 + 16);
}
