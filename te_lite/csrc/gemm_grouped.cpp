// Host side of gemm_grouped.cu.
#include "gemm_grouped.h"

#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "boxes.h"

using namespace te_lite;

namespace {

// gemm_grouped.cu compiled for one kind of operands and loaded for one device, which need not be the current one.
class GroupedGemm {
 public:
  GroupedGemm(int device, const std::string& cubin, unsigned element_bytes, unsigned columns, bool tokens_first)
      : device_(device),
        kernel_(load_kernel(device_, cubin, "gemm_grouped", kGroupedThreads)),
        bytes_(element_bytes),
        columns_(columns),
        tokens_first_(tokens_first) {}

  // a [a_rows, a_cols], b [b_rows, b_cols]. arguments: GroupedArguments as it lies in memory, behind its outs.
  void launch(unsigned programs, uint64_t stream, uint64_t a, int a_rows, int a_cols, uint64_t b, int b_rows,
              int b_cols, const std::vector<uint64_t>& outs, const std::string& arguments) const {
    const PrimaryContext::Scope scope(device_);
    GroupedArguments p{};
    constexpr size_t rest = sizeof p - sizeof p.outs;
    if (outs.size() > kMostOuts || arguments.size() != rest) {
      throw std::invalid_argument("a launch with " + std::to_string(outs.size()) + " outputs and " +
                                  std::to_string(arguments.size()) + " bytes of arguments: at most " +
                                  std::to_string(kMostOuts) + " and " + std::to_string(rest) + " are taken");
    }
    for (size_t i = 0; i < outs.size(); ++i) p.outs[i] = reinterpret_cast<void*>(outs[i]);
    std::memcpy(reinterpret_cast<char*>(&p) + sizeof p.outs, arguments.data(), rest);
    const unsigned deep = kBoxBytes / bytes_;
    const unsigned a_box = tokens_first_ ? deep : kGroupedRows, b_box = tokens_first_ ? deep : columns_ / 2;
    GroupedMaps maps{boxes(a, bytes_, a_rows, a_cols, a_box, deep), boxes(b, bytes_, b_rows, b_cols, b_box, deep)};
    void* parameters[] = {&maps, &p};
    kernel_.launch(programs, stream, parameters);
  }

 private:
  const PrimaryContext device_;
  const Kernel kernel_;
  unsigned bytes_, columns_;
  bool tokens_first_;  // operands are [tokens, features]
};

}  // namespace

void bind_gemm_grouped(py::module_& m) {
  m.attr("MOST_GROUPED_OUTS") = kMostOuts;
  py::class_<GroupedGemm>(m, "GroupedGemm", "csrc/gemm_grouped.cu, compiled. See _C.pyi.")
      .def(py::init<int, const std::string&, unsigned, unsigned, bool>(), "device"_a, "cubin"_a, "element_bytes"_a,
           "columns"_a, "tokens_first"_a)
      .def("launch", &GroupedGemm::launch, "programs"_a, "stream"_a, "a"_a, "a_rows"_a, "a_cols"_a, "b"_a, "b_rows"_a,
           "b_cols"_a, "outs"_a, "arguments"_a, Unlocked());
}
