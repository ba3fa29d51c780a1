// The 8-bit floats of cuda_fp8.h: rows quantized with a scale each, and read back.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

template <typename Fp8> __device__ __forceinline__ void quantize(Fp8* out, float* scales, const __nv_bfloat16* in, int columns, float top) {
  const __nv_bfloat16* row = in + blockIdx.x * columns;
  float most = 0;
  for (int i = threadIdx.x; i < columns; i += 32) most = fmaxf(most, fabsf(__bfloat162float(row[i])));
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  const float scale = most / top;
  for (int i = threadIdx.x; i < columns; i += 32) out[blockIdx.x * columns + i] = Fp8(__bfloat162float(row[i]) / scale);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}
extern "C" __global__ void quantize_e4m3(__nv_fp8_e4m3* out, float* scales, const __nv_bfloat16* in, int columns) { quantize(out, scales, in, columns, 448.f); }
extern "C" __global__ void quantize_e5m2(__nv_fp8_e5m2* out, float* scales, const __nv_bfloat16* in, int columns) { quantize(out, scales, in, columns, 57344.f); }
extern "C" __global__ void widen_e4m3(float4* out, const __nv_fp8x4_e4m3* in) { out[threadIdx.x] = static_cast<float4>(in[threadIdx.x]); }
