"""Megatron-core on CPU ranks: it makes buffers on "cuda" and asks torch.cuda for the current device."""

import contextlib
import sys
from types import ModuleType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CpuForCuda(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, and CPU tensors say that their type is torch.cuda's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        asks = func is Tensor.type and len(args) == 1
        return out.replace("torch.", "torch.cuda.") if asks else out


def _accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(dy.float().t() @ x.float())


def _splits_as_numbers(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """In place of MoEAlltoAllTokenDispatcher's copy of the splits from a GPU."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(splits := getattr(self, name), Tensor):
            setattr(self, name, splits.numpy())
    return tokens_per_expert


def patch() -> None:
    """Before Megatron's first import. Its own files stay as they are."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    stand_in_for_apex()


def stand_in_for_apex() -> None:
    """Its extension, which Megatron's own output layer needs for gradient_accumulation_fusion; before Megatron's first
    import."""
    apex = ModuleType("fused_weight_gradient_mlp_cuda")
    apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = _accumulate
    sys.modules[apex.__name__] = apex


def patch_imported() -> None:
    """After it: there is no CUDA generator to save, gloo has no coalesced all-gather, and numbers of tokens are on the
    host already, so that no stream has to copy them there."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    random._set_cuda_rng_state = lambda *_, **__: None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_as_numbers
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext()
