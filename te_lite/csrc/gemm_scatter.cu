// GEMM + reduce-scatter in one launch, for sm_90a; compiled at run time by te_lite/ops/gemm_scatter.py with the macros
//   A_TYPE, B_TYPE  bf16, f16, e4m3 or e5m2      SCALES   0 none, 1 one for all, 2 one a row of a and of b
//   OUT_TYPE        bf16 or f16                  COLUMNS  of a tile: 128 or 256
//   RANKS                                        B_T      1: b lies as [k, n], for 16-bit types
//
//   others' rows   product -> the owner's staging, straight across the links; the last tile of a block sets its flag
//   own rows       wait for the flags of a block; slots of rank + 1, rank + 2, ... + product + bias -> out
//
// Own blocks follow `lag` blocks behind the others', so that links are busy from the first tile to nearly the last one.
// Of three warpgroups two multiply a tile, 64 rows each, and hold it, rounded, in registers. They hand it over in boxes
// while they multiply the next one: stores that come at once fill the links' queues, and loads wait behind them. In the
// third, single warps load operands (and slots, as if they were more of them), look at flags, and store. The two blocks
// of a cluster take neighbouring rows and load half of b's tile each, for both.
// Clusters take the next tiles from a counter, so those that run do all of the work when others find no room: what own
// rows wait for has then been taken by clusters that wait for earlier blocks at most. No rank holds up another for ever.
#include "gemm_scatter.h"
#include "hopper.h"

using namespace te_lite;
using Arguments = GemmScatterArguments;
using Maps = GemmScatterMaps;

constexpr int kStep = kBoxBytes >> !IS_BYTE(A_TYPE);  // elements of K in a stage
constexpr u32 kABytes = kTileRows * kBoxBytes, kBBytes = COLUMNS * kBoxBytes, kStageBytes = kABytes + kBBytes;
constexpr int kStages = COLUMNS == 256 ? 4 : 6;
constexpr int kTogether = kStageBytes / kABytes;      // slots in a stage
constexpr int kHalfRows = kTileRows / 2;              // of a warpgroup
constexpr int kBoxes = COLUMNS / kBoxColumns;         // of these rows, side by side
constexpr u32 kOutputBytes = kHalfRows * kBoxBytes;   // one of them
// Tiles taken and not forgotten. A cluster takes one when it begins to load the one before, some stages before that is
// multiplied: with one step a tile, the oldest that anybody still has to look up.
constexpr int kTaken = 16;

struct Place {
  int owner, block, row, col;  // row: within the owner's
};

// The walk: block by block; in a block column by column, and there the others' rows and then own ones, `lag` blocks back.
__device__ __forceinline__ Place place_of(const Arguments& p, int pair) {
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

// Addresses in shared memory.
struct Shared {
  u32 stages;            // operands, or slots
  u32 output;            // for each warpgroup two boxes, used by turns
  u32 full, empty;       // barriers of stages
  u32 filled, drained;   // of boxes of output
  u32 checked;           // a tile's flags, if it is an own one, were there
  u32 taken, pair_of;    // of the tiles that this cluster has taken: barriers, and the tiles

  __device__ __forceinline__ explicit Shared(void* raw) {
    stages = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;  // the swizzle's period
    output = stages + kStages * kStageBytes;
    full = output + 4 * kOutputBytes, empty = full + 8 * kStages;
    filled = empty + 8 * kStages, drained = filled + 32, checked = drained + 32;
    taken = checked + 8, pair_of = taken + 8 * kTaken;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; i++) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, 4);  // 4 warpgroups in a cluster
    for (int i = 0; i < 4; i++) bar_init(filled + 8 * i, 128), bar_init(drained + 8 * i, 1);
    bar_init(checked, 32);
    for (int i = 0; i < kTaken; i++) bar_init(taken + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // The i-th tile that this cluster has taken; false: there is none.
  __device__ __forceinline__ bool tile(const Arguments& p, int i, Place& at) const {
    bar_wait(taken + 8 * (i % kTaken), i / kTaken & 1);
    const int pair = load_shared(pair_of + 4 * (i % kTaken));
    if (pair >= RANKS * p.blocks * p.pairs * p.columns) return false;
    at = place_of(p, pair);
    return true;
  }
};

struct Ring {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ int before() const { return stage ? stage - 1 : kStages - 1; }
};

// The next pair of tiles; the last cluster to find none leaves the counter as it was.
__device__ __forceinline__ int take(const Arguments& p) {
  int pair;
  unsigned* const counter = p.counters + RANKS * p.blocks;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(pair) : "l"(counter) : "memory");
  if (pair == RANKS * p.blocks * p.pairs * p.columns + (int)gridDim.x / 2 - 1) *counter = 0;
  return pair;
}

__device__ __forceinline__ void load(const Maps& maps, const Arguments& p, const Shared& shared, int steps) {  // one thread
  const int cta = cluster_rank();
  int next = cta ? 0 : take(p);
  Ring ring;
  Place at;
  for (int i = 0;; i++) {
    const int taken = i % kTaken;
    bar_expect(shared.taken + 8 * taken, 4);
    for (u32 to = 0; to < 2 && !cta; to++) send(shared.pair_of + 4 * taken, shared.taken + 8 * taken, next, to);
    if (!shared.tile(p, i, at)) return;
    if (!cta) next = take(p);
    for (int step = 0; step < steps; step++, ring.advance()) {
      const u32 to = shared.stages + ring.stage * kStageBytes, bar = shared.full + 8 * ring.stage;
      bar_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      bar_expect(bar, kStageBytes);
      load_box<false>(to, &maps.a, bar, step * kStep, at.owner * p.m + at.row);
      const u32 half = to + kABytes + cta * (kBBytes / 2);
      const int col = at.col + cta * (COLUMNS / 2);
      for (int c = 0; c < COLUMNS / 2 && B_T; c += kBoxColumns) {
        load_box<true>(half + c * kBoxBytes, &maps.b, bar, col + c, step * kStep);
      }
      if (!B_T) load_box<true>(half, &maps.b, bar, step * kStep, col);
    }
    bar_wait(shared.checked, i & 1);  // so `look` is never behind by more than a tile
    if (at.owner != p.rank) continue;
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the tensor-copy unit reads what the flags are about
    for (int box = 0; box < kBoxes; box++) {
      for (int first = 1; first < RANKS; first += kTogether, ring.advance()) {
        const u32 to = shared.stages + ring.stage * kStageBytes, bar = shared.full + 8 * ring.stage;
        const int count = min(kTogether, RANKS - first), col = at.col + box * kBoxColumns;
        bar_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1);
        bar_expect(bar, count * kABytes);
        for (int s = 0; s < count; s++) {
          load_box<false>(to + s * kABytes, &maps.slots, bar, col, (p.rank + first + s) % RANKS * p.m + at.row);
        }
      }
    }
  }
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

// One warp: flags are looked at, and slots on their way to L2, before the products of an own tile are loaded.
__device__ __forceinline__ void look(const Maps& maps, const Arguments& p, const Shared& shared) {
  const int source = threadIdx.x % 32;
  Place at;
  for (int i = 0; shared.tile(p, i, at); i++) {
    if (at.owner == p.rank && source < RANKS && source != p.rank) {
      await(p, p.ready + source * p.flags + at.block, 0);
      asm volatile("fence.proxy.async.global;" ::: "memory");
      for (int box = 0; box < kBoxes; box++) prefetch_box(&maps.slots, at.col + box * kBoxColumns, source * p.m + at.row);
    }
    bar_arrive(shared.checked);
  }
}

// One thread for each warpgroup that multiplies. The one that stores the last half tile of a block tells the owner. What
// the others had in their staging from here has been read by then, as a rule: nobody waits for it before.
__device__ __forceinline__ void store(const Maps& maps, const Arguments& p, const Shared& shared, int group) {
  for (int i = 1; i < RANKS; i++) await(p, p.free + (p.rank + i) % RANKS, -1);
  asm volatile("fence.proxy.async.global;" ::: "memory");
  Place at;
  for (int i = 0; shared.tile(p, i, at); i++) {
    for (int box = 0; box < kBoxes; box++) {
      const int turn = 2 * group + box % 2, use = i * kBoxes + box;
      bar_wait(shared.filled + 8 * turn, use / 2 & 1);
      store_box(&maps.to[at.owner], shared.output + turn * kOutputBytes, at.col + box * kBoxColumns,
                at.row + group * kHalfRows);
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
      bar_arrive(shared.drained + 8 * turn);
    }
    if (at.owner == p.rank) continue;
    unsigned* const counter = p.counters + at.owner * p.blocks + at.block;
    int before;
    asm volatile("cp.async.bulk.wait_group 0; fence.acq_rel.sys; atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before) : "l"(counter) : "memory");
    if (before + 1 != 4 * p.pairs * p.columns) continue;
    *counter = 0;
    asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p.arrived[at.owner] + at.block),
                 "r"((u32)*p.word + p.delta) : "memory");
  }
}

__device__ __forceinline__ void together(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// A warpgroup. held: its half of the tile before, [box][2 * (columns / 8) + half of 16 rows].
__device__ __forceinline__ void multiply(const Arguments& p, const Shared& shared, int group, int steps) {
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  float d[COLUMNS / 2];
  u32 held[kBoxes][16];
  Ring ring;
  Place at;
  const auto release = [&](int stage) {  // no other thread of the warpgroup reads it any more
    if (thread < 2) bar_arrive_at(shared.empty + 8 * stage, thread);
  };
  // Of 8 rows and a box's 16-byte chunks, each thread of a warp has a word of its own: no two in one bank.
  const auto word = [&](u32 box, int j, int h) {
    return box + (row + 8 * h) * kBoxBytes + ((j ^ lane / 4) << 4) + lane % 4 * 4;
  };
  const auto hand_over = [&](int i, int box) {
    const int turn = 2 * group + box % 2, use = i * kBoxes + box;
    bar_wait(shared.drained + 8 * turn, use / 2 & 1 ^ 1);
#pragma unroll
    for (int j = 0; j < 16; j++) store_shared(word(shared.output + turn * kOutputBytes, j / 2, j % 2), held[box][j]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    bar_arrive(shared.filled + 8 * turn);
  };
  int i = 0;
  for (; shared.tile(p, i, at); i++) {
    int step = 0;
#pragma unroll
    for (int box = 0; box <= kBoxes; box++) {
      const int until = box == kBoxes ? steps : min(steps, 1 + steps * box / kBoxes);
#pragma unroll 1
      for (; step < until; step++, ring.advance()) {
        bar_wait(shared.full + 8 * ring.stage, ring.phase);
        const u64 a = descriptor(shared.stages + ring.stage * kStageBytes + group * (kABytes / 2));
        const u64 b = descriptor(shared.stages + ring.stage * kStageBytes + kABytes, B_T ? kStep * kBoxBytes : 16);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma(d, a + 2 * k, b + (B_T ? 128 : 2) * k, step + k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wgmma_wait<1>(d);
        if (step) release(ring.before());
      }
      if (box < kBoxes && i) hand_over(i - 1, box);
    }
    wgmma_wait<0>(d);
    release(ring.before());

    const bool own = at.owner == p.rank;
    const int first = at.row + group * kHalfRows + row;
    float scale[2] = {1.0f, 1.0f};
    if (SCALES == 1) scale[0] = scale[1] = *p.a_scale * *p.b_scale;
    for (int h = 0; h < 2 && SCALES == 2; h++) {
      if (first + 8 * h < p.m) scale[h] = p.a_scale[at.owner * p.m + first + 8 * h];
    }
#pragma unroll
    for (int box = 0; box < kBoxes; box++) {
      float* const x = d + 32 * box;
      const int first_col = at.col + box * kBoxColumns + lane % 4 * 2;
      const auto factor = [&](const float* of, int j, float otherwise) -> float2 {
        const int c = first_col + 8 * j;
        return of && c < p.n ? float2{of[c], of[c + 1]} : float2{otherwise, otherwise};
      };
#pragma unroll
      for (int j = 0; j < 8 && SCALES; j++) {
        const float2 b = SCALES == 2 ? factor(p.b_scale, j, 1.0f) : float2{1.0f, 1.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          x[4 * j + 2 * h] = x[4 * j + 2 * h] * scale[h] * b.x;
          x[4 * j + 2 * h + 1] = x[4 * j + 2 * h + 1] * scale[h] * b.y;
        }
      }
      if (own) {
        float2 total[16] = {};
#pragma unroll
        for (int from = 1; from < RANKS; from += kTogether, ring.advance()) {
          bar_wait(shared.full + 8 * ring.stage, ring.phase);
#pragma unroll
          for (int s = 0; s < min(kTogether, RANKS - from); s++) {
            const u32 slot = shared.stages + ring.stage * kStageBytes + s * kABytes + group * kOutputBytes;
#pragma unroll
            for (int j = 0; j < 16; j++) {
              const u32 pair = load_shared(word(slot, j / 2, j % 2));
              total[j].x += unpack(pair), total[j].y += unpack(pair >> 16);
            }
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // loads come here next
          together(group);
          release(ring.stage);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float2 bias = factor(p.bias, j, 0.0f);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            x[4 * j + 2 * h] = total[2 * j + h].x + x[4 * j + 2 * h] + bias.x;
            x[4 * j + 2 * h + 1] = total[2 * j + h].y + x[4 * j + 2 * h + 1] + bias.y;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 16; j++) held[box][j] = pack(x[2 * j], x[2 * j + 1]);
    }
  }
#pragma unroll
  for (int box = 0; box < kBoxes; box++) {
    if (i) hand_over(i - 1, box);
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kScatterThreads, 1)
    gemm_scatter(const __grid_constant__ Maps maps, const __grid_constant__ Arguments p) {
  extern __shared__ char raw[];
  const Shared shared(raw);
  const int steps = (p.k + kStep - 1) / kStep, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.init();
  cluster_sync();
  if (warp < 8) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply(p, shared, warp / 4, steps);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const bool one = threadIdx.x % 32 == 0;
    if (warp == 8) look(maps, p, shared);
    if (warp == 9 && one) load(maps, p, shared, steps);
    if (warp > 9 && one) store(maps, p, shared, warp - 10);
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");  // nobody arrives here any more
}
