// All-gather + GEMM, or GEMM + reduce-scatter, in one launch, for sm_90a; compiled at run time by
// te_lite/ops/gemm_fused.py with the macros
//   A_TYPE, B_TYPE  bf16, f16, e4m3 or e5m2      SCALES   0 none, 1 one a rank and one, 2 one a row of a and of b
//   OUT_TYPE        bf16 or f16                  COLUMNS  of a tile: 128, 256; with GATHER
//                                                         192 and, not with B_T, 224
//   RANKS                                        B_T      1: b lies as [k, n], for 16-bit types
//   GATHER          1: all-gather, 0: reduce-scatter      NARROW   1: partials travel in fp8, see gemm_slots.h
//   RESIDUAL        1: of a reduce-scatter's sum, as if it were one more slot, the last; not with NARROW
//   SPLIT           1: fp8 products are summed in fp32 registers every 512 elements of K; with 128 COLUMNS
//   ACT             of an all-gather's h = [gate | up], to be followed by an activation: 0 nothing, 1 written beside h,
//                   2 its largest magnitude, 3 both, in ACT_TYPE (e4m3, e5m2) by rows and by columns; with 256 COLUMNS
//   ACTIVATION      which one, and macros with the names of its parameters, see gemm_activation.h
//   GRAD            1: the product is that activation's gradient, and ACT what becomes of h's, [R * m, 2 * n]; it is
//                   itself written only with ACT 2; with 128 COLUMNS, see gemm_grad.h
//
// all-gather
//   own rows       product + bias -> out, first
//   others' rows   wait for the flag of rank + 1, rank + 2, ...; product + bias -> out
// reduce-scatter
//   others' rows   product -> the owner's staging, straight across the links; the last tile of a block sets its flag
//   own rows       wait for the flags of a block; slots of rank + 1, ... + residual + product + bias -> out
//
// Own blocks of a reduce-scatter follow `lag` blocks behind the others', so that links are busy from the first tile to
// nearly the last one. Two warpgroups multiply a tile, 64 rows each, and hold it, rounded, in registers. They hand it over
// in boxes while they multiply the next one: stores that come at once fill the links' queues, and loads wait behind them.
// In the third, single warps load operands (and slots, as if they were more of them), look at flags, and store; GRAD has a
// fourth. The two blocks of a cluster take neighbouring rows and load half of b's tile each, for both.
// Clusters take the next tiles from a counter, so those that run do all of the work when others find no room: what own
// rows wait for has then been taken by clusters that wait for earlier blocks at most. No rank holds up another for ever.
#include "gemm_grad.h"

__device__ __forceinline__ void load(const Maps& maps, const Arguments& p, const Shared& shared, int steps) {  // one thread
  const int cta = cluster_rank();
  int next = cta ? 0 : take(p);
  Ring ring;
  Place at;
  for (int i = 0, there = p.rank;; i++) {
    const int taken = i % kTaken;
    bar_expect(shared.taken + 8 * taken, 4);
    for (u32 to = 0; to < 2 && !cta; to++) send(shared.pair_of + 4 * taken, shared.taken + 8 * taken, next, to);
    if (!shared.tile(p, i, at)) break;
    // Taken early, which hides the counter's latency; behind one of the last own tiles late, so that nobody holds a tile
    // back while it waits for flags.
    const bool own = at.owner == p.rank, late = !GATHER && own && at.block >= p.blocks - p.lag;
    if (!cta && !late) next = take(p);
    if (GATHER && at.owner != there) {
      there = at.owner;
      await(p, p.ready + there * p.flags, 0);
      asm volatile("fence.proxy.async.global;" ::: "memory");  // the tensor-copy unit reads what the flag is about
    }
    const void* const rows = GATHER && own ? &maps.other : &maps.a;
    const int first_row = GATHER && own ? at.row : at.owner * p.m + at.row;
    for (int step = 0; step < steps; step++, ring.advance()) {
      const u32 to = shared.stages + ring.stage * kStageBytes, bar = shared.full + 8 * ring.stage;
      bar_wait(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      bar_expect(bar, kStageBytes);
      load_box<false>(to, rows, bar, step * kStep, first_row);
      const u32 b = to + kABytes;
      for (int box = cta; box < kBoxes && B_T; box += 2) {
        load_box<true>(b + box * kBoxColumns * kBoxBytes, &maps.b, bar, column(p, at, box), step * kStep);
      }
      const int half = kForward ? column(p, at, cta * kBoxes / 2) : at.col + cta * kHalfColumns;
      if (!B_T) load_box<true>(b + cta * (kBBytes / 2), &maps.b, bar, step * kStep, half);
    }
    if (GATHER) continue;
    bar_wait(shared.checked, i & 1);  // so `look` is never behind by more than a tile
    if (!own) continue;
    if (!cta && late) next = take(p);
    load_slots(maps, p, shared, at, ring);
  }
  // All shards are here: the next kernel may take the room that is left. Of a reduce-scatter others may wait for it.
  if (GATHER) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// One thread for each warpgroup that multiplies. Of a reduce-scatter the one that stores the last half tile of a block
// tells the owner. What the others had in their staging from here has been read by then, as a rule: nobody waits for it
// before.
__device__ __forceinline__ void store(const Maps& maps, const Arguments& p, const Shared& shared, int group) {
  for (int i = 1; i < RANKS && !GATHER; i++) await(p, p.free + (p.rank + i) % RANKS, -1);
  asm volatile("fence.proxy.async.global;" ::: "memory");
  Place at;
  for (int i = 0; shared.tile(p, i, at); i++) {
    for (int box = 0; box < kUses; box++) {
      const int use = i * kUses + box, turn = kTurns * group + use % kTurns, row = at.row + group * kHalfRows;
      const u32 from = shared.output + turn * kOutputBytes;
      bar_wait(shared.filled + 8 * turn, use / kTurns & 1);
      if (box < kBoxes) {
        const int col = column(p, at, box);
        store_box(&maps.to[at.owner], from, col, row);
        if (NARROW && at.owner != p.rank && box % 2 && row < p.m && col < p.n) {
          store_bytes(p.scales_to[at.owner] + (u64)(col / 128) * p.m + row, from + kNarrowBytes, 4 * kHalfRows);
        }
      } else if (ACT == 3 && box > kBoxes) {
        store_box(&maps.act_t[at.owner], from, row, at.col);
      } else {
        store_box(&maps.act[at.owner], from, at.col + (box - kBoxes) * kBoxColumns, row);
      }
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
      bar_arrive(shared.drained + 8 * turn);
    }
    if (GATHER || at.owner == p.rank) continue;
    unsigned* const counter = p.counters + 1 + at.owner * p.blocks + at.block;
    int before;
    asm volatile("cp.async.bulk.wait_group 0; fence.acq_rel.sys; atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before) : "l"(counter) : "memory");
    if (before + 1 != 4 * p.pairs * p.columns) continue;
    *counter = 0;
    asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p.arrived[at.owner] + at.block),
                 "r"((u32)*p.word + p.delta) : "memory");
  }
}

// A warpgroup. held: its half of the tile before, [box][2 * (columns / 8) + half of 16 rows].
__device__ __forceinline__ void multiply(const Arguments& p, const Shared& shared, int group, int steps) {
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  float d[COLUMNS / 2], total[SPLIT ? COLUMNS / 2 : 1];
  u32 held[kBoxes][kWords] = {};
  Ring ring;
  Place at;
  const auto release = [&](int stage) {  // no other thread of the warpgroup reads it any more
    if (thread < 2) bar_arrive_at(shared.empty + 8 * stage, thread);
  };
  const auto room = [&](int i, int box) -> u32 {  // for a box of tile i
    const int use = i * kUses + box, turn = kTurns * group + use % kTurns;
    bar_wait(shared.drained + 8 * turn, use / kTurns & 1 ^ 1);
    return shared.output + turn * kOutputBytes;
  };
  const auto filled = [&](int i, int box) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    bar_arrive(shared.filled + 8 * (kTurns * group + (i * kUses + box) % kTurns));
  };
  Place before{};  // the tile that is held
  u32 peak = 0;  // the bits of the largest magnitude
  const float act_scale = ACT == 3 ? *p.act_scale : 1.0f;
  u32 to_act = 0, to_act_t = 0;
  // Of the held tile's activation what belongs to the box `half` of gates: j as of held.
  const auto activated = [&](int half, int j) -> float2 {
    const u32 gate = held[half][j], up = held[kBoxes / 2 + half][j];
    const float2 v = {ACTIVATION::value(unpack(gate), unpack(up)), ACTIVATION::value(unpack(gate >> 16), unpack(up >> 16))};
    const bool live = before.row + group * kHalfRows + row + j % 2 * 8 < p.m &&
                      before.col + half * kBoxColumns + j / 2 * 8 + lane % 4 * 2 < p.n / 2;
    if (ACT > 1 && live) peak = max(peak, max(magnitude(v.x), magnitude(v.y)));
    return v;
  };
  // Part of tile i, the one before: a box; or, after those, a quarter of its activation.
  const auto hand_over = [&](int i, int part) {
    if (part < kBoxes) {
      const u32 to = room(i, part);
      if (NARROW) {
        store_wide_or_narrow(held[part], to, row, lane, before.owner != p.rank, part % 2);
      } else {
#pragma unroll
        for (int j = 0; j < kWords; j++) store_shared(to + word(row, lane, j), held[part][j]);
      }
      filled(i, part);
      return;
    }
    const int quarter = part - kBoxes, half = quarter / 2;
    const int box = kBoxes + (ACT == 1 ? half : 0);
    const bool begins = ACT == 1 ? quarter % 2 == 0 : ACT == 3 && quarter == 0;
    const bool ends = ACT == 1 ? quarter % 2 : ACT == 3 && quarter == 3;
    if (begins) to_act = room(i, box), to_act_t = ACT == 3 ? room(i, box + 1) : 0;
#pragma unroll
    for (int j = quarter % 2 * (kWords / 2); j < (quarter % 2 + 1) * (kWords / 2); j++) {
      const float2 v = activated(half, j);
      if (ACT == 1) store_shared(to_act + word(row, lane, j), pack(v.x, v.y));
      if (ACT != 3) continue;
      const u16 q = pack_fp8(v.x * act_scale, v.y * act_scale);
      const int r = row + j % 2 * 8, chunk = half * 4 + j / 4, at = j / 2 % 2 * 8 + lane % 4 * 2;
      store_shared_16(to_act + r * kBoxBytes + ((chunk ^ lane / 4) << 4) + at, q);
      const u32 c = to_act_t + (chunk * 16 + at) * kHalfRows + ((r / 16 ^ lane % 4) << 4) + r % 16;
      store_shared_8(c, q), store_shared_8(c + kHalfRows, q >> 8);
    }
    if (ends) filled(i, box);
    if (ends && ACT == 3) filled(i, box + 1);
  };
  int i = 0;
  for (; shared.tile(p, i, at); i++) {
    int step = 0;
    for (int j = 0; j < COLUMNS / 2 && SPLIT; j++) total[j] = 0.0f;
#pragma unroll
    for (int part = 0; part <= kParts; part++) {  // by turns, for one warpgroup multiplies while the other hands over
      const int until = part == kParts ? steps : min(steps, 1 + steps * (2 * part + group) / (2 * kParts));
      while (step < until) {
        const int first = SPLIT ? step : 0;  // of a sum
#pragma unroll 1
        do {
          bar_wait(shared.full + 8 * ring.stage, ring.phase);
          const u64 a = descriptor(shared.stages + ring.stage * kStageBytes + group * (kABytes / 2));
          const u64 b = descriptor(shared.stages + ring.stage * kStageBytes + kABytes, B_T ? kStep * kBoxBytes : 16);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int k = 0; k < 4; k++) wgmma(d, a + 2 * k, b + (B_T ? 128 : 2) * k, step - first + k);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          wgmma_wait<1>(d);
          if (step > first) release(ring.before());
          ring.advance();
        } while (++step < (SPLIT ? min(steps, first + kSplitSteps) : until));
        if constexpr (SPLIT) {
          wgmma_wait<0>(d);
          release(ring.before());
#pragma unroll
          for (int j = 0; j < COLUMNS / 2; j++) total[j] += d[j];
        }
      }
      if (part < kParts && i) hand_over(i - 1, part);
    }
    if constexpr (SPLIT) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; j++) d[j] = total[j];
    } else {
      wgmma_wait<0>(d);
      release(ring.before());
    }

    const bool own = at.owner == p.rank;
    const int first = at.row + group * kHalfRows + row;
    const float* const a_scale = GATHER && own ? p.own_scale : p.a_scale + at.owner * p.scales;
    float scale[2] = {1.0f, 1.0f};
    if (SCALES == 1) scale[0] = scale[1] = __ldcg(a_scale) * *p.b_scale;  // not from L1: others may have sent it
    for (int h = 0; h < 2 && SCALES == 2; h++) {
      if (first + 8 * h < p.m) scale[h] = __ldcg(a_scale + first + 8 * h);
    }
    const auto factor = [&](const float* of, int box, int j, float otherwise) -> float2 {
      const int c = column(p, at, box) + lane % 4 * 2 + 8 * j;
      return of && c < p.n ? float2{of[c], of[c + 1]} : float2{otherwise, otherwise};
    };
    const auto apply_scales = [&](int box) {
      float* const x = d + kBoxColumns / 2 * box;
#pragma unroll
      for (int j = 0; j < kBoxColumns / 8 && SCALES; j++) {
        const float2 b = SCALES == 2 ? factor(p.b_scale, box, j, 1.0f) : float2{1.0f, 1.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          x[4 * j + 2 * h] = x[4 * j + 2 * h] * scale[h] * b.x;
          x[4 * j + 2 * h + 1] = x[4 * j + 2 * h + 1] * scale[h] * b.y;
        }
      }
    };
#pragma unroll
    for (int box = 0; box < kBoxes && NARROW && !own; box += 2) {
      float* const x = d + kBoxColumns / 2 * box;
      apply_scales(box), apply_scales(box + 1);
      const Scales scales = narrow_scales(x);
      narrow_words(held[box], x, scales, lane), narrow_words(held[box + 1], x + kBoxColumns / 2, scales, lane);
    }
#pragma unroll
    for (int box = 0; box < kBoxes && !(NARROW && !own); box++) {
      float* const x = d + kBoxColumns / 2 * box;
      apply_scales(box);
      if constexpr (!GATHER) if (own) {
        float2 total[16] = {};
#pragma unroll
        for (int from = 1; from < RANKS + RESIDUAL; from += kTogether, ring.advance()) {
          bar_wait(shared.full + 8 * ring.stage, ring.phase);
#pragma unroll
          for (int s = 0; s < min(kTogether, RANKS + RESIDUAL - from); s++) {
            add_slot(total, shared.stages + ring.stage * kStageBytes + s * kSlotBytes, group, row, lane);
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // loads come here next
          together(group);
          release(ring.stage);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float2 bias = factor(p.bias, box, j, 0.0f);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            x[4 * j + 2 * h] = total[2 * j + h].x + x[4 * j + 2 * h] + bias.x;
            x[4 * j + 2 * h + 1] = total[2 * j + h].y + x[4 * j + 2 * h + 1] + bias.y;
          }
        }
      }
      if (GATHER && p.bias) {
#pragma unroll
        for (int j = 0; j < kBoxColumns / 8; j++) {
          const float2 bias = factor(p.bias, box, j, 0.0f);
#pragma unroll
          for (int h = 0; h < 2; h++) x[4 * j + 2 * h] += bias.x, x[4 * j + 2 * h + 1] += bias.y;
        }
      }
#pragma unroll
      for (int j = 0; j < kWords; j++) held[box][j] = pack(x[2 * j], x[2 * j + 1]);
    }
    before = at;
  }
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    if (i) hand_over(i - 1, part);
  }
  if (kForward && ACT > 1) tell_peak(p, shared, group, 2 * blockIdx.x + group, peak, act_scale);
}

#if GATHER
#define KERNEL gemm_gather
#else
#define KERNEL gemm_scatter
#endif
static_assert(1024 + kStages * kStageBytes + (2 * kTurns + 6 * GRAD) * kOutputBytes + 16 * kStages + 32 * 2 + 16 + 12 * kTaken + 80
              <= kFusedShared, "what Shared lays out");
static_assert(sizeof(Maps) + sizeof(Arguments) <= 4096, "a kernel's parameters");
static_assert(GATHER ? !NARROW && !RESIDUAL : !ACT, "an activation is a gather's, partial sums and what is added a scatter's");
static_assert(!(NARROW && RESIDUAL), "boxes of a slot have one size");
static_assert(!ACT || COLUMNS == (GRAD ? 128 : 256), "two boxes of each half of h, or registers for a fourth warpgroup");
static_assert(ACT || !GRAD, "of a gradient something is made");
static_assert(!SPLIT || (COLUMNS == 128 && IS_BYTE(A_TYPE)), "registers hold two sums of so many columns");
// Registers of a thread: 64 K in all, for 3 warpgroups or 4.
constexpr int kMultiplies = GRAD ? 200 : 232, kMoves = GRAD ? 32 : 40, kDifferentiates = 80;
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplies));
    multiply(p, shared, warp / 4, steps);
  } else if (warp >= 12) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDifferentiates));
    if (GRAD) differentiate(maps, p, shared);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMoves));
    const bool one = threadIdx.x % 32 == 0;
    if (warp == 8 && !GATHER) look(maps, p, shared);
    if (warp == 9 && one) load(maps, p, shared, steps);
    if (warp == 8 && GRAD && one) load_h(maps, p, shared);
    if (warp > 9 && one && !(GRAD && kActs)) store(maps, p, shared, warp - 10);
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");  // nobody arrives here any more
}
