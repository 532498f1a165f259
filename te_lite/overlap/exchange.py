"""What an exchange (collective.py) takes and gives: a GEMM, the place that it serves, what it has begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from te_lite.ops.nvtx import ranged
from te_lite.ops.recorder import called
from te_lite.overlap.epilogues import Epilogue
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import Layout, QTensor, matmul

if TYPE_CHECKING:
    import torch

    from te_lite.overlap.group import Group


@dataclass(slots=True)  # frozen takes thrice as long to construct
class Gemm:
    """A GEMM with its second operand in place: gemm(a) = finish(a.row[M, k] @ b^T[k, n] + bias[n]).

    layout: that of b whose last dimension is k. dtype: of the product. label: of its range in profilers. bias[n],
    residual[M, n]: where products are summed over ranks they are added to the sum, of which the epilogue is then.
    """

    b: QTensor
    layout: Layout
    dtype: torch.dtype
    fast_accum: bool
    label: str
    bias: Tensor | None = None
    residual: Tensor | None = None
    epilogue: Epilogue | None = None

    @property
    def columns(self) -> int:
        """n."""
        return self.b.shape[self.layout != "row"]

    @ranged()
    def product(
        self, a: QTensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """a @ b^T + bias alone, in another dtype where one is given; written to `out` where that is given."""
        return matmul(a, "row", self.b, self.layout, dtype or self.dtype, bias, self.fast_accum, out)

    def finish(self, product: Tensor) -> Any:
        """epilogue(product + residual); the product alone where there is neither."""
        if self.residual is not None:
            called(Tensor.add_, product, self.residual)
        return product if self.epilogue is None else self.epilogue(product)

    def __call__(self, a: QTensor) -> Any:
        """The whole program where no ranks' products are summed."""
        product = self.product(a, self.bias)
        return product if self.residual is self.epilogue is None else self.finish(product)


class Outcome(NamedTuple):
    """What the exchange of a GEMM was in the newest call. sent: bytes that this rank sent to others."""

    method: str
    sent: int
    reason: str = ""


@dataclass(slots=True, eq=False)
class Place:
    """Where an exchange serves: one GEMM of one linear.

    gemm: "fprop", "dgrad" or "wgrad". group: the userbuffers of its ranks. method: as ub_cfgs calls the exchange that
    was asked for. label, recipe: of the linear, for texts that the ranks must agree on. strict: what does not overlap
    is an error. narrow: partial sums travel as ops/narrow.py has them, where fused kernels send them and its blocks
    fit. remark: for the report. note: of the newest call, None before any that moved something.
    """

    tp: TensorParallel
    gemm: str
    group: Group | None = None
    method: str = ""
    label: str = ""
    recipe: str = ""
    strict: bool = False
    narrow: bool = False
    remark: str = ""
    note: Outcome | None = None

    def text(self, what: str, q: QTensor | Tensor, gemm: Gemm | None = None) -> str:
        """What the ranks must agree on. q: what is moved, or multiplied by `gemm`."""
        if self.group is None:
            return f"{self.label} {what}".lstrip()
        by = "" if gemm is None else f" x {gemm.columns}"
        label = getattr(getattr(q, "format", None), "label", "") or str(q.dtype).removeprefix("torch.")
        return f"{self.label} {what}, {self.tp.mode}-parallel, {label} {list(q.shape)}{by}{self.recipe}"


class Gathering(Protocol):
    """An all-gather that has begun."""

    q: QTensor  # this rank's shard

    def whole(self) -> QTensor:
        """The gathered tensor, once it is there; borrowed, where it lies in a userbuffer."""

    def close(self) -> None:
        """What has been read will not be read again."""


class Summing(Protocol):
    """A reduce-scatter that has begun."""

    def result(self) -> Any:
        """gemm.finish() of the sum, this rank's rows, once the others' partial sums are there."""
