"""delayed_update against numerics.md's formulas written as a loop over numpy floats, bit for bit."""

from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import Tensor

from te_lite.ops import delayed
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
FP32_MAX = numpy.finfo(numpy.float32).max


@dataclass(frozen=True)
class Case:
    """layout: how the columns lie in memory. why: what it is there for."""

    length: int
    columns: int
    why: str
    algo: str = "max"
    fp8_max: float = E4M3_MAX
    layout: str = "contiguous"


CASES = [
    Case(1, 1, "no past"),
    Case(1, 5, "no past, most recent", "most_recent"),
    Case(2, 3, "one past row, which the roll clears"),
    Case(7, 9, "odd sizes, a second program", layout="every third column"),
    Case(7, 9, "columns first", layout="transposed"),
    Case(16, 20, "most recent", "most_recent", E5M2_MAX),
    Case(16, 20, "margin 2", fp8_max=E5M2_MAX * 2.0**-2),
    Case(1024, 12, "TE's default"),
    Case(1025, 5, "one row more than a step"),
    Case(4096, 9, "several steps", "max", E5M2_MAX, "every third column"),
    Case(2048, 0, "no column"),
]


def fresh(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(the whole buffer, the history in it, scale); magnitudes over the whole range of fp32's exponents."""
    length, n = case.length, case.columns
    values = torch.randn(length, n).abs() * 2.0 ** torch.randint(-30, 30, (length, n))
    values[torch.rand(length, n) < 0.2] = 0.0
    if case.layout == "transposed":
        buffer = torch.full((n + 2, length), -7.0, device=device)
        history = buffer[1:-1].t()
    elif case.layout == "every third column":
        buffer = torch.full((length, 3 * n + 1), -7.0, device=device)
        history = buffer[:, 1::3]
    else:
        buffer = history = torch.empty(length, n, device=device)
    history.copy_(values)
    return buffer, history, (torch.rand(n) * 100).to(device)


def column_by_hand(past: numpy.ndarray, scale: numpy.float32, fp8_max: float, algo: str):
    """One column's (new history, new scale)."""
    current = past[0] if numpy.isfinite(past[0]) else numpy.float32(0.0)
    if current == 0.0:
        return numpy.concatenate([[numpy.float32(0.0)], past[1:]]), scale
    seen = numpy.concatenate([[current], past[1:]])
    amax = seen.max() if algo == "max" else current  # numpy's max keeps a nan
    rolled = numpy.roll(seen, -1)
    rolled[0] = 0.0
    if not numpy.isfinite(amax):
        return rolled, scale
    with numpy.errstate(over="ignore"):
        scale = numpy.float32(fp8_max) / amax
    return rolled, min(scale, FP32_MAX)


def by_hand(history: Tensor, scale: Tensor, fp8_max: float, algo: str) -> tuple[Tensor, Tensor]:
    columns = [
        column_by_hand(past, old, fp8_max, algo)
        for past, old in zip(history.cpu().numpy().T, scale.cpu().numpy(), strict=True)
    ]
    if not columns:
        return history.cpu().clone(), scale.cpu().clone()
    histories = numpy.stack([column[0] for column in columns]).T.astype(numpy.float32)
    scales = numpy.array([column[1] for column in columns], dtype=numpy.float32)
    return torch.from_numpy(histories.copy()), torch.from_numpy(scales)


def update_on(path: str):
    return delayed._delayed_update_cuda if path == "interpreted" else delayed.delayed_update


def check(update, history: Tensor, scale: Tensor, fp8_max: float, algo: str) -> None:
    want_history, want_scale = by_hand(history, scale, fp8_max, algo)
    update(history, scale, fp8_max, algo)
    assert_bitwise_equal("history", history.cpu(), want_history)
    assert_bitwise_equal("scale", scale.cpu(), want_scale)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_three_updates(case: Case, path: str) -> None:
    update = update_on(path)
    buffer, history, scale = fresh(case, device_of(path))
    rest = buffer.clone()
    for _ in range(3):
        check(update, history, scale, case.fp8_max, case.algo)
        history[0] = torch.rand(case.columns, device=history.device) * 10  # what the next step sees
    if case.layout == "every third column":
        untouched = torch.ones(buffer.shape[1], dtype=torch.bool, device=buffer.device)
        untouched[1::3] = False
        assert_bitwise_equal("neighbours", buffer[:, untouched], rest[:, untouched])
    elif case.layout == "transposed":
        assert_bitwise_equal("neighbours", buffer[[0, -1]], rest[[0, -1]])


@pytest.mark.parametrize("path", PATHS)
def test_steps_in_place(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column cut into several steps: no row is read after an earlier step has overwritten it."""
    update = update_on(path)
    monkeypatch.setattr(delayed, "_ROWS", 4)
    for length in (3, 4, 5, 8, 13):
        _, history, scale = fresh(Case(length, 11, ""), device_of(path))
        check(update, history, scale, E4M3_MAX, "max")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_edge_values(algo: str, path: str) -> None:
    """Non-finite and zero amax leave the scale and clear row 0; tiny ones give fp32's largest value."""
    update = update_on(path)
    inf, nan = float("inf"), float("nan")
    tiny, least = 1e-38, 1.4e-45
    current = [0.0, nan, inf, tiny, least, 3.0, 3.0, 3.0, float(FP32_MAX)]
    past = [5.0, 5.0, 5.0, 0.0, 0.0, nan, inf, 7.0, 1.0]
    history = torch.tensor([current, past, [0.0] * 9], device=device_of(path))
    scale = torch.arange(1, 10, dtype=torch.float32, device=history.device)
    check(update, history, scale, E4M3_MAX, algo)
    assert history[0].tolist() == [0.0] * 9
    assert scale[:3].tolist() == [1.0, 2.0, 3.0] and history[1:, :3].isfinite().all()
    assert scale[3] == scale[4] == float(FP32_MAX)
    assert scale[5:7].tolist() == ([6.0, 7.0] if algo == "max" else pytest.approx([448 / 3] * 2))


@pytest.mark.parametrize("path", PATHS)
def test_division_is_ieee(path: str) -> None:
    """A reciprocal and a product would differ in the last bit for about a quarter of these."""
    update = update_on(path)
    history = torch.rand(1, 1000).to(device_of(path)) + 0.5
    shortcut = history[0].reciprocal() * E4M3_MAX
    exact = (E4M3_MAX / history[0].double()).float()  # fp64 holds the quotient of fp32 numbers well enough
    assert (shortcut != exact).sum() > 50
    scale = torch.ones(1000, device=history.device)
    update(history, scale, E4M3_MAX, "max")
    assert_bitwise_equal("scale", scale, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_registration(device: str) -> None:
    _, history, scale = fresh(Case(4, 6, ""), device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(delayed.delayed_update.overload, (history, scale, 448.0, "max"), test_utils=checks)


def test_kernel_in_the_interpreter() -> None:
    run_interpreted(__file__)
