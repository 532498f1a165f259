// Host side of gemm_scatter.cu.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "gemm_scatter.h"

#include <algorithm>
#include <stdexcept>

#include "check.h"
#include "launch.h"

namespace py = pybind11;
using namespace te_lite;

namespace {

// Boxes of [rows, columns] that are 128 bytes wide, as wgmma wants them.
TensorMap tensor_map(uint64_t address, unsigned bytes, int rows, int columns, unsigned box_rows) {
  TensorMap map;
  const unsigned long long sizes[] = {static_cast<unsigned long long>(columns), static_cast<unsigned long long>(rows)};
  const unsigned long long stride = sizes[0] * bytes;
  const unsigned box[] = {kBoxBytes / bytes, box_rows}, steps[] = {1, 1};
  const Driver& cuda = driver();
  TE_LITE_CHECK(cuda, cuTensorMapEncodeTiled, &map, bytes == 1 ? kMapUint8 : kMapUint16, 2, address, sizes, &stride, box,
                steps, 0, kMapSwizzle128, kMapPromote128, 0);
  return map;
}

// A compiled gemm_scatter for one kind of operands. Built and launched where the device's context is current.
class GemmScatter {
 public:
  GemmScatter(const std::string& cubin, unsigned element_bytes, unsigned columns, bool transposed)
      : kernel_(load(cubin), kScatterThreads, kScatterShared, ""),
        bytes_(element_bytes),
        columns_(columns),
        transposed_(transposed) {}

  // to: [m, n] of each rank, this one's being its output. slots: [ranks * m, n].
  void launch(unsigned programs, uint64_t stream, uint64_t a, uint64_t b, uint64_t slots,
              const std::vector<uint64_t>& to, GemmScatterArguments& p) const {
    const int rows = static_cast<int>(to.size()) * p.m;
    GemmScatterMaps maps{};
    maps.a = tensor_map(a, bytes_, rows, p.k, kTileRows);
    maps.b = transposed_ ? tensor_map(b, bytes_, p.k, p.n, kBoxBytes / bytes_)
                         : tensor_map(b, bytes_, p.n, p.k, columns_ / 2);
    maps.slots = tensor_map(slots, 2, rows, p.n, kTileRows);
    for (size_t i = 0; i < to.size(); ++i) maps.to[i] = tensor_map(to[i], 2, p.m, p.n, kTileRows / 2);
    void* parameters[] = {&maps, &p};
    kernel_.launch(programs, stream, parameters);
  }

 private:
  static uint64_t load(const std::string& cubin) {  // for the life of the process
    const Driver& cuda = driver();
    void *module = nullptr, *function = nullptr;
    TE_LITE_CHECK(cuda, cuModuleLoadData, &module, cubin.data());
    TE_LITE_CHECK(cuda, cuModuleGetFunction, &function, module, "gemm_scatter");
    TE_LITE_CHECK(cuda, cuFuncSetAttribute, function, kFunctionDynamicShared, kScatterShared);
    return reinterpret_cast<uint64_t>(function);
  }

  Kernel kernel_;
  unsigned bytes_, columns_;
  bool transposed_;  // b
};

template <typename T>
T pointer(uint64_t address) {
  return reinterpret_cast<T>(address);
}

void launch(const GemmScatter& kernel, unsigned programs, uint64_t stream, uint64_t a, uint64_t b, uint64_t slots,
            const std::vector<uint64_t>& to, const std::vector<uint64_t>& arrived, const std::vector<uint64_t>& tensors,
            const std::vector<int>& numbers) {
  if (to.size() > kMostScatterRanks || arrived.size() != to.size() || tensors.size() != 8 || numbers.size() != 10) {
    throw std::invalid_argument("a launch with " + std::to_string(to.size()) + " ranks, " +
                                std::to_string(tensors.size()) + " tensors and " + std::to_string(numbers.size()) +
                                " numbers: at most " + std::to_string(kMostScatterRanks) + ", 8 and 10 are taken");
  }
  GemmScatterArguments p{};
  std::transform(arrived.begin(), arrived.end(), p.arrived, pointer<int*>);
  p.ready = pointer<const int*>(tensors[0]);
  p.free = pointer<const int*>(tensors[1]);
  p.counters = pointer<unsigned*>(tensors[2]);
  p.word = pointer<const int*>(tensors[3]);
  p.abort = pointer<const int*>(tensors[4]);
  p.a_scale = pointer<const float*>(tensors[5]);
  p.b_scale = pointer<const float*>(tensors[6]);
  p.bias = pointer<const float*>(tensors[7]);
  int* const fields[] = {&p.delta, &p.m, &p.n, &p.k, &p.rank, &p.flags, &p.blocks, &p.lag, &p.pairs, &p.columns};
  for (size_t i = 0; i < numbers.size(); ++i) *fields[i] = numbers[i];
  kernel.launch(programs, stream, a, b, slots, to, p);
}

}  // namespace

void bind_gemm_scatter(py::module_& m) {
  m.attr("MOST_SCATTER_RANKS") = kMostScatterRanks;
  py::class_<GemmScatter>(m, "GemmScatter", "csrc/gemm_scatter.cu, compiled. See _C.pyi.")
      .def(py::init([](const py::bytes& cubin, unsigned element_bytes, unsigned columns, bool transposed) {
             return std::make_unique<GemmScatter>(std::string(cubin), element_bytes, columns, transposed);
           }),
           py::arg("cubin"), py::arg("element_bytes"), py::arg("columns"), py::arg("transposed"))
      .def("launch", &launch, py::arg("programs"), py::arg("stream"), py::arg("a"), py::arg("b"), py::arg("slots"),
           py::arg("to"), py::arg("arrived"), py::arg("tensors"), py::arg("numbers"),
           py::call_guard<py::gil_scoped_release>());
}
