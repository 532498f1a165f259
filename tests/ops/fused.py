"""Playing the ranks of a fused schedule: data with one right result, flags, and work that comes late."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
# A flag grows from one epoch to the next, also where an int32 and where a uint32 wraps around.
EPOCHS = [1, 2, 16, 17, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
PATIENCE_S = 20.0
# block_m, block_n, warps, stages, group
CONFIGS = [(128, 256, 8, 4, 8), (128, 128, 8, 4, 4), (128, 128, 8, 3, 1), (64, 128, 4, 4, 8), (64, 64, 4, 4, 2)]


@dataclass(frozen=True)
class Case:
    """R ranks with m rows each, K, N. scale: none, tensor, shard, row. pieces: flags a source. wire: what is sent,
    scatter only. turned: b lies as [K, N]. residual: scatter only."""

    ranks: int
    m: int
    k: int
    n: int
    a: torch.dtype = BF16
    b: torch.dtype | None = None
    out: torch.dtype = BF16
    scale: str = "none"
    bias: torch.dtype | None = None
    pieces: int = 1
    wire: torch.dtype = BF16
    turned: bool = False
    residual: bool = False

    def __str__(self) -> str:
        types = "-".join(str(t)[6:] for t in (self.a, self.b, self.out, self.bias) if t is not None)
        sizes = f"{self.ranks}x{self.m}x{self.k}x{self.n}{'t' * self.turned}{'r' * self.residual}"
        return f"{sizes}-{types}-{self.scale}-{self.pieces}p-{str(self.wire)[6:]}"

    @property
    def rows_per_piece(self) -> int:
        return -(-self.m // self.pieces) if self.pieces == 1 else 128


@dataclass
class Problem:
    a: Tensor  # [R * m, K]
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None


def problem(case: Case, device: str, exact: bool = False) -> Problem:
    """Random, or (exact) small integers and powers of two, whose sums fp32 holds in any order."""
    rows = case.ranks * case.m

    def values(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).float() if exact else torch.randn(*shape)

    def scale(count: int) -> Tensor:
        return 2.0 ** torch.randint(-2, 3, (count,)) if exact else 0.01 + torch.rand(count) * 0.1

    a, b = values(rows, case.k).to(case.a), values(case.n, case.k).to(case.b or case.a)
    counts = {"none": None, "tensor": (1, 1), "shard": (case.ranks, 1), "row": (rows, case.n)}[case.scale]
    a_scale, b_scale = (None, None) if counts is None else map(scale, counts)
    bias = None if case.bias is None else values(case.n).to(case.bias)
    a, b, *rest = (None if t is None else t.to(device) for t in (a, b, a_scale, b_scale, bias))
    return Problem(a, b.t().contiguous().t() if case.turned else b, *rest)


def truth(case: Case, p: Problem) -> tuple[Tensor, Tensor]:
    """fp64 (a @ b^T * scales, sum_k |a_k b_k| * scales), [R * m, N] on the CPU; no bias."""
    factor = torch.ones(1, 1, dtype=torch.float64)
    if p.a_scale is not None:
        rows = case.ranks * case.m
        factor = p.a_scale.cpu().double().reshape(-1, 1).repeat_interleave(rows // p.a_scale.numel(), 0)
        factor = factor * p.b_scale.cpu().double().reshape(1, -1)
    a, b = p.a.cpu().double(), p.b.cpu().double()
    return a @ b.t() * factor, a.abs() @ b.abs().t() * factor


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), device=device).to(dtype)


def words(*shape: int, device: str) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def as_int32(epoch: int) -> int:
    return (epoch + 2**31) % 2**32 - 2**31


class Late:
    """Copies from pinned memory, in order, by a copy engine on a stream of its own: it needs no multiprocessor.

    To be prepared before a kernel waits: an allocation might wait for that kernel.
    """

    def __init__(self) -> None:
        self.stream, self.copies = torch.cuda.Stream(), []

    def copy(self, to: Tensor, value: Tensor | int) -> "Late":
        source = torch.full(to.shape, value, dtype=to.dtype) if isinstance(value, int) else value.cpu()
        if source.element_size() == 1:
            source, to = source.view(torch.uint8), to.view(torch.uint8)
        self.copies.append((to, source.pin_memory()))
        return self

    def start(self, milliseconds: float = 20.0) -> None:
        with torch.cuda.stream(self.stream):
            if milliseconds:
                torch.cuda._sleep(int(milliseconds * 1.5e6))
            for to, source in self.copies:
                to.copy_(source, non_blocking=True)


def finished_within(seconds: float, event: torch.cuda.Event) -> bool:
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def finish(abort: Tensor) -> None:
    """Waits for the current stream; a kernel that waits for ever is released and fails the test."""
    event = torch.cuda.Event()
    event.record()
    if not finished_within(PATIENCE_S, event):
        Late().copy(abort, 1).start(0.0)
        torch.cuda.synchronize()
        raise AssertionError("the kernel waited for a flag that was set")


def narrow_bound(want: Tensor, off: Tensor) -> Tensor:
    """How far from want[m, N] what ops/narrow.py makes of a product may be that is off by `off` at most: by that, and
    by the bound of that module for the largest magnitudes that the product and its block may then have."""
    most = want.abs() + off
    largest = most.view(most.shape[0], -1, 128).amax(2).repeat_interleave(128, 1)
    return off + torch.maximum(2.0**-4 * most, largest / 224 * 2.0**-10)


def scaled_product_ref(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
    """fp32 (a[M, K] @ b[N, K]^T) * a_scale * b_scale; scales of one element, of one a row, or one a block of rows."""
    out = a.float() @ b.float().t()
    if a_scale is not None:
        out = out * a_scale.reshape(-1, 1).repeat_interleave(a.shape[0] // a_scale.numel(), 0)
    return out if b_scale is None else out * b_scale.reshape(1, -1)
