// A libcuda that keeps a log instead of a GPU: two devices, contexts 0x100 and 0x101, one function handle. What streams are
// given besides launches waits in one queue until fake_run or a synchronisation. Captures are begun by fake_capture.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, WRONG_ARCHITECTURE = 209, NOT_FOUND = 500, NOT_READY = 600,
       LOST_CONTEXT = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_IMPLICIT = 906 };

static char text[1 << 16];
static size_t used;
static uintptr_t stack[16];
static int depth;

static void record(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (used < sizeof text - 256) used += vsnprintf(text + used, 256, format, arguments);
    va_end(arguments);
}
const char *fake_log(void) { return text; }
void fake_clear(void) { used = 0, text[0] = 0; }

// NVRTC asks for a table that is in no header; a driver without it says so.
Result cuGetExportTable(const void **table, const void *id) { *table = 0; return NOT_FOUND; }
Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuGetErrorString(Result error, const char **out) { *out = "fake refusal"; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 2 ? SUCCESS : 101; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return SUCCESS; }
Result cuDevicePrimaryCtxRetain(uintptr_t *context, int device) { *context = 0x100 + device; return SUCCESS; }
Result cuCtxGetCurrent(uintptr_t *context) { *context = depth ? stack[depth - 1] : 0; return SUCCESS; }
Result cuCtxSetCurrent(uintptr_t context) { depth = 1, stack[0] = context; return SUCCESS; }
Result cuCtxPushCurrent_v2(uintptr_t context) { stack[depth++] = context; return SUCCESS; }
Result cuCtxPopCurrent_v2(uintptr_t *context) { *context = stack[--depth]; return SUCCESS; }
Result cuCtxGetDevice(int *device) {
    if (!depth) return INVALID_CONTEXT;
    *device = (int)(stack[depth - 1] - 0x100);
    return SUCCESS;
}
static uintptr_t current(void) { return depth ? stack[depth - 1] : 0; }

Result cuPointerGetAttribute(void *data, int attribute, uintptr_t pointer) { *(int *)data = pointer >> 40; return SUCCESS; }
Result cuModuleLoadData(uintptr_t *module, const char *image) {
    record("load %s in %zx\n", image, (size_t)current());
    *module = 0x200;
    return strcmp(image, "wrong") ? SUCCESS : WRONG_ARCHITECTURE;
}
Result cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
    record("get %s in %zx\n", name, (size_t)current());
    *function = 0x300;
    return strcmp(name, "absent") ? SUCCESS : NOT_FOUND;
}
Result cuFuncSetAttribute(uintptr_t function, int attribute, int value) {
    if (!current()) return INVALID_CONTEXT;
    record("attribute %d = %d in %zx\n", attribute, value, (size_t)current());
    return value <= 232448 ? SUCCESS : INVALID_VALUE;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, uintptr_t function, int threads, size_t shared) {
    if (!current()) return INVALID_CONTEXT;
    int by_threads = 2048 / threads, by_shared = (int)(233472 / (shared + 1024));  // of sm_90, 1 KB a block reserved
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    return SUCCESS;
}
static int held;  // allocations and events that live
Result cuMemAlloc_v2(uintptr_t *pointer, size_t bytes) {
    ++held;
    *pointer = (uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return SUCCESS;
}
int fake_held(void) { return held; }

// The stream that captures (0: none), and how this thread minds it: 0 global, 2 relaxed.
static uintptr_t capturing;
static int minds, broken;
void fake_capture(uintptr_t stream) { capturing = stream; }
int fake_broken(void) { return broken; }
static Result may(const char *what, uintptr_t stream) {
    if (!capturing || (stream && stream != capturing)) return SUCCESS;
    record("%s breaks the capture\n", what);
    broken = 1;
    return CAPTURE_UNSUPPORTED;
}
// A call that may wait.
static Result unsafe(const char *what) { return minds == 2 ? SUCCESS : may(what, 0); }
Result cuThreadExchangeStreamCaptureMode(int *mode) {
    int was = minds;
    minds = *mode, *mode = was;
    return SUCCESS;
}
static int gone;
void fake_lose(void) { gone = 1; }
Result cuStreamIsCapturing(uintptr_t stream, int *status) {
    if (gone) return LOST_CONTEXT;
    if (capturing && !stream) return CAPTURE_IMPLICIT;
    *status = capturing && stream == capturing;
    return SUCCESS;
}

typedef struct { void *to; const void *from; size_t bytes; int byte, event; } Work;
static Work queue[64];
static int queued, asked[16], done[16], events;
void fake_run(int most) {
    int n = most < queued ? most : queued;
    for (int i = 0; i < n; ++i) {
        Work w = queue[i];
        if (w.from) memcpy(w.to, w.from, w.bytes);
        else if (w.to) memset(w.to, w.byte, w.bytes);
        else ++done[w.event];
    }
    memmove(queue, queue + n, (queued -= n) * sizeof *queue);
}
static Result later(const char *what, uintptr_t stream, Work work) {
    Result result = may(what, stream);
    if (result) return result;
    record("%s in %zx stream %zx\n", what, (size_t)current(), (size_t)stream);
    queue[queued++] = work;
    return SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, uintptr_t stream) {
    return later("copy", stream, (Work){to, (void *)from, bytes, 0, 0});
}
Result cuMemsetD8Async(uintptr_t to, unsigned char byte, size_t bytes, uintptr_t stream) {
    return later("fill", stream, (Work){(void *)to, NULL, bytes, byte, 0});
}
Result cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) { ++held; *pointer = malloc(bytes); return SUCCESS; }
Result cuMemFreeHost(void *pointer) { --held; free(pointer); return unsafe("freeing host memory"); }
Result cuEventCreate(uintptr_t *event, unsigned flags) {
    ++held, *event = 0x700 + events++;
    return flags == 2 ? SUCCESS : INVALID_VALUE;
}
Result cuEventDestroy_v2(uintptr_t event) { --held; return unsafe("destroying an event"); }
Result cuEventRecord(uintptr_t event, uintptr_t stream) {
    ++asked[event - 0x700];
    return later("event", stream, (Work){NULL, NULL, 0, 0, (int)(event - 0x700)});
}
Result cuEventQuery(uintptr_t event) {
    Result result = unsafe("asking for an event");
    return gone ? LOST_CONTEXT : result ? result : asked[event - 0x700] == done[event - 0x700] ? SUCCESS : NOT_READY;
}
Result cuMemFree_v2(uintptr_t pointer) {
    fake_run(64);
    --held, free((void *)pointer);
    return unsafe("freeing memory");
}
Result cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return SUCCESS; }
Result cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return SUCCESS; }
Result cuStreamSynchronize(uintptr_t stream) { fake_run(64), record("wait %zx\n", (size_t)stream); return SUCCESS; }

typedef struct { int id; char pad[4]; union { int flag; char bytes[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; uintptr_t stream; Attribute *attributes; unsigned count; } Config;

Result cuLaunchKernelEx(const Config *c, uintptr_t function, void **params, void **extra) {
    record("launch %zx in %zx grid %u,%u,%u block %u,%u,%u shared %u stream %zx pdl %d", (size_t)function, (size_t)current(),
           c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, (size_t)c->stream,
           c->count == 1 && c->attributes[0].id == 6 && c->attributes[0].value.flag == 1);
    record(" args %llx %u\n", *(unsigned long long *)params[0], *(unsigned *)params[1]);
    return c->grid[0] ? SUCCESS : INVALID_VALUE;
}

#include "../support/fake_tensor_map.h"

static Result unexpected(void) { return NOT_FOUND; }
Result cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    char versioned[128];
    void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *address = dlsym(self, versioned);
    if (!*address) *address = dlsym(self, symbol);
    if (!*address) *address = (void *)unexpected;
    if (status) *status = 0;
    return SUCCESS;
}
