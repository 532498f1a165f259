// te_lite._C's part of cublaslt.h.
#include "cublaslt.h"

#include "bindings.h"

using namespace te_lite;

void bind_cublaslt(py::module_& m) {
  py::class_<Cublaslt, std::shared_ptr<Cublaslt>>(m, "Cublaslt", "cublasLt as torch has loaded it. See _C.pyi.")
      .def(py::init<const std::string&>(), "soname"_a, Unlocked());
  py::class_<GemmPlan>(m, "GemmPlan", "A product that cublasLt is ready to compute. See _C.pyi.")
      .def(py::init<std::shared_ptr<Cublaslt>, uint64_t, uint64_t, uint64_t, int, int, int, int, int, bool, uint64_t,
                    bool, uint64_t, bool, bool, bool, uint32_t, uint64_t, int>(),
           "library"_a, "m"_a, "n"_a, "k"_a, "a_type"_a, "b_type"_a, "out_type"_a, "a_scale"_a, "b_scale"_a,
           "a_turned"_a, "a_apart"_a, "b_turned"_a, "b_apart"_a, "bias"_a, "fast"_a, "accumulate"_a, "alignment"_a,
           "most_workspace"_a, "most_algorithms"_a = 1)
      .def_property_readonly("workspace", &GemmPlan::workspace)
      .def_property_readonly("algorithms", &GemmPlan::algorithms)
      .def("choose", &GemmPlan::choose, "algorithm"_a, Unlocked())
      .def("run", &GemmPlan::run, "a"_a, "b"_a, "out"_a, "a_scale"_a, "b_scale"_a, "bias"_a, "workspace"_a, "stream"_a,
           Unlocked());
}
