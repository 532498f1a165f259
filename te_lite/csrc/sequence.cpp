// Launches between which nothing stands, issued by one call: recorded once (te_lite/ops/recorder.py), with addresses that
// each call gives anew.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cublaslt.h"
#include "launch.h"

using namespace te_lite;

namespace {

// Of DLPack's version 1: how a library's tensors are seen from C.
struct DLPackExchangeAPI {
  uint32_t major, minor;
  void* unused[4];
  // A view of the tensor, valid while that lives. Not 0: a Python error is set.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
};

// A tensor of torch's without torch's headers; all zero for None.
DLTensor look(const py::handle& tensor) {
  static const DLPackExchangeAPI* torch = nullptr;  // set under the GIL, perhaps twice to the same
  if (!torch) {
    const py::capsule found = py::module_::import("torch").attr("Tensor").attr("__dlpack_c_exchange_api__");
    const auto* api = found.get_pointer<const DLPackExchangeAPI>();
    if (api->major != 1) throw std::runtime_error("torch's DLPack is of another major version than 1");
    torch = api;
  }
  DLTensor seen{};
  if (!tensor.is_none() && torch->dltensor_from_py_object_no_sync(tensor.ptr(), &seen)) throw py::error_already_set();
  return seen;
}

py::tuple described(const py::tuple& tensors) {
  std::vector<const void*> at;
  std::string out;
  const auto append = [&out](const void* from, size_t bytes) { out.append(static_cast<const char*>(from), bytes); };
  for (const py::handle& tensor : tensors) {
    const DLTensor seen = look(tensor);
    const auto first = seen.data ? std::find(at.begin(), at.end(), seen.data) - at.begin() : -1;
    const uint64_t where[2] = {static_cast<uint64_t>(first), reinterpret_cast<uintptr_t>(seen.data) & 255};
    at.push_back(seen.data);
    append(&seen.device_type, 16);  // the device, how many dimensions, the dtype
    append(where, sizeof where);
    append(seen.shape, seen.dimensions * sizeof *seen.shape);
    append(seen.strides, seen.dimensions * sizeof *seen.strides);
  }
  const auto* addresses = reinterpret_cast<const char*>(at.data());
  return py::make_tuple(py::bytes(out), py::bytes(addresses, at.size() * sizeof *at.data()));
}

struct Patch {  // arguments[argument] = addresses[slot] + offset
  int argument;
  size_t slot;
  uint64_t offset;
};
using Patches = std::vector<std::tuple<int, size_t, uint64_t>>;

struct Step {
  const Kernel* kernel;  // or gemm; where there is neither, zeros
  GemmPlan* gemm;
  unsigned programs;
  size_t bytes;  // of zeros
  std::vector<uint64_t> arguments;
  std::vector<Patch> patches;
};

class Sequence {
 public:
  explicit Sequence(size_t slots) : slots_(slots) {}

  // values: as Kernel.launch takes them. patches: (position in values, slot, offset) of each that is an address.
  void add_kernel(const py::object& kernel, unsigned programs, const py::tuple& values, const Patches& patches) {
    const Kernel& known = kernel.cast<const Kernel&>();
    std::vector<uint64_t> arguments = packed(known, values);
    std::vector<int> places;  // of each value among the arguments
    int count = 0;
    for (const char kind : known.kinds()) places.push_back(kind == '-' ? -1 : count++);
    add({&known, nullptr, programs, 0, std::move(arguments), {}}, patches, &places);
    held_.append(kernel);
  }

  // patches: (position among GemmPlan.run's addresses, slot, offset).
  void add_gemm(const py::object& plan, const Patches& patches) {
    add({nullptr, &plan.cast<GemmPlan&>(), 0, 0, std::vector<uint64_t>(kGemmAddresses), {}}, patches, nullptr);
    held_.append(plan);
  }

  void add_zeros(size_t bytes, size_t slot, uint64_t offset) {
    add({nullptr, nullptr, 0, bytes, std::vector<uint64_t>(1), {}}, {{0, slot, offset}}, nullptr);
  }

  void run(uint64_t stream, std::string_view first, const py::list& rest) const {
    std::vector<uint64_t> at(first.size() / sizeof(uint64_t));
    std::memcpy(at.data(), first.data(), at.size() * sizeof(uint64_t));
    for (const py::handle& tensor : rest) at.push_back(reinterpret_cast<uint64_t>(look(tensor).data));
    if (at.size() != slots_) throw std::invalid_argument(std::to_string(at.size()) + " tensors: not one for each slot");
    const py::gil_scoped_release release;  // the driver blocks when the stream's queue is full
    uint64_t arguments[kMostArguments];
    for (const Step& step : steps_) {
      if (step.kernel) {
        step.kernel->enter();  // for what comes before it too
        break;
      }
    }
    for (const Step& step : steps_) {
      std::copy(step.arguments.begin(), step.arguments.end(), arguments);
      for (const Patch& patch : step.patches) arguments[patch.argument] = at[patch.slot] + patch.offset;
      if (step.gemm) {
        const uint64_t* const a = arguments;
        step.gemm->run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], stream);
      } else if (step.kernel) {
        step.kernel->launch(step.programs, stream, arguments, static_cast<int>(step.arguments.size()));
      } else {
        TE_LITE_CHECK(cuMemsetD8Async, arguments[0], 0, step.bytes, reinterpret_cast<void*>(stream));
      }
    }
  }

 private:
  static constexpr size_t kGemmAddresses = 7;

  void add(Step step, const Patches& patches, const std::vector<int>* places) {
    for (const auto& [position, slot, offset] : patches) {
      const int argument = places ? places->at(position) : position;
      if (argument < 0 || argument >= static_cast<int>(step.arguments.size()) || slot >= slots_) {
        throw std::invalid_argument("a step's address " + std::to_string(position) + " from slot " +
                                    std::to_string(slot) + ": it has no such argument, or the sequence no such slot");
      }
      step.patches.push_back({argument, slot, offset});
    }
    steps_.push_back(std::move(step));
  }

  const size_t slots_;
  std::vector<Step> steps_;
  py::list held_;  // what the steps point to
};

}  // namespace

void bind_sequence(py::module_& m) {
  py::class_<Sequence>(m, "Sequence", "Launches issued by one call. See _C.pyi.")
      .def(py::init<size_t>(), "slots"_a)
      .def("add_kernel", &Sequence::add_kernel, "kernel"_a, "programs"_a, "values"_a, "patches"_a)
      .def("add_gemm", &Sequence::add_gemm, "plan"_a, "patches"_a)
      .def("add_zeros", &Sequence::add_zeros, "bytes"_a, "slot"_a, "offset"_a)
      .def("run", &Sequence::run, "stream"_a, "first"_a, "rest"_a);
  m.def("described", &described, "tensors"_a);
}
