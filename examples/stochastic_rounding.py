"""A quantizer of one's own: E4M3 with one scale a tensor, rounded at random so that errors cancel over many roundings.

docs/how-to/write-a-quantizer.md walks through this file.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.cast import amax, scale_from_amax_ref
from te_lite.ops.source import Source, produce_ref
from te_lite.quantize.custom import Role
from te_lite.quantize.per_tensor import Current, PerTensorFormat
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers, Quantizer, Site
from te_lite.recipe import Recipe

E4M3 = PerTensorFormat(dtype=torch.float8_e4m3fn)
LARGEST = 448.0


def round_at_random(v: Tensor, generator: torch.Generator) -> Tensor:
    """v as E4M3: one of its two neighbours there, each the likelier the nearer it is, so that v is the mean.

    v: fp32; beyond the largest value it saturates, nan stays nan. Neighbours are 2^(e - 3) apart in [2^e, 2^(e + 1)),
    and 2^-9 apart below 2^-6 (OCP 8-bit Floating Point Specification).
    """
    v = v.clamp(-LARGEST, LARGEST)
    exponent = torch.frexp(v).exponent - 1  # 2^exponent <= |v|; frexp's mantissa is below 1
    spacing = torch.ldexp(torch.ones_like(v), exponent.clamp(min=-6) - 3)
    steps = v / spacing  # exact: a power of two divides
    below = steps.floor()
    up = torch.rand(v.shape, generator=generator, device=v.device) < steps - below
    return ((below + up) * spacing).to(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class StochasticQuantizer(Quantizer):
    """amax_group: ranks whose shards of one tensor will be gathered, so that they must share the scale."""

    format: PerTensorFormat = E4M3
    amax_group: dist.ProcessGroup | None = None

    def quantize(
        self, source: Source, *, row: bool = True, col: bool = False, bias_grad: torch.dtype | None = None
    ) -> tuple[QTensor, Tensor | None]:
        seed = torch.randint(2**62, (1,))  # from the CPU's generator, so that no device is waited for
        sums = None if bias_grad is None else produce_ref(source).sum(0).to(bias_grad)
        return self._cast(source, seed, row, col), sums

    def again(self, source: Source, earlier: QTensor) -> QTensor:
        return self._cast(source, earlier.seed, row=False, col=True)

    def _cast(self, source: Source, seed: Tensor, row: bool, col: bool) -> QTensor:
        largest = amax(source).amax().view(1)
        if self.amax_group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.amax_group)
        scale = scale_from_amax_ref(largest, LARGEST)
        generator = torch.Generator(source.device).manual_seed(int(seed))
        data = round_at_random(produce_ref(source) * scale, generator)
        q = QTensor(self.format, (source.rows, source.cols), source.dtype, data, 1.0 / scale, seed=seed)
        if col:
            q.col, q.col_scale = self.format.make_col(q)
        if not row:
            q.row = q.row_scale = None
        return q


@dataclass(frozen=True)
class StochasticRounding(Recipe):
    """Every operand of every GEMM rounded at random."""

    name: ClassVar[str] = "stochastic"
    factory: ClassVar[str] = f"{__name__}:operands"
    summary: ClassVar[str] = "one scale a tensor, rounded at random: unbiased, in plain torch"


def operands(recipe: StochasticRounding, site: Site) -> GemmOperands:
    """The quantizers of the linear at `site`."""
    x = StochasticQuantizer(amax_group=site.tp.group if site.tp.gathers_input else None)
    w = StochasticQuantizer()
    dy = StochasticQuantizer(amax_group=site.tp.group if site.tp.gathers_grad else None)
    return GemmOperands(
        fprop=GemmQuantizers(x, w),
        dgrad=GemmQuantizers(dy, w),
        wgrad=GemmQuantizers(dy, x),
    )


def gradients_at_random(role: Role) -> Quantizer | None:
    """For CustomRecipe: gradients rounded at random in dgrad, x and w to nearest, wgrad in high precision."""
    tp = role.site.tp
    if role.gemm == "wgrad":
        return None
    if role.operand == "dy":
        return StochasticQuantizer(amax_group=tp.group if tp.gathers_grad else None)
    return Current(E4M3, amax_group=tp.group if role.operand == "x" and tp.gathers_input else None)
