/* Host-memory implementation of the runtime calls that torch_npu makes into CANN's Ascend Computing Language (ACL).
 *
 * torch_npu loads CANN's libraries at its import, so without CANN it cannot be tested. Linked under those libraries'
 * names, this file lets the unmodified torch_npu wheel run with two devices, whose memory is the host's. Allocation,
 * dense copies, views, streams, events, device properties and ZerosLike work. Other compute operators are refused with
 * UNSUPPORTED. torch_npu queues operators: it would report a refusal later, and return uninitialised memory before.
 * Run with ASCEND_LAUNCH_BLOCKING=1, so that a refused operator raises at its call.
 *
 * It makes these testable: dispatch on the npu key, autograd, device checks, and, with Triton's interpreter, kernels on
 * npu tensors. It says nothing about an Ascend chip. README.md has the environment variables that set the reported
 * chip, cores and devices.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ACL_SUCCESS 0
#define ACL_INVALID_DEVICE 107001
#define ACL_OUT_OF_MEMORY 207001
#define ACL_UNSUPPORTED 500002

typedef int aclError;

/* Functions whose arguments do not matter; in the C calling conventions of x86-64 and AArch64 extra ones are ignored. */
#define RETURNS(value, name) \
    aclError name() { return value; }
#define SUCCEEDS(name) RETURNS(ACL_SUCCESS, name)
#define REFUSES(name) RETURNS(ACL_UNSUPPORTED, name)

/* ---- the device --------------------------------------------------------------------------------------------- */

enum { CUBE_CORES = 20, DEVICES = 2, MOST_DEVICES = 16 };
static const size_t device_memory = (size_t)64 << 30;
static int32_t contexts[MOST_DEVICES]; /* their addresses are the handles */
static _Thread_local int32_t current_device;

static int setting_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text ? atoi(text) : otherwise;
}

static uint32_t device_count(void) {
    int count = setting_of("ACL_HOST_SHIM_DEVICES", DEVICES);
    return count < 0 ? 0 : count > MOST_DEVICES ? MOST_DEVICES : count;
}

SUCCEEDS(aclInit)
SUCCEEDS(aclFinalize)
SUCCEEDS(aclrtResetDevice)
SUCCEEDS(aclrtDeviceEnablePeerAccess)
SUCCEEDS(aclrtDeviceGetBareTgid)

const char *aclrtGetSocName(void) {
    const char *name = getenv("ACL_HOST_SHIM_SOC");
    return name ? name : "Ascend910B3";
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = device_count();
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || (uint32_t)device >= device_count()) return ACL_INVALID_DEVICE;
    current_device = device;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(void **context) {
    *context = &contexts[current_device];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(void *context) { return aclrtSetDevice((int32_t)((int32_t *)context - contexts)); }

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    (void)device, (void)peer;
    *can = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    (void)kind;
    *total_bytes = device_memory;
    *free_bytes = device_memory / 2;
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    (void)device;
    *value = setting_of("ACL_HOST_SHIM_CUBE_CORES", CUBE_CORES) * (what == 0 ? 1 : 2);
    return ACL_SUCCESS;
}

/* ---- memory: poisoned when allocated, so that a test sees what a kernel did not write ------------------------- */

enum { ALIGNMENT = 512 };

static aclError allocate(void **pointer, size_t bytes) {
    size_t rounded = (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    *pointer = aligned_alloc(ALIGNMENT, rounded);
    if (!*pointer) return ACL_OUT_OF_MEMORY;
    memset(*pointer, 0xff, rounded); /* NaN in fp16, bf16 and fp32 */
    return ACL_SUCCESS;
}

static aclError release(void *pointer) {
    free(pointer);
    return ACL_SUCCESS;
}

static aclError copy(void *to, const void *from, size_t bytes) {
    memmove(to, from, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **pointer, size_t bytes, int policy) { return (void)policy, allocate(pointer, bytes); }
aclError aclrtMallocAlign32(void **pointer, size_t bytes, int policy) { return (void)policy, allocate(pointer, bytes); }
aclError aclrtMallocHost(void **pointer, size_t bytes) { return allocate(pointer, bytes); }
aclError aclrtFree(void *pointer) { return release(pointer); }
aclError aclrtFreeHost(void *pointer) { return release(pointer); }

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    return (void)room, (void)kind, copy(to, from, bytes);
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    return (void)room, (void)kind, (void)stream, copy(to, from, bytes);
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) {
    (void)room;
    memset(to, value, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) {
    return (void)stream, aclrtMemset(to, room, value, bytes);
}

/* Memory mapped and shared between processes is not imitated. */
REFUSES(aclrtMallocPhysical)
REFUSES(aclrtFreePhysical)
REFUSES(aclrtReserveMemAddress)
REFUSES(aclrtReleaseMemAddress)
REFUSES(aclrtMapMem)
REFUSES(aclrtUnmapMem)
REFUSES(aclrtMemExportToShareableHandle)
REFUSES(aclrtMemImportFromShareableHandle)
REFUSES(aclrtMemSetPidToShareableHandle)

/* ---- streams and events: nothing is asynchronous, so everything is always finished --------------------------- */

static aclError create(void **object, size_t bytes) {
    *object = calloc(1, bytes);
    return *object ? ACL_SUCCESS : ACL_OUT_OF_MEMORY;
}

static aclError answer(int *status, int value) {
    *status = value;
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(void **stream) { return create(stream, sizeof(int)); }
aclError aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    return (void)priority, (void)flags, create(stream, sizeof(int));
}
/* A destroyed stream keeps its few bytes: torch_npu may still hold the handle at exit. */
SUCCEEDS(aclrtDestroyStream)
SUCCEEDS(aclrtDestroyStreamForce)
SUCCEEDS(aclrtSynchronizeStream)
SUCCEEDS(aclrtSynchronizeStreamWithTimeout)
SUCCEEDS(aclrtSynchronizeDevice)
SUCCEEDS(aclrtSynchronizeDeviceWithTimeout)
aclError aclrtStreamQuery(void *stream, int *status) { return (void)stream, answer(status, 0); }

aclError aclrtCreateEvent(void **event) { return create(event, sizeof(struct timespec)); }
aclError aclrtCreateEventWithFlag(void **event, uint32_t flag) { return (void)flag, aclrtCreateEvent(event); }
aclError aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return (void)flag, aclrtCreateEvent(event); }
aclError aclrtDestroyEvent(void *event) { return release(event); }
SUCCEEDS(aclrtResetEvent)
SUCCEEDS(aclrtSynchronizeEvent)
SUCCEEDS(aclrtStreamWaitEvent)
aclError aclrtQueryEvent(void *event, int *status) { return (void)event, answer(status, 0); }
aclError aclrtQueryEventStatus(void *event, int *status) { return (void)event, answer(status, 1); }
aclError aclrtQueryEventWaitStatus(void *event, int *status) { return (void)event, answer(status, 1); }

aclError aclrtRecordEvent(void *event, void *stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, event);
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    const struct timespec *a = start, *b = end;
    *milliseconds = (float)(b->tv_sec - a->tv_sec) * 1e3f + (float)(b->tv_nsec - a->tv_nsec) * 1e-6f;
    return ACL_SUCCESS;
}

/* ---- settings: kept, because torch_npu reads back what it wrote ------------------------------------------------ */

enum { SETTINGS = 64 };
static int64_t settings[SETTINGS];

aclError aclrtGetSysParamOpt(int option, int64_t *value) {
    *value = settings[(unsigned)option % SETTINGS];
    return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(int option, int64_t value) {
    settings[(unsigned)option % SETTINGS] = value;
    return ACL_SUCCESS;
}

aclError aclrtCtxGetSysParamOpt(int option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
aclError aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
SUCCEEDS(aclrtSetDeviceSatMode)
SUCCEEDS(aclrtSetOpExecuteTimeOut)
SUCCEEDS(aclrtProcessReport)
SUCCEEDS(aclrtSetStreamOverflowSwitch) /* asked for on chips before the 910B */
SUCCEEDS(aclSetCompileopt)
SUCCEEDS(aclmdlInitDump)
SUCCEEDS(aclmdlSetDump)
SUCCEEDS(aclmdlFinalizeDump)

const char *aclGetRecentErrMsg(void) { return "host shim: compute operators need a real Ascend device"; }

void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;
}

SUCCEEDS(MsprofGetHashId)
SUCCEEDS(MsprofRegisterCallback)
SUCCEEDS(MsprofReportAdditionalInfo)
SUCCEEDS(MsprofReportApi)
SUCCEEDS(MsprofReportCompactInfo)
SUCCEEDS(MsprofSysCycleTime)

/* ---- compute operators: torch_npu first builds descriptions, then asks for the operator by name ---------------- */

enum { DESCRIPTION_BYTES = 64 };

struct data_buffer {
    void *data;
    size_t bytes;
};

void *aclCreateDataBuffer(void *data, size_t bytes) {
    struct data_buffer *buffer = malloc(sizeof *buffer);
    if (buffer) *buffer = (struct data_buffer){data, bytes};
    return buffer;
}

aclError aclDestroyDataBuffer(const void *buffer) { return release((void *)buffer); }
void *aclCreateTensorDesc(int type, int dimensions, const int64_t *shape, int format) {
    return (void)type, (void)dimensions, (void)shape, (void)format, calloc(1, DESCRIPTION_BYTES);
}
void aclDestroyTensorDesc(const void *description) { free((void *)description); }
void *aclopCreateAttr(void) { return calloc(1, DESCRIPTION_BYTES); }
void aclopDestroyAttr(const void *attribute) { free((void *)attribute); }
SUCCEEDS(aclGetTensorDescDimV2)
SUCCEEDS(aclGetTensorDescFormat)
SUCCEEDS(aclGetTensorDescNumDims)
SUCCEEDS(aclGetTensorDescType)
SUCCEEDS(aclSetTensorDescName)
SUCCEEDS(aclSetTensorFormat)
SUCCEEDS(aclSetTensorPlaceMent)
SUCCEEDS(aclSetTensorShape)
SUCCEEDS(aclopSetAttrBool)
SUCCEEDS(aclopSetAttrDataType)
SUCCEEDS(aclopSetAttrFloat)
SUCCEEDS(aclopSetAttrInt)
SUCCEEDS(aclopSetAttrListBool)
SUCCEEDS(aclopSetAttrListFloat)
SUCCEEDS(aclopSetAttrListInt)
SUCCEEDS(aclopSetAttrListListInt)
SUCCEEDS(aclopSetAttrString)

/* The one operator that there is: autograd makes zeros where an output's gradient was not given. */
aclError aclopCompileAndExecute(const char *name, int inputs, const void *const *input_descriptions,
                                const struct data_buffer *const *input, int outputs,
                                const void *const *output_descriptions, struct data_buffer *const *output) {
    (void)inputs, (void)input_descriptions, (void)input, (void)output_descriptions;
    if (strcmp(name, "ZerosLike") != 0) return ACL_UNSUPPORTED;
    for (int i = 0; i < outputs; i++) memset(output[i]->data, 0, output[i]->bytes);
    return ACL_SUCCESS;
}

REFUSES(aclrtBinaryLoadFromData)
REFUSES(aclrtBinaryGetFunction)
REFUSES(aclrtGetFunctionAddr)
REFUSES(rtKernelLaunch)
REFUSES(rtDevBinaryRegister)
REFUSES(rtFunctionRegister)
REFUSES(rtGetC2cCtrlAddr)

/* ---- collectives: torch_npu 2.7 links them, later ones look for them when they are called ------------------------ */

REFUSES(HcclAllGather)
REFUSES(HcclAllReduce)
REFUSES(HcclBroadcast)
REFUSES(HcclCommDestroy)
REFUSES(HcclCommInitAll)
REFUSES(HcclCommInitRootInfo)
REFUSES(HcclGetRootInfo)
REFUSES(HcclRecv)
REFUSES(HcclReduceScatter)
REFUSES(HcclSend)
