// What gemm_fused.cpp hands to the kernel in gemm_fused.cu; read by both compilers. For a reduce-scatter; for an
// all-gather where it says so.
#pragma once

#include "tensor_map.h"

namespace te_lite {

constexpr int kTileRows = 128;
// Of the output's, of a tile's columns; a function would be the host's.
#define BOX_COLUMNS(columns) ((columns) % 64 ? 32 : 64)
constexpr int kMostFusedRanks = 8;
// Two warpgroups that multiply, one that loads and stores, and one for gradients.
#define FUSED_THREADS(grad) (384 + (grad) * 128)
struct FusedMaps {
  TensorMap a, b;   // [ranks * m, k]; [n, k] or, transposed, [k, n]
  TensorMap other;  // [ranks * m, n], NARROW: bytes: what the others store here; all-gather: own rows of a [m, k]
  TensorMap h;      // GRAD: [ranks * m, 2 * n]; RESIDUAL: [m, n]
  TensorMap to[kMostFusedRanks];  // [m, n]: in each rank's memory, where this one's rows for it go; its own, and all of
                                  // an all-gather's: out
  TensorMap act[kMostFusedRanks];    // of each rank's rows what is made of them: [m, width], bytes or of out's type, of
                                     // h the activation, n / 2 wide; GRAD: the gradient of h, 2 * n
  TensorMap act_t[kMostFusedRanks];  // bytes [width, m] in [width, ranks * m]
};
struct FusedArguments {
  int* arrived[kMostFusedRanks];      // in each rank's memory: flags [blocks], set to epoch once a block is stored
  float* scales_to[kMostFusedRanks];  // NARROW: there, [n / 128, m]: scales of what is stored in `to`
  const int* ready;                   // [ranks, flags]
  const int* free;                    // [ranks]: set to epoch by those who have read what was stored there
  unsigned* counters;                 // [1 + ranks * blocks] zeros, and zeros again at the end; all-gather: [1]
  const int* word;                    // epoch = *word + delta
  const int* abort;
  const float* a_scale;      // [1], [ranks] or [ranks * m]
  const float* own_scale;    // all-gather: [1] or [m], in place of those of this rank
  const float* b_scale;      // [1] or [n]
  const float* bias;         // [n] or null
  const float* act_scale;    // [1]
  float* act_scale_inv;      // [1], written
  unsigned* amax;            // fp32; ACT 2: [blocks of the launch * (GRAD ? 1 : 2)], each written; ACT 3: [1],
                             // raised, or null
  const float* slot_scales;  // NARROW: [ranks, n / 128, m]
  int delta, m, n, k, rank, flags, blocks, lag;
  int pairs, columns;  // a block has so many pairs of tiles, one below the other, in each column
  int scales;          // of a, from rank to rank: 0, 1 or m
};

}  // namespace te_lite
