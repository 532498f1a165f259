// GRAD: a tile's product is the gradient of an activation of h = [gate | up]. A fourth warpgroup makes h's of it, box by box, while the
// tensor cores are at the next tile.
#pragma once

#include "gemm_slots.h"

constexpr int kGradGroup = 2;  // for sync_warpgroup(), after those that multiply

// One thread: the boxes of h.
__device__ __forceinline__ void load_h(const Maps& maps, const Arguments& p, const Shared& shared) {
  Tile tile;
  for (int i = 0, use = 0; shared.tile(p, i, tile); i++) {
    for (int box = 0; box < kBoxes; box++) {
      for (int group = 0; group < 2; group++, use++) {
        const int col = tile.col + box * kBoxColumns, row = tile.owner * p.m + tile.row + group * kGroupRows;
        const u32 to = shared.h + use % 2 * (2 * kOutputBytes), bar = shared.h_full + use % 2 * 8;
        bar_wait(shared.h_empty + use % 2 * 8, use / 2 & 1 ^ 1);
        bar_expect(bar, 2 * kOutputBytes);
        load_box_once(to, &maps.h, bar, col, row);
        load_box_once(to + kOutputBytes, &maps.h, bar, p.n + col, row);
      }
    }
  }
}

// One thread: the gradients of a box of 64 columns, of gates and of ups.
__device__ __forceinline__ void store_h_grads(const Maps& maps, const Arguments& p, const Tile& tile, int col, int row,
                                              u32 from) {
  for (int up = 0; up < 2 && col < p.n; up++) {
    const int to = up * p.n + col;
    if (ACT == 1) store_box_once(&maps.act[tile.owner], from + up * kOutputBytes, to, row);
    if (ACT == 3) store_box_once(&maps.act[tile.owner], from + up * (kOutputBytes / 2), to, row);
    if (ACT == 3) store_box_once(&maps.act_t[tile.owner], from + kOutputBytes + up * (kOutputBytes / 2), row, to);
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

// Where row k of a thread's columns lies in a box of 16-bit values. quad: of rows; fours: of columns, both in fours.
__device__ __forceinline__ u32 grad_word(int quad, int fours, int k) {
  return (quad * 4 + k) * kBoxBytes + ((fours / 2 ^ (quad * 4 + k) % 8) << 4) + fours % 2 * 8;
}

// The gradients of a thread's four rows of four columns. ACT 1: stored; else in fp8 in dgate and dup. live: rows of them
// within the matrix. Returns the largest magnitude, also of `amax`.
__device__ __forceinline__ float grads_of_rows(const Shared& shared, const uint2 (&grad)[4], const uint2 (&gate)[4],
                                               const uint2 (&up)[4], int quad, int fours, int live, float scale,
                                               float amax, u32 (&dgate)[4], u32 (&dup)[4]) {
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
    if (ACT > 1 && k < live) amax = max_or_nan(amax, largest);
    if (ACT == 1) {
      const u32 to = shared.h_grads + grad_word(quad, fours, k);
      store_shared_64(to, {pack(v[0].x, v[1].x), pack(v[2].x, v[3].x)});
      store_shared_64(to + kOutputBytes, {pack(v[0].y, v[1].y), pack(v[2].y, v[3].y)});
    }
    dgate[k] = pack_fp8(v[0].x * scale, v[1].x * scale) | pack_fp8(v[2].x * scale, v[3].x * scale) << 16;
    dup[k] = pack_fp8(v[0].y * scale, v[1].y * scale) | pack_fp8(v[2].y * scale, v[3].y * scale) << 16;
  }
  return amax;
}

// Four rows of four bytes to shared memory: by rows, and transposed.
__device__ __forceinline__ void store_fp8(u32 rows, u32 (&bytes)[4], int quad, int fours) {
  const u32 columns = rows + kOutputBytes;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int r = quad * 4 + k;
    store_shared(rows + r * 64 + ((fours / 4 ^ r / 2 % 4) << 4) + fours % 4 * 4, bytes[k]);
  }
  transpose(bytes);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int c = fours * 4 + k;
    store_shared(columns + c * kGroupRows + ((quad / 4 ^ c / 2 % 4) << 4) + quad % 4 * 4, bytes[k]);
  }
}

// The fourth warpgroup. Each thread takes four rows of four columns at once: a warp 16 columns of half the rows, then of
// the others.
__device__ __forceinline__ void differentiate(const Maps& maps, const Arguments& p, const Shared& shared) {
  const int thread = threadIdx.x % 128, lane = thread % 32, fours = thread / 32 * 4 + lane % 4;
  const float scale = ACT == 3 ? *p.act_scale : 1.0f;
  float amax = 0.0f;
  Tile tile;
  for (int i = 0, use = 0; shared.tile(p, i, tile); i++) {
    for (int box = 0; box < kBoxes; box++) {
      for (int group = 0; group < 2; group++, use++) {
        const int first_row = tile.row + group * kGroupRows, first_col = tile.col + box * kBoxColumns;
        const u32 grads = shared.output + group * kOutputBytes, h = shared.h + use % 2 * (2 * kOutputBytes);
        bar_wait(shared.filled + 8 * group, i * kBoxes + box & 1);
        bar_wait(shared.h_full + use % 2 * 8, use / 2 & 1);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
          const int quad = lane / 4 + 8 * half;
          uint2 grad[4], gate[4], up[4];
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const u32 from = grad_word(quad, fours, k);
            grad[k] = load_shared_64(grads + from), gate[k] = load_shared_64(h + from);
            up[k] = load_shared_64(h + kOutputBytes + from);
          }
          if (half) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // loads come here next
            bar_arrive(shared.h_empty + use % 2 * 8), bar_arrive(shared.drained + 8 * group);
          }
          if (kStoresAct && !half) {
            if (!thread) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            sync_warpgroup(kGradGroup);
          }
          u32 dgate[4], dup[4];
          const int live = first_col < p.n ? p.m - first_row - quad * 4 : 0;
          amax = grads_of_rows(shared, grad, gate, up, quad, fours, live, scale, amax, dgate, dup);
          if (ACT == 3) {
            store_fp8(shared.h_grads, dgate, quad, fours);
            store_fp8(shared.h_grads + kOutputBytes / 2, dup, quad, fours);
          }
        }
        if (!kStoresAct) continue;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_warpgroup(kGradGroup);
        if (!thread) store_h_grads(maps, p, tile, first_col, first_row, shared.h_grads);
      }
    }
  }
  if (!thread) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  if (ACT > 1) store_amax(p, shared, kGradGroup, blockIdx.x, __float_as_uint(amax), scale);
}
