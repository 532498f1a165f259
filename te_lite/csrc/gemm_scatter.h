// What gemm_scatter.cpp hands to the kernel in gemm_scatter.cu; read by both compilers.
#pragma once

namespace te_lite {

constexpr int kTileRows = 128;
constexpr int kBoxBytes = 128;   // a row of every box that the tensor-copy unit moves: elements of K, or of a row
constexpr int kBoxColumns = 64;  // so many of the output's
constexpr int kMostScatterRanks = 8;
constexpr int kScatterThreads = 384;  // two warpgroups that multiply, one that loads and stores
constexpr int kScatterShared = 227 << 10;  // all that a block can have

struct alignas(64) TensorMap {
  char bytes[128];
};
struct GemmScatterMaps {
  TensorMap a, b;                     // [ranks * m, k]; [n, k] or, transposed, [k, n]
  TensorMap slots;                    // [ranks * m, n]: what the others store here
  TensorMap to[kMostScatterRanks];    // [m, n]: in each rank's memory, where this one's rows for it go; its own: out
};
struct GemmScatterArguments {
  int* arrived[kMostScatterRanks];    // in each rank's memory: flags [blocks], set to epoch once a block is stored
  const int* ready;                   // [ranks, flags]
  const int* free;                    // [ranks]: set to epoch by those who have read what was stored there
  unsigned* counters;                 // [ranks * blocks + 1] zeros, and zeros again at the end
  const int* word;                    // epoch = *word + delta
  const int* abort;
  const float* a_scale;               // [1] or [ranks * m]
  const float* b_scale;               // [1] or [n]
  const float* bias;                  // [n] or null
  int delta, m, n, k, rank, flags, blocks, lag;
  int pairs, columns;                 // a block has so many pairs of tiles, one below the other, in each column
};

}  // namespace te_lite
