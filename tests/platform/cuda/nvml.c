/* An emulation of NVML with one GPU, as far as a process asks that configures an engine. */
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 6 };
static const char UUID[] = "GPU-00000000-1111-2222-3333-444444444444";
static int gpu;

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "emulated"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = 0; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &gpu;
    return index == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &gpu;
    return strcmp(uuid, UUID) == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, "Emulated GPU");
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 9, *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
    total_free_used[0] = 80ULL << 30;
    return SUCCESS;
}
