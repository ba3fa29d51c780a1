"""Tiny kernels for the compile tests."""

from __future__ import annotations

from kvgen.compile import Unit

TEXT = """\
#line 1 "generated/tiny/vec.cuh"
__device__ float twice(float x) { return 2.0f * x; }
#line 1 "generated/tiny/reverse.cu"
extern "C" __global__ void reverse(float* p) {
    __shared__ float s[32];
    s[threadIdx.x] = twice(p[threadIdx.x]);
    __syncthreads();
    p[threadIdx.x] = s[31 - threadIdx.x];
}
"""


def unit_of(text: str = TEXT, name: str = "tiny/reverse", entry: str = "reverse") -> Unit:
    return Unit(name=name, entry=entry, text=text)
