// The consumers of gemm_fused.cu: mainloop, epilogue, output.
#pragma once

#include "gemm_slots.h"

// A thread of a consumer warpgroup, which multiplies 64 rows of each tile. Its results of the tile before leave for shared
// memory in parts, while the tensor cores are at the next tile.
struct Consumer {
  const Arguments& p;
  const Shared& shared;
  const int group, steps;  // which warpgroup; steps of K
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  u32 rounded[kBoxes][kWords];  // [box][2 * (columns / 8) + half of 16 rows]; to zero it costs registers
  Pipeline pipeline;
  Tile previous{};  // that of `rounded`
  u32 amax = 0;     // the bits of the largest magnitude
  const float act_scale = ACT == 3 ? *p.act_scale : 1.0f;
  u32 to_act = 0, to_act_t = 0;

  __device__ __forceinline__ Consumer(const Arguments& p, const Shared& shared, int group, int steps)
      : p(p), shared(shared), group(group), steps(steps) {}

  __device__ __forceinline__ void run() {
    float d[COLUMNS / 2];
    Tile tile;
    int i = 0;
    for (; shared.tile(p, i, tile); i++) {
      mainloop(d, i);
      epilogue(d, tile);
      previous = tile;
    }
#pragma unroll
    for (int part = 0; part < kOutputParts; part++) {
      if (i) output(i - 1, part);
    }
    if (kForward && ACT > 1) store_amax(p, shared, group, 2 * blockIdx.x + group, amax, act_scale);
  }

  // d = the products of tile i, over all of K. In between, by turns with the other warpgroup, the output of tile i - 1.
  __device__ __forceinline__ void mainloop(float (&d)[COLUMNS / 2], int i) {
    float total[SPLIT ? COLUMNS / 2 : 1];
    int step = 0;
    for (int j = 0; j < COLUMNS / 2 && SPLIT; j++) total[j] = 0.0f;
#pragma unroll
    for (int part = 0; part <= kOutputParts; part++) {
      const int until = part == kOutputParts ? steps : min(steps, 1 + steps * (2 * part + group) / (2 * kOutputParts));
      while (step < until) {
        multiply(d, step, until);
        if constexpr (SPLIT) {
          wgmma_wait<0>(d);
          release(pipeline.previous());
#pragma unroll
          for (int j = 0; j < COLUMNS / 2; j++) total[j] += d[j];
        }
      }
      if (part < kOutputParts && i) output(i - 1, part);
    }
    if constexpr (SPLIT) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; j++) d[j] = total[j];
    } else {
      wgmma_wait<0>(d);
      release(pipeline.previous());
    }
  }

  // Steps of one sum in the tensor cores: until `until`, or with SPLIT kSplitSteps.
  __device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], int& step, int until) {
    const int first = SPLIT ? step : 0;
#pragma unroll 1
    do {
      bar_wait(shared.full + 8 * pipeline.stage, pipeline.phase);
      const u64 a = descriptor(shared.stages + pipeline.stage * kStageBytes + group * (kABytes / 2));
      const u64 b = descriptor(shared.stages + pipeline.stage * kStageBytes + kABytes, B_T ? kStep * kBoxBytes : 16);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) wgmma(d, a + 2 * k, b + (B_T ? 128 : 2) * k, step - first + k);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      wgmma_wait<1>(d);
      if (step > first) release(pipeline.previous());
      pipeline.advance();
    } while (++step < (SPLIT ? min(steps, first + kSplitSteps) : until));
  }

  __device__ __forceinline__ void release(int stage) {  // no other thread of the warpgroup reads it any more
    if (thread < 2) bar_arrive_at(shared.empty + 8 * stage, thread);
  }

  // d, scaled, with slots and bias, goes to `rounded`.
  __device__ __forceinline__ void epilogue(float (&d)[COLUMNS / 2], const Tile& tile) {
    const bool own = tile.owner == p.rank;
    float scale[2] = {1.0f, 1.0f};
    load_row_scales(scale, tile);
#pragma unroll
    for (int box = 0; box < kBoxes && NARROW && !own; box += 2) {
      float* const x = d + kBoxColumns / 2 * box;
      apply_scales(x, scale, tile, box), apply_scales(x + kBoxColumns / 2, scale, tile, box + 1);
      const Scales scales = narrow_scales(x);
      narrow_words(rounded[box], x, scales, lane), narrow_words(rounded[box + 1], x + kBoxColumns / 2, scales, lane);
    }
#pragma unroll
    for (int box = 0; box < kBoxes && !(NARROW && !own); box++) {
      float* const x = d + kBoxColumns / 2 * box;
      apply_scales(x, scale, tile, box);
      if constexpr (!GATHER) {
        if (own) reduce(x, tile, box);
      }
      if (GATHER && p.bias) add_bias(x, tile, box);
#pragma unroll
      for (int j = 0; j < kWords; j++) rounded[box][j] = pack(x[2 * j], x[2 * j + 1]);
    }
  }

  // Of this thread's two rows of a.
  __device__ __forceinline__ void load_row_scales(float (&scale)[2], const Tile& tile) const {
    const int first = tile.row + group * kGroupRows + row;
    const float* const of = GATHER && tile.owner == p.rank ? p.own_scale : p.a_scale + tile.owner * p.scales;
    if (SCALES == 1) scale[0] = scale[1] = __ldcg(of) * *p.b_scale;  // not from L1: others may have sent it
    for (int h = 0; h < 2 && SCALES == 2; h++) {
      if (first + 8 * h < p.m) scale[h] = __ldcg(of + first + 8 * h);
    }
  }

  // Of the columns of this thread's j-th pair in a box; `otherwise` beyond the matrix, or where `of` is null.
  __device__ __forceinline__ float2 of_columns(const float* of, const Tile& tile, int box, int j,
                                               float otherwise) const {
    const int c = column(p, tile, box) + lane % 4 * 2 + 8 * j;
    return of && c < p.n ? float2{of[c], of[c + 1]} : float2{otherwise, otherwise};
  }

  __device__ __forceinline__ void apply_scales(float* x, const float (&scale)[2], const Tile& tile, int box) const {
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8 && SCALES; j++) {
      const float2 b = SCALES == 2 ? of_columns(p.b_scale, tile, box, j, 1.0f) : float2{1.0f, 1.0f};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x[4 * j + 2 * h] = x[4 * j + 2 * h] * scale[h] * b.x;
        x[4 * j + 2 * h + 1] = x[4 * j + 2 * h + 1] * scale[h] * b.y;
      }
    }
  }

  // A reduce-scatter's own rows: slots + residual + x + bias.
  __device__ __forceinline__ void reduce(float* x, const Tile& tile, int box) {
    float2 total[16] = {};
#pragma unroll
    for (int from = 1; from < RANKS + RESIDUAL; from += kSlotsPerStage, pipeline.advance()) {
      bar_wait(shared.full + 8 * pipeline.stage, pipeline.phase);
#pragma unroll
      for (int s = 0; s < min(kSlotsPerStage, RANKS + RESIDUAL - from); s++) {
        add_slot(total, shared.stages + pipeline.stage * kStageBytes + s * kSlotBytes, group, row, lane);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // loads come here next
      sync_warpgroup(group);
      release(pipeline.stage);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float2 bias = of_columns(p.bias, tile, box, j, 0.0f);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x[4 * j + 2 * h] = total[2 * j + h].x + x[4 * j + 2 * h] + bias.x;
        x[4 * j + 2 * h + 1] = total[2 * j + h].y + x[4 * j + 2 * h + 1] + bias.y;
      }
    }
  }

  __device__ __forceinline__ void add_bias(float* x, const Tile& tile, int box) const {
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; j++) {
      const float2 bias = of_columns(p.bias, tile, box, j, 0.0f);
#pragma unroll
      for (int h = 0; h < 2; h++) x[4 * j + 2 * h] += bias.x, x[4 * j + 2 * h + 1] += bias.y;
    }
  }

  // A part of tile i, the previous one: a box; or, after those, a quarter of its activation.
  __device__ __forceinline__ void output(int i, int part) {
    if (part >= kBoxes) return output_activation(i, part - kBoxes);
    const u32 to = acquire_output(i, part);
    if (NARROW) {
      store_wide_or_narrow(rounded[part], to, row, lane, previous.owner != p.rank, part % 2);
    } else {
#pragma unroll
      for (int j = 0; j < kWords; j++) store_shared(to + word(row, lane, j), rounded[part][j]);
    }
    commit_output(i, part);
  }

  __device__ __forceinline__ void output_activation(int i, int quarter) {
    const int half = quarter / 2, box = kBoxes + (ACT == 1 ? half : 0);
    const bool begins = ACT == 1 ? quarter % 2 == 0 : ACT == 3 && quarter == 0;
    const bool ends = ACT == 1 ? quarter % 2 : ACT == 3 && quarter == 3;
    if (begins) to_act = acquire_output(i, box), to_act_t = kTransposes ? acquire_output(i, box + 1) : 0;
#pragma unroll
    for (int j = quarter % 2 * (kWords / 2); j < (quarter % 2 + 1) * (kWords / 2); j++) {
      const float2 v = activated(half, j);
      if (ACT == 1) store_shared(to_act + word(row, lane, j), pack(v.x, v.y));
      if (ACT != 3) continue;
      const u16 q = pack_fp8(v.x * act_scale, v.y * act_scale);
      const int r = row + j % 2 * 8, chunk = half * 4 + j / 4, at = j / 2 % 2 * 8 + lane % 4 * 2;
      store_shared_16(to_act + r * kBoxBytes + ((chunk ^ lane / 4) << 4) + at, q);
      if (!kTransposes) continue;
      const u32 c = to_act_t + (chunk * 16 + at) * kGroupRows + ((r / 16 ^ lane % 4) << 4) + r % 16;
      store_shared_8(c, q), store_shared_8(c + kGroupRows, q >> 8);
    }
    if (ends) commit_output(i, box);
    if (ends && kTransposes) commit_output(i, box + 1);
  }

  // What belongs to the j-th word of box `half` of the previous tile's gates.
  __device__ __forceinline__ float2 activated(int half, int j) {
    const u32 gate = rounded[half][j], up = rounded[kBoxes / 2 + half][j];
    const float2 v = {ACTIVATION::value(unpack(gate), unpack(up)),
                      ACTIVATION::value(unpack(gate >> 16), unpack(up >> 16))};
    const bool live = previous.row + group * kGroupRows + row + j % 2 * 8 < p.m &&
                      previous.col + half * kBoxColumns + j / 2 * 8 + lane % 4 * 2 < p.n / 2;
    if (ACT > 1 && live) amax = max(amax, max(magnitude(v.x), magnitude(v.y)));
    return v;
  }

  // Where a box of tile i is to be written, once what was there has been stored; then it is handed to store_output().
  __device__ __forceinline__ u32 acquire_output(int i, int box) const {
    const int use = i * kOutputBoxes + box, slot = kOutputSlots * group + use % kOutputSlots;
    bar_wait(shared.drained + 8 * slot, use / kOutputSlots & 1 ^ 1);
    return shared.output + slot * kOutputBytes;
  }
  __device__ __forceinline__ void commit_output(int i, int box) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    bar_arrive(shared.filled + 8 * (kOutputSlots * group + (i * kOutputBoxes + box) % kOutputSlots));
  }
};
