// How a reduce-scatter's partial sums travel: in OUT_TYPE or, with NARROW, as te_lite/ops/narrow.py makes them: E4M3 with
// a power of two for every 128 columns of a row. A box of theirs, 64 columns, then has half the bytes; behind them in
// shared memory lie scales, of a slot's every box, of output's every second one.
#pragma once

#include "gemm_walk.h"

constexpr u32 kNarrowBytes = kGroupRows * kBoxColumns;  // of a warpgroup's box, without scales

// One box of a slot, in shared memory, is added to a warpgroup's sums.
__device__ __forceinline__ void add_slot(float2 (&total)[16], u32 slot, int group, int row, int lane) {
  if constexpr (!NARROW) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const u32 pair = load_shared(slot + group * kOutputBytes + word(row, lane, j));
      total[j].x += unpack(pair), total[j].y += unpack(pair >> 16);
    }
  } else {
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      scale[h] = __uint_as_float(load_shared(slot + 2 * kNarrowBytes + (group * kGroupRows + row + 8 * h) * 4));
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
      // As word().
      const u32 at = slot + group * kNarrowBytes + (row + j % 2 * 8) * kBoxColumns + ((j / 4 ^ lane / 8) << 4);
      const float2 v = unpack_e4m3(load_shared_16(at + j / 2 % 2 * 8 + lane % 4 * 2));
      total[j].x += v.x * scale[j % 2], total[j].y += v.y * scale[j % 2];  // products are exact
    }
  }
}

// Of a thread's two rows, in 128 columns: powers of two, and what they are multiplied by.
struct Scales {
  u32 stored[2];
  float factor[2];
};

__device__ __forceinline__ Scales narrow_scales(const float* x) {  // four threads share a row
  Scales s;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float largest = 0.0f;  // no integers: to look at sums as such, ptxas lets each wgmma wait for the one before
#pragma unroll
    for (int j = 0; j < 16; j++) {
      largest = max_or_nan(max_or_nan(largest, fabsf(x[4 * j + 2 * h])), fabsf(x[4 * j + 2 * h + 1]));
    }
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    const u32 amax = min(magnitude(largest), 0x7f800000u);
    const int exponent = max((int)((amax + 0x1fffff) >> 23) - 8, 1);
    s.stored[h] = amax < 0x7f800000 ? exponent << 23 : 0x7fc00000;
    s.factor[h] = __uint_as_float((254 - exponent) << 23);
  }
  return s;
}

// A box in words of four columns: of the first row in even threads, of the second in odd ones. Then the scales.
__device__ __forceinline__ void narrow_words(u32 (&held)[kWords], const float* x, const Scales& s, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const u32 first = pack_fp8(x[4 * j] * s.factor[0], x[4 * j + 1] * s.factor[0]);
    const u32 second = pack_fp8(x[4 * j + 2] * s.factor[1], x[4 * j + 3] * s.factor[1]);
    const u32 both = first | second << 16, got = __shfl_xor_sync(~0u, both >> (lane % 2 ? 0 : 16), 1);
    held[j] = __byte_perm(both, got, lane % 2 ? 0x3254 : 0x5410);
  }
  held[8] = s.stored[0], held[9] = s.stored[1];
}

// To shared memory, of either kind. No branch: ptxas would let each wgmma wait for the one before. Chunks of 16 bytes lie
// as the tensor-copy unit's swizzle of 64 bytes has them.
__device__ __forceinline__ void store_wide_or_narrow(const u32 (&held)[kWords], u32 to, int row, int lane, bool narrow,
                                                     bool scales) {
  const u32 from = to + (row + lane % 2 * 8) * kBoxColumns + lane % 4 / 2 * 4;
#pragma unroll
  for (int j = 0; j < kWords; j++) {
    store_shared_if(j < 8 || !narrow, narrow ? from + ((j / 2 ^ lane / 8) << 4) + j % 2 * 8 : to + word(row, lane, j),
                    held[j]);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    store_shared_if(narrow && scales && lane % 4 == 0, to + kNarrowBytes + (row + 8 * h) * 4, held[8 + h]);
  }
}

// One warp: flags are looked at, and slots on their way to L2, before the products of an own tile are loaded.
__device__ __forceinline__ void await_slots(const Maps& maps, const Arguments& p, const Shared& shared) {
  const int source = threadIdx.x % 32;
  Tile at;
  for (int i = 0; shared.tile(p, i, at); i++) {
    if (at.owner == p.rank && source < RANKS && source != p.rank) {
      await(p, p.ready + source * p.flags + at.block, 0);
      asm volatile("fence.proxy.async.global;" ::: "memory");
      for (int box = 0; box < kBoxes; box++)
        prefetch_box(&maps.other, at.col + box * kBoxColumns, source * p.m + at.row);
    }
    bar_arrive(shared.checked);
  }
}

// One thread: the slots of an own tile, as if they were more operands.
__device__ __forceinline__ void load_slots(const Maps& maps, const Arguments& p, const Shared& shared, const Tile& at,
                                           Pipeline& pipeline) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
#pragma unroll 1  // unrolled, these two spill registers
  for (int box = 0; box < kBoxes; box++) {
    const int col = at.col + box * kBoxColumns;
#pragma unroll 1
    for (int first = 1; first < RANKS + RESIDUAL; first += kSlotsPerStage, pipeline.advance()) {
      const u32 to = shared.stages + pipeline.stage * kStageBytes, bar = shared.full + 8 * pipeline.stage;
      const int count = min(kSlotsPerStage, RANKS + RESIDUAL - first);
      bar_wait(shared.empty + 8 * pipeline.stage, pipeline.phase ^ 1);
      bar_expect(bar, count * kSlotBytes);
      for (int s = 0; s < count; s++) {
        const int source = (p.rank + first + s) % RANKS;
        const u32 slot = to + s * kSlotBytes;
        const bool residual = RESIDUAL && source == p.rank;
        load_box<false>(slot, residual ? &maps.h : &maps.other, bar, col, residual ? at.row : source * p.m + at.row);
        if (!NARROW) continue;
        // What lies beyond the matrix is not stored; only its address must be one.
        const int block = source * (p.n / 128) + min(col, p.n - 1) / 128, row = min(at.row, p.m - kTileRows);
        load_bytes(slot + 2 * kNarrowBytes, p.slot_scales + (u64)block * p.m + row, 4 * kTileRows, bar);
      }
    }
  }
}
