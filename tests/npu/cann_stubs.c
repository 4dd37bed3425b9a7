/* A stand-in for CANN's runtime, for tests only: device memory is host memory, streams run at once.
 *
 * cann_stubs.py adds a function that returns 0 for every other symbol that the wheel needs. Signatures are those of
 * CANN's public headers, with int for its error and enumeration types and void* for its handles.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEVICES_DEFAULT 2
#define ALIGNMENT 512

static _Thread_local int current_device = 0;

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* --- devices ---------------------------------------------------------------------------------------------------- */

int aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)number("RLFLOW_STUB_DEVICES", DEVICES_DEFAULT);
    return 0;
}

int aclrtSetDevice(int32_t device) {
    current_device = device;
    return 0;
}

int aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return 0;
}

const char *aclrtGetSocName(void) { return "Ascend910B1"; }

int aclrtGetCurrentContext(void **context) {
    static char contexts[64];
    *context = &contexts[current_device & 63];
    return 0;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    (void)device, (void)peer;
    *can = 1;
    return 0;
}

int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) {
    (void)device, (void)kind;
    *value = 24;
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------------------------- */

static uint64_t used_bytes[64];

/* The size lies before the block, so that freeing can give it back. */
static int take(void **pointer, size_t size) {
    char *block = NULL;
    if (posix_memalign((void **)&block, ALIGNMENT, size + ALIGNMENT)) return 207001; /* ACL_ERROR_RT_MEMORY_ALLOCATION */
    ((uint64_t *)block)[0] = size;
    ((uint64_t *)block)[1] = (uint64_t)(current_device & 63);
    *pointer = block + ALIGNMENT;
    return 0;
}

static void give_back(void *pointer) {
    if (pointer) free((char *)pointer - ALIGNMENT);
}

int aclrtMalloc(void **pointer, size_t size, int policy) {
    (void)policy;
    uint64_t total = number("RLFLOW_STUB_HBM_BYTES", 64ull << 30);
    if (__atomic_load_n(&used_bytes[current_device & 63], __ATOMIC_RELAXED) + size > total) return 207001;
    int error = take(pointer, size);
    if (!error) __atomic_fetch_add(&used_bytes[current_device & 63], size, __ATOMIC_RELAXED);
    return error;
}

int aclrtMallocAlign32(void **pointer, size_t size, int policy) { return aclrtMalloc(pointer, size, policy); }

int aclrtFree(void *pointer) {
    if (!pointer) return 0;
    uint64_t *head = (uint64_t *)((char *)pointer - ALIGNMENT);
    __atomic_fetch_sub(&used_bytes[head[1]], head[0], __ATOMIC_RELAXED);
    give_back(pointer);
    return 0;
}

int aclrtMallocHost(void **pointer, size_t size) { return take(pointer, size); }

int aclrtFreeHost(void *pointer) {
    give_back(pointer);
    return 0;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    (void)kind;
    if (size > room) return 107000; /* ACL_ERROR_RT_PARAM_INVALID */
    memmove(to, from, size);
    return 0;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, size, kind);
}

int aclrtMemset(void *pointer, size_t room, int32_t value, size_t size) {
    if (size > room) return 107000;
    memset(pointer, value, size);
    return 0;
}

int aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t size, void *stream) {
    (void)stream;
    return aclrtMemset(pointer, room, value, size);
}

int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) {
    (void)kind;
    *total = number("RLFLOW_STUB_HBM_BYTES", 64ull << 30);
    *unused = *total - __atomic_load_n(&used_bytes[current_device & 63], __ATOMIC_RELAXED);
    return 0;
}

/* --- streams and events: everything has run when its call returns ------------------------------------------------ */

typedef struct {
    double recorded_ms;
} Event;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

int aclrtCreateStream(void **stream) {
    *stream = malloc(16);
    return *stream ? 0 : 207001;
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority, (void)flag;
    return aclrtCreateStream(stream);
}

int aclrtDestroyStream(void *stream) {
    free(stream);
    return 0;
}

int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }

int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(Event));
    return *event ? 0 : 207001;
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }

int aclrtDestroyEvent(void *event) {
    free(event);
    return 0;
}

int aclrtRecordEvent(void *event, void *stream) {
    (void)stream;
    if (event) ((Event *)event)->recorded_ms = now_ms();
    return 0;
}

int aclrtQueryEventStatus(void *event, int *status) {
    (void)event;
    *status = 1; /* ACL_EVENT_RECORDED_STATUS_COMPLETE */
    return 0;
}

int aclrtEventElapsedTime(float *ms, void *start, void *end) {
    *ms = (float)(((Event *)end)->recorded_ms - ((Event *)start)->recorded_ms);
    return 0;
}

/* --- settings and messages ---------------------------------------------------------------------------------------- */

int aclrtGetSysParamOpt(int option, int64_t *value) {
    (void)option;
    *value = 0;
    return 0;
}

size_t aclGetCompileoptSize(int option) {
    (void)option;
    return 8;
}

int aclGetCompileopt(int option, char *value, size_t length) {
    (void)option;
    if (length) value[0] = 0;
    return 0;
}

const char *aclGetRecentErrMsg(void) { return ""; }

void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;
}
