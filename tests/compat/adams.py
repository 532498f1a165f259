"""Parameters, gradients and torch's optimizer to compare with, for the tests of FusedAdam."""

from typing import Any

import torch

OPTIONS: dict[str, Any] = {"lr": 2.0**-7, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.1}
REMAINDERS = {"master_weights": True, "store_param_remainders": True}
STATES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
STEPS = 4


def some_params(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in ((8, 12), (7,), (), (0,))]


def set_grads(params: list, seed: int, name: str = "grad", dtype: torch.dtype | None = None) -> None:
    draw = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=draw).bfloat16()  # of every dtype without rounding
        setattr(param, name, grad.to(dtype or param.dtype))


def train(optimizer: torch.optim.Optimizer, params: list, seeds: range, name: str = "grad", dtype: Any = None) -> None:
    for seed in seeds:
        set_grads(params, seed, name, dtype)
        optimizer.step()


def torchs(params: list, adam_w: bool = True) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """(fp32 copies, torch's optimizer of them)."""
    wide = [torch.nn.Parameter(param.detach().float().clone()) for param in params]
    return wide, torch.optim.Adam(wide, fused=True, decoupled_weight_decay=adam_w, **OPTIONS)


KEPT: list[dict[str, Any]] = [
    {},
    {"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    {"master_weights": True, "master_weight_dtype": torch.float16, "exp_avg_dtype": torch.uint8},
    {**REMAINDERS, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8},
    {"capturable": True, "master_weights": True},
]
