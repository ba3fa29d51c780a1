// What the memory of this GPU can do, measured beside our kernels: read, write and copy, 16 bytes a thread and access;
// a fill with random numbers, since zeros run faster than data; and a kernel that does nothing, as a graph's node.
#line 5 "kvgen/verify/bandwidth.cu"
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct alignas(16) Vector {
  uint32_t e[4];
};

constexpr uint32_t kThreads = 512;
constexpr uint32_t kAhead = 8;  // independent accesses in flight a thread

__device__ __forceinline__ Vector load(const Vector* p) {
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.e[0]), "=r"(v.e[1]), "=r"(v.e[2]), "=r"(v.e[3])
               : "l"(p));
  return v;
}

__device__ __forceinline__ void store(Vector* p, const Vector& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.e[0]), "r"(v.e[1]), "r"(v.e[2]), "r"(v.e[3])
               : "memory");
}

// Blocks take turns with pieces of kThreads * kAhead vectors; `count` is a multiple of that.
#define FOR_EACH_PIECE(at) \
  for (uint64_t at = (uint64_t)blockIdx.x * kThreads * kAhead + threadIdx.x; at < count; at += (uint64_t)gridDim.x * kThreads * kAhead)

extern "C" __global__ void __launch_bounds__(kThreads) bandwidth_read(const Vector* from, Vector* to, uint64_t count) {
  uint32_t mix = 0;
  FOR_EACH_PIECE(at) {
    Vector v[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) v[i] = load(from + at + i * kThreads);
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) mix ^= v[i].e[0] ^ v[i].e[1] ^ v[i].e[2] ^ v[i].e[3];
  }
  // Almost never true; the compiler does not know that, so the loads stay.
  if (mix == 0x9e3779b9u) store(to + threadIdx.x, {mix, mix, mix, mix});
}

extern "C" __global__ void __launch_bounds__(kThreads) bandwidth_write(const Vector* from, Vector* to, uint64_t count) {
  FOR_EACH_PIECE(at) {
    const uint32_t x = (uint32_t)at * 2654435761u;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) store(to + at + i * kThreads, {x, x + i, ~x, x ^ i});
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) bandwidth_copy(const Vector* from, Vector* to, uint64_t count) {
  FOR_EACH_PIECE(at) {
    Vector v[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) v[i] = load(from + at + i * kThreads);
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) store(to + at + i * kThreads, v[i]);
  }
}

// Random 32-bit words, with the bits outside `keep` taken from `fixed`: numbers of either sign in [0.5, 1).
extern "C" __global__ void __launch_bounds__(kThreads) bandwidth_fill(uint32_t* to, uint64_t words, uint32_t keep, uint32_t fixed,
                                                                      uint32_t seed) {
  for (uint64_t at = (uint64_t)blockIdx.x * kThreads + threadIdx.x; at < words; at += (uint64_t)gridDim.x * kThreads) {
    uint64_t x = at + ((uint64_t)seed << 40);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    to[at] = ((uint32_t)(x >> 31) & keep) | fixed;
  }
}

// Nothing but what each of our kernels begins with: wait for the one before, let the next one start.
extern "C" __global__ void bandwidth_empty() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
