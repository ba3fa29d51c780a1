// The same where there are no conversions of fp8 (sm_80), on a machine that has them: only e4m3 differs.
#undef __CUDA_ARCH__
#define __CUDA_ARCH__ 800
#define TYPES KERNELS(e4m3, e4m3) KERNELS(e4m3_bf16, InBf16<e4m3>)
#include "../../device_fragments/fragments.cu"
