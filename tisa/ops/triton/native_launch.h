// A launch whose addresses are left open, and a pass: tensors that are allocated, and the launches
// that fill them (native.cpp).

#pragma once

#include <array>
#include <cstring>

#include <ATen/ATen.h>
#include <torch/csrc/python_headers.h>

#include "cuda.h"

namespace {

using at::Tensor;

// What Python hands in once: the driver's functions, and what is asked of PyTorch and of Triton.
struct {
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuTensorMapEncodeTiled) encode;
  decltype(&cuCtxGetCurrent) get_context;
  decltype(&cuCtxSetCurrent) set_context;
  CUresult (*retain_context)(CUcontext*, CUdevice);
  PyObject* current_stream;
  PyObject* hooks;  // `triton.knobs.runtime`: profilers put themselves there.
} host;

void check(CUresult result, const char* what) {
  TORCH_CHECK(result == CUDA_SUCCESS, "tisa: ", what, " failed, the driver says ", int(result));
}

struct Pointer {
  size_t at;  // In bytes, among the parameters.
  size_t tensor;
  uint64_t offset;
};

// A tensor descriptor, its axes in the driver's order: the last of the tensor first.
struct Descriptor : Pointer {
  int type, swizzle, fill;
  std::vector<cuuint64_t> sizes, strides;
  std::vector<cuuint32_t> box;
};

constexpr size_t MOST_BYTES = 4096, MOST_PLACES = 32;
using Places = std::array<uint64_t, MOST_PLACES>;

struct Launch {
  CUfunction function;
  unsigned programs, rows, warps, cluster, shared;
  bool dependent, cooperative;
  std::vector<char> bytes;
  std::vector<size_t> parameters;  // Where each begins.
  std::vector<Pointer> pointers;
  std::vector<Descriptor> descriptors;

  void run(const Places& places, CUstream stream) const {
    alignas(64) char filled[MOST_BYTES];
    std::memcpy(filled, bytes.data(), bytes.size());
    for (const auto& p : pointers) {
      const uint64_t address = places[p.tensor] + p.offset;
      std::memcpy(filled + p.at, &address, sizeof address);
    }
    constexpr cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    for (const auto& d : descriptors) {
      check(
          host.encode(
              reinterpret_cast<CUtensorMap*>(filled + d.at), CUtensorMapDataType(d.type),
              d.box.size(), reinterpret_cast<void*>(places[d.tensor] + d.offset), d.sizes.data(),
              d.strides.data(), d.box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
              CUtensorMapSwizzle(d.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
              CUtensorMapFloatOOBfill(d.fill)),
          "a tensor descriptor");
    }
    std::array<void*, MOST_BYTES / 4> given;
    for (size_t i = 0; i < parameters.size(); i++) given[i] = filled + parameters[i];
    std::array<CUlaunchAttribute, 4> attributes{};
    CUlaunchConfig config{};
    const auto next = [&](CUlaunchAttributeID id) -> CUlaunchAttributeValue& {
      attributes[config.numAttrs].id = id;
      return attributes[config.numAttrs++].value;
    };
    // In the order of Triton's launcher.
    if (dependent) {
      next(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
          .programmaticStreamSerializationAllowed = 1;
    }
    if (cooperative) next(CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1;
    if (cluster != 1) {
      auto& size = next(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim;
      size.x = cluster, size.y = size.z = 1;
      next(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
          .clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    }
    config.gridDimX = programs * cluster;
    config.blockDimX = 32 * warps;
    config.gridDimY = rows;
    config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared;
    config.hStream = stream;
    config.attrs = attributes.data();
    check(host.launch(&config, function, given.data(), nullptr), "a launch");
  }
};

struct Buffer {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Pass {
  std::vector<Buffer> buffers;
  std::vector<Launch> launches;

  // Return the new tensors; one without numbers, which stands for nothing, is not allocated.
  std::vector<Tensor> run(
      const std::vector<Tensor>& given, at::Device device, CUstream stream) const {
    const at::OptionalDeviceGuard on(device);
    if (device.is_cuda()) {
      CUcontext context = nullptr;
      check(host.get_context(&context), "the context");
      if (context == nullptr) {
        // A thread of autograd's that has not met the driver.
        check(host.retain_context(&context, device.index()), "the context");
        check(host.set_context(context), "the context");
      }
    }
    Places places{};
    size_t count = 0;
    for (const auto& tensor : given) {
      places[count++] = tensor.defined() ? reinterpret_cast<uint64_t>(tensor.data_ptr()) : 0;
    }
    std::vector<Tensor> made(buffers.size());
    for (size_t i = 0; i < buffers.size(); i++) {
      const auto& b = buffers[i];
      if (b.sizes.size() != 1 || b.sizes[0] != 0) {
        made[i] = at::empty_strided(b.sizes, b.strides, at::dtype(b.dtype).device(device));
        places[count + i] = reinterpret_cast<uint64_t>(made[i].data_ptr());
      }
    }
    for (const auto& launch : launches) launch.run(places, stream);
    return made;
  }
};

}  // namespace
