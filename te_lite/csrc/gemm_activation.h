// The activations of [gate | up] that fused GEMMs compute, as structs with their parameters, in the order of
// te_lite/ops/activation.py: ACTIVATION is the name of one, PARAMETERS their values. All bits are those that Triton's own
// kernels compute, also of what a compiler might contract.
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
  __device__ __forceinline__ float value(float gate, float up) const {
    return __fmul_rn(gate, sigmoid(gate)) * up;
  }
  __device__ __forceinline__ float2 grads(float d, float gate, float up) const {
    const float s = sigmoid(gate), inside = fminf(fmaxf(gate, -128.0f), 128.0f);
    const float slope = __fmaf_rn(__fmul_rn(inside, s), __fsub_rn(1.0f, s), s);
    return {__fmul_rn(__fmul_rn(up, d), slope), __fmul_rn(__fmul_rn(gate, s), d)};
  }
};

}  // namespace te_lite
