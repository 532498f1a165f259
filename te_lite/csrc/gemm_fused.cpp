// Host side of gemm_fused.cu.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "boxes.h"
#include "fused_gemm.h"

using namespace te_lite;

FusedGemm::FusedGemm(int device, const std::string& cubin, bool gather, unsigned element_bytes, unsigned columns,
                     bool transposed, bool grad, bool narrow, unsigned act_bytes)
    : device_(device),
      kernel_(load_kernel(device_, cubin, gather ? "gemm_gather" : "gemm_scatter", FUSED_THREADS(grad))),
      gather_(gather),
      bytes_(element_bytes),
      columns_(columns),
      transposed_(transposed),
      narrow_(narrow),
      act_bytes_(act_bytes) {}

void FusedGemm::launch(unsigned programs, uint64_t stream, uint64_t a, uint64_t b, uint64_t other, uint64_t h,
                       const std::vector<uint64_t>& to, const std::vector<uint64_t>& act,
                       const std::vector<uint64_t>& act_t, const std::string& arguments) const {
  const PrimaryContext::Scope scope(device_);
  FusedArguments p;
  const size_t ranks = std::max({to.size(), act.size(), act_t.size()});
  if (ranks > kMostFusedRanks || arguments.size() != sizeof p) {
    throw std::invalid_argument("a launch with " + std::to_string(ranks) + " ranks and " +
                                std::to_string(arguments.size()) + " bytes of arguments: at most " +
                                std::to_string(kMostFusedRanks) + " and " + std::to_string(sizeof p) + " are taken");
  }
  std::memcpy(&p, arguments.data(), sizeof p);
  const int rows = static_cast<int>(ranks) * p.m;
  FusedMaps maps{};
  const unsigned deep = kBoxBytes / bytes_, wide = BOX_COLUMNS(columns_);  // boxes of operands, as wgmma wants them
  maps.a = boxes(a, bytes_, rows, p.k, kTileRows, deep);
  maps.b = transposed_ ? boxes(b, bytes_, p.k, p.n, deep, deep) : boxes(b, bytes_, p.n, p.k, columns_ / 2, deep);
  maps.other = gather_ ? boxes(other, bytes_, p.m, p.k, kTileRows, deep)
                       : boxes(other, narrow_ ? 1 : 2, rows, p.n, kTileRows, wide);
  for (size_t i = 0; i < to.size(); ++i) {
    const bool travels = !gather_ && static_cast<int>(i) != p.rank;
    maps.to[i] = boxes(to[i], travels && narrow_ ? 1 : 2, p.m, p.n, kTileRows / 2, wide);
  }
  if (h) {
    maps.h =
        gather_ ? boxes(h, 2, rows, 2 * p.n, kTileRows / 2, kBoxBytes / 2) : boxes(h, 2, p.m, p.n, kTileRows, wide);
  }
  const unsigned box = h ? 64 : kBoxBytes / act_bytes_;
  const int width = h ? 2 * p.n : p.n / 2;
  for (size_t i = 0; i < act.size(); ++i) {
    maps.act[i] = boxes(act[i], act_bytes_, p.m, width, kTileRows / 2, box);
  }
  for (size_t i = 0; i < act_t.size(); ++i) {
    maps.act_t[i] = boxes(act_t[i], 1, width, p.m, box, kTileRows / 2, rows);
  }
  void* parameters[] = {&maps, &p};
  kernel_.launch(programs, stream, parameters);
}

void bind_gemm_fused(py::module_& m) {
  m.attr("MOST_FUSED_RANKS") = kMostFusedRanks;
  py::class_<FusedGemm>(m, "FusedGemm", "csrc/gemm_fused.cu, compiled. See _C.pyi.")
      .def(py::init<int, const std::string&, bool, unsigned, unsigned, bool, bool, bool, unsigned>(), "device"_a,
           "cubin"_a, "gather"_a, "element_bytes"_a, "columns"_a, "transposed"_a, "grad"_a, "narrow"_a, "act_bytes"_a)
      .def("launch", &FusedGemm::launch, "programs"_a, "stream"_a, "a"_a, "b"_a, "other"_a, "h"_a, "to"_a, "act"_a,
           "act_t"_a, "arguments"_a, Unlocked());
}
