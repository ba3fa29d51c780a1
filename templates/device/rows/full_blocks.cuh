// The count of blocks of 256 threads that fill an SM.
#pragma once

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
constexpr uint32_t kFullBlocks = 8;  // 2048 threads of 32 registers
#else
constexpr uint32_t kFullBlocks = 6;  // sm_89 and sm_120f have 1536 threads; 40 registers, since 32 spill on sm_100f
#endif
