// All-gather + GEMM, or GEMM + reduce-scatter, in one launch, for sm_90a; compiled at run time by
// te_lite/ops/gemm_fused.py with the macros
//   A_TYPE, B_TYPE  bf16, f16, e4m3 or e5m2      SCALES   0 none, 1 one a rank and one, 2 one a row of a and of b
//   OUT_TYPE        bf16 or f16                  COLUMNS  of a tile: 128, 256; with GATHER
//                                                         192 and, not with B_T, 224
//   RANKS           of a gather also 1           B_T      1: b lies as [k, n], for 16-bit types
//   GATHER          1: all-gather, 0: reduce-scatter      NARROW   1: partials travel in fp8, see gemm_slots.h
//   RESIDUAL        1: of a reduce-scatter's sum, as if it were one more slot, the last; not with NARROW
//   SPLIT           1: fp8 products are summed in fp32 registers every 512 elements of K; with 128 COLUMNS
//   ACT             of an all-gather's h = [gate | up], to be followed by an activation: 0 nothing, 1 written beside h,
//                   2 its largest magnitude, 3 both, in ACT_TYPE (e4m3, e5m2) by rows, and with ACT_T by columns too;
//                   with 256 COLUMNS
//   ACTIVATION      which one, and macros with the names of its parameters, see gemm_activation.h
//   GRAD            1: the product is that activation's gradient, and ACT what becomes of h's, [R * m, 2 * n]; it is
//                   itself written only with ACT 2; with 128 COLUMNS, see gemm_grad.h; ACT 3 has ACT_T
//
// all-gather
//   own rows       product + bias -> out, first
//   others' rows   wait for the flag of rank + 1, rank + 2, ...; product + bias -> out
// reduce-scatter
//   others' rows   product -> the owner's staging, straight across the links; the last tile of a block sets its flag
//   own rows       wait for the flags of a block; slots of rank + 1, ... + residual + product + bias -> out
//
// Own blocks of a reduce-scatter follow `lag` blocks behind the others', so that links are busy from the first tile to
// nearly the last one. Two consumer warpgroups multiply a tile, 64 rows each, and keep it, rounded, in registers. It leaves
// in boxes while they multiply the next one: stores that come at once fill the links' queues, and loads wait behind them.
// In the third, single warps load operands (and slots, as if they were more of them), look at flags, and store; GRAD has a
// fourth. The two blocks of a cluster take neighbouring rows and load half of b's tile each, for both.
// Clusters take the next tiles from a counter, so those that run do all of the work when others find no room: what own
// rows wait for has then been taken by clusters that wait for earlier blocks at most. No rank holds up another for ever.
#include "gemm_consumer.h"
#include "gemm_grad.h"

// The producer, one thread: the operands of each tile, and of a reduce-scatter's own tiles the slots, stage by stage.
__device__ __forceinline__ void produce(const Maps& maps, const Arguments& p, const Shared& shared, int steps) {
  const int cta = cluster_rank();
  int next = cta ? 0 : next_pair(p);
  Pipeline pipeline;
  Tile tile;
  for (int i = 0, shard = p.rank;; i++) {
    const int place = i % kQueue;
    bar_expect(shared.queued + 8 * place, 4);
    for (u32 to = 0; to < 2 && !cta; to++) send(shared.pair_of + 4 * place, shared.queued + 8 * place, next, to);
    if (!shared.tile(p, i, tile)) break;
    // Taken early, which hides the counter's latency; behind one of the last own tiles late, so that nobody holds a tile
    // back while it waits for flags.
    const bool own = tile.owner == p.rank, late = !GATHER && own && tile.block >= p.blocks - p.lag;
    if (!cta && !late) next = next_pair(p);
    if (GATHER && tile.owner != shard) {
      shard = tile.owner;
      await(p, p.ready + shard * p.flags, 0);
      asm volatile("fence.proxy.async.global;" ::: "memory");  // the tensor-copy unit reads what the flag is about
    }
    const void* const rows = GATHER && own ? &maps.other : &maps.a;
    const int first_row = GATHER && own ? tile.row : tile.owner * p.m + tile.row;
    for (int step = 0; step < steps; step++, pipeline.advance()) {
      const u32 to = shared.stages + pipeline.stage * kStageBytes, bar = shared.full + 8 * pipeline.stage;
      bar_wait(shared.empty + 8 * pipeline.stage, pipeline.phase ^ 1);
      bar_expect(bar, kStageBytes);
      load_box<false>(to, rows, bar, step * kStep, first_row);
      const u32 b = to + kABytes;
      for (int box = cta; box < kBoxes && B_T; box += 2) {
        load_box<true>(b + box * kBoxColumns * kBoxBytes, &maps.b, bar, column(p, tile, box), step * kStep);
      }
      const int half = kForward ? column(p, tile, cta * kBoxes / 2) : tile.col + cta * kHalfColumns;
      if (!B_T) load_box<true>(b + cta * (kBBytes / 2), &maps.b, bar, step * kStep, half);
    }
    if (GATHER) continue;
    bar_wait(shared.checked, i & 1);  // so await_slots() is never behind by more than a tile
    if (!own) continue;
    if (!cta && late) next = next_pair(p);
    load_slots(maps, p, shared, tile, pipeline);
  }
  // All shards are here: the next kernel may take the room that is left. Of a reduce-scatter others may wait for it.
  if (GATHER) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// One thread for each consumer warpgroup stores its output. Of a reduce-scatter the one that stores the last half tile of a block
// tells the owner. What the others had in their staging from here has been read by then, as a rule: nobody waits for it
// before.
__device__ __forceinline__ void store_output(const Maps& maps, const Arguments& p, const Shared& shared, int group) {
  for (int i = 1; i < RANKS && !GATHER; i++) await(p, p.free + (p.rank + i) % RANKS, -1);
  asm volatile("fence.proxy.async.global;" ::: "memory");
  Tile tile;
  for (int i = 0; shared.tile(p, i, tile); i++) {
    for (int box = 0; box < kOutputBoxes; box++) {
      const int use = i * kOutputBoxes + box, slot = kOutputSlots * group + use % kOutputSlots;
      const int row = tile.row + group * kGroupRows;
      const u32 from = shared.output + slot * kOutputBytes;
      bar_wait(shared.filled + 8 * slot, use / kOutputSlots & 1);
      if (box < kBoxes) {
        const int col = column(p, tile, box);
        store_box(&maps.to[tile.owner], from, col, row);
        if (NARROW && tile.owner != p.rank && box % 2 && row < p.m && col < p.n) {
          store_bytes(p.scales_to[tile.owner] + (u64)(col / 128) * p.m + row, from + kNarrowBytes, 4 * kGroupRows);
        }
      } else if (ACT == 3 && box > kBoxes) {
        store_box(&maps.act_t[tile.owner], from, row, tile.col);
      } else {
        store_box(&maps.act[tile.owner], from, tile.col + (box - kBoxes) * kBoxColumns, row);
      }
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
      bar_arrive(shared.drained + 8 * slot);
    }
    if (GATHER || tile.owner == p.rank) continue;
    unsigned* const counter = p.counters + 1 + tile.owner * p.blocks + tile.block;
    int before;
    asm volatile("cp.async.bulk.wait_group 0; fence.acq_rel.sys; atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    if (before + 1 != 4 * p.pairs * p.columns) continue;
    *counter = 0;
    asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p.arrived[tile.owner] + tile.block),
                 "r"((u32)*p.word + p.delta)
                 : "memory");
  }
}

#if GATHER
#define KERNEL gemm_gather
#else
#define KERNEL gemm_scatter
#endif
static_assert(1024 + kStages * kStageBytes + (2 * kOutputSlots + 6 * GRAD) * kOutputBytes + 16 * kStages + 32 * 2 + 16 +
                      12 * kQueue + 80 <=
                  kBlockShared,
              "what Shared lays out");
static_assert(sizeof(Maps) + sizeof(Arguments) <= 4096, "a kernel's parameters");
static_assert(GATHER ? !NARROW && !RESIDUAL : !ACT,
              "an activation is a gather's, partial sums and what is added a scatter's");
static_assert(!(NARROW && RESIDUAL), "boxes of a slot have one size");
static_assert(!ACT || COLUMNS == (GRAD ? 128 : 256),
              "two boxes of each half of h, or registers for a fourth warpgroup");
static_assert(ACT || !GRAD, "ACT says what becomes of a gradient");
static_assert(ACT_T || ACT != 3 || !GRAD, "of a gradient wgrad reads the columns");
static_assert(!SPLIT || (COLUMNS == 128 && IS_BYTE(A_TYPE)), "registers hold two sums of so many columns");
// Registers of a thread: 64 K in all, for 3 warpgroups or 4.
constexpr int kConsumerRegisters = GRAD ? 200 : 232, kProducerRegisters = GRAD ? 32 : 40, kGradRegisters = 80;
static_assert(!B_T || (COLUMNS % 64 == 0 && !IS_BYTE(A_TYPE)), "b as [k, n] comes in boxes of 64 columns");
static_assert(GATHER || COLUMNS == 128 || COLUMNS == 256, "slots come in boxes of 64 columns, some to a stage");

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(FUSED_THREADS(GRAD), 1)
    KERNEL(const __grid_constant__ Maps maps, const __grid_constant__ Arguments p) {
  extern __shared__ char raw[];
  const Shared shared(raw);
  const int steps = (p.k + kStep - 1) / kStep, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.init();
  cluster_sync();
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the kernel before has ended
  if (warp < 8) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    Consumer(p, shared, warp / 4, steps).run();
  } else if (warp >= 12) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGradRegisters));
    if (GRAD) differentiate(maps, p, shared);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    const bool one = threadIdx.x % 32 == 0;
    if (warp == 8 && !GATHER) await_slots(maps, p, shared);
    if (warp == 9 && one) produce(maps, p, shared, steps);
    if (warp == 8 && GRAD && one) load_h(maps, p, shared);
    if (warp > 9 && one && !(GRAD && kStoresAct)) store_output(maps, p, shared, warp - 10);
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");  // nobody arrives here any more
}
