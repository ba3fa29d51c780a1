// angles.cuh: sines and cosines.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/rows/angles.cuh"

extern "C" __global__ void angles(uint32_t* sines, uint32_t* cosines, const float* in) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  float s, c;
  sincos_f32(in[i], s, c);
  sines[i] = __float_as_uint(s);
  cosines[i] = __float_as_uint(c);
}
