// What the files that make te_lite._C share. Signatures for Python are in te_lite/_C.pyi: change both together.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "launch.h"

namespace py = pybind11;
using namespace py::literals;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// Of DLPack's C ABI (github.com/dmlc/dlpack).
struct DLTensor {
  void* data;
  int32_t device_type;  // 1 CPU, 2 CUDA
  int32_t device_id;
  int32_t dimensions;
  uint8_t type_code;  // 1: unsigned integer
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // null: dense
  uint64_t byte_offset;
};
static_assert(sizeof(DLTensor) == 48);

// The parameters of a launch from the arguments of Python's call.
std::vector<uint64_t> packed(const te_lite::Kernel& kernel, const py::tuple& values);

void bind_cuda_memory(py::module_& m);  // cuda_memory.cpp
void bind_userbuffers(py::module_& m);  // userbuffers.cpp
void bind_gemm_fused(py::module_& m);   // gemm_fused.cpp
void bind_cublaslt(py::module_& m);     // cublaslt.cpp
void bind_sequence(py::module_& m);     // sequence.cpp
