/* What Triton's launcher needs of libcuda, without a GPU: launches go to a callback, and an encoded descriptor says what
   it was encoded from. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void (*on_launch)(const void *config, void *function, void **parameters);

void simulator_on_launch(void (*callback)(const void *, void *, void **)) { on_launch = callback; }

int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  on_launch(config, function, parameters);
  return 0;
}

int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
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

int cuPointerGetAttribute(uint64_t *pointer, int attribute, uint64_t address) {
  *pointer = address;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

/* Linked and never called: Python describes the device and loads kernels. */
#define NEVER(name)                                                                                                    \
  void name(void) { abort(); }
NEVER(cuCtxGetDevice)
NEVER(cuCtxGetLimit)
NEVER(cuCtxSetCurrent)
NEVER(cuCtxSetLimit)
NEVER(cuDeviceGet)
NEVER(cuDeviceGetAttribute)
NEVER(cuDevicePrimaryCtxRetain)
NEVER(cuFuncGetAttribute)
NEVER(cuFuncSetAttribute)
NEVER(cuFuncSetCacheConfig)
NEVER(cuGetErrorString)
NEVER(cuInit)
NEVER(cuModuleGetFunction)
NEVER(cuModuleLoadData)
NEVER(cuModuleUnload)
NEVER(cuOccupancyMaxActiveClusters)
NEVER(cuStreamIsCapturing)
NEVER(cuTensorMapEncodeIm2col)
