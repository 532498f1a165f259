// GEMMs by cublasLt: descriptors and algorithms of a problem are kept, so that a call is little more than a launch.
// No header of CUDA's is needed to build, and nothing is linked: the library is the one that torch has loaded.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace te_lite {

using Status = int;
// Of cublasLt's public ABI, the same from CUDA 12.0 to 13; scale modes came with 12.8 (tests/csrc/test_cublaslt.py).
constexpr int kCompute32F = 68, kReal32F = 0;
constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr int kScaleA = 17, kScaleB = 18, kFastAccum = 25, kBiasType = 26, kModeA = 31, kModeB = 32;
constexpr int kMostWorkspace = 1, kAlignmentA = 5;  // and of B, C, D behind it
constexpr uint32_t kEpilogueBias = 4;
constexpr uint64_t kAnyAddress = 256;  // for the heuristic, which wants one; each call sets its own
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  Status status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96, "cublasLt's ABI");

#define TE_LITE_LT_ENTRIES(X) \
  X(cublasLtGetStatusString, const char*, (Status status)) \
  X(cublasLtCreate, Status, (void** handle)) \
  X(cublasLtMatmulDescCreate, Status, (void** operation, int compute, int scale)) \
  X(cublasLtMatmulDescDestroy, Status, (void* operation)) \
  X(cublasLtMatmulDescSetAttribute, Status, (void* operation, int attribute, const void* value, size_t bytes)) \
  X(cublasLtMatrixLayoutCreate, Status, (void** layout, int type, uint64_t rows, uint64_t columns, int64_t apart)) \
  X(cublasLtMatrixLayoutDestroy, Status, (void* layout)) \
  X(cublasLtMatmulPreferenceCreate, Status, (void** preference)) \
  X(cublasLtMatmulPreferenceDestroy, Status, (void* preference)) \
  X(cublasLtMatmulPreferenceSetAttribute, Status, (void* preference, int attribute, const void* value, size_t bytes)) \
  X(cublasLtMatmulAlgoGetHeuristic, Status, \
    (void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int wanted, \
     Heuristic* results, int* count)) \
  X(cublasLtMatmul, Status, \
    (void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout, \
     const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const void* algorithm, void* workspace, \
     size_t bytes, void* stream))

// The library with a handle for the device that is current.
struct Cublaslt {
  explicit Cublaslt(const std::string& soname) {
    void* library = dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!library) throw std::runtime_error(soname + " is not loaded in this process");
#define TE_LITE_RESOLVE(name, result, parameters) resolve(library, #name, name);
    TE_LITE_LT_ENTRIES(TE_LITE_RESOLVE)
#undef TE_LITE_RESOLVE
    check(cublasLtCreate(&handle), "cublasLtCreate");
  }
  Cublaslt(const Cublaslt&) = delete;  // never destroyed: it would have to be before the driver

  template <typename Function>
  void resolve(void* library, const char* symbol, Function& entry) {
    entry = reinterpret_cast<Function>(dlsym(library, symbol));
    if (!entry) throw std::runtime_error(std::string("cublasLt has no symbol ") + symbol);
  }

  void check(Status status, const char* call) const {
    if (!status) return;
    throw std::runtime_error(std::string(call) + " failed: " + cublasLtGetStatusString(status));
  }

#define TE_LITE_FIELD(name, result, parameters) result(*name) parameters;
  TE_LITE_LT_ENTRIES(TE_LITE_FIELD)
#undef TE_LITE_FIELD
  void* handle = nullptr;
};

using Owned = std::unique_ptr<void, Status (*)(void*)>;  // a descriptor, with what frees it

// out[m, n] = a[m, k] @ b[n, k]^T (+ bias[n], of out's type) (+ out): out contiguous, fp32 inside.
class GemmPlan {
 public:
  // Types as cudaDataType_t, scales as cublasLtMatmulMatrixScale_t, -1 where operands have none (16 bits). a_turned,
  // b_turned: the operand lies as [k, m], [k, n]. a_apart, b_apart: elements from one row to the next, as it lies.
  // alignment: bytes of which every address but those of the scales is a multiple. most_workspace: bytes that an
  // algorithm may ask for. most_algorithms: to ask the heuristic for. Its first is used until choose() says another.
  GemmPlan(std::shared_ptr<Cublaslt> library, uint64_t m, uint64_t n, uint64_t k, int a_type, int b_type, int out_type,
           int a_scale, int b_scale, bool a_turned, uint64_t a_apart, bool b_turned, uint64_t b_apart, bool bias,
           bool fast, bool accumulate, uint32_t alignment, uint64_t most_workspace, int most_algorithms)
      : lt_(std::move(library)), scaled_(a_scale >= 0), bias_(bias), beta_(accumulate ? 1.0f : 0.0f) {
    void* made = nullptr;
    check(lt_->cublasLtMatmulDescCreate(&made, kCompute32F, kReal32F), "cublasLtMatmulDescCreate");
    operation_ = Owned(made, lt_->cublasLtMatmulDescDestroy);
    // cublasLt counts by column, so it is asked for the transpose: out^T = b @ a^T.
    set(kTransA, int32_t{!b_turned});
    set(kTransB, int32_t{a_turned});
    if (scaled_) {
      set(kModeA, int32_t{b_scale});
      set(kModeB, int32_t{a_scale});
      set(kFastAccum, int8_t{fast});
      set(kScaleA, kAnyAddress);
      set(kScaleB, kAnyAddress);
    }
    if (bias) {
      set(kEpilogue, kEpilogueBias);
      set(kBiasType, int32_t{out_type});
      set(kBiasPointer, kAnyAddress);
    }
    b_ = b_turned ? layout(b_type, n, k, b_apart) : layout(b_type, k, n, b_apart);
    a_ = a_turned ? layout(a_type, m, k, a_apart) : layout(a_type, k, m, a_apart);
    out_ = layout(out_type, n, m, n);
    check(lt_->cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    const Owned preference(made, lt_->cublasLtMatmulPreferenceDestroy);
    const auto prefer = [&](int attribute, auto value) {
      check(lt_->cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(kMostWorkspace, most_workspace);
    for (int i = 0; i < 4; ++i) prefer(kAlignmentA + i, alignment);
    found_.resize(most_algorithms);
    int count = 0;
    check(lt_->cublasLtMatmulAlgoGetHeuristic(lt_->handle, operation_.get(), b_.get(), a_.get(), out_.get(), out_.get(),
                                              preference.get(), most_algorithms, found_.data(), &count),
          "cublasLtMatmulAlgoGetHeuristic");
    found_.resize(count);
    const auto failed = [](const Heuristic& one) { return one.status != 0; };
    found_.erase(std::remove_if(found_.begin(), found_.end(), failed), found_.end());
    if (found_.empty()) throw std::runtime_error("cublasLtMatmulAlgoGetHeuristic found no algorithm");
    for (const Heuristic& one : found_) workspace_ = std::max(workspace_, one.workspace);
  }

  // Enough for every algorithm: a recording's workspace must do for one that is chosen later.
  size_t workspace() const { return workspace_; }
  size_t algorithms() const { return found_.size(); }

  // Of `algorithms`, for the runs that follow.
  void choose(size_t algorithm) {
    found_.at(algorithm);  // or raises
    const std::lock_guard<std::mutex> lock(busy_);
    chosen_ = algorithm;
  }

  // Addresses; 0 where there is no scale, bias or workspace.
  void run(uint64_t a, uint64_t b, uint64_t out, uint64_t a_scale, uint64_t b_scale, uint64_t bias, uint64_t workspace,
           uint64_t stream) {
    const auto at = [](uint64_t address) { return reinterpret_cast<void*>(address); };
    const float one = 1.0f;
    const std::lock_guard<std::mutex> lock(busy_);  // the descriptor holds the addresses of one call
    if (scaled_) {
      set(kScaleA, b_scale);
      set(kScaleB, a_scale);
    }
    if (bias_) set(kBiasPointer, bias);
    check(lt_->cublasLtMatmul(lt_->handle, operation_.get(), &one, at(b), b_.get(), at(a), a_.get(), &beta_, at(out),
                              out_.get(), at(out), out_.get(), found_[chosen_].algorithm, at(workspace),
                              found_[chosen_].workspace, at(stream)),
          "cublasLtMatmul");
  }

 private:
  void check(Status status, const char* call) const { lt_->check(status, call); }

  template <typename Value>
  void set(int attribute, Value value) {
    check(lt_->cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }

  Owned layout(int type, uint64_t rows, uint64_t columns, uint64_t apart) const {
    void* made = nullptr;
    check(lt_->cublasLtMatrixLayoutCreate(&made, type, rows, columns, static_cast<int64_t>(apart)),
          "cublasLtMatrixLayoutCreate");
    return Owned(made, lt_->cublasLtMatrixLayoutDestroy);
  }

  const std::shared_ptr<Cublaslt> lt_;
  const bool scaled_, bias_;
  const float beta_;
  Owned operation_{nullptr, nullptr}, a_{nullptr, nullptr}, b_{nullptr, nullptr}, out_{nullptr, nullptr};
  std::vector<Heuristic> found_;
  size_t chosen_ = 0, workspace_ = 0;
  std::mutex busy_;
};

}  // namespace te_lite
