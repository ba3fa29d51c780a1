// A libcuda that notes launches instead of making them, one line each: entry, grid, block, shared memory, overlap, the most dynamic
// shared memory that was asked for, then the bytes of every parameter in hex. Sizes of parameters are given by note_sizes().
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

struct CUfunc_st {
  std::string entry;
  int most_shared = 0, carveout = -1;
};
struct CUmod_st {
  std::string image;
};

static std::vector<size_t> sizes;
void note_sizes(std::vector<size_t> found) { sizes = std::move(found); }

extern "C" {
CUresult CUDAAPI cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuGetErrorString(CUresult, const char** text) { *text = "refused by the stub"; return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice* device, int) { *device = 0; return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  const char* capability = std::getenv("STUB_CAPABILITY");
  const int major = capability ? capability[0] - '0' : 9, minor = capability ? capability[2] - '0' : 0;
  *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? major
           : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? minor
                                                                   : 132;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuStreamCreate(CUstream*, unsigned) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuMemAlloc(CUdeviceptr* memory, size_t) {
  static CUdeviceptr next = 0;
  *memory = next += CUdeviceptr{1} << 32;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemsetD8(CUdeviceptr, unsigned char, size_t) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuMemcpyDtoH(void*, CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  *module = new CUmod_st{static_cast<const char*>(image)};
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule, const char* entry) {
  *function = new CUfunc_st{entry};
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
    function->carveout = value;
    return CUDA_SUCCESS;
  }
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > 232448) return CUDA_ERROR_INVALID_VALUE;
  function->most_shared = value;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
  if (extra != nullptr || function->carveout != 100) return CUDA_ERROR_INVALID_VALUE;
  const bool overlap = c->numAttrs == 1 && c->attrs[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                       c->attrs[0].value.programmaticStreamSerializationAllowed == 1;
  std::printf("%s %u %u %u %u %u %u %u %d %d", function->entry.c_str(), c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
              c->blockDimY, c->blockDimZ, c->sharedMemBytes, overlap, function->most_shared);
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::printf(" ");
    for (size_t byte = 0; byte < sizes[i]; ++byte) std::printf("%02x", static_cast<unsigned char*>(parameters[i])[byte]);
  }
  std::printf("\n");
  return CUDA_SUCCESS;
}
}
