// The activations of [gate | up] that fused GEMMs compute. ACTIVATION is the name of the one that a kernel is compiled for;
// its parameters are macros with the names that te_lite/ops/activation.py gives them, in upper case. All bits are those
// that Triton's own kernels compute.
#pragma once

#include "hopper.h"

namespace te_lite {

// 1 / (1 + exp(-x)). What is flushed is no part of 1 + e.
__device__ __forceinline__ float sigmoid(float x) {
  float e, gate;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(-x, 1.44269502f)));
  asm("div.full.f32 %0, %1, %2;" : "=f"(gate) : "f"(1.0f), "f"(__fadd_rn(e, 1.0f)));
  return gate;
}

// value: of a pair; grads: those of gate and up, where that of the value is d.
struct glu {
  static __device__ __forceinline__ float value(float gate, float up) { return __fmul_rn(sigmoid(gate), up); }
  static __device__ __forceinline__ float2 grads(float d, float gate, float up) {
    const float s = sigmoid(gate);
    return {__fmul_rn(__fmul_rn(up, d), __fmul_rn(s, __fsub_rn(1.0f, s))), __fmul_rn(s, d)};
  }
};

struct swiglu {
  static __device__ __forceinline__ float value(float gate, float up) { return __fmul_rn(gate, sigmoid(gate)) * up; }
  static __device__ __forceinline__ float2 grads(float d, float gate, float up) {
    const float s = sigmoid(gate), inside = fminf(fmaxf(gate, -128.0f), 128.0f);
    const float slope = __fmaf_rn(__fmul_rn(inside, s), __fsub_rn(1.0f, s), s);
    return {__fmul_rn(__fmul_rn(up, d), slope), __fmul_rn(__fmul_rn(gate, s), d)};
  }
};

#ifdef LIMIT
// nan stays nan. At a limit the gradient still passes.
struct clamped_swiglu {
  static constexpr float limit = LIMIT, alpha = ALPHA, offset = GLU_LINEAR_OFFSET;

  static __device__ __forceinline__ float linear(float up) {
    return __fadd_rn(max_or_nan(min_or_nan(up, limit), -limit), offset);
  }
  static __device__ __forceinline__ float value(float gate, float up) {
    const float x = min_or_nan(gate, limit);
    return __fmul_rn(__fmul_rn(x, sigmoid(__fmul_rn(x, alpha))), linear(up));
  }
  static __device__ __forceinline__ float2 grads(float d, float gate, float up) {
    const float x = min_or_nan(gate, limit), z = __fmul_rn(x, alpha), s = sigmoid(z);
    const float inside = fminf(fmaxf(z, -128.0f), 128.0f);
    const float slope = __fmaf_rn(__fmul_rn(inside, s), __fsub_rn(1.0f, s), s), d_up = __fmul_rn(__fmul_rn(x, s), d);
    return {__fmul_rn(__fmul_rn(linear(up), d), gate > limit ? 0.0f : slope), fabsf(up) > limit ? 0.0f : d_up};
  }
};
#endif

}  // namespace te_lite
