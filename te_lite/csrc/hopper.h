// Hopper's instructions that C++ has no words for: tensor copies, barriers in shared memory, wgmma. For kernels that are
// compiled with A_TYPE and B_TYPE (bf16, f16, e4m3, e5m2), the types of operands, A_T and B_T (1: 16-bit ones lie
// with K first), OUT_TYPE (bf16, f16), ACT_TYPE (e4m3, e5m2) and COLUMNS (128, 192, 224, 256) of a tile.
#pragma once

using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define IS_BYTE_e4m3 1
#define IS_BYTE_e5m2 1
#define IS_BYTE_bf16 0
#define IS_BYTE_f16 0
#define IS_BYTE_(x) IS_BYTE_##x
#define IS_BYTE(x) IS_BYTE_(x)

__device__ __forceinline__ void bar_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; "
               "DONE: }" ::"r"(bar),
               "r"(parity)
               : "memory");
}
__device__ __forceinline__ void bar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// The same barrier in block `cta` of the cluster. Not released to the cluster: reads of wgmma are over when it is.
__device__ __forceinline__ void bar_arrive_at(u32 bar, u32 cta) {
  asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; mbarrier.arrive.shared::cluster.b64 _, "
               "[remote]; }" ::"r"(bar),
               "r"(cta)
               : "memory");
}
// A box of a matrix to shared memory; kBoth: to both blocks of the cluster, at the same place.
template <bool kBoth>
__device__ __forceinline__ void load_box(u32 to, const void* map, u32 bar, int column, int row) {
  if (kBoth) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(column), "r"(row), "h"((u16)3)
                 : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                 "[%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(column), "r"(row)
                 : "memory");
  }
}
// As load_box and store_box, of what is used once: it makes room in L2 first.
constexpr u64 kEvictFirst = 0x12f0000000000000;  // what createpolicy.fractional.L2::evict_first gives for all of it
__device__ __forceinline__ void load_box_once(u32 to, const void* map, u32 bar, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
               "l"(map), "r"(bar), "r"(column), "r"(row), "l"(kEvictFirst)
               : "memory");
}
__device__ __forceinline__ void store_box_once(const void* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::
                   "l"(map),
               "r"(from), "r"(column), "r"(row), "l"(kEvictFirst)
               : "memory");
}
__device__ __forceinline__ void prefetch_box(const void* map, int column, int row) {  // to L2
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}
// And back, what lies within the matrix.
__device__ __forceinline__ void store_box(const void* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}
// So many bytes, a multiple of 16, as they lie.
__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void store_bytes(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
// Four fp32, added to what is there, in L2; nobody waits. Subnormal sums become zeros.
__device__ __forceinline__ void add_floats(void* to, uint4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(__uint_as_float(v.x)),
               "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)), "f"(__uint_as_float(v.w))
               : "memory");
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// A word and its barrier, in block `cta` of the cluster.
__device__ __forceinline__ void send(u32 word, u32 bar, int value, u32 cta) {
  asm volatile("{ .reg .b32 to, remote; mapa.shared::cluster.u32 to, %0, %3; mapa.shared::cluster.u32 remote, %1, %3;\n"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %2, [remote]; }" ::"r"(word),
               "r"(bar), "r"(value), "r"(cta)
               : "memory");
}

// Where a warp is in a ring of so many stages.
template <int kStages>
struct Stages {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ int previous() const { return stage ? stage - 1 : kStages - 1; }
};

// Of an operand in shared memory, in boxes 128 bytes wide and swizzled, whose groups of 8 rows are 1024 bytes apart. K
// lies along the rows, or (apart: bytes from box to box) across them.
__device__ __forceinline__ u64 descriptor(u32 address, u32 apart = 16) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(apart >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}
// d += a[64, 32 bytes] @ b[COLUMNS, 32 bytes]^T, or d = where add is 0; with B_T of b as [K, COLUMNS].
// d[4 * j + 2 * h + i]: row warp * 16 + 8 * h + lane / 4, column 8 * j + lane % 4 * 2 + i.
#define D(i) "+f"(d[i])
#define D8(i) D(i), D(i + 1), D(i + 2), D(i + 3), D(i + 4), D(i + 5), D(i + 6), D(i + 7)
#define D64(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24), D8(i + 32), D8(i + 40), D8(i + 48), D8(i + 56)
#define TEN(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define NAMES_60 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5")
#define NAMES_90 NAMES_60 TEN("6") TEN("7") TEN("8")
#define NAMES_110 NAMES_90 TEN("9") TEN("10")
#if COLUMNS == 256
#define ACCUMULATORS D64(0), D64(64)
#define NAMES NAMES_110 TEN("11") "%120,%121,%122,%123,%124,%125,%126,%127"
#define OPERANDS(x) x("%128", "%129", "%130")
#elif COLUMNS == 224
#define ACCUMULATORS D64(0), D8(64), D8(72), D8(80), D8(88), D8(96), D8(104)
#define NAMES NAMES_110 "%110,%111"
#define OPERANDS(x) x("%112", "%113", "%114")
#elif COLUMNS == 192
#define ACCUMULATORS D64(0), D8(64), D8(72), D8(80), D8(88)
#define NAMES NAMES_90 "%90,%91,%92,%93,%94,%95"
#define OPERANDS(x) x("%96", "%97", "%98")
#else
#define ACCUMULATORS D64(0)
#define NAMES NAMES_60 "%60,%61,%62,%63"
#define OPERANDS(x) x("%64", "%65", "%66")
#endif
#if IS_BYTE(A_TYPE)
#define DEPTH "k32"
#define END "; }"
#else
#define DEPTH "k16"
#define END ", " TEXT(A_T) ", " TEXT(B_T) "; }"
#endif
__device__ __forceinline__ void wgmma(float (&d)[COLUMNS / 2], u64 a, u64 b, int add) {
#define WGMMA(a, b, add) \
  "{ .reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) DEPTH \
      ".f32." TEXT(A_TYPE) "." TEXT(B_TYPE) " {" NAMES "}, " a ", " b ", p, 1, 1" END
  asm volatile(OPERANDS(WGMMA) : ACCUMULATORS : "l"(a), "l"(b), "r"(add));
}
template <int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[COLUMNS / 2]) {  // until N groups are left
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 w;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
  return w;
}
__device__ __forceinline__ void store_shared(u32 address, u32 w) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(w) : "memory");
}
__device__ __forceinline__ void store_shared_if(bool wanted, u32 address, u32 w) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b32 [%0], %1; }" ::"r"(address), "r"(w),
               "r"((int)wanted)
               : "memory");
}
__device__ __forceinline__ uint2 load_shared_64(u32 address) {
  uint2 w;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(address) : "memory");
  return w;
}
__device__ __forceinline__ uint4 load_shared_128(u32 address) {
  uint4 w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(address)
               : "memory");
  return w;
}
__device__ __forceinline__ void store_shared_64(u32 address, uint2 w) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(w.x), "r"(w.y) : "memory");
}
__device__ __forceinline__ void store_shared_floats(u32 address, float a, float b) {  // bits as integers cost copies
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 w;
  asm("cvt.rn." TEXT(OUT_TYPE) "x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
__device__ __forceinline__ float unpack(u32 half) {
  float v;
  asm("cvt.f32." TEXT(OUT_TYPE) " %0, %1;" : "=f"(v) : "h"((u16)half));
  return v;
}
__device__ __forceinline__ void store_shared_16(u32 address, u16 w) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(w) : "memory");
}
__device__ __forceinline__ u16 load_shared_16(u32 address) {
  u16 w;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(w) : "r"(address) : "memory");
  return w;
}
__device__ __forceinline__ float2 unpack_e4m3(u16 pair) {
  float2 v;
  asm("{ .reg .b32 w; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 w, %2; mov.b32 {low, high}, w;\n"
      "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(v.x), "=f"(v.y)
      : "h"(pair));
  return v;
}
__device__ __forceinline__ void store_shared_8(u32 address, u32 w) {
  asm volatile("st.shared.b8 [%0], %1;" ::"r"(address), "r"(w) : "memory");
}
__device__ __forceinline__ u16 pack_fp8(float low, float high) {
  u16 q;
  asm("cvt.rn.satfinite." TEXT(ACT_TYPE) "x2.f32 %0, %1, %2;" : "=h"(q) : "f"(high), "f"(low));
  return q;
}
__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffff; }
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float v;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
