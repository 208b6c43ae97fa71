/* The functions of libcuda that Triton's and diyfa's launchers call, without a GPU. Launches go to a callback, and an
   encoded descriptor contains the arguments of its encoding. */
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INVALID_VALUE 1
#define INVALID_CONTEXT 201
#define FUNCTIONS 4096
#define MAX_DYNAMIC_SHARED_SIZE 8

static void (*on_launch)(const void *config, void *function, void **parameters);
static int (*on_load)(const void *image);
static int failure, needs_context, version = 13020;
static uint32_t shared_allowed[FUNCTIONS];
static __thread int has_context;

void simulator_on_launch(void (*callback)(const void *, void *, void **)) { on_launch = callback; }
void simulator_on_load(int (*callback)(const void *)) { on_load = callback; }
void simulator_fail(int result) { failure = result; } /* launches return it until it is 0 */
void simulator_need_contexts(int needed) { needs_context = needed; }
void simulator_set_version(int number) { version = number; }

int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute != MAX_DYNAMIC_SHARED_SIZE)
    return INVALID_VALUE;
  shared_allowed[(intptr_t)function] = value;
  return 0;
}

int cuFuncSetCacheConfig(void *function, int config) { return config == 1 ? 0 : INVALID_VALUE; }

int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  uint32_t shared = ((const uint32_t *)config)[6], allowed = shared_allowed[(intptr_t)function];
  if (failure)
    return failure;
  if (needs_context && !has_context)
    return INVALID_CONTEXT;
  if (shared > 48 * 1024 && shared > allowed)
    return INVALID_VALUE;
  on_launch(config, function, parameters);
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  if (needs_context && !has_context)
    return INVALID_CONTEXT;
  *module = (void *)(intptr_t)on_load(image);
  return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = module;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)1;
  return 0;
}

int cuCtxSetCurrent(void *context) {
  has_context = 1;
  return 0;
}

int cuGetErrorString(int result, const char **text) {
  *text = result == 700 ? "an illegal memory access was encountered" : result == INVALID_VALUE ? "invalid argument" : 0;
  return *text ? 0 : INVALID_VALUE;
}

int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  sched_yield(); /* lets another thread run, so that a shared buffer shows */
  memset(map, 0, 128);
  map[0] = (uint64_t)address;
  map[1] = type | rank << 8 | interleave << 16 | swizzle << 20 | promotion << 24 | (uint64_t)fill << 32;
  for (uint32_t i = 0; i < rank; i++) {
    map[2 + i] = sizes[i];
    map[7 + i] = i + 1 < rank ? strides[i] : 0;
    ((uint32_t *)(map + 12))[i] = box[i];
  }
  return 0;
}

int cuTensorMapReplaceAddress(uint64_t *map, void *address) {
  sched_yield();
  map[0] = (uint64_t)address;
  return 0;
}

int cuPointerGetAttribute(uint64_t *pointer, int attribute, uint64_t address) {
  *pointer = address;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

int cuDriverGetVersion(int *number) {
  *number = version;
  return 0;
}

/* Linked but never called: Python describes the device and loads kernels. */
#define NEVER(name)                                                                                                    \
  void name(void) { abort(); }
NEVER(cuCtxGetDevice)
NEVER(cuCtxGetLimit)
NEVER(cuCtxSetLimit)
NEVER(cuDeviceGetAttribute)
NEVER(cuFuncGetAttribute)
NEVER(cuInit)
NEVER(cuModuleUnload)
NEVER(cuOccupancyMaxActiveClusters)
NEVER(cuStreamIsCapturing)
NEVER(cuTensorMapEncodeIm2col)
