// GRAD: a tile's product is the gradient of an activation of h = [gate | up]. A fourth warpgroup makes h's of it, box by box, while the
// tensor cores are at the next tile.
#pragma once

#include "gemm_slots.h"

constexpr int kGradGroup = 2;  // for together(), after those that multiply

// One thread: the boxes of h.
__device__ __forceinline__ void load_h(const Maps& maps, const Arguments& p, const Shared& shared) {
  Place at;
  for (int i = 0, use = 0; shared.tile(p, i, at); i++) {
    for (int box = 0; box < kBoxes; box++) {
      for (int group = 0; group < 2; group++, use++) {
        const int col = at.col + box * kBoxColumns, row = at.owner * p.m + at.row + group * kHalfRows;
        const u32 to = shared.h + use % 2 * (2 * kOutputBytes), bar = shared.h_full + use % 2 * 8;
        bar_wait(shared.h_empty + use % 2 * 8, use / 2 & 1 ^ 1);
        bar_expect(bar, 2 * kOutputBytes);
        load_box_once(to, &maps.h, bar, col, row);
        load_box_once(to + kOutputBytes, &maps.h, bar, p.n + col, row);
      }
    }
  }
}

// One thread: what was made of a box of 64 columns, of gates and of ups.
__device__ __forceinline__ void store_made(const Maps& maps, const Arguments& p, const Place& at, int col, int row,
                                           u32 made) {
  for (int up = 0; up < 2 && col < p.n; up++) {
    const int to = up * p.n + col;
    if (ACT == 1) store_box_once(&maps.act[at.owner], made + up * kOutputBytes, to, row);
    if (ACT == 3) store_box_once(&maps.act[at.owner], made + up * (kOutputBytes / 2), to, row);
    if (ACT == 3) store_box_once(&maps.act_t[at.owner], made + kOutputBytes + up * (kOutputBytes / 2), row, to);
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Of four rows of four bytes the columns.
__device__ __forceinline__ void transpose(u32 (&b)[4]) {
  const u32 low01 = __byte_perm(b[0], b[1], 0x5140), low23 = __byte_perm(b[2], b[3], 0x5140);
  const u32 high01 = __byte_perm(b[0], b[1], 0x7362), high23 = __byte_perm(b[2], b[3], 0x7362);
  b[0] = __byte_perm(low01, low23, 0x5410), b[1] = __byte_perm(low01, low23, 0x7632);
  b[2] = __byte_perm(high01, high23, 0x5410), b[3] = __byte_perm(high01, high23, 0x7632);
}

// Each thread takes four rows of four columns at once: a warp 16 columns of half the rows, then of the others.
__device__ __forceinline__ void differentiate(const Maps& maps, const Arguments& p, const Shared& shared) {
  const int thread = threadIdx.x % 128, lane = thread % 32, fours = thread / 32 * 4 + lane % 4;
  const float scale = ACT == 3 ? *p.act_scale : 1.0f;
  float peak = 0.0f;
  Place at;
  for (int i = 0, use = 0; shared.tile(p, i, at); i++) {
    for (int box = 0; box < kBoxes; box++) {
      for (int group = 0; group < 2; group++, use++) {
        const int handed = i * kBoxes + box;
        const int first_row = at.row + group * kHalfRows, first_col = at.col + box * kBoxColumns;
        const u32 grads = shared.output + group * kOutputBytes, h = shared.h + use % 2 * (2 * kOutputBytes);
        bar_wait(shared.filled + 8 * group, handed & 1);
        bar_wait(shared.h_full + use % 2 * 8, use / 2 & 1);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
          const int quad = lane / 4 + 8 * half;
          uint2 grad[4], gate[4], up[4];
          const auto place = [&](int k) -> u32 {  // of row k in a box of 16-bit values
            return (quad * 4 + k) * kBoxBytes + ((fours / 2 ^ (quad * 4 + k) % 8) << 4) + fours % 2 * 8;
          };
#pragma unroll
          for (int k = 0; k < 4; k++) {
            grad[k] = load_shared_64(grads + place(k)), gate[k] = load_shared_64(h + place(k));
            up[k] = load_shared_64(h + kOutputBytes + place(k));
          }
          if (half) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // loads come here next
            bar_arrive(shared.h_empty + use % 2 * 8), bar_arrive(shared.drained + 8 * group);
          }
          if (kActs && !half) {
            if (!thread) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            together(kGradGroup);
          }
          u32 dgate[4], dup[4];  // in fp8, for ACT 3
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const float2 v[4] = {ACTIVATION::grads(unpack(grad[k].x), unpack(gate[k].x), unpack(up[k].x)),
                                 ACTIVATION::grads(unpack(grad[k].x >> 16), unpack(gate[k].x >> 16), unpack(up[k].x >> 16)),
                                 ACTIVATION::grads(unpack(grad[k].y), unpack(gate[k].y), unpack(up[k].y)),
                                 ACTIVATION::grads(unpack(grad[k].y >> 16), unpack(gate[k].y >> 16), unpack(up[k].y >> 16))};
            float largest = 0.0f;
#pragma unroll
            for (int c = 0; c < 4 && ACT > 1; c++) {
              largest = max_or_nan(max_or_nan(largest, fabsf(v[c].x)), fabsf(v[c].y));
            }
            if (ACT > 1 && first_row + quad * 4 + k < p.m && first_col < p.n) peak = max_or_nan(peak, largest);
            if (ACT == 1) {
              store_shared_64(shared.made + place(k), {pack(v[0].x, v[1].x), pack(v[2].x, v[3].x)});
              store_shared_64(shared.made + kOutputBytes + place(k), {pack(v[0].y, v[1].y), pack(v[2].y, v[3].y)});
            }
            dgate[k] = pack_fp8(v[0].x * scale, v[1].x * scale) | pack_fp8(v[2].x * scale, v[3].x * scale) << 16;
            dup[k] = pack_fp8(v[0].y * scale, v[1].y * scale) | pack_fp8(v[2].y * scale, v[3].y * scale) << 16;
          }
#pragma unroll
          for (int which = 0; which < 2 && ACT == 3; which++) {
            u32(&bytes)[4] = which ? dup : dgate;
            const u32 rows = shared.made + which * (kOutputBytes / 2), columns = rows + kOutputBytes;
#pragma unroll
            for (int k = 0; k < 4; k++) {
              const int r = quad * 4 + k;
              store_shared(rows + r * 64 + ((fours / 4 ^ r / 2 % 4) << 4) + fours % 4 * 4, bytes[k]);
            }
            transpose(bytes);
#pragma unroll
            for (int k = 0; k < 4; k++) {
              const int c = fours * 4 + k;
              store_shared(columns + c * kHalfRows + ((quad / 4 ^ c / 2 % 4) << 4) + quad % 4 * 4, bytes[k]);
            }
          }
        }
        if (!kActs) continue;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        together(kGradGroup);
        if (!thread) store_made(maps, p, at, first_col, first_row, shared.made);
      }
    }
  }
  if (!thread) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  if (ACT > 1) tell_peak(p, shared, kGradGroup, blockIdx.x, __float_as_uint(peak), scale);
}
