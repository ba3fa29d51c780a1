// The logging libcuda of runtime/fake_driver.c, with what benchmarks/run_gpu.py asks besides: streams, events, graphs.
// Launches do nothing. With FAKE_LOST_AFTER=n the context is lost at the n-th launch of a process.
#define cuPointerGetAttribute logging_cuPointerGetAttribute
#define cuMemAlloc_v2 logging_cuMemAlloc_v2
#define cuDeviceGetAttribute logging_cuDeviceGetAttribute
#define cuLaunchKernelEx logging_cuLaunchKernelEx
#define cuStreamSynchronize logging_cuStreamSynchronize
#define cuEventCreate logging_cuEventCreate
#define cuEventRecord logging_cuEventRecord
#define cuEventDestroy_v2 logging_cuEventDestroy_v2
#include "../runtime/fake_driver.c"
#undef cuPointerGetAttribute
#undef cuMemAlloc_v2
#undef cuDeviceGetAttribute
#undef cuLaunchKernelEx
#undef cuStreamSynchronize
#undef cuEventCreate
#undef cuEventRecord
#undef cuEventDestroy_v2

enum { LOST = 700, MULTIPROCESSORS = 16, L2_SIZE = 38 };
static int launches;

static int lost(void) {
    const char *limit = getenv("FAKE_LOST_AFTER");
    return limit && launches >= atoi(limit);
}

Result cuPointerGetAttribute(void *data, int attribute, uintptr_t pointer) { *(int *)data = 0; return SUCCESS; }
Result cuMemAlloc_v2(uintptr_t *pointer, size_t bytes) { *pointer = (uintptr_t)calloc(bytes, 1); return SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == MULTIPROCESSORS ? 4 : attribute == L2_SIZE ? 1 << 20 : 0;
    return SUCCESS;
}
Result cuLaunchKernelEx(const Config *c, uintptr_t function, void **params, void **extra) {
    ++launches;
    return c->grid[0] ? SUCCESS : INVALID_VALUE;
}
Result cuStreamSynchronize(uintptr_t stream) { return lost() ? LOST : SUCCESS; }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Fake GPU"); return SUCCESS; }
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = (size_t)2 << 30; return SUCCESS; }
Result cuStreamCreate(uintptr_t *stream, unsigned flags) { *stream = 0x400; return SUCCESS; }
Result cuStreamBeginCapture_v2(uintptr_t stream, int mode) { return SUCCESS; }
Result cuStreamEndCapture(uintptr_t stream, uintptr_t *graph) { *graph = 0x500; return SUCCESS; }
Result cuGraphInstantiateWithFlags(uintptr_t *executable, uintptr_t graph, unsigned long long flags) { *executable = 0x600; return SUCCESS; }
Result cuGraphLaunch(uintptr_t executable, uintptr_t stream) { return SUCCESS; }
Result cuGraphExecDestroy(uintptr_t executable) { return SUCCESS; }
Result cuGraphDestroy(uintptr_t graph) { return SUCCESS; }
Result cuEventCreate(uintptr_t *event, unsigned flags) { *event = 0x700; return SUCCESS; }
Result cuEventRecord(uintptr_t event, uintptr_t stream) { return SUCCESS; }
Result cuEventSynchronize(uintptr_t event) { return SUCCESS; }
Result cuEventElapsedTime_v2(float *milliseconds, uintptr_t begin, uintptr_t end) { *milliseconds = 1.0f; return SUCCESS; }
Result cuEventElapsedTime(float *milliseconds, uintptr_t begin, uintptr_t end) { *milliseconds = 1.0f; return SUCCESS; }
Result cuEventDestroy_v2(uintptr_t event) { return SUCCESS; }
