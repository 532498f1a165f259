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
  int32_t device_type, device_id, dimensions;  // of type 1: CPU, 2: CUDA
  uint8_t type_code, type_bits;                // of code 1: unsigned integers
  uint16_t type_lanes;
  int64_t *shape, *strides;  // strides null: dense
  uint64_t byte_offset;
};
static_assert(sizeof(DLTensor) == 48);

// The parameters of a launch from the arguments of Python's call.
std::vector<uint64_t> packed(const te_lite::Kernel& kernel, const py::tuple& values);

void bind_cuda_memory(py::module_& m);   // cuda_memory.cpp
void bind_userbuffers(py::module_& m);   // userbuffers.cpp
void bind_gemm_fused(py::module_& m);    // gemm_fused.cpp
void bind_gemm_grouped(py::module_& m);  // gemm_grouped.cpp
void bind_cublaslt(py::module_& m);      // cublaslt.cpp
void bind_sequence(py::module_& m);      // sequence.cpp
