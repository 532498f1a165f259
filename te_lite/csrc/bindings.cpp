// te_lite._C. Signatures for Python are in te_lite/_C.pyi: change both together.
#include <pybind11/pybind11.h>

#include <cstring>

#include "launch.h"

namespace py = pybind11;
using namespace py::literals;
using namespace te_lite;

void bind_cuda_memory(py::module_& m);  // cuda_memory.cpp
void bind_userbuffers(py::module_& m);  // userbuffers.cpp
void bind_gemm_fused(py::module_& m);   // gemm_fused.cpp

namespace {

py::dict device_info(const Driver& cuda, int ordinal) {
  CUdevice device = 0;
  char name[256] = {};
  size_t total_memory = 0;
  int multiprocessors = 0, major = 0, minor = 0;
  TE_LITE_CHECK(cuda, cuDeviceGet, &device, ordinal);
  TE_LITE_CHECK(cuda, cuDeviceGetName, name, static_cast<int>(sizeof name), device);
  TE_LITE_CHECK(cuda, cuDeviceTotalMem, &total_memory, device);
  TE_LITE_CHECK(cuda, cuDeviceGetAttribute, &multiprocessors, kAttributeMultiprocessorCount, device);
  TE_LITE_CHECK(cuda, cuDeviceGetAttribute, &major, kAttributeComputeCapabilityMajor, device);
  TE_LITE_CHECK(cuda, cuDeviceGetAttribute, &minor, kAttributeComputeCapabilityMinor, device);
  return py::dict("name"_a = name, "ordinal"_a = ordinal, "compute_capability"_a = py::make_tuple(major, minor),
                  "total_memory"_a = total_memory, "multiprocessors"_a = multiprocessors);
}

py::dict driver_info() {
  std::string reason;
  int version = 0;
  py::list devices;
  try {
    const py::gil_scoped_release release;  // cuInit takes up to seconds
    // Works without cuInit, so the version is known also where every device is hidden.
    TE_LITE_CHECK(opened_driver(), cuDriverGetVersion, &version);
    driver();
  } catch (const DriverUnavailable& unavailable) {
    reason = unavailable.what();
  }
  if (reason.empty()) {
    const Driver& cuda = driver();
    int count = 0;
    TE_LITE_CHECK(cuda, cuDeviceGetCount, &count);
    for (int ordinal = 0; ordinal < count; ++ordinal) devices.append(device_info(cuda, ordinal));
    if (devices.empty()) reason = "the driver shows no device: check CUDA_VISIBLE_DEVICES";
  }
  return py::dict("available"_a = reason.empty(), "reason"_a = reason, "driver_version"_a = version,
                  "devices"_a = devices);
}

uint64_t pack(char kind, PyObject* value) {
  if (kind == 'p') return value == Py_None ? 0 : PyLong_AsUnsignedLongLong(value);
  if (kind != 'f') return static_cast<uint64_t>(PyLong_AsLongLong(value));  // little-endian: int32 is the low half
  const float number = static_cast<float>(PyFloat_AsDouble(value));
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof number);
  return bits;
}

void launch(const Kernel& kernel, unsigned programs, uint64_t stream, const py::tuple& values) {
  uint64_t arguments[kMostArguments];
  const std::string& kinds = kernel.kinds();
  if (values.size() != kinds.size()) {
    throw std::invalid_argument("a launch with " + std::to_string(values.size()) + " arguments: the kernel takes " +
                                std::to_string(kinds.size()));
  }
  int count = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] != '-') arguments[count++] = pack(kinds[i], PyTuple_GET_ITEM(values.ptr(), i));
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  py::gil_scoped_release release;  // the driver blocks when the stream's queue is full
  kernel.launch(programs, stream, arguments, count);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What Python cannot do. Importing it opens no driver; the first call that needs one does.";
  m.def("driver_info", &driver_info, "The CUDA driver and its devices. See _C.pyi.");
  py::class_<Kernel>(m, "Kernel", "A compiled kernel, ready to launch. See _C.pyi.")
      .def(py::init<uint64_t, int, int, std::string, bool>(), "function"_a, "threads"_a, "shared_bytes"_a, "kinds"_a,
           "early"_a = false)
      .def("launch", &launch, "programs"_a, "stream"_a, "arguments"_a);
  bind_cuda_memory(m);
  bind_userbuffers(m);
  bind_gemm_fused(m);
}
