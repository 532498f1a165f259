// The activations of [gate | up] that fused GEMMs compute. ACTIVATION is the name of the one that a kernel is compiled for;
// its parameters are macros with the names that te_lite/ops/activation.py gives them, in upper case. All bits are those
// that Triton's own kernels compute.
#pragma once

namespace te_lite {

// 1 / (1 + exp(-x)). What is flushed is no part of 1 + e.
__device__ __forceinline__ float sigmoid(float x) {
  float e, gate;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(-x, 1.44269502f)));
  asm("div.full.f32 %0, %1, %2;" : "=f"(gate) : "f"(1.0f), "f"(__fadd_rn(e, 1.0f)));
  return gate;
}

// value: of a pair; grads: those of gate and up, where that of the value is d.
struct swiglu {
  static __device__ __forceinline__ float value(float gate, float up) {
    return __fmul_rn(gate, sigmoid(gate)) * up;
  }
  static __device__ __forceinline__ float2 grads(float d, float gate, float up) {
    const float s = sigmoid(gate), inside = fminf(fmaxf(gate, -128.0f), 128.0f);
    const float slope = __fmaf_rn(__fmul_rn(inside, s), __fsub_rn(1.0f, s), s);
    return {__fmul_rn(__fmul_rn(up, d), slope), __fmul_rn(__fmul_rn(gate, s), d)};
  }
};

}  // namespace te_lite
