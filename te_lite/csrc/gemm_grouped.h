// What gemm_grouped.cpp hands to the kernel in gemm_grouped.cu; read by both compilers.
#pragma once

#include "tensor_map.h"

namespace te_lite {

constexpr int kMostOuts = 256;
constexpr int kGroupedThreads = 384;  // two warpgroups that multiply, one that loads
constexpr int kGroupedRows = 128;     // of a block's tile; those of a cluster are neighbours

struct GroupedMaps {
  TensorMap a, b;
};
struct GroupedArguments {
  void* outs[kMostOuts];  // of each group [rows, cols]; ROWS: one [M, cols]
  const int* layout;      // [2, groups + 2], see te_lite/ops/grouped_layout.py
  const float* a_scale;
  const float* b_scale;
  int groups, rows, cols, k;         // rows: not of ROWS, k: of ROWS only, the rest is in the layout
  int a_scale_group, b_scale_group;  // elements of scales from group to group, or SCALES 3: from block to block
};

}  // namespace te_lite
