"""Casts of all groups: the bytes of each group are those of its rows cast alone, by the casts of whole matrices."""

import pytest
import torch
from torch import Tensor

from te_lite.ops import grouped_cast as C
from te_lite.ops import grouped_layout as L
from te_lite.ops import grouped_mx
from te_lite.ops.block_cast import block_cast_ref, dequantize_blocks_ref
from te_lite.ops.cast import amax_ref, transform_ref
from te_lite.ops.row_cast import row_cast_ref, vector_amax_ref, vector_scales_ref
from te_lite.ops.source import plain
from tests.ops.grouped import E4M3, E5M2, RAGGED, layout_of, offs_of, poisoned, same, spans_of, special
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of

WIDE, FEATURES = 144, 48
LAYOUTS = [(True, False), (False, True), (True, True)]


def test_kernels_in_the_interpreter():
    run_interpreted(__file__)


def values(path: str, m: int, n: int) -> Tensor:
    """The interpreter rounds fp8 in its own way: there only what fp8 holds."""
    return torch.randint(-2, 3, (m, n)).bfloat16() if path == "interpreted" else special(m, n)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    params = request.node.callspec.params
    other = params.get("case", "no tokens") not in list(RAGGED)[::3] or params.get("col") is False
    if request.param == "interpreted" and (other or (params.get("fp8") == E5M2 and not params["row"])):
        pytest.skip("takes seconds, and shows what the others show")
    poisoned(monkeypatch, request.param)
    return request.param


def op(path: str, one):
    return one.cuda if path == "interpreted" else one


@pytest.mark.parametrize("case", RAGGED)
def test_interpreted_layout(case, path):
    sizes, rest = RAGGED[case]
    rows = sum(sizes) + rest
    got = op(path, L.group_layout)(offs_of(sizes, device_of(path)), rows).cpu()
    spans = list(spans_of(sizes))
    assert got[0].tolist() == [0, *(end for _, end, *_ in spans), sum(sizes)]
    assert got[1].tolist() == [0, *(end for *_, end in spans), 0]
    assert spans[-1][3] <= L.capacity(rows, len(sizes)), "padded groups fit"


@pytest.mark.parametrize("offs", [(3, 2, 5), (3, 4, 9), (-1, 2, 5)], ids=str)
def test_interpreted_invalid_ends(offs, path):
    """The CPU refuses; a GPU computes nothing and fills with nan."""
    ends = torch.tensor(offs, dtype=torch.int32, device=device_of(path))
    if path == "cpu":
        with pytest.raises(ValueError, match="must be the end of each group"):
            L.group_layout(ends, 5)
        return
    layout = op(path, L.group_layout)(ends, 5)
    y = torch.zeros(5, 7, device=device_of(path))
    op(path, L.fill_rest_)(y, layout)
    assert not L.ends(layout).any() and y.isnan().all()


@pytest.mark.parametrize("case", RAGGED)
def test_interpreted_rest_and_sums(case, path):
    sizes, rest = RAGGED[case]
    device, layout = device_of(path), layout_of(sizes, rest, device_of(path))
    x = torch.randint(-9, 9, (sum(sizes) + rest, 40)).bfloat16()
    y = x.clone().to(device)
    op(path, L.fill_rest_)(y, layout)
    want = x.clone()
    want[sum(sizes) :] = 0
    same("rest", y, want)
    sums = torch.stack([x[first:end].float().sum(0) for first, end, *_ in spans_of(sizes)])
    same("sums", op(path, L.group_sums)(x.to(device), layout), sums)


def tokens(path: str, case: str) -> tuple[Tensor, Tensor, list, str]:
    sizes, rest = RAGGED[case]
    x = values(path, sum(sizes) + rest, WIDE)
    x[sum(sizes) :] = float("nan")  # what is in no group must not be read
    return x, layout_of(sizes, rest, device_of(path)), list(spans_of(sizes)), device_of(path)


def check_columns(name: str, got: Tensor, want: Tensor, span) -> None:
    """got [C, P]: group's columns, zeros after its tokens. want [C, any number of columns, zeros at the end]."""
    first, end, padded, padded_end = span
    same(name, got[:, padded : padded + end - first], want[:, : end - first])
    assert not got[:, padded + end - first : padded_end].view(torch.uint8).any(), f"{name}: pad is not zero"


@pytest.mark.parametrize("row, col", LAYOUTS)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("case", RAGGED)
def test_interpreted_a_scale_a_group(case, fp8, row, col, path):
    x, layout, spans, device = tokens(path, case)
    amax = C.group_amax(x.to(device), layout)
    recorded = torch.full((2 * len(spans),), 1e-30, device=device)[::2]  # between the slots of others
    got = C.group_cast(x.to(device), layout, fp8, row=row, col=col, amax=amax, amax_out=recorded, pow2=True)
    for g, span in enumerate(spans):
        part = plain(x[span[0] : span[1]])
        assert amax[g] == amax_ref(part).max()
        assert recorded[g] == max(amax[g].item(), torch.tensor(1e-30).item())
        want = transform_ref(part, fp8_dtype=fp8, row=True, col=True, amax=amax[g : g + 1].cpu(), pow2=True)
        scale = got.row_scale if row else got.col_scale
        same(f"scale {g}", scale[g : g + 1], want.scale_inv)
        if row:
            same(f"row {g}", got.row[span[0] : span[1]], want.row)
        if col:
            check_columns(f"col {g}", got.col.cpu(), want.col, span)


@pytest.mark.parametrize("case", RAGGED)
def test_interpreted_scales_of_rows_and_columns(case, path):
    x, layout, spans, device = tokens(path, case)
    moved = x.to(device)
    row, row_scale, amax = C.group_rows(moved, layout, True, True)
    by_row, by_col = C.group_vector_amax(moved, layout, True)
    scale, _ = vector_scales_ref(amax.cpu(), True)
    col = C.group_cast(moved, layout, E4M3, row=False, col=True, col_scale=scale.to(device)).col.cpu()
    for g, span in enumerate(spans):
        rows = slice(*span[:2])
        part = plain(x[rows])
        if span[1] > span[0]:
            want, want_scale = row_cast_ref(part)
            same(f"row {g}", row[rows], want)
            same(f"scale {g}", row_scale[rows], want_scale)
            same(f"amax of rows {g}", by_row[rows], vector_amax_ref(part, True, False))
            same(f"amax of columns {g}", amax[g], vector_amax_ref(part, False, True))
        same(f"both amaxes of columns {g}", amax[g], by_col[g])
        check_columns(f"col {g}", col, transform_ref(part, fp8_dtype=E4M3, col=True, col_scale=scale[g]).col, span)


@pytest.mark.parametrize("row, col", LAYOUTS)
@pytest.mark.parametrize("case", RAGGED)
def test_interpreted_blocks(case, row, col, path):
    x, layout, spans, device = tokens(path, case)
    got = C.group_blocks(x.to(device), layout, square=False, row=row, col=col)
    for g, span in enumerate(spans):
        first, end, padded, padded_end = span
        want = block_cast_ref(plain(x[first:end]), block=128, row=True, col=True)
        if row:
            same(f"row {g}", got.row[first:end], want.row)
            same(f"row scales {g}", got.row_scale[first:end], want.row_scale)
        if col:
            check_columns(f"col {g}", got.col.cpu(), want.col, span)
            blocks = got.col_scale[padded // 128 : padded_end // 128]
            same(f"col scales {g}", blocks, want.col_scale if end > first else torch.ones_like(blocks).cpu())


@pytest.mark.parametrize("case", RAGGED)
def test_interpreted_mx(case, path):
    x, layout, spans, device = tokens(path, case)
    moved = x.to(device)
    kept = grouped_mx.group_mx(moved, layout, row=True, col=True)
    at_once = grouped_mx.group_mx(moved, layout, col=True, values=True).col_values
    later = op(path, grouped_mx.group_mx_values)(kept.col, layout, kept.col_scale, x.dtype)
    for g, (first, end, *_) in enumerate(spans):
        want = block_cast_ref(plain(x[first:end]), block=32, row=True, col=True, flat=True)
        by_row = dequantize_blocks_ref(want.row, want.row_scale, 1, 32, x.dtype)
        by_col = dequantize_blocks_ref(want.col, want.col_scale, 32, 1, x.dtype)
        same(f"row {g}", kept.row_values[first:end], by_row)
        same(f"col at once {g}", at_once[first:end], by_col)
        same(f"col later {g}", later[first:end], by_col)
        same(f"col data {g}", kept.col[first:end], want.col)


def test_interpreted_weights(path):
    """[G, N, C], of which no block and no column lies in two experts."""
    w = values(path, 3 * FEATURES, WIDE).view(3, FEATURES, WIDE)
    moved = w.to(device_of(path))
    amax = C.group_amax(moved, None)
    scaled = C.group_cast(moved, None, E4M3, row=True, col=True, amax=amax)
    row, row_scale, columns = C.group_rows(moved, None, True, True)
    scale, _ = vector_scales_ref(columns.cpu(), True)
    col = C.group_cast(moved, None, E4M3, row=False, col=True, col_scale=scale.to(moved.device)).col
    squares = C.group_blocks(moved, None, square=True, row=True, col=True)
    mx = grouped_mx.group_mx(moved, None, row=True, col=True, values=True)
    kept = grouped_mx.group_mx(moved, None, col=True)
    later = op(path, grouped_mx.group_mx_values)(kept.col, None, kept.col_scale, w.dtype)
    for g in range(3):
        part = plain(w[g])
        want = transform_ref(part, fp8_dtype=E4M3, row=True, col=True, amax=amax_ref(part))
        same("tensorwise row", scaled.row[g], want.row)
        same("tensorwise col", scaled.col[g], want.col)
        same("tensorwise scale", scaled.row_scale[g : g + 1], want.scale_inv)
        same("rowwise row", row[g], row_cast_ref(part)[0])
        same("rowwise scale", row_scale[g], row_cast_ref(part)[1])
        same("rowwise col", col[g], transform_ref(part, fp8_dtype=E4M3, col=True, col_scale=scale[g]).col)
        square = block_cast_ref(part, block=128, square=True, row=True, col=True)
        same("square row", squares.row[g], square.row)
        same("square col", squares.col[g], square.col)
        same("square scales", squares.row_scale[g], square.row_scale)
        same("square scales of columns", squares.col_scale[g], square.col_scale)
        blocks = block_cast_ref(part, block=32, row=True, col=True, flat=True)
        same("mx row", mx.row_values[g], dequantize_blocks_ref(blocks.row, blocks.row_scale, 1, 32, w.dtype))
        by_col = dequantize_blocks_ref(blocks.col, blocks.col_scale, 32, 1, w.dtype)
        same("mx col", mx.col_values[g], by_col)
        same("mx col later", later[g], by_col)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pow2, eps", [(False, 0.0), (True, 1e-3), (False, 1e-3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_scales_and_types(dtype, pow2, eps, device):
    sizes = (37, 0, 200)
    x, layout = special(237, 160, dtype), layout_of(sizes, 0, device)
    blocks = C.group_blocks(x.to(device), layout, square=False, row=True, col=True, pow2=pow2, eps=eps)
    amax = C.group_amax(x.to(device), layout)
    tensorwise = C.group_cast(x.to(device), layout, E5M2, row=True, col=True, amax=amax, pow2=pow2, eps=eps)
    for g, span in enumerate(spans_of(sizes)):
        part = plain(x[span[0] : span[1]])
        want = block_cast_ref(part, block=128, row=True, col=True, pow2=pow2, eps=eps)
        same("row", blocks.row[span[0] : span[1]], want.row)
        check_columns("col", blocks.col.cpu(), want.col, span)
        want = transform_ref(part, fp8_dtype=E5M2, row=True, col=True, amax=amax[g : g + 1].cpu(), pow2=pow2, eps=eps)
        same("tensorwise", tensorwise.row[span[0] : span[1]], want.row)
        check_columns("tensorwise col", tensorwise.col.cpu(), want.col, span)
