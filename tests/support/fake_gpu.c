// The logging libcuda of runtime/fake_driver.c, with what benchmarks/run_gpu.py asks besides: streams, events, graphs.
// Launches do nothing. FAKE_FAULTS="entry:n=what,..." plans faults: at the n-th launch of a kernel in a process (entries end in
// what is given) the device hangs ("hang": nothing that waits for it returns), sleeps ("sleep": half a second), is lost ("lost"), or
// the process crashes ("crash"). FAKE_MEMORY_GIB is its memory, 2 by default.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#define cuPointerGetAttribute logging_cuPointerGetAttribute
#define cuMemAlloc_v2 logging_cuMemAlloc_v2
#define cuMemFree_v2 logging_cuMemFree_v2
#define cuMemcpyDtoH_v2 logging_cuMemcpyDtoH_v2
#define cuModuleGetFunction logging_cuModuleGetFunction
#define cuDeviceGetAttribute logging_cuDeviceGetAttribute
#define cuLaunchKernelEx logging_cuLaunchKernelEx
#define cuStreamSynchronize logging_cuStreamSynchronize
#define cuEventCreate logging_cuEventCreate
#define cuEventRecord logging_cuEventRecord
#define cuEventDestroy_v2 logging_cuEventDestroy_v2
#include "../runtime/fake_driver.c"
#undef cuPointerGetAttribute
#undef cuMemAlloc_v2
#undef cuMemFree_v2
#undef cuMemcpyDtoH_v2
#undef cuModuleGetFunction
#undef cuDeviceGetAttribute
#undef cuLaunchKernelEx
#undef cuStreamSynchronize
#undef cuEventCreate
#undef cuEventRecord
#undef cuEventDestroy_v2

enum { MULTIPROCESSORS = 16, L2_SIZE = 38, KERNELS = 4096, FIRST = 0x10000, PAGE = 4096 };
typedef struct { char name[128]; int launches; } Kernel;
static Kernel kernels[KERNELS];
static int known, hung, is_lost;

// What is planned for this launch, "" for nothing.
static const char *planned(Kernel *kernel) {
    static char plan[1024], what[16];
    const char *given = getenv("FAKE_FAULTS");
    ++kernel->launches;
    snprintf(plan, sizeof plan, "%s", given ? given : "");
    for (char *rest = plan, *one; (one = strtok_r(rest, ",", &rest));) {
        char name[128];
        int at;
        if (sscanf(one, "%127[^:]:%d=%15s", name, &at, what) != 3 || at != kernel->launches) continue;
        size_t length = strlen(kernel->name), end = strlen(name);
        if (length >= end && !strcmp(kernel->name + length - end, name)) return what;
    }
    return "";
}

// A call that waits for the device.
static Result wait_for_it(void) {
    while (hung) pause();
    return is_lost ? LOST_CONTEXT : SUCCESS;
}

Result cuPointerGetAttribute(void *data, int attribute, uintptr_t pointer) { *(int *)data = 0; return SUCCESS; }
// Zeros that take no memory before somebody writes there, behind a page with their size.
Result cuMemAlloc_v2(uintptr_t *pointer, size_t bytes) {
    if (is_lost) return LOST_CONTEXT;
    char *place = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return 2;
    *(size_t *)place = bytes + PAGE;
    *pointer = (uintptr_t)place + PAGE;
    return SUCCESS;
}
Result cuMemFree_v2(uintptr_t pointer) {
    munmap((char *)pointer - PAGE, *(size_t *)(pointer - PAGE));
    return SUCCESS;
}
Result cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes) {
    memcpy(to, (void *)from, bytes);
    return wait_for_it();
}
Result cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
    for (int i = 0; i < known; ++i) {
        if (strcmp(kernels[i].name, name)) continue;
        *function = FIRST + i;
        return SUCCESS;
    }
    if (known == KERNELS) return INVALID_VALUE;
    snprintf(kernels[known].name, sizeof kernels[known].name, "%s", name);
    *function = FIRST + known++;
    return SUCCESS;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == MULTIPROCESSORS ? 4 : attribute == L2_SIZE ? 1 << 20 : 0;
    return SUCCESS;
}
Result cuLaunchKernelEx(const Config *c, uintptr_t function, void **params, void **extra) {
    const char *what = planned(&kernels[function - FIRST]);
    if (!strcmp(what, "hang")) hung = 1;
    if (!strcmp(what, "sleep")) usleep(500000);
    if (!strcmp(what, "lost")) is_lost = 1;
    if (!strcmp(what, "crash")) raise(SIGSEGV);
    return c->grid[0] ? SUCCESS : INVALID_VALUE;
}
Result cuStreamSynchronize(uintptr_t stream) { return wait_for_it(); }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Fake GPU"); return SUCCESS; }
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    const char *gib = getenv("FAKE_MEMORY_GIB");
    *free_bytes = *total = (size_t)(gib ? atoi(gib) : 2) << 30;
    return SUCCESS;
}
Result cuStreamCreate(uintptr_t *stream, unsigned flags) { *stream = 0x400; return SUCCESS; }
Result cuStreamBeginCapture_v2(uintptr_t stream, int mode) { return SUCCESS; }
Result cuStreamEndCapture(uintptr_t stream, uintptr_t *graph) { *graph = 0x500; return SUCCESS; }
Result cuGraphInstantiateWithFlags(uintptr_t *executable, uintptr_t graph, unsigned long long flags) { *executable = 0x600; return SUCCESS; }
Result cuGraphLaunch(uintptr_t executable, uintptr_t stream) { return SUCCESS; }
Result cuGraphExecDestroy(uintptr_t executable) { return SUCCESS; }
Result cuGraphDestroy(uintptr_t graph) { return SUCCESS; }
Result cuEventCreate(uintptr_t *event, unsigned flags) { *event = 0x700; return SUCCESS; }
Result cuEventRecord(uintptr_t event, uintptr_t stream) { return SUCCESS; }
Result cuEventSynchronize(uintptr_t event) { return wait_for_it(); }
Result cuEventElapsedTime_v2(float *milliseconds, uintptr_t begin, uintptr_t end) { *milliseconds = 1.0f; return SUCCESS; }
Result cuEventElapsedTime(float *milliseconds, uintptr_t begin, uintptr_t end) { *milliseconds = 1.0f; return SUCCESS; }
Result cuEventDestroy_v2(uintptr_t event) { return SUCCESS; }
