// te_lite._C. Signatures for Python are in te_lite/_C.pyi: change both together.
#include <pybind11/pybind11.h>

#include <cstring>

#include "driver.h"
#include "launch.h"

namespace py = pybind11;

void bind_userbuffers(py::module_& m);  // userbuffers.cpp

namespace {

py::dict to_python(const te_lite::DeviceInfo& device) {
  py::dict out;
  out["name"] = device.name;
  out["ordinal"] = device.ordinal;
  out["compute_capability"] = py::make_tuple(device.compute_major, device.compute_minor);
  out["total_memory"] = device.total_memory;
  out["multiprocessors"] = device.multiprocessors;
  out["uuid"] = device.uuid;
  return out;
}

py::dict driver_info() {
  te_lite::DriverInfo info;
  {
    py::gil_scoped_release release;  // cuInit takes up to seconds
    info = te_lite::driver_info();
  }
  py::list devices;
  for (const auto& device : info.devices) devices.append(to_python(device));
  py::dict out;
  out["available"] = info.available;
  out["reason"] = info.reason;
  out["driver_version"] = info.driver_version;
  out["devices"] = devices;
  return out;
}

uint64_t pack(char kind, PyObject* value) {
  if (kind == 'p') return value == Py_None ? 0 : PyLong_AsUnsignedLongLong(value);
  if (kind != 'f') return static_cast<uint64_t>(PyLong_AsLongLong(value));  // little-endian: int32 is the low half
  const float number = static_cast<float>(PyFloat_AsDouble(value));
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof number);
  return bits;
}

void launch(const te_lite::Kernel& kernel, unsigned programs, uint64_t stream, const py::tuple& values) {
  uint64_t arguments[te_lite::kMostArguments];
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
  m.def("driver_info", &driver_info,
        "The CUDA driver and its devices as a dict; available is False, with a reason, where there are none.");
  m.def("can_access_peer", &te_lite::can_access_peer, py::arg("a"), py::arg("b"),
        py::call_guard<py::gil_scoped_release>(),
        "Whether device a can reach memory of device b (ordinals). RuntimeError without a driver, ValueError for "
        "an ordinal that does not exist.");
  py::class_<te_lite::Kernel>(m, "Kernel", "A compiled kernel, ready to launch. See _C.pyi.")
      .def(py::init<uint64_t, int, int, std::string>(), py::arg("function"), py::arg("threads"),
           py::arg("shared_bytes"), py::arg("kinds"))
      .def("launch", &launch, py::arg("programs"), py::arg("stream"), py::arg("arguments"));
  bind_userbuffers(m);
}
