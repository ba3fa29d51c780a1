// The same as where there are no conversions of fp8 (sm_80), on a machine that has them: both must make the same bits.
#undef __CUDA_ARCH__
#define __CUDA_ARCH__ 800
#include "elements.cu"
