// Packed 16-bit arithmetic with 16-byte accesses, and cooperative groups.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cg = cooperative_groups;

template <typename Pair> union Packet {
  uint4 raw;
  Pair pairs[4];
};
__device__ __forceinline__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }

// out = silu(gate) * up, eight values a thread
template <typename Pair> __device__ __forceinline__ void silu_and_multiply(uint4* out, const uint4* gate, const uint4* up, int packets) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= packets) return;
  Packet<Pair> g, u, r;
  g.raw = gate[t], u.raw = up[t];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 x = widen(g.pairs[i]);
    Pair s;
    s.x = x.x / (1.0f + __expf(-x.x)), s.y = x.y / (1.0f + __expf(-x.y));
    r.pairs[i] = __hmul2(s, u.pairs[i]);
  }
  out[t] = r.raw;
}
extern "C" __global__ void silu_half(uint4* out, const uint4* gate, const uint4* up, int packets) { silu_and_multiply<__half2>(out, gate, up, packets); }
extern "C" __global__ void silu_bfloat(uint4* out, const uint4* gate, const uint4* up, int packets) { silu_and_multiply<__nv_bfloat162>(out, gate, up, packets); }

extern "C" __global__ void half_arithmetic(__half2* out, const __half2* x, const __half2* y) {
  const int t = threadIdx.x;
  const __half2 a = x[t], b = y[t];
  __half2* row = out + 8 * t;
  row[0] = __hadd2(a, b), row[1] = __hfma2(a, b, a), row[2] = __hmax2(a, b), row[3] = __hsub2_sat(a, b);
  row[4] = __hneg2(__habs2(a)), row[5] = __hgt2(a, b), row[6] = __lowhigh2highlow(a), row[7] = h2rint(a);
}
// The mean square of a row of bf16, a warp a row.
extern "C" __global__ void mean_square(float* out, const __nv_bfloat16* in, int columns) {
  const auto block = cg::this_thread_block();
  const auto warp = cg::tiled_partition<32>(block);
  const int row = block.group_index().x * warp.meta_group_size() + warp.meta_group_rank();
  float sum = 0;
  for (int i = warp.thread_rank(); i < columns; i += warp.size()) {
    const float v = __bfloat162float(in[row * columns + i]);
    sum += v * v;
  }
  sum = cg::reduce(warp, sum, cg::plus<float>());
  if (warp.thread_rank() == 0) out[row] = sum / columns;
}
