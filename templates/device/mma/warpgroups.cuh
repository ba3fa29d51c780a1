// True if the architecture multiplies by warpgroups: sm_90a alone.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kWarpgroups = true;
#else
constexpr bool kWarpgroups = false;
#endif
