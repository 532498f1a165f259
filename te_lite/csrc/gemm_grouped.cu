// The products of all groups of tokens in one launch, for sm_90a; compiled at run time by te_lite/ops/gemm_grouped.py with
// the macros
//   ROWS            1: out[m, n] = sum_k a[m, k] b[g, n, k] for each token m of group g, in fp8
//                   0: out[g][n, k] = sum_m a[n, m] b[k, m] over the tokens m of group g, of fp8 columns with zeros behind
//                   each group, or of 16-bit a[m, n] and b[m, k] as they lie
//   A_TYPE, B_TYPE  bf16, f16, e4m3 or e5m2      OUT_TYPE  bf16, f16 or, of ROWS 0, f32
//   ADD             1: to what out holds, in f32
//   A_T, B_T        both 1: 16-bit operands, of ROWS 0
//   SCALES          0 none; of a and of b: 1 one a group; 2 one a row; 3 one a row and 128 tokens, not with ROWS
//   SPLIT           0, or after how many steps of K sums are added in fp32 registers
//   COLUMNS         of a tile: 256, or 192 with SPLIT
//
// Which tokens a group has is read from the layout on the device. A cluster of two blocks goes through every
// clusters-th tile; its blocks take neighbouring rows and load half of b's tile each, for both. In a block one warp loads,
// and two warpgroups multiply 64 rows each and write them, while the next tile's operands come. A weight gradient of few
// tokens takes longer to write than to compute: it leaves in whole lines, and is added to what is there in L2, not here.
#include "gemm_grouped_walk.h"

// Bytes of the scales of so many rows or columns, of those that are left.
__device__ __forceinline__ u32 scale_bytes(int left, int count) { return 4 * max(0, min(left, count)); }

__device__ __forceinline__ void load_step(const Maps& maps, const Arguments& p, const Shared& shared, const Tile& tile,
                                          int step, const Pipeline& pipeline) {
  const int cta = cluster_rank(), k = (ROWS ? 0 : tile.first) + step * kStep;
  const u32 to = shared.stages + pipeline.stage * kTileBytes, b = to + kABytes, bar = shared.full + 8 * pipeline.stage;
  const u32 of_a = SCALES == 3 ? scale_bytes(tile.end - tile.row, kGroupedRows) : 0;
  const bool scaled = SCALES == 3 || (SCALES == 2 && step == tile.steps - 1);
  const u32 of_b = scaled ? scale_bytes(p.cols - tile.col, COLUMNS) : 0;
  bar_wait(shared.empty + 8 * pipeline.stage, pipeline.phase ^ 1);
  bar_expect(bar, kTileBytes + of_a + of_b);
  for (int box = 0; box < 2 && A_T; box++) {
    load_box<false>(to + box * kLyingBytes, &maps.a, bar, tile.row + box * 64, k);
  }
  for (int box = cta; box < COLUMNS / 64 && B_T; box += 2) {
    load_box<true>(b + box * kLyingBytes, &maps.b, bar, tile.col + box * 64, k);
  }
  const int b_row = (ROWS ? tile.group * p.cols : 0) + tile.col + cta * (COLUMNS / 2);
  if (!A_T) load_box<false>(to, &maps.a, bar, k, tile.row);
  if (!B_T) load_box<true>(b + cta * (kBBytes / 2), &maps.b, bar, k, b_row);
  const u32 scales = shared.scales + pipeline.stage * kScaleBytes;
  const int of = SCALES == 3 ? k / 128 : tile.group;
  if (of_a) load_bytes(scales, p.a_scale + (u64)of * p.a_scale_group + tile.row, of_a, bar);
  if (of_b) load_bytes(scales + 4 * kGroupedRows, p.b_scale + (u64)of * p.b_scale_group + tile.col, of_b, bar);
}

__device__ __forceinline__ void produce(const Maps& maps, const Arguments& p, const Shared& shared) {  // one thread
  Pipeline pipeline;
  Walk walk(p);
  for (Tile tile; walk.next(tile);) {
    for (int step = 0; step < tile.steps; step++, pipeline.advance()) load_step(maps, p, shared, tile, step, pipeline);
  }
}

// A thread of a warpgroup that multiplies 64 rows of each tile.
struct Consumer {
  const Arguments& p;
  const Shared& shared;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const int row = group * 64 + thread / 32 * 16 + lane / 4;  // of a tile; it also has the one 8 further down
  Pipeline pipeline;

  __device__ __forceinline__ Consumer(const Arguments& p, const Shared& shared) : p(p), shared(shared) {}

  __device__ __forceinline__ void run() {
    Walk walk(p);
    for (Tile tile; walk.next(tile);) {
      float d[COLUMNS / 2], total[SPLIT ? COLUMNS / 2 : 1], a[2] = {1.0f, 1.0f};
      load_row_scales(a, tile);
      if constexpr (SPLIT) {
        sum(total, d, tile);
        finish(total, a, tile);
      } else {
        multiply(d, tile, 0, tile.steps);
        finish(d, a, tile);
      }
    }
  }

  __device__ __forceinline__ void load_row_scales(float (&a)[2], const Tile& tile) const {
    if (SCALES == 1) a[0] = a[1] = p.a_scale[tile.group];
    for (int h = 0; h < 2 && SCALES == 2; h++) {
      const int at = tile.row + row + 8 * h;
      if (at < tile.end) a[h] = p.a_scale[(u64)tile.group * p.a_scale_group + at];
    }
  }

  // total = the products of all steps, of which d has a few.
  __device__ __forceinline__ void sum(float* total, float (&d)[COLUMNS / 2], const Tile& tile) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j++) total[j] = 0.0f;
    int step = 0;
#pragma unroll 1
    do {
      multiply(d, tile, step, min(tile.steps, step + SPLIT));
      step += SPLIT;
      if constexpr (SCALES == 3) {
        add_scaled(total, d);
        release_read(pipeline.previous());
      } else {
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j++) total[j] += d[j];
        if (step < tile.steps) release(pipeline.previous());
      }
    } while (step < tile.steps);
  }

  // d = the products of these steps, at least one; the last one's stage is still held.
  __device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], const Tile& tile, int step, int until) {
    const int first = step;
#pragma unroll 1
    do {
      const u32 from = shared.stages + pipeline.stage * kTileBytes;
      bar_wait(shared.full + 8 * pipeline.stage, pipeline.phase);
      if (A_T && tile.tokens - step * kStep < kStep) clear(from, tile.tokens - step * kStep);
      const u64 a = descriptor(from + group * (kABytes / 2), A_T ? kLyingBytes : 16);
      const u64 b = descriptor(from + kABytes, B_T ? kLyingBytes : 16);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) wgmma(d, a + (A_T ? 128 : 2) * k, b + (B_T ? 128 : 2) * k, step - first + k);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      wgmma_wait<1>(d);
      if (step > first) release(pipeline.previous());
      pipeline.advance();
    } while (++step < until);
    wgmma_wait<0>(d);
  }

  __device__ __forceinline__ void release(int stage) const {  // no thread of the warpgroup reads it any more
    if (thread < 2) bar_arrive_at(shared.empty + 8 * stage, thread);
  }

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
  __device__ __forceinline__ void release_read(int stage) const {  // of which threads have read on their own
    sync();
    release(stage);
  }

  // Of operands as they lie, rows from `left` on are another group's: they become zeros. Of b both warpgroups write them.
  __device__ __forceinline__ void clear(u32 from, int left) const {
    const int chunks = (kStep - left) * (kBoxBytes / 16);
    for (int box = 0; box < 1 + COLUMNS / 64; box++) {
      const u32 to = from + (box ? kABytes + (box - 1) * kLyingBytes : group * kLyingBytes) + left * kBoxBytes;
      for (int i = thread; i < chunks; i += 128) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + 16 * i), "r"(0) : "memory");
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync();
  }

  // Of the columns of this thread's j-th pair, as they came with a stage.
  __device__ __forceinline__ float2 column_scales(int stage, int j) const {
    const u32 scales = shared.scales + stage * kScaleBytes + 4 * kGroupedRows;
    const uint2 b = load_shared_64(scales + 32 * j + lane % 4 * 8);
    return {__uint_as_float(b.x), __uint_as_float(b.y)};
  }

  // total += d, scaled as the last step's are.
  __device__ __forceinline__ void add_scaled(float* total, const float (&d)[COLUMNS / 2]) const {
    const int stage = pipeline.previous();
    const u32 scales = shared.scales + stage * kScaleBytes + 4 * row;
    const float a[2] = {__uint_as_float(load_shared(scales)), __uint_as_float(load_shared(scales + 32))};
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      const float2 b = column_scales(stage, j);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        total[4 * j + 2 * h] += d[4 * j + 2 * h] * (a[h] * b.x);
        total[4 * j + 2 * h + 1] += d[4 * j + 2 * h + 1] * (a[h] * b.y);
      }
    }
  }

  // The sum of a tile, scaled, is on its way to memory when this returns. a: scales of this thread's rows.
  __device__ __forceinline__ void finish(float* x, const float (&a)[2], const Tile& tile) const {
    const int stage = pipeline.previous();
    if constexpr (SCALES == 1 || SCALES == 2) {
      float2 b = {1.0f, 1.0f};
      if (SCALES == 1) b.x = b.y = p.b_scale[tile.group];
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        if (SCALES == 2) b = column_scales(stage, j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          x[4 * j + 2 * h] = x[4 * j + 2 * h] * a[h] * b.x;
          x[4 * j + 2 * h + 1] = x[4 * j + 2 * h + 1] * a[h] * b.y;
        }
      }
    }
    if (SCALES == 2) release_read(stage);
    if (SCALES < 2) release(stage);
    if (!ROWS && !tile.tokens) {  // whatever its scales are
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; j++) x[j] = 0.0f;
    }
    if constexpr (ROWS) {
      write_pairs(x, tile);
    } else {
      write_lines(x, tile);
    }
  }

  // By way of shared memory, so that whole lines leave: 8 of a warp's 16 rows and 64 columns at a time.
  __device__ __forceinline__ void write_lines(const float* x, const Tile& tile) const {
    constexpr int kChunks = kPartColumns * kOutBytes / 16;  // of 16 bytes, of a row
    const int warp = threadIdx.x / 32, chunk = lane % kChunks * 16, left = (p.cols - tile.col) * kOutBytes;
    const u32 rows = shared.parts + warp * kPartBytes, to = rows + lane / 4 * kPitch + lane % 4 * 2 * kOutBytes;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int first = tile.row + warp * 16 + h * 8 + lane / kChunks;
      char* const out = (char*)p.outs[tile.group] + ((u64)first * p.cols + tile.col) * kOutBytes + chunk;
#pragma unroll
      for (int part = 0; part < COLUMNS / kPartColumns; part++) {
        const int skip = part * kPartColumns * kOutBytes;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPartColumns / 8; i++) {
          const int j = part * (kPartColumns / 8) + i;
          const float low = x[4 * j + 2 * h], high = x[4 * j + 2 * h + 1];
          if constexpr (kOutBytes == 4) {
            store_shared_floats(to + 32 * i, low, high);
          } else {
            store_shared(to + 16 * i, pack(low, high));
          }
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 8; r += 32 / kChunks) {
          const uint4 v = load_shared_128(rows + (lane / kChunks + r) * kPitch + chunk);
          if (first + r >= tile.end || skip + chunk >= left) continue;
          void* const at = out + (u64)r * p.cols * kOutBytes + skip;
          if constexpr (ADD) {
            add_floats(at, v);
          } else {
            __stcs((uint4*)at, v);
          }
        }
      }
    }
  }

  // In 16 bits, from registers. Four threads have 16 columns of a row: each gives pairs away, and writes four neighbours.
  __device__ __forceinline__ void write_pairs(const float* x, const Tile& tile) const {
    const int first = tile.row + row, left = p.cols - tile.col - lane % 4 * 4, from = (lane & ~3) + lane % 2 * 2;
    const bool there[2] = {first < tile.end, first + 8 < tile.end};
    uint2* const out = (uint2*)((u16*)p.outs[0] + (u64)first * p.cols + tile.col) + lane % 4;
    uint2* const below = out + 2 * p.cols;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float low = __shfl_sync(~0u, x[4 * j + 2 * h + i % 2], from + i / 2);
          const float high = __shfl_sync(~0u, x[4 * j + 4 + 2 * h + i % 2], from + i / 2);
          v[i] = lane % 4 < 2 ? low : high;
        }
        if (there[h] && 8 * j < left) (h ? below : out)[2 * j] = {pack(v[0], v[1]), pack(v[2], v[3])};
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGroupedThreads, 1)
    gemm_grouped(const __grid_constant__ Maps maps, const __grid_constant__ Arguments p) {
  extern __shared__ char raw[];
  const Shared shared(raw);
  if (threadIdx.x == 0) shared.init();
  cluster_sync();
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");  // the kernel before has ended
  if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer(p, shared).run();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) produce(maps, p, shared);
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");  // nobody arrives here any more
}
