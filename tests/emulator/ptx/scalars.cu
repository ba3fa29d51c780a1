// What a compiler makes of ordinary CUDA C++: math functions, 64-bit integers, local arrays, jump tables, warp and block
// operations, device functions that stay calls.

extern "C" __global__ void floats(const float* x, const float* y, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float a = x[i], b = y[i];
  const float values[] = {fmaf(a, b, 1.0f), a / b, sqrtf(fabsf(a)), rsqrtf(fabsf(a) + 1.0f), expf(a), exp2f(a), __expf(a),
                          log2f(fabsf(b)), logf(fabsf(b)), sinf(a), cosf(1000.0f * a), tanhf(a), erff(a), powf(fabsf(a), b),
                          floorf(a), ceilf(b), rintf(a), truncf(b), fminf(a, b), fmaxf(a, b), copysignf(a, b), fmodf(a, b)};
  for (unsigned k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

extern "C" __global__ void doubles(const double* x, const double* y, double* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double a = x[i], b = y[i];
  const double values[] = {a * b + 1.0, a / b, sqrt(fabs(a)), exp(a), log(fabs(b)), rint(a), (double)(float)a, (double)(long long)b};
  for (unsigned k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

// A jump table.
__device__ unsigned turn(unsigned which, unsigned a, unsigned b) {
  switch (which) {
    case 0: return a + b;
    case 1: return a * b;
    case 2: return a ^ b;
    case 3: return __umulhi(a, b);
    case 4: return __brev(a);
    case 5: return __byte_perm(a, b, 0x5140);
    case 6: return __funnelshift_l(a, b, 7);
    case 7: return min(a, b);
    default: return 77;
  }
}

// A call: recursion cannot be inlined.
__device__ __noinline__ unsigned steps(unsigned a, unsigned count) { return a <= 1 || count == 0 ? count : 1 + steps(a % 2 ? 3 * a + 1 : a / 2, count - 1); }

extern "C" __global__ void integers(const unsigned* x, const unsigned* y, unsigned long long* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned a = x[i], b = y[i];
  const unsigned long long wide = (unsigned long long)a << 32 | b;
  unsigned char bytes[16];  // indexed by data: it lives in local memory
  for (unsigned k = 0; k < 16; ++k) bytes[(a + k) % 16] = (unsigned char)(b >> k);
  const unsigned long long values[] = {wide / (a | 1u), wide % (b | 1u), (unsigned long long)((long long)wide / 7), __umul64hi(wide, wide),
                                       (unsigned long long)__popcll(wide), (unsigned long long)__clzll((long long)wide),
                                       (unsigned long long)__ffs((int)b), (unsigned long long)(unsigned)__dp4a((int)a, (int)b, 5),
                                       turn(i % 9, a, b), bytes[b % 16], steps(a % 64, 12u), (unsigned long long)((int)a >> (b % 32))};
  for (unsigned k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

// Sum, maximum and the lanes that share a key, of a grid; the last block to finish adds up. *ticket is 0 before.
extern "C" __global__ void reduce(const unsigned* x, unsigned* partial, unsigned* ticket, unsigned* out) {
  __shared__ unsigned sums[32], last;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, value = x[blockIdx.x * blockDim.x + threadIdx.x];
  unsigned sum = value;
  for (unsigned step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const unsigned most = __reduce_max_sync(0xffffffffu, value), same = __match_any_sync(0xffffffffu, value % 4);
  if (lane == 0) sums[warp] = sum;
  if (lane == 0) atomicMax(out + 1, most);
  atomicAdd(out + 2, (unsigned)__popc(same & ((1u << lane) - 1)));
  if (__syncthreads_count(value % 2) > (int)blockDim.x) sums[0] = 0;
  if (warp == 0) {
    sum = lane < blockDim.x / 32 ? sums[lane] : 0;
    for (unsigned step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (lane == 0) {
      partial[blockIdx.x] = sum;
      __threadfence();
      last = atomicAdd(ticket, 1u) == gridDim.x - 1;
      __threadfence();
    }
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    unsigned total = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) total += partial[b];
    out[0] = total;
  }
}
