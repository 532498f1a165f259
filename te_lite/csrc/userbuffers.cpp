// te_lite._C's part for userbuffers.
#include "bindings.h"
#include "executor.h"

using namespace te_lite;

namespace {

// DLPack's version 0, as the array API's "dltensor" capsule holds it.
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
static_assert(sizeof(DLManagedTensor) == 64);

struct Export : DLManagedTensor {  // its context: the owner, a PyObject
  int64_t bytes;                   // the shape
};

// The consumer may call this on any thread, and after the interpreter has ended.
void drop(DLManagedTensor* managed) {
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(managed->context));
  }
  delete static_cast<Export*>(managed);
}

py::object dlpack(uint64_t address, int64_t bytes, int device, const py::object& owner) {
  auto* out = new Export{{{}, owner.inc_ref().ptr(), &drop}, bytes};
  out->tensor = {
      reinterpret_cast<void*>(address), device < 0 ? 1 : 2, std::max(device, 0), 1, 1, 8, 1, &out->bytes, nullptr, 0};
  return py::capsule(static_cast<DLManagedTensor*>(out), "dltensor", [](PyObject* capsule) {
    // A consumer renames the capsule and has the deleter from then on.
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    drop(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
  });
}

std::unique_ptr<Executor> make_executor(int device, Control& control, uint64_t copy_stream, uint64_t flags,
                                        size_t flag_bytes, const Kernel* wait_kernel) {
  py::gil_scoped_release release;  // a context may take seconds; a call_guard would cover the new object's registration
  if (device < 0) return host_executor(control);
  if (!wait_kernel) throw std::invalid_argument("a CUDA executor without a wait kernel: pass wait_kernel");
  return cuda_executor(device, control, copy_stream, flags, flag_bytes, *wait_kernel);
}

}  // namespace

void bind_userbuffers(py::module_& m) {
  // memory
  m.def("dlpack", &dlpack, "address"_a, "bytes"_a, "device"_a, "owner"_a,
        "A 'dltensor' capsule: uint8 of one dimension over memory that owner keeps; device -1 is the CPU.");

  // control
  py::register_exception<GroupBroken>(m, "GroupBroken", PyExc_RuntimeError);
  m.attr("CONTROL_BYTES") = sizeof(ControlBlock);
  py::class_<Control>(m, "Control", "What the ranks of a group tell each other beside the work. See _C.pyi.")
      .def(py::init([](int rank, int size, const std::vector<uint64_t>& addresses, const py::object&, double timeout,
                       double silence, std::vector<int> names) {
             return std::make_unique<Control>(rank, size, addresses, timeout, silence, std::move(names));
           }),
           "rank"_a, "size"_a, "addresses"_a, "owner"_a, "timeout"_a, "silence"_a = 5.0, "names"_a = std::vector<int>(),
           py::keep_alive<1, 5>())
      .def("announce", &Control::announce, "operation"_a, "value"_a)
      .def("agree", &Control::agree, "operation"_a, "value"_a, Unlocked())
      .def("break_group", &Control::break_group, "message"_a)
      .def_property_readonly("broken", &Control::broken)
      .def_property_readonly("told", &Control::told)
      .def("check", &Control::check)
      .def("close", &Control::close, Unlocked());

  // programs
  py::class_<Program>(m, "Program", "Steps over buffers and flags, written down once. See _C.pyi.")
      .def(py::init<std::string>(), "name"_a)
      .def("copy", &Program::copy, "stream"_a, "to"_a, "argument"_a, "offset"_a, "bytes"_a, "rows"_a = 1, "pitch"_a = 0)
      .def("set", &Program::set, "stream"_a, "flag_address"_a, "delta"_a)
      .def("wait", &Program::wait, "flag_address"_a, "delta"_a, "rank"_a, "kind"_a)
      .def("expect", &Program::expect, "flag_address"_a, "delta"_a, "rank"_a, "kind"_a)
      .def("after", &Program::after, "stream"_a)
      .def("cut", &Program::cut);
  py::class_<Executor>(m, "Executor", "Issues programs to a copy thread or to streams. See _C.pyi.")
      .def(py::init(&make_executor), "device"_a, "control"_a, "copy_stream"_a = 0, "flags"_a = 0, "flag_bytes"_a = 0,
           "wait_kernel"_a = py::none(), py::keep_alive<1, 3>(), py::keep_alive<1, 7>())
      .def("issue", &Executor::issue, "program"_a, "segment"_a, "epoch"_a, "main_stream"_a, "arguments"_a,
           "epoch_word"_a = 0, Unlocked())
      .def("synchronize", &Executor::synchronize, Unlocked())
      .def("close", &Executor::close, Unlocked())
      .def_property_readonly("abort_address", &Executor::abort_address)
      .def("set_delays", &Executor::set_delays, "seed"_a, "max_microseconds"_a)
      .def("set_ignore_free", &Executor::set_ignore_free, "ignore"_a);
}
