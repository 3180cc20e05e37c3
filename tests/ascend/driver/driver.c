// The functions of Ascend's driver (acl) that torch_npu calls, over this machine's own memory: an emulation, no device.
// What is called "device memory" is malloc's; streams and events are names, because everything is done when it is asked
// for; graphs are recorder.cpp's. Every other function of the driver does nothing and returns 0 (../stubs.py).
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NO_OPERATORS = 500000 };  // ACL_ERROR_INTERNAL_ERROR: there is no compiler of operators
enum { EVENT_RECORDED = 1, EVENT_WAITED_FOR = 0, STREAM_COMPLETE = 0, ALIGNMENT = 512 };

static const size_t total_memory = (size_t)4 << 30;
static atomic_size_t used_memory;
static _Thread_local int32_t current_device;

const char *aclrtGetSocName(void) {
    const char *name = getenv("EMULATED_NPU_SOC");
    return name ? name : "Ascend910B3";
}

const char *aclGetRecentErrMsg(void) { return "emulated driver"; }

int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return SUCCESS; }
int aclrtSetDevice(int32_t device) { current_device = device; return SUCCESS; }
int aclrtGetDevice(int32_t *device) { *device = current_device; return SUCCESS; }
int aclrtGetCurrentContext(void **context) { *context = &current_device; return SUCCESS; }
int aclrtSetCurrentContext(void *context) { (void)context; return SUCCESS; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { *can = 0; (void)a; (void)b; return SUCCESS; }

int aclrtGetMemInfo(int attribute, size_t *free_memory, size_t *total) {
    (void)attribute;
    *total = total_memory;
    *free_memory = total_memory - used_memory;
    return SUCCESS;
}

// The size stands before what is handed out, so that it can be given back.
int aclrtMalloc(void **pointer, size_t size, int policy) {
    (void)policy;
    if (size > total_memory - used_memory) return 207001;  // ACL_ERROR_RT_MEMORY_ALLOCATION
    char *block = aligned_alloc(ALIGNMENT, (size + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!block) return 207001;
    // Memory of a device holds what was there before: never zeros that nobody wrote. All ones are NaN in every float.
    memset(block + ALIGNMENT, 0xff, size);
    *(size_t *)block = size;
    used_memory += size;
    *pointer = block + ALIGNMENT;
    return SUCCESS;
}

int aclrtMallocAlign32(void **pointer, size_t size, int policy) { return aclrtMalloc(pointer, size, policy); }

int aclrtFree(void *pointer) {
    if (!pointer) return SUCCESS;
    char *block = (char *)pointer - ALIGNMENT;
    used_memory -= *(size_t *)block;
    free(block);
    return SUCCESS;
}

int aclrtMallocHost(void **pointer, size_t size) { *pointer = malloc(size); return SUCCESS; }
int aclrtFreeHost(void *pointer) { free(pointer); return SUCCESS; }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    (void)room; (void)kind;
    memmove(to, from, size);
    return SUCCESS;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, size, kind);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    (void)room;
    memset(to, value, size);
    return SUCCESS;
}
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *stream) {
    (void)stream;
    return aclrtMemset(to, room, value, size);
}

static int new_name(void **name) { *name = malloc(1); return SUCCESS; }
int aclrtCreateStream(void **stream) { return new_name(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority; (void)flag;
    return new_name(stream);
}
int aclrtDestroyStream(void *stream) { free(stream); return SUCCESS; }
int aclrtDestroyStreamForce(void *stream) { free(stream); return SUCCESS; }
int aclrtStreamQuery(void *stream, int *status) { (void)stream; *status = STREAM_COMPLETE; return SUCCESS; }
int aclrtSynchronizeDevice(void) { return SUCCESS; }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { (void)timeout; return SUCCESS; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) { (void)stream; (void)timeout; return SUCCESS; }

int aclrtCreateEventWithFlag(void **event, uint32_t flag) { (void)flag; return new_name(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; return new_name(event); }
int aclrtDestroyEvent(void *event) { free(event); return SUCCESS; }
int aclrtQueryEventStatus(void *event, int *status) { (void)event; *status = EVENT_RECORDED; return SUCCESS; }
int aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = EVENT_WAITED_FOR; return SUCCESS; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) { (void)start; (void)end; *ms = 0; return SUCCESS; }

int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return SUCCESS; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return SUCCESS; }
int aclrtSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return SUCCESS; }
int aclSetCompileopt(int option, const char *value) { (void)option; (void)value; return SUCCESS; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { (void)seconds; return SUCCESS; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { (void)seconds; return SUCCESS; }
int aclrtSetDeviceSatMode(int mode) { (void)mode; return SUCCESS; }
int aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) { (void)stream; (void)flag; return SUCCESS; }
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) { (void)stream; *flag = 0; return SUCCESS; }

// An operator that nothing has emulated must not seem to have run.
int aclopCompileAndExecute(const char *operator_, ...) { (void)operator_; return NO_OPERATORS; }
