/* A CUDA driver without a GPU: every launch is told to a callback, a descriptor is what it was made
   of. Built as libcuda.so.1 (native_process.py), so that Triton's own launcher takes it. */
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

typedef int (*told_t)(const CUlaunchConfig *, CUfunction, void **);
static told_t told = NULL;
static uintptr_t functions = 0x1000;

void stub_tell(told_t callback) { told = callback; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  return told ? (CUresult)told(config, f, params) : CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dim, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char *at = (unsigned char *)map;
  memset(map, 0, sizeof *map);
  memcpy(at, &address, 8);
  memcpy(at + 8, dim, 8 * rank);
  memcpy(at + 48, strides, 8 * (rank - 1));
  memcpy(at + 80, box, 4 * rank);
  for (unsigned i = 0; i < rank; i++) at[100 + i] = (unsigned char)steps[i];
  unsigned char rest[6] = {type, rank, interleave, swizzle, promotion, fill};
  memcpy(at + 108, rest, 6);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)(uintptr_t)0x77;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)(functions += 16);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction f) {
  *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = 232448;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute what, CUdeviceptr pointer) {
  memcpy(value, &pointer, 8);
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "stub";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)(uintptr_t)0x55;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)0x55;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute what, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit what) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit what, size_t value) { return CUDA_SUCCESS; }
