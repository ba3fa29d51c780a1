// cub: scan, radix sort and reductions of one block.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

extern "C" __global__ void __launch_bounds__(64) scan(int* out, const int* in, int* total) {
  using Scan = cub::BlockScan<int, 64>;
  __shared__ typename Scan::TempStorage storage;
  int sum;
  Scan(storage).ExclusiveSum(in[threadIdx.x], out[threadIdx.x], sum);
  if (threadIdx.x == 0) *total = sum;
}
extern "C" __global__ void __launch_bounds__(64) sort(unsigned* keys, int* values) {
  using Sort = cub::BlockRadixSort<unsigned, 64, 2, int>;
  __shared__ typename Sort::TempStorage storage;
  unsigned k[2] = {keys[2 * threadIdx.x], keys[2 * threadIdx.x + 1]};
  int v[2] = {values[2 * threadIdx.x], values[2 * threadIdx.x + 1]};
  Sort(storage).Sort(k, v);
  keys[2 * threadIdx.x] = k[0], keys[2 * threadIdx.x + 1] = k[1];
  values[2 * threadIdx.x] = v[0], values[2 * threadIdx.x + 1] = v[1];
}
extern "C" __global__ void __launch_bounds__(128) sum(float* out, const float* in, int items) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage storage;
  float own = 0;
  for (int i = threadIdx.x; i < items; i += 128) own += in[i];
  const float total = Reduce(storage).Sum(own);
  __syncthreads();
  const float most = Reduce(storage).Reduce(own, [](float a, float b) { return a < b ? b : a; });
  if (threadIdx.x == 0) out[0] = total, out[1] = most;
}
