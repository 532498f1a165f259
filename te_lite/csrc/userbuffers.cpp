// te_lite._C's part for userbuffers. Signatures for Python are in te_lite/_C.pyi: change both together.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda_memory.h"
#include "executor.h"

namespace py = pybind11;
using namespace te_lite;
using Unlocked = py::call_guard<py::gil_scoped_release>;

namespace {

// DLPack's version 0 structures, as the array API's "dltensor" capsule holds them.
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
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64);

struct Export {
  DLManagedTensor managed;
  int64_t shape;
  PyObject* owner;
};

// The consumer may call this on any thread, and after the interpreter has ended.
void drop(DLManagedTensor* managed) {
  auto* out = static_cast<Export*>(managed->context);
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    Py_DECREF(out->owner);
  }
  delete out;
}

py::object dlpack(uint64_t address, int64_t bytes, int device, const py::object& owner) {
  auto* out = new Export{};
  out->shape = bytes;
  out->owner = owner.inc_ref().ptr();
  out->managed = {{reinterpret_cast<void*>(address), device < 0 ? 1 : 2, std::max(device, 0), 1, 1, 8, 1, &out->shape,
                   nullptr, 0},
                  out,
                  &drop};
  return py::capsule(&out->managed, "dltensor", [](PyObject* capsule) {
    // A consumer renames the capsule and has the deleter from then on.
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    drop(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
  });
}

std::unique_ptr<Executor> make_executor(int device, const std::vector<uint64_t>& streams, Control& control) {
  py::gil_scoped_release release;  // a context may take seconds; a call_guard would cover the new object's registration
  if (device < 0) return host_executor(static_cast<int>(streams.size()), control);
  return cuda_executor(device, streams, control);
}

void bind_memory(py::module_& m) {
  m.def("dlpack", &dlpack, py::arg("address"), py::arg("bytes"), py::arg("device"), py::arg("owner"),
        "A 'dltensor' capsule: uint8 of one dimension over memory that owner keeps; device -1 is the CPU.");
  py::class_<CudaMemory>(m, "CudaMemory", "Device memory that other processes can map. See _C.pyi.")
      .def_static("vmm", &CudaMemory::vmm, py::arg("device"), py::arg("bytes"), Unlocked())
      .def_static("import_fd", &CudaMemory::import_fd, py::arg("device"), py::arg("fd"), py::arg("bytes"), Unlocked())
      .def_static("ipc", &CudaMemory::ipc, py::arg("device"), py::arg("bytes"), Unlocked())
      .def_static("open_ipc", &CudaMemory::open_ipc, py::arg("device"), py::arg("handle"), py::arg("bytes"), Unlocked())
      .def("export_fd", &CudaMemory::export_fd)
      .def("ipc_handle", [](const CudaMemory& memory) { return py::bytes(memory.ipc_handle()); })
      .def_property_readonly("address", &CudaMemory::address)
      .def_property_readonly("bytes", &CudaMemory::bytes);
}

void bind_control(py::module_& m) {
  py::register_exception<GroupBroken>(m, "GroupBroken", PyExc_RuntimeError);
  m.attr("CONTROL_BYTES") = sizeof(ControlBlock);
  py::class_<Control>(m, "Control", "What the ranks of a group tell each other beside the work. See _C.pyi.")
      .def(py::init([](int rank, int size, const std::vector<uint64_t>& addresses, const py::object&, double timeout,
                       double silence, std::vector<int> names) {
             return std::make_unique<Control>(rank, size, addresses, timeout, silence, std::move(names));
           }),
           py::arg("rank"), py::arg("size"), py::arg("addresses"), py::arg("owner"), py::arg("timeout"),
           py::arg("silence") = 5.0, py::arg("names") = std::vector<int>(), py::keep_alive<1, 5>())
      .def("announce", &Control::announce, py::arg("operation"), py::arg("value"))
      .def("agree", &Control::agree, py::arg("operation"), py::arg("value"), Unlocked())
      .def("break_group", &Control::break_group, py::arg("message"))
      .def_property_readonly("broken", &Control::broken)
      .def_property_readonly("told", &Control::told)
      .def("check", &Control::check)
      .def("close", &Control::close, Unlocked());
}

void bind_executor(py::module_& m) {
  py::class_<Program>(m, "Program", "Steps over buffers and flags, written down once. See _C.pyi.")
      .def(py::init<std::string>(), py::arg("name"))
      .def("copy", &Program::copy, py::arg("stream"), py::arg("dst_arg"), py::arg("dst_off"), py::arg("src_arg"),
           py::arg("src_off"), py::arg("bytes"))
      .def("set", &Program::set, py::arg("stream"), py::arg("flag_address"), py::arg("delta"))
      .def("wait", &Program::wait, py::arg("stream"), py::arg("flag_address"), py::arg("delta"), py::arg("rank"),
           py::arg("kind"))
      .def("expect", &Program::expect, py::arg("flag_address"), py::arg("delta"), py::arg("rank"), py::arg("kind"))
      .def("after", &Program::after, py::arg("stream"), py::arg("other"))
      .def("cut", &Program::cut)
      .def_property_readonly("segments", &Program::segments);
  py::class_<Executor>(m, "Executor", "Issues programs to copy threads or to streams. See _C.pyi.")
      .def(py::init(&make_executor), py::arg("device"), py::arg("streams"), py::arg("control"), py::keep_alive<1, 4>())
      .def("issue", &Executor::issue, py::arg("program"), py::arg("segment"), py::arg("epoch"), py::arg("main_stream"),
           py::arg("arguments"), py::arg("epoch_word") = 0, Unlocked())
      .def("synchronize", &Executor::synchronize, Unlocked())
      .def("close", &Executor::close, Unlocked())
      .def("set_flags", &Executor::set_flags, py::arg("address"), py::arg("bytes"), Unlocked())
      .def_property_readonly("abort_address", &Executor::abort_address)
      .def_property("wait_kernel", nullptr, py::cpp_function(&Executor::set_wait_kernel, py::keep_alive<1, 2>()))
      .def("set_delays", &Executor::set_delays, py::arg("seed"), py::arg("max_microseconds"))
      .def("set_ignore_free", &Executor::set_ignore_free, py::arg("ignore"));
}

}  // namespace

void bind_userbuffers(py::module_& m) {
  bind_memory(m);
  bind_control(m);
  bind_executor(m);
}
