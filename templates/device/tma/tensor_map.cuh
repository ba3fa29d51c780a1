// Tensor maps: arguments of kernels with tensor copies (TMA), and of their counterparts for older architectures.
#pragma once

// The 128 bytes of kvgen.runtime.tensor_map.encode. A kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
