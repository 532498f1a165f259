// The tiles of gemm_grouped.cu: their sizes, who takes which, and what the warps of a block share.
#pragma once

#include "gemm_grouped.h"
#include "hopper.h"

using namespace te_lite;
using Arguments = GroupedArguments;
using Maps = GroupedMaps;

#define IS_WORD_f32 1
#define IS_WORD_bf16 0
#define IS_WORD_f16 0
#define IS_WORD_(x) IS_WORD_##x
#define IS_WORD(x) IS_WORD_(x)

constexpr int kStep = kBoxBytes >> !IS_BYTE(A_TYPE);  // elements of K in a stage
constexpr u32 kABytes = kGroupedRows * kBoxBytes, kBBytes = COLUMNS * kBoxBytes, kTileBytes = kABytes + kBBytes;
constexpr u32 kScaleBytes = SCALES > 1 ? 4 * (kGroupedRows + COLUMNS) : 0;
constexpr u32 kLyingBytes = kStep * kBoxBytes;  // a box of an operand as it lies: kStep rows of 64 elements
constexpr int kRaster = 8;                      // pairs of rows of tiles in work at once
constexpr int kOutBytes = IS_WORD(OUT_TYPE) ? 4 : 2;
constexpr int kStages = COLUMNS == 256 ? 4 : 5;
constexpr int kPartColumns = 64;  // of a result's that pass through shared memory together, and bytes from row to row:
constexpr u32 kPitch = kPartColumns * kOutBytes + 8 * kOutBytes;  // no two threads meet in a bank
constexpr u32 kPartBytes = ROWS ? 0 : 8 * kPitch;                 // a warp's
static_assert(1024 + kStages * (kTileBytes + kScaleBytes + 16) + 8 * kPartBytes <= kBlockShared,
              "what Shared lays out");
static_assert(sizeof(Maps) + sizeof(Arguments) <= 4096, "a kernel's parameters");
static_assert(A_T == B_T && !(A_T && (IS_BYTE(A_TYPE) || ROWS)), "tokens come first in 16-bit operands of ROWS 0");
static_assert(kOutBytes == (ROWS ? 2 : ADD ? 4 : kOutBytes), "rows are written in 16 bits, and added to in fp32");
static_assert(!SPLIT || COLUMNS == 192, "registers hold two sums of so many columns");
static_assert(SCALES != 3 || (SPLIT == 1 && !ROWS), "each step has scales of its own");

using Pipeline = Stages<kStages>;

struct Tile {
  int group, row, col;  // of its result
  int end;              // of rows: beyond it nothing is written
  int first, tokens;    // of the group; ROWS 0: what is summed over
  int steps;
};

// The tiles of this cluster, group by group; in a group a few rows of tiles at a time column by column.
struct Walk {
  const Arguments& p;
  int number = blockIdx.x / 2, group = -1, before = 0, count = 0;  // before: tiles of earlier groups
  int first = 0, end = 0, pairs = 0;

  __device__ __forceinline__ explicit Walk(const Arguments& p) : p(p) {}
  __device__ __forceinline__ bool next(Tile& tile) {
    const int columns = (p.cols + COLUMNS - 1) / COLUMNS;
    while (number - before >= count) {
      if (++group >= p.groups) return false;
      before += count;
      first = p.layout[group], end = p.layout[group + 1];
      pairs = ((ROWS ? end - first : p.rows) + 2 * kGroupedRows - 1) / (2 * kGroupedRows);
      count = ADD && first == end ? 0 : pairs * columns;
    }
    const int at = number - before, top = at / (kRaster * columns) * kRaster, inside = at % (kRaster * columns);
    const int high = min(pairs - top, kRaster);
    const int row = ((top + inside % high) * 2 + cluster_rank()) * kGroupedRows;
    const int from = ROWS || A_T ? first : p.layout[p.groups + 2 + group];
    const int steps = max(1, ((ROWS ? p.k : end - first) + kStep - 1) / kStep);  // one over zeros where there are none
    tile = {group, ROWS ? first + row : row, inside / high * COLUMNS, ROWS ? end : p.rows, from, end - first, steps};
    number += gridDim.x / 2;
    return true;
  }
};

// Addresses in shared memory.
struct Shared {
  u32 stages, scales, parts, full, empty;  // parts: of each warp that multiplies

  __device__ __forceinline__ explicit Shared(void* raw) {
    stages = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;  // the swizzle's period
    scales = stages + kStages * kTileBytes, parts = scales + kStages * kScaleBytes;
    full = parts + 8 * kPartBytes, empty = full + 8 * kStages;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 4);  // 4 warpgroups
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};
