"""Grouped GEMMs: the products of a linear for each group of tokens, of which a layout on the device tells.

    group_product   y[m] = a[m] @ b[g]^T for the tokens m of group g: fprop and dgrad
    group_wgrad     dw[g] = sum over the tokens m of group g of dy[m]^T x[m]

The layout is ops/grouped_layout.py's. Operands: high precision, or fp8 with inverse scales in fp32, of which `scaling`
says those of a: "group" [G]; "rows", one a row; "blocks" of 128 along the inner dimension. Those of b: [G] or one a row
under "group" and "rows". Data lie with the inner dimension last; in high precision `inner_first` says that they lie the
other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from te_lite.ops import gemm_grouped, grouped_each
from te_lite.ops.block_cast import BLOCK
from te_lite.ops.gemm import placed
from te_lite.ops.grouped_gemm_kernels import GemmConfig, groups_kernel, rows_kernel
from te_lite.ops.grouped_layout import PAD, capacity, ends, fill_rest_, lanes, spans
from te_lite.ops.launch import sm_count
from te_lite.ops.registry import register

# Where nothing else multiplies: (product, operands) -> the tile of the Triton kernel, chosen by benchmarks/grouped.py
# --kernels on an H100 for 8 groups of 1,024 tokens, 4096 x 14336. Operands: "16" and "32" bits; fp8 with scales applied
# to the sum, summed "fast" or "exact"ly; "blocks".
Table = dict[tuple[str, str], GemmConfig]
CONFIGS: Table = {
    ("rows", "16"): GemmConfig(128, 256, 64, 8, 3),
    ("rows", "32"): GemmConfig(64, 64, 32, 4, 2),
    ("rows", "fast"): GemmConfig(128, 256, 128, 8, 4),
    ("rows", "exact"): GemmConfig(128, 128, 128, 4, 3, persistent=2),
    ("rows", "blocks"): GemmConfig(128, 128, 128, 8, 4),
    ("groups", "16"): GemmConfig(128, 128, 64, 4, 3, group_m=16, persistent=0),
    ("groups", "32"): GemmConfig(64, 64, 32, 4, 2),
    ("groups", "fast"): GemmConfig(128, 128, 128, 4, 3, persistent=0),
    ("groups", "exact"): GemmConfig(128, 128, 128, 4, 3, persistent=0),
    ("groups", "blocks"): GemmConfig(128, 128, 128, 8, 3, persistent=0),
}


def _kind(a: Tensor, scaling: str, fast: bool) -> str:
    if scaling == "none":
        return "32" if a.dtype == torch.float32 else "16"
    return "blocks" if scaling == "blocks" else "fast" if fast else "exact"


def torch_takes(a: Tensor, b: Tensor, scaling: str, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether torch's grouped GEMM computes this product of bf16: faster than Triton's kernel."""
    if scaling != "none" or bias is not None or not a.numel() or {a.dtype, b.dtype, dtype} != {torch.bfloat16}:
        return False
    rows = [t.stride(-2) * t.element_size() % 16 for t in (a, b)]
    return a.is_cuda and torch.cuda.get_device_capability(a.device) == (9, 0) and not any(rows)


def _scaled(data: Tensor, scale: Tensor | None, scaling: str, g: int, rows: slice) -> Tensor:
    """fp32 values of rows of an operand that lie as [rows, inner]; g: its group."""
    v = data.float()
    if scale is None:
        return v
    if scaling == "blocks":
        return v * scale.repeat_interleave(BLOCK, 1)[:, : v.shape[1]]
    if scale.dim() == 1 and scaling == "rows":
        return v * scale[rows, None]
    return v * (scale[g] if scale.dim() == 1 else scale[g][:, None])


def group_product_ref(
    a: Tensor, b: Tensor, layout: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str,
    bias: Tensor | None, out_dtype: torch.dtype, inner_first: bool, fast: bool, sizes: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The oracle of `group_product`: fp32 throughout, one rounding."""
    b = b.mT if inner_first else b
    out = _product_fake(a, b, layout, a_scale, b_scale, scaling, bias, out_dtype, False, fast)
    for g, (first, end, *_) in enumerate(spans(layout, b.shape[0])):
        rows = slice(first, end)
        scale = a_scale[rows] if scaling == "blocks" and a_scale is not None else a_scale
        left = _scaled(a[rows], scale, scaling, g, rows)
        scale = b_scale
        if scaling == "blocks" and b_scale is not None:
            scale = b_scale[g].repeat_interleave(BLOCK, 0)[: b.shape[1]]
        right = _scaled(b[g], scale, scaling if scaling == "blocks" else "group", g, rows)
        y = left @ right.t()
        out[rows] = (y if bias is None else y + bias[g].float()).to(out_dtype)
    fill_rest_(out, layout)
    return out


def _product_fake(a, b, layout, a_scale, b_scale, scaling, bias, out_dtype, inner_first, fast, sizes=None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2 if inner_first else 1]), dtype=out_dtype)


def _start(kernel: Any, config: GemmConfig, tiles: int, device: torch.device, *arguments: Any) -> None:
    """`tiles`: the most there may be."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _start(kernel, config, tiles, device, *arguments)
    programs = min(tiles, config.persistent * sm_count(device)) if config.persistent else tiles
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel[(programs,)](*arguments, **options)


def _source(data: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """What a kernel reads tiles from: a matrix, or its descriptor."""
    data = placed(data).reshape(-1, data.shape[-1]) if tma else data.reshape(-1, data.shape[-1])
    return TensorDescriptor(data, list(data.shape), list(data.stride()), list(block)) if tma else data


def _strides(scale: Tensor | None, scaling: str, is_a: bool) -> tuple[int, int, int]:
    """(from group to group, row to row, block to block) of group_product's scales; blocks of b are square."""
    if scale is None:
        return 0, 0, 0
    if scaling == "blocks":
        return (0, scale.stride(0), scale.stride(1)) if is_a else (scale.stride(0), scale.stride(1), scale.stride(2))
    if is_a:
        return (0, 1, 0) if scaling == "rows" else (1, 0, 0)
    return (scale.stride(0), 1, 0) if scale.dim() == 2 else (1, 0, 0)


def _applied(scaling: str) -> str:
    return scaling if scaling in ("none", "blocks") else "outer"


def triton_product(
    a, b, layout, a_scale, b_scale, scaling, bias, out_dtype, inner_first, fast, config: GemmConfig | None = None
) -> Tensor:
    """group_product by the Triton kernel. config: another than the table's."""
    out = _product_fake(a, b, layout, a_scale, b_scale, scaling, bias, out_dtype, inner_first, fast)
    kind = _kind(a, scaling, fast)
    config, tma = config or CONFIGS["rows", kind], scaling != "none"
    groups, n, k = b.shape[0], out.shape[1], a.shape[1]
    m, bn, bk = config.block_m, config.block_n, config.block_k
    if not out.numel():
        return out
    _start(
        rows_kernel, config, capacity(a.shape[0], groups) // m * -(-n // bn), a.device,
        _source(a, (m, bk), tma), _source(b, (bk, bn) if inner_first else (bn, bk), tma), a_scale, b_scale, bias, out,
        layout, groups, n, k, a.stride(0), b.stride(1), b.shape[1],
        *_strides(a_scale, scaling, True), *_strides(b_scale, scaling, False),
        tma, inner_first, _applied(scaling), BLOCK if scaling == "blocks" else 1, bk if kind == "exact" else 0,
        lanes(groups), m, bn, bk, config.group_m,
    )  # fmt: skip
    fill_rest_(out, layout)
    return out


def _product_cuda(a, b, layout, a_scale, b_scale, scaling, bias, out_dtype, inner_first, fast, sizes=None):
    given = (a, b, layout, a_scale, b_scale, scaling, bias, out_dtype, inner_first, fast)
    if grouped_each.takes(a, b, scaling, sizes, b.shape[1], b.shape[2]):
        out = _product_fake(*given)
        grouped_each.product_each(out, a, b, a_scale, b_scale, scaling, bias, inner_first, fast, sizes)
        return out
    if not inner_first and gemm_grouped.takes_product(a, b, a_scale, b_scale, scaling, bias, out_dtype):
        out = _product_fake(*given)
        gemm_grouped.product(out, a, b, layout, a_scale, b_scale, scaling, fast)
    elif torch_takes(a, b, scaling, bias, out_dtype):
        right = placed(b if inner_first else b.mT)
        out = torch._grouped_mm(placed(a), right, offs=ends(layout)).contiguous()  # it pads rows to 16 bytes
    else:
        return triton_product(*given)
    fill_rest_(out, layout)
    return out


# y[M, N] in out_dtype, rounded once: sum_k a[m, k] * b[g, n, k] + bias[g, n] for each m of group g, zero for those of
# no group. a [M, K]; b [G, N, K], or inner_first [G, K, N]. fast: sums of fp8 products are not promoted on their way.
# sizes, here and below: the tokens of each group, all tokens together, where the host knows them.
group_product = register(
    "group_product(Tensor a, Tensor b, Tensor layout, Tensor? a_scale, Tensor? b_scale, str scaling, Tensor? bias, "
    "ScalarType out_dtype, bool inner_first, bool fast, int[]? sizes=None) -> Tensor",
    cpu=group_product_ref,
    cuda=_product_cuda,
    fake=_product_fake,
)
register_flop_formula(group_product.overload.overloadpacket)(lambda a, b, *_, **__: 2 * a[0] * b[1] * b[2])


def _wgrad_shape(a: Tensor, b: Tensor, layout: Tensor, inner_first: bool) -> tuple[int, int, int]:
    return layout.shape[1] - 2, a.shape[1 if inner_first else 0], b.shape[1 if inner_first else 0]


def _wgrad_group_ref(a, b, span, g, a_scale, b_scale, scaling, inner_first) -> Tensor:
    """fp32 [N, K] of group g, of which `span` is as ops/grouped_layout.py's."""
    columns = slice(*span[:2]) if inner_first else slice(*span[2:])
    sides = []
    for data, scale in ((a, a_scale), (b, b_scale)):
        part = data.t()[:, columns] if inner_first else data[:, columns]
        if scaling == "blocks":
            scale = scale[span[2] // BLOCK : span[3] // BLOCK].t()
        sides.append(_scaled(part, scale, scaling if scaling == "blocks" else "group", g, slice(None)))
    return sides[0] @ sides[1].t()


def group_wgrad_ref(
    a: Tensor, b: Tensor, layout: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str,
    out_dtype: torch.dtype, inner_first: bool, fast: bool, sizes: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The oracle of `group_wgrad`: fp32 throughout, one rounding."""
    groups, n, k = _wgrad_shape(a, b, layout, inner_first)
    each = enumerate(spans(layout, groups))
    parts = [_wgrad_group_ref(a, b, span, g, a_scale, b_scale, scaling, inner_first) for g, span in each]
    return torch.stack(parts).to(out_dtype)


def _wgrad_strides(scale: Tensor | None, scaling: str) -> tuple[int, int, int]:
    """(from group to group, row to row, block to block of padded tokens)."""
    if scale is None:
        return 0, 0, 0
    if scaling == "blocks":
        return 0, scale.stride(1), scale.stride(0)
    return (scale.stride(0), 1, 0) if scale.dim() == 2 else (1, 0, 0)


def triton_wgrad(
    outs: Sequence[Tensor], stride: int, add: bool, a, b, layout, a_scale, b_scale, scaling, inner_first, fast,
    config: GemmConfig | None = None,
) -> None:  # fmt: skip
    """group_wgrad by the Triton kernel, to outs[g] [N, K], which lie `stride` elements apart; add: onto what is there.
    config: another than the table's."""
    groups, n, k = _wgrad_shape(a, b, layout, inner_first)
    kind = _kind(a, scaling, fast)
    config, tma = config or CONFIGS["groups", kind], scaling != "none"
    m, bn, bk = config.block_m, config.block_n, config.block_k
    _start(
        groups_kernel, config, groups * -(-n // m) * -(-k // bn), a.device,
        _source(a, (m, bk), tma), _source(b, (bn, bk), tma), a_scale, b_scale, outs[0], layout,
        groups, n, k, a.stride(0), b.stride(0), stride,
        *_wgrad_strides(a_scale, scaling), *_wgrad_strides(b_scale, scaling),
        tma, inner_first, _applied(scaling), bk if kind == "exact" else 0, add, m, bn, bk, config.group_m,
    )  # fmt: skip


def _wgrad_fake(a, b, layout, a_scale, b_scale, scaling, out_dtype, inner_first, fast, sizes=None) -> Tensor:
    return a.new_empty(_wgrad_shape(a, b, layout, inner_first), dtype=out_dtype)


def _wgrad_cuda(a, b, layout, a_scale, b_scale, scaling, out_dtype, inner_first, fast, sizes=None):
    given = (a, b, layout, a_scale, b_scale, scaling)
    out = _wgrad_fake(*given, out_dtype, inner_first, fast)
    if _wgrad_by_others(out.unbind(), False, *given, inner_first, fast, sizes):
        return out
    if inner_first and torch_takes(a, b, scaling, None, out_dtype):
        return torch._grouped_mm(placed(a).t(), placed(b), offs=ends(layout))
    triton_wgrad([out[0]], out.stride(0), False, *given, inner_first, fast)
    return out


def _wgrad_by_others(outs, add, a, b, layout, a_scale, b_scale, scaling, inner_first, fast, sizes) -> bool:
    """Whether it was computed, by another kernel than Triton's."""
    lies = (inner_first or scaling != "none") and not (add and {out.dtype for out in outs} != {torch.float32})
    if lies and grouped_each.takes(a, b, scaling, sizes, *outs[0].shape):
        grouped_each.wgrad_each(outs, add, a, b, a_scale, b_scale, scaling, fast, sizes)
        return True
    own = lies and gemm_grouped.takes_wgrad(outs, a, b, a_scale, b_scale, scaling)
    if own:
        gemm_grouped.wgrad(outs, add, a, b, layout, a_scale, b_scale, scaling, fast)
    return own


# dw[G, N, K] in out_dtype, rounded once: sum_m a[n, m] * b[k, m] over the tokens of each group, 0 where it has none.
# a [N, P], b [K, P]: columns as grouped_cast.py writes them; inner_first: [M, N] and [M, K].
group_wgrad = register(
    "group_wgrad(Tensor a, Tensor b, Tensor layout, Tensor? a_scale, Tensor? b_scale, str scaling, "
    "ScalarType out_dtype, bool inner_first, bool fast, int[]? sizes=None) -> Tensor",
    cpu=group_wgrad_ref,
    cuda=_wgrad_cuda,
    fake=_wgrad_fake,
)


def group_wgrad_accumulate_ref_(
    outs: list[Tensor], a: Tensor, b: Tensor, layout: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
    scaling: str, inner_first: bool, fast: bool, sizes: Sequence[int] | None = None, add: bool = True,
) -> None:  # fmt: skip
    """The oracle of `group_wgrad_accumulate_`."""
    for g, (out, span) in enumerate(zip(outs, spans(layout, len(outs)), strict=True)):
        out.copy_((out.float() if add else 0) + _wgrad_group_ref(a, b, span, g, a_scale, b_scale, scaling, inner_first))


def distance(outs: Sequence[Tensor]) -> int | None:
    """By how many elements contiguous outs[g + 1] lies behind outs[g], where that is the same for all; else None."""
    size = outs[0].element_size()
    steps = {after.data_ptr() - before.data_ptr() for before, after in zip(outs, outs[1:], strict=False)}
    same = len(steps) < 2 and all(out.is_contiguous() and out.dtype == outs[0].dtype for out in outs)
    step = steps.pop() if steps else 0
    return step // size if same and step % (16 * size) == 0 else None


def _accumulate_cuda_(outs, a, b, layout, a_scale, b_scale, scaling, inner_first, fast, sizes=None, add=True):
    if _wgrad_by_others(outs, add, a, b, layout, a_scale, b_scale, scaling, inner_first, fast, sizes):
        return
    groups, n, k = _wgrad_shape(a, b, layout, inner_first)
    given = (a, b, layout, a_scale, b_scale, scaling, inner_first, fast)
    if (stride := distance(outs)) is not None:
        triton_wgrad(outs, stride, add, *given)
    else:
        sums = a.new_empty((groups, n, k), dtype=torch.float32)
        triton_wgrad([sums[0]], sums.stride(0), False, *given)
        for out, one in zip(outs, sums, strict=True):
            out.copy_(out + one if add else one)


# outs[g] [N, K] += group_wgrad's dw[g], the sum in fp32, one rounding; or = without add. To fp32 cublasLt adds, one
# group after the other, where the host knows the sizes, and csrc/gemm_grouped.cu. The Triton kernel does where the outs
# lie at equal distances, as gradients in one buffer do in either order; elsewhere a temporary of fp32 is added.
group_wgrad_accumulate_ = register(
    "group_wgrad_accumulate_(Tensor(a!)[] outs, Tensor a, Tensor b, Tensor layout, Tensor? a_scale, Tensor? b_scale, "
    "str scaling, bool inner_first, bool fast, int[]? sizes=None, bool add=True) -> ()",
    cpu=group_wgrad_accumulate_ref_,
    cuda=_accumulate_cuda_,
)


def _wgrad_flops(a: Any, b: Any, layout: Any, *, inner_first: bool) -> int:
    tokens = a[0] if inner_first else a[1] - (layout[1] - 2) * PAD
    n, k = (a[1], b[1]) if inner_first else (a[0], b[0])
    return 2 * tokens * n * k


register_flop_formula(group_wgrad.overload.overloadpacket)(lambda *g, **_: _wgrad_flops(*g[:3], inner_first=g[7]))
register_flop_formula(group_wgrad_accumulate_.overload.overloadpacket)(
    lambda *g, **_: _wgrad_flops(*g[1:4], inner_first=g[7])
)
