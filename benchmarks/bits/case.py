"""One case: a module of te_lite, a recipe, and what is special about the steps that it runs."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import te_lite as te

# Recipes with options that have no name of their own.
OPTIONS: dict[str, te.recipe.Recipe] = {
    "delayed_recent": te.recipe.DelayedScaling(margin=1, amax_history_len=2, amax_compute_algo="most_recent"),
    "delayed_e4m3": te.recipe.DelayedScaling(fp8_format=te.recipe.Format.E4M3, amax_history_len=3),
    "current_per_shard": te.recipe.Float8CurrentScaling(per_shard_scales=True),
    "current_eps": te.recipe.Float8CurrentScaling(
        use_power_2_scales=True, fp8_quant_fwd_inp=te.recipe.QParams(power_2_scale=True, amax_epsilon=0.5)
    ),
    "blockwise_fp32": te.recipe.Float8BlockScaling(use_f32_scales=True),
    "rowwise_fp32": te.recipe.RowwiseScaling(use_power_2_scales=False),
}
RECIPES = tuple(te.recipe.available())
STATEFUL = ("delayed", "delayed_recent", "delayed_e4m3")
PER_TENSOR = (*STATEFUL, "current", "tensorwise", "current_per_shard", "current_eps")


class Sizes(NamedTuple):
    """Features: in, out, and of an MLP's middle."""

    k: int
    n: int
    ffn: int


SMALL = Sizes(64, 80, 96)
BLOCKS = Sizes(144, 272, 160)  # more than one block of 128 and a ragged one


@dataclass(frozen=True)
class Case:
    """A module and the steps that it runs.

    kind: the class in te_lite. build: arguments of its constructor beside the sizes. tokens: leading dimensions of the
    input. forward: keyword arguments of each micro-batch of a step. run: how a micro-batch is run, a name in
    steps.RUNS. frozen: parts of the names of parameters without a gradient; "x" means the input.
    pipelined: all forwards of a step come before its backwards. initial: the recipe of quantized_model_init.
    main_grad: dtype of the weights' main_grad. special: zeros, inf and nan among the inputs.
    """

    kind: str
    recipe: str
    label: str = ""
    build: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (48,)
    sizes: Sizes | None = None
    dtype: torch.dtype = torch.bfloat16
    input_dtype: torch.dtype | None = None
    steps: int = 3
    forward: tuple[Mapping[str, Any], ...] = ({},)
    run: str = "plain"
    frozen: tuple[str, ...] = ()
    residual: bool = False
    pipelined: bool = False
    initial: str | None = None
    main_grad: torch.dtype | None = None
    special: bool = False

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return " ".join(filter(None, (self.kind, self.recipe, self.label)))

    @property
    def features(self) -> Sizes:
        """The case's sizes, or those that fit its recipe."""
        return self.sizes or (SMALL if self.recipe in ("bf16", *PER_TENSOR) else BLOCKS)

    @property
    def width(self) -> int:
        """Features of the output, of all ranks."""
        return self.features.n if self.kind in ("Linear", "LayerNormLinear") else self.features.k


def recipe_of(name: str) -> te.recipe.Recipe:
    """The recipe of that name, also of OPTIONS."""
    return OPTIONS[name] if name in OPTIONS else te.recipe.from_name(name)


def under(name: str) -> contextlib.AbstractContextManager:
    """te.autocast of a recipe by name; nothing at all for "bf16"."""
    return contextlib.nullcontext() if name == "bf16" else te.autocast(enabled=True, recipe=recipe_of(name))


class Draw:
    """Random tensors of one case, the same in every process. seed: a text."""

    def __init__(self, seed: str, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(zlib.crc32(seed.encode()))

    def tensor(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal values of standard deviation `scale`."""
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return (values * scale).to(dtype)

    def tokens(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, special: bool = False) -> Tensor:
        """As tensor(), with rows and columns of larger and smaller magnitudes, and with a row of zeros.

        In the smallest rows the variance is near a norm's epsilon."""
        values = torch.randn(shape, generator=self._generator, device=self.device) * scale
        rows = values.view(-1, shape[-1])
        count, width = rows.shape
        powers = torch.tensor([0.0, 2.0, -10.0, 1.0, -1.0, 3.0, -3.0], device=self.device)
        rows *= torch.exp2(powers[torch.arange(count, device=self.device) % 7])[:, None]
        rows *= torch.exp2(torch.arange(width, device=self.device) % 5 - 2.0)
        if count > 2:
            rows[count // 2] = 0
        if special:
            for i, value in enumerate((float("inf"), float("-inf"), float("nan"), 0.0, 3e38)):
                rows[(7 * i + 1) % count, (11 * i + 3) % width] = value
        return values.to(dtype)
