// gemm_fused.cu as the host has it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm_fused.h"
#include "launch.h"

namespace te_lite {

// Compiled for one kind of operands and loaded for one device, which need not be the current one.
class FusedGemm {
 public:
  FusedGemm(int device, const std::string& cubin, bool gather, unsigned element_bytes, unsigned columns,
            bool transposed, bool grad, bool narrow, unsigned act_bytes);

  // a to act_t: as in FusedMaps. arguments: FusedArguments as it lies in memory.
  void launch(unsigned programs, uint64_t stream, uint64_t a, uint64_t b, uint64_t other, uint64_t h,
              const std::vector<uint64_t>& to, const std::vector<uint64_t>& act, const std::vector<uint64_t>& act_t,
              const std::string& arguments) const;

 private:
  const PrimaryContext device_;
  const Kernel kernel_;
  bool gather_;
  unsigned bytes_, columns_;
  bool transposed_;  // b
  bool narrow_;
  unsigned act_bytes_;
};

}  // namespace te_lite
