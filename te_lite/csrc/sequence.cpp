// Launches, and between ranks programs, announcements and waits of streams, issued by one call: recorded once
// (te_lite/ops/recorder.py), with addresses and epochs that each call gives anew.
#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cublaslt.h"
#include "executor.h"
#include "fused_gemm.h"

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

py::bytes described(const py::tuple& tensors) {
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
  return out;
}

// (argument, slot, offset): arguments[argument] = addresses[slot] + offset.
using Patches = std::vector<std::tuple<int, size_t, uint64_t>>;
// (argument, slot): the lower half of arguments[argument] = addresses[slot]; a fused GEMM has another int32 above.
using EpochPatches = std::vector<std::tuple<int, size_t>>;

// What a Sequence issues at one place: a launch, a product, zeros, a segment of a program, an announcement or a wait.
// `arguments` are as they were recorded; each run patches a copy of them.
struct SequenceStep {
  std::function<void(uint64_t stream, uint64_t* arguments)> issue;
  uint64_t stream;  // 0: that of the call
  std::vector<uint64_t> arguments;
  Patches patches;
  EpochPatches epochs;
};

class Sequence {
 public:
  explicit Sequence(size_t slots) : slots_(slots) {}
  ~Sequence() {
    if (event_) driver().cuEventDestroy(event_);
  }

  // Where later steps are issued; 0: to the stream of the call.
  void on(uint64_t stream) { on_ = stream; }

  // values: as Kernel.launch takes them. patches: (position in values, slot, offset) of each that is an address;
  // epochs: (position, slot) of each integer that a call gives.
  void add_kernel(const py::object& kernel, unsigned programs, const py::tuple& values, const Patches& patches,
                  const EpochPatches& epochs) {
    const Kernel& known = kernel.cast<const Kernel&>();
    std::vector<uint64_t> arguments = packed(known, values);
    std::vector<int> places;  // of each value among the arguments
    int count = 0;
    for (const char kind : known.kinds()) places.push_back(kind == '-' ? -1 : count++);
    if (!first_) first_ = &known;
    add([&known, programs, count](uint64_t stream, uint64_t* a) { known.launch(programs, stream, a, count); },
        std::move(arguments), patches, epochs, &places);
    held_.append(kernel);
  }

  // patches: (position among GemmPlan.run's addresses, slot, offset).
  void add_gemm(const py::object& plan, const Patches& patches) {
    GemmPlan& known = plan.cast<GemmPlan&>();
    add([&known](uint64_t stream, uint64_t* a) { known.run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], stream); },
        std::vector<uint64_t>(7), patches, {}, nullptr);
    held_.append(plan);
  }

  void add_zeros(size_t bytes, size_t slot, uint64_t offset) {
    add([bytes](uint64_t stream,
                uint64_t* a) { TE_LITE_CHECK(cuMemsetD8Async, a[0], 0, bytes, reinterpret_cast<void*>(stream)); },
        std::vector<uint64_t>(1), {{0, slot, offset}}, {}, nullptr);
  }

  // counts: of to, act and act_t. values: a, b, other, h, those, then the words of FusedArguments.
  void add_fused(const py::object& gemm, unsigned programs, const std::tuple<size_t, size_t, size_t>& counts,
                 std::vector<uint64_t> values, const Patches& patches, const EpochPatches& epochs) {
    const FusedGemm& known = gemm.cast<const FusedGemm&>();
    const auto [to, act, act_t] = counts;
    const size_t last = 4 + to + act + act_t;
    if (values.size() != last + sizeof(FusedArguments) / sizeof(uint64_t)) {
      throw std::invalid_argument(std::to_string(values.size()) + " values of a fused GEMM: not those of " +
                                  std::to_string(last) + " addresses and its arguments");
    }
    const auto launch = [&known, programs, to = to, act = act, last](uint64_t stream, uint64_t* a) {
      const uint64_t *const of_to = a + 4, *const of_act = of_to + to, *const of_act_t = of_act + act;
      const uint64_t* const words = a + last;
      const std::string arguments(reinterpret_cast<const char*>(words), sizeof(FusedArguments));
      known.launch(programs, stream, a[0], a[1], a[2], a[3], {of_to, of_act}, {of_act, of_act_t}, {of_act_t, words},
                   arguments);
    };
    add(launch, std::move(values), patches, epochs, nullptr);
    held_.append(gemm);
  }

  // A segment of a program: its epoch is number 0, argument i of issue() address 1 + i.
  void add_issue(const py::object& executor, const py::object& program, int segment, size_t count,
                 const Patches& patches, const EpochPatches& epochs) {
    Executor& known = executor.cast<Executor&>();
    const Program& what = program.cast<const Program&>();
    const auto issue = [&known, &what, segment, count](uint64_t stream, uint64_t* a) {
      known.issue(what, segment, static_cast<uint32_t>(a[0]), stream, {a + 1, a + 1 + count}, 0);
    };
    add(issue, std::vector<uint64_t>(1 + count), patches, epochs, nullptr);
    held_.append(executor);
    held_.append(program);
  }

  void add_announce(const py::object& control, const std::string& operation, int64_t value) {
    Control& known = control.cast<Control&>();
    add([&known, operation, value](uint64_t, uint64_t*) { known.announce(operation, value); }, {}, {}, {}, nullptr);
    held_.append(control);
  }

  // What comes on the stream waits for what the other has been given; 0: that of the call.
  void add_wait(uint64_t waits, uint64_t other) {
    if (!event_) {
      TE_LITE_CHECK(cuEventCreate, &event_, kEventDisableTiming);
      TE_LITE_CHECK(cuCtxGetCurrent, &context_);
    }
    const auto wait = [this, waits, other](uint64_t stream, uint64_t*) {
      TE_LITE_CHECK(cuCtxSetCurrent, context_);  // a thread may have none
      TE_LITE_CHECK(cuEventRecord, event_, reinterpret_cast<void*>(other ? other : stream));
      TE_LITE_CHECK(cuStreamWaitEvent, reinterpret_cast<void*>(waits ? waits : stream), event_, 0);
    };
    const uint64_t before = std::exchange(on_, 0);
    add(wait, {}, {}, {}, nullptr);
    on_ = before;
  }

  void run(uint64_t stream, const py::list& tensors, const std::vector<uint64_t>& epochs) const {
    std::vector<uint64_t> at;
    at.reserve(slots_);
    for (const py::handle& tensor : tensors) at.push_back(reinterpret_cast<uint64_t>(look(tensor).data));
    at.push_back(0);  // from where what stays in its place is counted
    at.insert(at.end(), epochs.begin(), epochs.end());
    if (at.size() != slots_) throw std::invalid_argument(std::to_string(at.size()) + " values: not one for each slot");
    const py::gil_scoped_release release;  // the driver blocks when the stream's queue is full
    std::vector<uint64_t> arguments(most_);
    if (first_) first_->enter();  // for what comes before it too
    for (const SequenceStep& step : steps_) {
      std::copy(step.arguments.begin(), step.arguments.end(), arguments.begin());
      for (const auto& [argument, slot, offset] : step.patches) arguments[argument] = at[slot] + offset;
      for (const auto& [argument, slot] : step.epochs) {
        arguments[argument] = (arguments[argument] & ~uint64_t{0xFFFFFFFF}) | (at[slot] & 0xFFFFFFFF);
      }
      step.issue(step.stream ? step.stream : stream, arguments.data());
    }
  }

 private:
  void add(std::function<void(uint64_t, uint64_t*)> issue, std::vector<uint64_t> arguments, const Patches& patches,
           const EpochPatches& epochs, const std::vector<int>* places) {
    SequenceStep step{std::move(issue), on_, std::move(arguments), {}, {}};
    const auto placed = [&](int position, size_t slot) {
      const int argument = places ? places->at(position) : position;
      if (argument < 0 || argument >= static_cast<int>(step.arguments.size()) || slot >= slots_) {
        throw std::invalid_argument("a step's value " + std::to_string(position) + " from slot " +
                                    std::to_string(slot) + ": it has no such argument, or the sequence no such slot");
      }
      return argument;
    };
    for (const auto& [position, slot, offset] : patches) step.patches.push_back({placed(position, slot), slot, offset});
    for (const auto& [position, slot] : epochs) step.epochs.push_back({placed(position, slot), slot});
    most_ = std::max(most_, step.arguments.size());
    steps_.push_back(std::move(step));
  }

  const size_t slots_;
  size_t most_ = 0;
  uint64_t on_ = 0;
  // One is enough: a stream that waits for it keeps to what was recorded by then, and one host thread at a time issues
  // to a second stream (ops/launch.py, side_stream).
  void* event_ = nullptr;
  void* context_ = nullptr;  // the event's
  const Kernel* first_ = nullptr;
  std::vector<SequenceStep> steps_;
  py::list held_;  // what the steps point to
};

}  // namespace

void bind_sequence(py::module_& m) {
  py::class_<Sequence>(m, "Sequence", "Steps issued by one call. See _C.pyi.")
      .def(py::init<size_t>(), "slots"_a)
      .def("on", &Sequence::on, "stream"_a)
      .def("add_kernel", &Sequence::add_kernel, "kernel"_a, "programs"_a, "values"_a, "patches"_a, "epochs"_a)
      .def("add_gemm", &Sequence::add_gemm, "plan"_a, "patches"_a)
      .def("add_zeros", &Sequence::add_zeros, "bytes"_a, "slot"_a, "offset"_a)
      .def("add_fused", &Sequence::add_fused, "gemm"_a, "programs"_a, "counts"_a, "values"_a, "patches"_a, "epochs"_a)
      .def("add_issue", &Sequence::add_issue, "executor"_a, "program"_a, "segment"_a, "count"_a, "patches"_a,
           "epochs"_a)
      .def("add_announce", &Sequence::add_announce, "control"_a, "operation"_a, "value"_a)
      .def("add_wait", &Sequence::add_wait, "waits"_a, "other"_a)
      .def("run", &Sequence::run, "stream"_a, "tensors"_a, "epochs"_a = std::vector<uint64_t>());
  m.def("described", &described, "tensors"_a);
}
