// Control flow that survives inlining: a jump table, function pointers, virtual functions, recursion, static locals.
#include <cstdio>

struct Range { int low, high, step; };
struct Operation { virtual __device__ int apply(int x) const = 0; };
struct Shift : Operation {
  int by;
  __device__ explicit Shift(int n) : by(n) {}
  __device__ int apply(int x) const override { return x << by; }
};
struct Clamp : Operation {
  Range range;
  __device__ explicit Clamp(Range r) : range(r) {}
  __device__ int apply(int x) const override { return x < range.low ? range.low : x > range.high ? range.high : x; }
};
__device__ __noinline__ int square(int x) { return x * x; }
__device__ __noinline__ int negate(int x) { return -x; }
__device__ __noinline__ int halve(int x) { return x / 2; }
typedef int (*Function)(int);
__device__ Function functions[3] = {square, negate, halve};

__device__ __noinline__ int ackermann(int m, int n) {
  if (m == 0) return n + 1;
  return ackermann(m - 1, n == 0 ? 1 : ackermann(m, n - 1));
}
__device__ __noinline__ Range widen(Range r, int by) { return {r.low - by * r.step, r.high + by * r.step, r.step + 1}; }

extern "C" __global__ void jump_table(int* out, const int* opcode, const int* value) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x, v = value[t];
  int r;
  switch (opcode[t]) {
    case 0: r = v + 11; break;
    case 1: r = v * v; break;
    case 2: r = __popc(v); break;
    case 3: r = __clz(v); break;
    case 4: r = v ^ 0x55; break;
    case 5: r = v % 7; break;
    case 6: r = v / 3; break;
    case 7: r = __brev(v); break;
    case 8: r = abs(v); break;
    case 9: r = min(v, -4); break;
    case 10: r = v << 3; break;
    default: r = -1;
  }
  out[t] = r;
}
extern "C" __global__ void indirect(int* out, const int* which, Range range) {
  const int t = threadIdx.x;
  Shift shift(t & 3);
  Clamp clamp(widen(range, t & 1));
  const Operation* op = which[t] & 1 ? (const Operation*)&shift : (const Operation*)&clamp;
  out[t] = op->apply(functions[which[t] % 3](t - 9)) + ackermann(t & 1, t & 3);
}
extern "C" __global__ void tickets(int* out, int report) {
  static __device__ int next = 100;
  const int mine = atomicAdd(&next, 2);
  out[mine / 2 - 50] = mine;
  if (report && mine == 104) printf("ticket %d of block %u\n", mine, blockIdx.x);
}
