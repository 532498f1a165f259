"""What benchmarks/grouped.py times of kernels: products of quantized operands, casts of all groups, tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_lite.ops import gemm_grouped as O
from te_lite.ops import grouped_cast as C
from te_lite.ops import grouped_each as E
from te_lite.ops import grouped_gemm as G
from te_lite.ops import grouped_mx
from te_lite.ops.grouped_gemm_kernels import GemmConfig
from te_lite.ops.grouped_layout import ends, group_layout

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# A product errs by what its rounding to bf16 and, with fast accumulation, sums of 14 bits do.
MAX_ERROR = 2.0**-7
ZIPF = 1.0  # tokens of the i-th expert ~ 1 / i^ZIPF


@dataclass(frozen=True)
class Problem:
    """tokens in groups of `sizes`; weights [G, n, k]."""

    name: str
    sizes: tuple[int, ...]
    k: int
    n: int

    @property
    def aligned(self) -> bool:
        """Whether peers that quantize take these sizes."""
        return not any(size % 16 for size in self.sizes)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    @property
    def flops(self) -> float:
        """Of one product."""
        return 2.0 * self.tokens * self.k * self.n

    def offs(self, device: str) -> Tensor:
        return torch.tensor(self.sizes, device=device).cumsum(0).int()


def split(kind: str, tokens: int, groups: int) -> tuple[int, ...]:
    """Sizes that are multiples of 16, for peers that take no others, "balanced" or "zipf"; "odd" ones by Zipf's law."""
    shares = [1.0 / (i + 1) ** (0.0 if kind == "balanced" else ZIPF) for i in range(groups)]
    sizes = [int(tokens * share / sum(shares)) // 16 * 16 + (kind == "odd") for share in shares]
    sizes[0] += tokens - sum(sizes)
    return tuple(sizes)


class Data:
    """x [M, K], dy [M, N], w [G, N, K] and the layout of one problem; what is quantized of them is made once."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=BF16, generator=generator)

        self.x, self.dy = random(problem.tokens, problem.k), random(problem.tokens, problem.n)
        self.w = random(len(problem.sizes), problem.n, problem.k)
        self.offs = problem.offs(device)
        self.layout = group_layout(self.offs, problem.tokens)
        self._made: dict[Any, Any] = {}

    def rows(self, which: str) -> tuple[Tensor, Tensor]:
        """E4M3 with a scale a row; "x", "dy", "w"."""
        t = getattr(self, which)
        return self.kept(
            ("rows", which), lambda: C.group_rows(t, None if which == "w" else self.layout, True, False)[:2]
        )

    def columns(self, which: str) -> tuple[Tensor, Tensor]:
        from te_lite.quantize.grouped import columns_of

        t, layout = getattr(self, which), None if which == "w" else self.layout
        amax = C.group_vector_amax(t, layout, False)[1]
        return self.kept(("columns", which), lambda: tuple(columns_of(t, layout, amax, True)))

    def tensorwise(self, which: str, dtype: torch.dtype) -> Any:
        t, layout = getattr(self, which), None if which == "w" else self.layout
        amax = C.group_amax(t, layout)
        return self.kept((which, dtype), lambda: C.group_cast(t, layout, dtype, row=True, col=True, amax=amax))

    def blocks(self, which: str) -> Any:
        t, layout = getattr(self, which), None if which == "w" else self.layout
        return self.kept(("b", which), lambda: C.group_blocks(t, layout, square=which == "w", row=True, col=True))

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def forget(self) -> None:
        self._made.clear()


Operands = tuple[Any, ...]


def products(data: Data) -> Iterator[tuple[str, str, Operands]]:
    """(gemm, operands, arguments of group_product or group_wgrad)."""
    x, dy, w, layout = data.x, data.dy, data.w, data.layout
    plain = (None, None, "none")
    yield "fprop", "bf16", (x, w, layout, *plain, None, BF16, False, False)
    yield "dgrad", "bf16", (dy, w, layout, *plain, None, BF16, True, False)
    yield "wgrad", "bf16", (dy, x, layout, *plain, BF16, True, False)
    (xr, xs), (wr, ws), (dr, ds) = data.rows("x"), data.rows("w"), data.rows("dy")
    (xc, xcs), (wc, wcs), (dc, dcs) = data.columns("x"), data.columns("w"), data.columns("dy")
    yield "fprop", "rowwise", (xr, wr, layout, xs, ws, "rows", None, BF16, False, True)
    yield "dgrad", "rowwise", (dr, wc, layout, ds, wcs, "rows", None, BF16, False, False)
    yield "wgrad", "rowwise", (dc, xc, layout, dcs, xcs, "rows", BF16, False, False)
    data.forget()
    x8, w8, d8 = data.tensorwise("x", E4M3), data.tensorwise("w", E4M3), data.tensorwise("dy", E5M2)
    yield "fprop", "current", (x8.row, w8.row, layout, x8.row_scale, w8.row_scale, "group", None, BF16, False, True)
    yield "dgrad", "current", (d8.row, w8.col, layout, d8.row_scale, w8.col_scale, "group", None, BF16, False, False)
    yield "wgrad", "current", (d8.col, x8.col, layout, d8.col_scale, x8.col_scale, "group", BF16, False, False)
    data.forget()
    x8, w8, d8 = data.blocks("x"), data.blocks("w"), data.blocks("dy")
    yield "fprop", "blockwise", (x8.row, w8.row, layout, x8.row_scale, w8.row_scale, "blocks", None, BF16, False, False)
    yield "dgrad", "blockwise", (d8.row, w8.col, layout, d8.row_scale, w8.col_scale, "blocks", None, BF16, False, False)
    yield "wgrad", "blockwise", (d8.col, x8.col, layout, d8.col_scale, x8.col_scale, "blocks", BF16, False, False)
    data.forget()


def by_triton(gemm: str, operands: Operands, config: GemmConfig | None = None, into: Tensor | None = None) -> Any:
    """What computes the product by the Triton kernel. into: fp32 [G, N, K], to which a wgrad is added."""
    if gemm != "wgrad":
        return partial(G.triton_product, *operands, config=config)
    a, b, layout, a_scale, b_scale, scaling, dtype, inner_first, fast = operands
    shape = G._wgrad_shape(a, b, layout, inner_first)
    out = a.new_empty(shape, dtype=dtype) if into is None else into
    rest = (a, b, layout, a_scale, b_scale, scaling, inner_first, fast)

    def run() -> Tensor:
        G.triton_wgrad([out[0]], out.stride(0), into is not None, *rest, config=config)
        return out

    return run


def by_expert(gemm: str, operands: Operands, sizes: Sequence[int], into: Tensor | None = None) -> Any:
    """What computes it one expert after the other by cublasLt. into: as of by_triton."""
    a, b, layout, a_scale, b_scale, scaling, *rest = operands
    if gemm != "wgrad":
        bias, _, inner_first, fast = rest
        out = G._product_fake(*operands)

        def product() -> Tensor:
            E.product_each(out, a, b, a_scale, b_scale, scaling, bias, inner_first, fast, sizes)
            return out

        return product
    dtype, inner_first, fast = rest
    dw = a.new_empty(G._wgrad_shape(a, b, layout, inner_first), dtype=dtype) if into is None else into

    def wgrad() -> Tensor:
        E.wgrad_each(list(dw), into is not None, a, b, a_scale, b_scale, scaling, fast, sizes)
        return dw

    return wgrad


def by_own(gemm: str, operands: Operands, into: Tensor | None = None) -> Any:
    """What computes it by csrc/gemm_grouped.cu, None where that does not. into: as of by_triton."""
    a, b, layout, a_scale, b_scale, scaling, *rest = operands
    if gemm != "wgrad":
        bias, dtype, inner_first, fast = rest
        if inner_first or not O.takes_product(a, b, a_scale, b_scale, scaling, bias, dtype):
            return None
        out = G._product_fake(*operands)

        def product() -> Tensor:
            O.product(out, a, b, layout, a_scale, b_scale, scaling, fast)
            return out

        return product
    dtype, inner_first, fast = rest
    dw = a.new_empty(G._wgrad_shape(a, b, layout, inner_first), dtype=dtype) if into is None else into
    outs = dw.unbind()
    if not O.takes_wgrad(outs, a, b, a_scale, b_scale, scaling):
        return None

    def wgrad() -> Tensor:
        O.wgrad(outs, into is not None, a, b, layout, a_scale, b_scale, scaling, fast)
        return dw

    return wgrad


def by_torch(gemm: str, operands: Operands) -> Any:
    """What computes it by torch: bf16, and E4M3 with a scale a row; None where torch has no kernel."""
    a, b, layout, a_scale, b_scale, scaling, *rest = operands
    if scaling == "none":
        if gemm == "wgrad":
            return partial(torch._grouped_mm, a.t(), b, offs=ends(layout))
        return partial(torch._grouped_mm, a, b if rest[2] else b.mT, offs=ends(layout))
    if scaling != "rows" or {a.dtype, b.dtype} != {E4M3}:
        return None
    options = {"out_dtype": BF16, "use_fast_accum": rest[-1]}
    if gemm == "wgrad":
        given = a, b.t(), a_scale.view(-1), b_scale.view(-1)
        return partial(torch._scaled_grouped_mm, *given, offs=layout[1, 1:-1], **options)
    return partial(torch._scaled_grouped_mm, a, b.mT, a_scale, b_scale, offs=ends(layout), **options)


def error(gemm: str, operands: Operands, run: Callable[[], Tensor], want: Tensor) -> float:
    """The largest |out - want| over the largest |want|; infinite where out has a nan."""
    out = run()
    worst = float((out.float() - want.float()).abs().max())
    return worst / float(want.abs().max()) if worst == worst else float("inf")


def reference(gemm: str, operands: Operands) -> Tensor:
    """The oracle's result, in bf16."""
    return (G.group_wgrad_ref if gemm == "wgrad" else G.group_product_ref)(*operands)


def tiles(gemm: str, kind: str) -> list[GemmConfig]:
    """Candidates for CONFIGS of ops/grouped_gemm.py."""
    c, k = GemmConfig, 64 if kind == "bf16" else 128
    wide = [c(128, 256, k, 8, s, g, p) for s, g, p in ((3, 8, 1), (4, 8, 1), (4, 16, 1), (4, 8, 0), (3, 8, 0))]
    square = [c(128, 128, k, w, s, g, p) for w, s, g, p in (
        (8, 4, 8, 1), (8, 5, 8, 1), (8, 3, 8, 2), (8, 3, 8, 0), (8, 4, 16, 0), (4, 4, 8, 1), (4, 3, 8, 2), (4, 3, 8, 0),
        (4, 3, 16, 0),
    )]  # fmt: skip
    tall = [c(128, 64, k, 4, 4, 8, p) for p in (2, 0)]
    low = [c(64, 256, k, 8, 4, 8, p) for p in (1, 0)] + [c(64, 256, k, 4, 4, 8, 1), c(64, 128, k, 4, 4, 8, 2)]
    return wide + square + tall + low


def casts(data: Data) -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    """(cast, of what, bytes it must move, call)."""
    for which in ("x", "dy", "w"):
        t = getattr(data, which)
        layout, size = None if which == "w" else data.layout, float(t.numel())
        amax = C.group_amax(t, layout)
        columns = C.group_vector_amax(t, layout, False)[1]
        row, col = {"row": True, "col": False}, {"row": False, "col": True}
        both = {"row": True, "col": True}
        yield "amax by group", which, 2 * size, partial(C.group_amax, t, layout)
        yield "amax of columns", which, 2 * size, partial(C.group_vector_amax, t, layout, False)
        for name, layouts, moved in (("row", row, 3), ("col", col, 3), ("row+col", both, 4)):
            call = partial(C.group_cast, t, layout, E4M3, amax=amax, **layouts)
            yield f"tensorwise {name}", which, moved * size, call
            call = partial(C.group_blocks, t, layout, square=which == "w", **layouts)
            yield f"blocks {name}", which, moved * size, call
        yield "rowwise row", which, 3 * size, partial(C.group_rows, t, layout, True, False)
        yield "rowwise row, amax of columns", which, 3 * size, partial(C.group_rows, t, layout, True, True)
        call = partial(C.group_cast, t, layout, E4M3, row=False, col=True, col_scale=columns)
        yield "rowwise col, scales known", which, 3 * size, call
        yield "mx row values", which, 4 * size, partial(grouped_mx.group_mx, t, layout, row=True)
        yield "mx col", which, 3 * size, partial(grouped_mx.group_mx, t, layout, col=True)
        yield "mx row+col values", which, 6 * size, partial(grouped_mx.group_mx, t, layout, **both, values=True)
        if which == "x":
            mx: Any = grouped_mx.group_mx(t, layout, col=True)
            yield (
                "mx col to values",
                which,
                3 * size,
                partial(grouped_mx.group_mx_values, mx.col, layout, mx.col_scale, BF16),
            )
