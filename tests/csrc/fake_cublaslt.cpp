// A cublasLt that computes nothing: its heuristic knows four algorithms, the third of which fails, and a product writes
// down which algorithm it was called with, and how many bytes of workspace.
#include <cstring>

#include "cublaslt.h"  // te_lite's, for what its heuristic gives

using te_lite::Heuristic;
using te_lite::Status;
static int made;

extern "C" {
const char* cublasLtGetStatusString(Status) { return "refused"; }
Status cublasLtCreate(void** handle) { return *handle = &made, 0; }
Status cublasLtMatmulDescCreate(void** made_, int, int) { return *made_ = &made, 0; }
Status cublasLtMatmulDescDestroy(void*) { return 0; }
Status cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
Status cublasLtMatrixLayoutCreate(void** made_, int, uint64_t, uint64_t, int64_t) { return *made_ = &made, 0; }
Status cublasLtMatrixLayoutDestroy(void*) { return 0; }
Status cublasLtMatmulPreferenceCreate(void** made_) { return *made_ = &made, 0; }
Status cublasLtMatmulPreferenceDestroy(void*) { return 0; }
Status cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }

Status cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Heuristic* results,
                                      int* count) {
  *count = wanted < 4 ? wanted : 4;
  for (int i = 0; i < *count; ++i) {
    results[i] = {};
    results[i].algorithm[0] = 100 + i;
    results[i].workspace = 16 * i;
    results[i].status = i == 2;
  }
  return 0;
}

Status cublasLtMatmul(void*, void*, const void*, void*, void*, const void*, void*, const void*, const void*, void*,
                      void* d, void*, const void* algorithm, void*, size_t bytes, void*) {
  std::memcpy(d, algorithm, 8);
  std::memcpy(static_cast<char*>(d) + 8, &bytes, 8);
  return 0;
}
}
