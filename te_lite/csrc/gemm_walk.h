// The tiles of gemm_fused.cu: their sizes, who takes which, and what the warps of a block share.
#pragma once

#include "gemm_activation.h"
#include "gemm_fused.h"
#include "hopper.h"

using namespace te_lite;
using Arguments = FusedArguments;
using Maps = FusedMaps;

constexpr int kStep = kBoxBytes >> !IS_BYTE(A_TYPE);  // elements of K in a stage
constexpr u32 kABytes = kTileRows * kBoxBytes, kBBytes = COLUMNS * kBoxBytes, kStageBytes = kABytes + kBBytes;
constexpr bool kForward = ACT && !GRAD;  // a tile has columns of both halves of h
constexpr int kStages = COLUMNS == 128 ? 6 - GRAD : 4;
constexpr int kSplitSteps = 4;  // with SPLIT, of a sum in the tensor cores; docs/background/numerics.md, Accumulation
constexpr u32 kSlotBytes = NARROW ? kTileRows * (BOX_COLUMNS(COLUMNS) + 4) : kABytes;  // a box of a slot
constexpr int kSlotsPerStage =
    NARROW ? 3 : kStageBytes / kSlotBytes;  // of them in a stage; more would spill more registers
constexpr int kGroupRows = kTileRows / 2;   // of a warpgroup
constexpr int kBoxColumns = BOX_COLUMNS(COLUMNS), kWords = kBoxColumns / 4;  // words: a thread's, of a box
constexpr int kBoxes = COLUMNS / kBoxColumns;  // of these rows, side by side; kForward: half of them of each half
constexpr int kHalfColumns = COLUMNS / 2;
constexpr bool kStoresAct = ACT == 1 || ACT == 3;  // what is made of the product is stored
constexpr bool kTransposes = ACT == 3 && ACT_T;
constexpr int kActBoxes = ACT == 3 ? 1 + ACT_T : 2;  // boxes of it, where a tile has both halves of h
constexpr int kOutputBoxes = kBoxes + (kForward && kStoresAct ? kActBoxes : 0);  // boxes of output of a tile
constexpr int kOutputParts =
    kBoxes + (kForward ? 4 : 0);                      // in which a tile is handed over, while the next is multiplied
constexpr u32 kOutputBytes = kGroupRows * kBoxBytes;  // one of them
constexpr int kOutputSlots = GRAD ? 1 : 2;            // boxes of a warpgroup in shared memory
// Tiles taken and not forgotten. A cluster takes one at the earliest when it begins to load the one before, some stages
// before that is multiplied: with one step a tile, the oldest that anybody still has to look up.
constexpr int kQueue = 16;
constexpr int kRasterRows = 8;  // pairs of rows of an all-gather's tiles, in work at once

using Pipeline = Stages<kStages>;

struct Tile {
  int owner, block, row, col;  // row: within the owner's
};

// The walk. All-gather: shard by shard, a few rows of tiles at a time column by column. Reduce-scatter: block by block; in a
// block column by column, and there the others' rows and then own ones, `lag` blocks back.
__device__ __forceinline__ Tile tile_of(const Arguments& p, int pair) {
  if (GATHER) {
    const int shard = p.pairs * p.columns, left = pair % shard, first = left / (kRasterRows * p.columns) * kRasterRows;
    const int rows = min(p.pairs - first, kRasterRows), in_group = left % (kRasterRows * p.columns);
    return {(p.rank + pair / shard) % RANKS, 0, ((first + in_group % rows) * 2 + cluster_rank()) * kTileRows,
            in_group / rows * (kForward ? kHalfColumns : COLUMNS)};
  }
  const int pairs = p.pairs, own = pairs * p.columns, others = (RANKS - 1) * own, early = p.lag * others;
  const int middle = (p.blocks - p.lag) * (others + own);
  int block, sharers;
  if (pair < early) {
    block = pair / others, pair %= others, sharers = RANKS - 1;
  } else if (pair < early + middle) {
    pair -= early, block = p.lag + pair / (others + own), pair %= others + own, sharers = RANKS;
  } else {
    pair -= early + middle, block = p.blocks + pair / own, pair %= own, sharers = 1;
  }
  const int who = block < p.blocks ? pair % (sharers * pairs) / pairs : RANKS - 1;
  if (who == RANKS - 1) block -= p.lag;
  return {(p.rank + 1 + who) % RANKS, block, ((block * pairs + pair % pairs) * 2 + cluster_rank()) * kTileRows,
          pair / (sharers * pairs) * COLUMNS};
}

// Where a box of a tile lies in h. kForward: a tile has as many columns of each half. Gates beyond their half are the first
// columns of the other: two tiles then store the same columns with the same bits, for everything goes by the column.
__device__ __forceinline__ int column(const Arguments& p, const Tile& at, int box) {
  if (!kForward || box < kBoxes / 2) return at.col + box * kBoxColumns;
  return p.n / 2 + at.col + (box - kBoxes / 2) * kBoxColumns;
}

// Addresses in shared memory.
struct Shared {
  u32 stages;           // operands, or slots
  u32 output;           // for each warpgroup kOutputSlots boxes, used by turns
  u32 h, h_grads;       // GRAD: two times a box of gates and one of ups, by turns; their gradients
  u32 full, empty;      // barriers of stages
  u32 filled, drained;  // of boxes of output
  u32 checked;          // a tile's flags, if it is an own one, were there
  u32 queued, pair_of;  // the tiles that this cluster has taken: barriers, and the pairs
  u32 amaxes;           // of each warp that looks for one, of three warpgroups
  u32 h_full, h_empty;  // barriers of h

  __device__ __forceinline__ explicit Shared(void* raw) {
    stages = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;  // the swizzle's period
    output = stages + kStages * kStageBytes;
    h = output + 2 * kOutputSlots * kOutputBytes, h_grads = h + 4 * kOutputBytes;
    full = h + GRAD * 6 * kOutputBytes, empty = full + 8 * kStages;
    filled = empty + 8 * kStages, drained = filled + 32, checked = drained + 32;
    queued = checked + 8, pair_of = queued + 8 * kQueue, amaxes = pair_of + 4 * kQueue;
    h_full = amaxes + 48, h_empty = h_full + 16;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; i++)
      bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 4);  // 4 warpgroups in a cluster
    const int drain = GRAD ? 128 + (ACT == 2) : 1;            // threads that read a box of output
    for (int i = 0; i < 4; i++) bar_init(filled + 8 * i, 128), bar_init(drained + 8 * i, drain);
    for (int i = 0; i < 2; i++) bar_init(h_full + 8 * i, 1), bar_init(h_empty + 8 * i, 128);
    bar_init(checked, 32);
    for (int i = 0; i < kQueue; i++) bar_init(queued + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // The i-th tile that this cluster has taken; false: there is none.
  __device__ __forceinline__ bool tile(const Arguments& p, int i, Tile& at) const {
    bar_wait(queued + 8 * (i % kQueue), i / kQueue & 1);
    const int pair = load_shared(pair_of + 4 * (i % kQueue));
    if (pair >= RANKS * p.blocks * p.pairs * p.columns) return false;
    at = tile_of(p, pair);
    return true;
  }
};

// The next pair of tiles; the last cluster to find none leaves the counter as it was.
__device__ __forceinline__ int next_pair(const Arguments& p) {
  int pair;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(pair) : "l"(p.counters) : "memory");
  if (pair == RANKS * p.blocks * p.pairs * p.columns + (int)gridDim.x / 2 - 1) *p.counters = 0;
  return pair;
}

// Until a flag has reached the epoch of this use, or, with -1, that of the one before.
__device__ __forceinline__ void await(const Arguments& p, const int* flag, int distance) {
  const u32 epoch = (u32)*p.word + p.delta + distance;  // which wraps around
  for (u32 polls = 1;; polls++) {
    u32 seen;
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if ((int)(seen - epoch) >= 0) return;
    __nanosleep(64);
    if (polls % 4096) continue;  // the word of abort lies in host memory
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(p.abort) : "memory");
    if (seen) return;
  }
}

__device__ __forceinline__ void sync_warpgroup(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// Where in a box a thread's j-th word lies: of 8 rows and 16-byte chunks, each thread of a warp has one of its own, and no
// two are in one bank, or two. row: of lane / 4, the word is in row + 8 * (j % 2).
__device__ __forceinline__ u32 word(int row, int lane, int j) {
  return (row + j % 2 * 8) * kBoxColumns * 2 + ((j / 2 ^ lane / (256 / kBoxColumns)) << 4) + lane % 4 * 4;
}

// The largest magnitude that any thread of a warpgroup saw, as number `slot` of the launch, and the scale that was taken.
__device__ __forceinline__ void store_amax(const Arguments& p, const Shared& shared, int group, int slot, u32 amax,
                                           float scale) {
  const int thread = threadIdx.x % 128;
  const u32 amaxes = shared.amaxes + 4 * 4 * group;
  amax = min(__reduce_max_sync(~0u, amax), 0x7f800000u);  // not a number counts as infinite
  if (thread % 32 == 0) store_shared(amaxes + thread / 32 * 4, amax);
  sync_warpgroup(group);
  if (thread) return;
  for (int warp = 0; warp < 4; warp++) amax = max(amax, load_shared(amaxes + warp * 4));
  if (ACT == 2) p.amax[slot] = amax;
  if (ACT == 3 && p.amax) atomicMax(p.amax, amax);
  if (ACT == 3 && !slot) *p.act_scale_inv = __fdiv_rn(1.0f, scale);
}
