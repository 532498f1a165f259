// te_lite._C: the driver and launches; the other files add their parts.
#include "bindings.h"

#include <cstring>

using namespace te_lite;

namespace {

uint64_t pack(char kind, PyObject* value) {
  if (kind == 'p') return value == Py_None ? 0 : PyLong_AsUnsignedLongLong(value);
  if (kind != 'f') return static_cast<uint64_t>(PyLong_AsLongLong(value));  // little-endian: int32 is the low half
  const float number = static_cast<float>(PyFloat_AsDouble(value));
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof number);
  return bits;
}

}  // namespace

std::vector<uint64_t> packed(const Kernel& kernel, const py::tuple& values) {
  const std::string& kinds = kernel.kinds();
  if (values.size() != kinds.size()) {
    throw std::invalid_argument("a launch with " + std::to_string(values.size()) + " arguments: the kernel takes " +
                                std::to_string(kinds.size()));
  }
  std::vector<uint64_t> arguments;
  arguments.reserve(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] != '-') arguments.push_back(pack(kinds[i], PyTuple_GET_ITEM(values.ptr(), i)));
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  return arguments;
}

namespace {

py::dict driver_info() {
  std::string reason;
  int version = 0, devices = 0;
  try {
    const py::gil_scoped_release release;  // cuInit takes up to seconds
    // Works without cuInit, so the version is known also where every device is hidden.
    check(opened_driver().cuDriverGetVersion(&version), "cuDriverGetVersion");
    TE_LITE_CHECK(cuDeviceGetCount, &devices);
    if (!devices) reason = "the driver shows no device: check CUDA_VISIBLE_DEVICES";
  } catch (const DriverUnavailable& unavailable) {
    reason = unavailable.what();
  }
  return py::dict("available"_a = reason.empty(), "reason"_a = reason, "driver_version"_a = version,
                  "devices"_a = devices);
}

void launch(const Kernel& kernel, unsigned programs, uint64_t stream, const py::tuple& values) {
  std::vector<uint64_t> arguments = packed(kernel, values);
  const py::gil_scoped_release release;  // the driver blocks when the stream's queue is full
  kernel.launch(programs, stream, arguments.data(), static_cast<int>(arguments.size()));
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
  bind_gemm_grouped(m);
  bind_cublaslt(m);
  bind_sequence(m);
}
