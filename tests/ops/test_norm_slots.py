"""A norm's backward that sums slots as it reads them, as at the end of a reduce-scatter: the bits of two passes."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from te_lite.ops import norm, norm_kernels, reduce
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of, not_interpreted
from tests.ops.test_compile_sm90 import TUNED, compile_sm90, resources

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """own: its dtype where it is not the wire's, which is x's."""

    ranks: int
    m: int
    n: int
    x: torch.dtype = BF16
    rms: bool = False
    zero_centered: bool = False
    gamma: torch.dtype = FP32
    own: torch.dtype | None = None

    def __str__(self) -> str:
        types = "-".join(str(t)[6:] for t in (self.x, self.gamma, self.own) if t)
        return f"{self.ranks}x{self.m}x{self.n}-{types}{'-rms' * self.rms}{'-zero_centered' * self.zero_centered}"


CASES = [
    Case(1, 3, 8, FP16),
    Case(2, 1, 16, FP16, rms=True),
    Case(2, 7, 33, FP16),
    Case(3, 5, 40, FP16, rms=True, zero_centered=True, gamma=FP16),
    Case(4, 9, 48, FP16),
    Case(4, 17, 64, FP16, rms=True),
    Case(5, 6, 80, FP16, gamma=FP16),
    Case(6, 5, 24, FP16),
    Case(4, 5, 24, FP32),
    Case(4, 5, 24, FP16, own=FP32),
    Case(4, 0, 24, FP16),
    Case(4, 133, 1024, BF16, rms=True),
    Case(2, 2049, 528, BF16),
    Case(4, 2048, 4096, BF16, gamma=BF16),
    Case(5, 301, 5120, FP16, rms=True),
    Case(4, 2048, 8192, BF16, rms=True, gamma=BF16),
    Case(4, 600, 8192, BF16),
    Case(5, 300, 8192, FP16, gamma=FP16),
    Case(2, 301, 8176, BF16, rms=True),
    Case(4, 301, 8184, BF16, rms=True),
    Case(4, 30, 8200, BF16, rms=True),
    Case(2, 30, 16384, FP16),
    Case(8, 300, 4096, BF16, rms=True),
]
SMALL = 1200  # elements; the interpreter calls Python for each when it folds a pair of sums


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """torch.empty hands out nan: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(case: Case, device: str) -> tuple[Tensor, ...]:
    """(slots, own, x, mean, rstd, gamma). Two slots cancel, but for what fp32 loses beside them: the order shows."""

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape) * 2.0 ** torch.randint(-8, 5, shape)

    slots, own = values(case.ranks, case.m, case.n).to(case.x), values(case.m, case.n).to(case.own or case.x)
    if case.ranks > 2:
        slots[1] *= 2.0**8 if case.x == FP16 else 2.0**20
        slots[2] = -slots[1]
    x = (torch.randn(case.m, case.n) * 2 + torch.randn(case.m, 1)).to(case.x)
    gamma = (torch.randn(case.n) * 0.3 + 1.0).to(case.gamma)
    mean, rstd, _ = norm.norm_stats_ref(x, gamma, None, 1e-5, case.rms, case.zero_centered, False)
    tensors = (slots, own, x, mean, rstd, gamma)
    return tuple(None if t is None else t.to(device) for t in tensors)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_the_sum_and_then_the_backward(case: Case, path: str, monkeypatch) -> None:
    if path == "interpreted":
        if case.m * case.n > SMALL:
            pytest.skip("too slow for the interpreter")
        monkeypatch.setattr(norm, "sm_count", lambda device: 1)
        monkeypatch.setattr(norm, "_backward_op", norm._backward_cuda)
    slots, own, *rest = inputs(case, device_of(path))
    for rank in {0, case.ranks // 2, case.ranks - 1}:
        slots[rank] = float("nan")  # its own entry is not used
        dy = reduce.reduce_slots(slots, own, None, rank, slots.dtype)
        want = norm.norm_backward(dy, *rest, case.zero_centered)
        got = norm.norm_backward(own, *rest, case.zero_centered, slots, rank)
        for name, a, b in zip(("dx", "dgamma", "dbeta"), got, want, strict=True):
            assert (a is None) == (b is None) == (name == "dbeta" and case.rms)
            if a is not None:
                assert not a.isnan().any()
                assert_bitwise_equal(f"rank {rank}: {name}", a, b)
        slots[rank] = 1.0


@pytest.mark.parametrize("device", DEVICES)
def test_the_order_matters(device: str) -> None:
    """With another rank's order the same values give other bits: the test above would notice."""
    slots, own, *rest = inputs(Case(4, 64, 256), device)
    slots[0] = own
    first = norm.norm_backward(own, *rest, False, slots, 0)[0]
    assert not torch.equal(first, norm.norm_backward(slots[1], *rest, False, slots, 1)[0])


@pytest.mark.gpu
def test_it_sums_where_it_can(monkeypatch) -> None:
    """Without a pass of its own: 16-bit slots of few ranks, rows that a program holds."""
    calls = []
    plain = norm.reduce_slots
    monkeypatch.setattr(norm, "reduce_slots", lambda *args: calls.append(args) or plain(*args))
    summed = (Case(4, 64, 8192), Case(5, 64, 2064), Case(4, 64, 2048))
    others = (Case(6, 64, 2064), Case(4, 64, 2056), Case(4, 8, 8208), Case(2, 64, 2064, FP32))
    others += (Case(2, 64, 2064, own=FP32), Case(4, 64, 1024))  # of 1024 columns and less a program has several rows
    for case in (*summed, *others):
        calls.clear()
        slots, own, *rest = inputs(case, "cuda")
        norm.norm_backward(own, *rest, False, slots, 1)
        assert len(calls) == (case in others), case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True])
def test_registration(rms: bool, device: str) -> None:
    slots, own, *rest = inputs(Case(3, 5, 24, rms=rms), device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(norm._backward_op.overload, (own, *rest, False, slots, 1), test_utils=checks)


def test_errors_name_value_rule_and_remedy() -> None:
    slots, own, *rest = inputs(Case(3, 4, 8), "cpu")
    for bad, with_own in ((slots[:, :2], own), (slots[:, :, :4], own), (slots, own[:, ::2])):
        with pytest.raises(ValueError, match=r"must be contiguous \[R, m, N\]"):
            norm.norm_backward(with_own, *rest, False, bad, 0)


def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


@not_interpreted
@pytest.mark.parametrize("ranks", [2, 4, norm.MOST_SLOTS])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", [768, 4096, 5120, 8192])
def test_on_hopper(n: int, rms: bool, ranks: int, tmp_path) -> None:
    """No spills; slots come to shared memory 16 bytes at a time, a row ahead of the one that is waited for; all
    programs of the grid are resident at once."""
    block_m, block_n, warps, _, per_sm = norm_kernels.backward_launch(n)
    x = ("*bf16", "*fp16")[(rms + ranks // 2 + (n > 4096)) % 2]  # each with each of the others
    types = {name: x for name in ("dy_ptr", "x_ptr", "gamma_ptr", "dx_ptr", "slots")}
    types |= {name: "*fp32" for name in ("mean_ptr", "rstd_ptr", "dgamma_ptr", "dbeta_ptr")}
    types |= {name: "i32" for name in ("M", "N", "stride_dy", "stride_x", "rank")}
    constants = {"RMS": rms, "ZERO_CENTERED": False, "DBETA": not rms, "REREAD": False, "BLOCK_M": block_m,
                 "BLOCK_N": block_n, "EVEN": block_n == n, "RANKS": ranks, "STAGES": 3}  # fmt: skip
    compiled = compile_sm90(norm_kernels.backward_kernel, types, constants, warps)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", ptx)) >= 3 * (ranks + 1)
    waits = re.search(rf"cp\.async\.wait_group\s+{ranks + 1};", ptx)
    assert waits or not TUNED, "nothing is under way while a row is reduced"
    assert per_sm * (compiled.metadata.shared + 1024) <= 228 << 10
    usage = resources(compiled, tmp_path)
    if usage is not None:
        registers, stack = (int(v) for v in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
        assert stack == 0 and registers * warps * 32 * per_sm <= 65536, usage
