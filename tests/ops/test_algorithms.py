"""Which of cublasLt's algorithms a large product uses."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops import algorithms, cublaslt
from te_lite.ops.recorder import Recorder
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.test_cublaslt import BF16, E4M3, E5M2, FP32, as_read, operands, scales_of

LARGE, SMALL = (4096, 4096, 4096), (256, 512, 1024)


@pytest.mark.parametrize(
    ("times", "like_first", "chosen"),
    [
        ([[2.0, 9.0, 2.0], [1.0, 1.0, 9.0], [1.5, 1.5, 1.5]], {1, 2}, 1),  # medians
        ([[2.0], [1.0], [1.5]], {2}, 2),  # the fastest has other bits
        ([[2.0], [1.0], [1.5]], set(), 0),
        ([[2.0], [1.985], [3.0]], {1, 2}, 0),  # within the noise
        ([[2.0]], set(), 0),
    ],
)
def test_the_fastest_with_the_bits_of_the_first(times: list, like_first: set, chosen: int) -> None:
    assert algorithms.pick(times, like_first.__contains__) == chosen


def test_only_large_products_are_asked_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "MEASURES", True)
    monkeypatch.setattr(algorithms, "_measured", 0)
    assert algorithms.most_algorithms(*LARGE) == 8 and algorithms.most_algorithms(*SMALL) == 1
    monkeypatch.setattr(algorithms, "MEASURES", False)  # TE_LITE_AUTO=rule
    assert algorithms.most_algorithms(*LARGE) == 1
    monkeypatch.setattr(algorithms, "MEASURES", True)
    monkeypatch.setattr(algorithms, "_measured", algorithms.MOST_PROBLEMS)
    assert algorithms.most_algorithms(*LARGE) == 1


class Plan:
    """On the CPU: algorithm i takes took[i] ms, writes its own value where `others` has it, else one for all."""

    workspace = 32

    def __init__(self, took: tuple[float, ...], others: tuple[int, ...] = (), refused: tuple[int, ...] = ()) -> None:
        self.took, self.others, self.refused = took, others, refused
        self.algorithms, self.chosen, self.clock, self.seen = len(took), 0, 0.0, set[int]()

    def choose(self, algorithm: int) -> None:
        self.chosen = algorithm

    def run(self, *addresses: int) -> None:
        if self.chosen in self.refused:
            raise RuntimeError("refused")
        self.clock += self.took[self.chosen]
        self.seen |= {addresses[2]}
        ctypes.memset(addresses[2], self.chosen + 1 if self.chosen in self.others else 77, 16)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """choose() on the CPU: which algorithm the plan has afterwards."""

    def chosen(
        trial: Plan, room: int = 1 << 30, debug: int = 0, tensors: Any = None, scales: Any = (None, None)
    ) -> int:
        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = trial.clock

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        class Stream:
            cuda_stream = 0

            def synchronize(self) -> None:
                pass

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: debug)
        monkeypatch.setattr(algorithms, "room", lambda: room)
        plan = Plan((1.0,) * trial.algorithms)
        out, a, b = tensors or (torch.zeros(8, 8), *operands(8, 16, 8, device="cpu"))
        before, state = out.clone(), torch.get_rng_state()
        algorithms.choose(plan, lambda: trial, out, a, b, scales, None)
        assert_bitwise_equal("the caller's out", out, before)
        assert out.data_ptr() not in trial.seen and torch.equal(state, torch.get_rng_state())
        return plan.chosen

    monkeypatch.setattr(algorithms, "_measured", 0)
    return chosen


def test_an_algorithm_is_measured_and_compared(on_cpu: Callable[..., int]) -> None:
    took = 1.0, 0.9, 0.5, 0.7, 0.1
    assert on_cpu(Plan(took)) == 4
    assert on_cpu(Plan(took, others=(4,))) == 2
    assert on_cpu(Plan(took, others=(2, 4))) == 3
    assert on_cpu(Plan(took, refused=(4,))) == 0
    assert on_cpu(Plan((1.0, 1.1))) == 0


def test_nothing_is_measured_where_that_would_hurt(on_cpu: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody may wait, without memory, or after many problems."""
    took = 1.0, 0.5
    assert on_cpu(Plan(took), room=1 << 10) == 0
    assert on_cpu(Plan(took), debug=1) == 0
    assert algorithms._measured == 0
    for _ in range(algorithms.MOST_PROBLEMS):
        assert on_cpu(Plan(took)) == 1
    assert on_cpu(Plan(took)) == 0


def test_memory_that_runs_out_changes_nothing(on_cpu: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("none")

    tensors = torch.zeros(8, 8), *operands(8, 16, 8, device="cpu")
    monkeypatch.setattr(torch, "randn", no_memory)
    assert on_cpu(Plan((1.0, 0.5)), tensors=tensors) == 0


class Sums(Plan):
    """Algorithm 1 is faster, and rounds half a sum."""

    def __init__(self, m: int, k: int, n: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, add: bool) -> None:
        super().__init__((1.0, 0.5))
        self.sizes, self.types, self.add = (m, k, n), (a, b, out), add

    def run(self, *addresses: int) -> None:
        (m, k, n), (a_type, b_type, out_type) = self.sizes, self.types
        a, b = seen(addresses[0], (m, k), a_type).float(), seen(addresses[1], (n, k), b_type).float()
        scale = seen(addresses[3], (1,), FP32) * seen(addresses[4], (1,), FP32)
        out, parts = seen(addresses[2], (m, n), out_type), 1 + self.chosen  # each of which is rounded
        pairs = zip(a.double().chunk(parts, 1), b.double().chunk(parts, 1), strict=True)
        halves = BF16 if parts == 2 and out_type != FP32 else FP32
        product = sum((left @ right.t()).to(halves).float() for left, right in pairs) * scale
        out.copy_(out.float() + product if self.add else product)
        self.clock += self.took[self.chosen]


def seen(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What lies there."""
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_uint8 * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("a", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("dtype", "add"), [(FP32, True), (FP32, False), (torch.float16, False)], ids=str)
@pytest.mark.parametrize("scale", [1e-10, 1e-30, 1e5])
def test_other_bits_are_seen_whatever_the_scales(
    a: torch.dtype, dtype: torch.dtype, add: bool, scale: float, on_cpu: Callable[..., int]
) -> None:
    """The caller's scales may let a product vanish in what it is added to, or in fp16."""
    m, k, n = 16, 4096, 16
    given = operands(m, k, n, a, E4M3, "cpu")
    scales = torch.full((1,), scale), torch.full((1,), scale)
    trial = Sums(m, k, n, a, E4M3, dtype, add)
    assert on_cpu(trial, tensors=(torch.zeros(m, n, dtype=dtype), *given), scales=scales) == 0


CASES = [
    (cublaslt.TENSOR, E4M3, E4M3, BF16, True, False),
    (cublaslt.TENSOR, E5M2, E4M3, BF16, False, False),
    (cublaslt.TENSOR, E5M2, E4M3, FP32, False, True),
    (cublaslt.SQUARES, E4M3, E4M3, BF16, False, False),
    (cublaslt.BLOCKS, E4M3, E4M3, FP32, False, True),
    (cublaslt.UNSCALED, BF16, BF16, BF16, False, False),
    (cublaslt.UNSCALED, BF16, BF16, FP32, False, True),
]


def large(case: tuple) -> tuple[Tensor, Tensor, Tensor, tuple, tuple, dict]:
    scaled, a_type, b_type, dtype, fast, accumulate = case
    m, k, n = LARGE
    a, b = operands(m, k, n, a_type, b_type)
    scales = (None, None) if scaled is cublaslt.UNSCALED else as_read(scaled, a, b, scales_of(scaled, m, k, n))
    out = torch.randn(m, n, device="cuda").to(dtype)
    return out, a, b, scales, scaled, {"fast": fast, "accumulate": accumulate}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is known, and there is memory to measure, whatever other processes of the tests hold."""
    monkeypatch.setattr(cublaslt, "_PLANS", {})
    monkeypatch.setattr(cublaslt, "_NEW", set())
    monkeypatch.setattr(algorithms, "_measured", 0)
    monkeypatch.setattr(algorithms, "MEASURES", True)
    monkeypatch.setattr(algorithms, "room", lambda: 1 << 60)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_change_with_the_algorithm(case: tuple, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call has the heuristic's first algorithm, which torch would ask for alone; later ones its bits."""
    before, a, b, scales, scaled, how = large(case)
    outs = [before.clone() for _ in range(5)]
    state = torch.cuda.get_rng_state()
    for i, out in enumerate(outs[:4]):
        assert cublaslt.product(out, a, b, *scales, scaled, **how)
        (plan,) = cublaslt._PLANS.values()
        assert isinstance(plan, _C.GemmPlan)
        several = plan.algorithms > 1
        assert several or scaled is cublaslt.SQUARES, "cublasLt had one for these alone"
        assert algorithms._measured == (several and i > 0) and len(cublaslt._NEW) == (several and i == 0)
    assert torch.equal(state, torch.cuda.get_rng_state())
    monkeypatch.setattr(cublaslt, "_PLANS", {})
    monkeypatch.setattr(algorithms, "MEASURES", False)  # as torch asks
    assert cublaslt.product(outs[4], a, b, *scales, scaled, **how)
    for out in outs[1:]:
        assert_bitwise_equal("out", out, outs[0])


@pytest.mark.gpu
def test_nothing_is_measured_in_a_capture(fresh: None) -> None:
    """But it is afterwards."""
    before, a, b, scales, scaled, how = large(CASES[0])
    first, out, graph = before.clone(), before.clone(), torch.cuda.CUDAGraph()
    assert cublaslt.product(first, a, b, *scales, scaled, **how)
    with torch.cuda.graph(graph):
        assert cublaslt.product(out, a, b, *scales, scaled, **how)
    assert algorithms._measured == 0 and cublaslt._NEW
    assert cublaslt.product(before, a, b, *scales, scaled, **how)
    assert algorithms._measured == 1 and not cublaslt._NEW
    out.fill_(torch.nan)
    graph.replay()
    for result in (out, before):
        assert_bitwise_equal("out", result, first)


@pytest.mark.gpu
def test_a_recording_does_not_see_the_measurement(fresh: None) -> None:
    """The second run of a body is recorded, and has its problem measured."""
    before, a, b, scales, scaled, how = large(CASES[0])

    def body() -> Tensor:
        out = torch.empty_like(before)
        cublaslt.product(out, a, b, *scales, scaled, **how)
        return out

    first = body()
    recorder = Recorder([a, b, *scales])
    recorded = recorder.run(body)
    assert algorithms._measured == 1
    recording = recorder.finish([recorded])
    assert recording is not None, recorder.why_not
    (replayed,) = recording.run((a, b, *scales))
    for out in (recorded, replayed):
        assert_bitwise_equal("out", out, first)
