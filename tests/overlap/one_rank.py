"""Fused epilogues on one rank as they would run on a GPU: decided so, and computed so by oracles on a CPU."""

from typing import Any

import pytest
import torch

from te_lite.ops.activation import NONE
from te_lite.ops.cast import amax, transform
from te_lite.ops.gemm import FP8, gemm, gemm_fp8
from te_lite.ops.gemm_gather import Computed, act_refusal
from te_lite.ops.source import act, dact
from te_lite.overlap import fused, one_rank


def force(monkeypatch: pytest.MonkeyPatch, word: str = "1") -> None:
    """Plans built from now on are those of a Hopper GPU with TE_LITE_EPILOGUES=word."""
    monkeypatch.setattr(one_rank, "unavailable", lambda device: "")
    monkeypatch.setenv("TE_LITE_EPILOGUES", word)


def by_oracles(
    own, gathered, b, ready, counters, epoch, delta, abort, rank, own_scale, scale, b_scale, bias, dtype, fast, wanted
) -> tuple[Any, Computed]:  # fmt: skip
    """gemm_gather on one rank, with the bits of the product and the pass that it stands for."""
    (m, _), n, grad = own.shape, b.shape[0], wanted.h is not None
    assert gathered is own and scale is own_scale and ready.shape == (1, 1) and rank == delta == 0
    assert not (ready.any() or counters.any() or epoch.any() or abort.any())
    low = own.dtype in FP8
    assert wanted.act and not act_refusal(m, n, wanted.act, grad, low and not fast)
    out = gemm_fp8(own, b, own_scale, b_scale, dtype, bias, fast) if low else gemm(own, b, dtype, bias)
    assert wanted.activation != NONE
    source = dact(out, wanted.h, wanted.activation) if grad else act(out, wanted.activation)
    if wanted.act == "amax":
        return out, Computed(amax=amax(source))
    if wanted.act == "high precision":
        return None if grad else out, Computed(transform(source, hp_dtype=dtype).hp)
    made = transform(source, fp8_dtype=wanted.fp8, row=True, col=wanted.col, scale=wanted.scale, amax_out=wanted.amax)
    return None if grad else out, Computed(made.row, made.col, made.scale_inv)


class Launches:
    """Notes what the kernel is asked for: (want, whether of a gradient). On a CPU the oracles are the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: bool = False) -> None:
        self.wants: list[tuple[str, bool]] = []
        kernel = fused.gemm_gather if cuda else by_oracles

        def noted(*args: Any) -> tuple[Any, Computed]:
            wanted = args[-1]
            self.wants.append((wanted.act, wanted.h is not None))
            return kernel(*args)

        monkeypatch.setattr(fused, "gemm_gather", noted)
        if cuda:
            return
        original = one_rank.product_refusal
        monkeypatch.setattr(
            one_rank, "product_refusal", lambda g, a: original(g, a).replace("fused kernels need a GPU", "")
        )
        monkeypatch.setattr(one_rank, "_words", lambda device: torch.zeros(2, dtype=torch.int32))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
