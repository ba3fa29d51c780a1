// angles.cuh: sines and cosines.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/rows/angles.cuh"

// Of every angle, also as (cosine, sine) times 0.5; entries of a table.
extern "C" __global__ void angles(uint32_t* sines, uint32_t* cosines, float2* halves, float2* entries, const float* in) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  float s, c;
  sincos_f32(in[i], s, c);
  sines[i] = __float_as_uint(s);
  cosines[i] = __float_as_uint(c);
  halves[i] = cos_sin_of(in[i], 0.5f);
  entries[i] = cos_sin_in(in, i, i / 2);
}
