"""Error bounds that are derived, not chosen.

A result is compared with the truth (fp64) and may err at most twice as much as an honest low-precision
computation of the same thing errs:

    rms: |out - truth| <= 2 |reference - truth| + floor
    max: |out - truth| <= 4 |reference - truth| + floor

in two norms: root mean square (a systematic error of every element shows there) and maximum (a single wrong
element shows there). A maximum is one sample of a distribution's tail: quantized values that fall on the other
side of a rounding boundary are few and large, and the maxima of two honest computations differed by up to 2.9
times (fc1's weight gradient of an fp8 MLP, 48 tokens); hence its larger factor. The floor covers fp32
accumulation in another order and is stated in `floors`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
MAX_FACTOR = 2.0  # on top of FACTOR
# Half the spacing of numbers just above 1.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8 / 2,  # half of it: a stricter floor, which tests meet
}
# fp32 sums of up to a few thousand products taken in another order.
ACCUMULATION = 8 * 2.0**-24


@dataclass(frozen=True)
class Closeness:
    """One compared tensor: errors and bounds, both relative to the truth's rms and maximum."""

    name: str
    rms_error: float
    rms_bound: float
    max_error: float
    max_bound: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.note and self.rms_error <= self.rms_bound and self.max_error <= self.max_bound

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAIL"
        text = (
            f"{self.name}: rms error {self.rms_error:.3e} (bound {self.rms_bound:.3e}), "
            f"max error {self.max_error:.3e} (bound {self.max_bound:.3e}) {verdict}"
        )
        return f"{text} [{self.note}]" if self.note else text


def floors(dtype: torch.dtype) -> tuple[float, float]:
    """(rms, maximum) error that is always allowed, relative to the truth's rms and maximum.

    rms: fp32 accumulation in another order. maximum: that, and one rounding of the top element to `dtype`.
    """
    return ACCUMULATION, ACCUMULATION + UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF[torch.float32])


def measure(name: str, out: Tensor, truth: Tensor, reference: Tensor, factor: float = FACTOR) -> Closeness:
    """Compare `out` with `truth`, given a low-precision `reference` of the same quantity.

    Args: out any dtype; truth and reference the same shape, truth computed in fp64.
    A wrong shape or a value that is non-finite where the truth is finite is a failure by itself.
    """
    if out.shape != truth.shape or reference.shape != truth.shape:
        note = f"shapes out {tuple(out.shape)}, truth {tuple(truth.shape)}, reference {tuple(reference.shape)}"
        return Closeness(name, math.inf, 0.0, math.inf, 0.0, note)
    if truth.numel() == 0:
        return Closeness(name, 0.0, 0.0, 0.0, 0.0)
    dtype = out.dtype
    out, truth, reference = (t.detach().to("cpu", torch.float64) for t in (out, truth, reference))
    if not bool(torch.isfinite(out).all()):
        where = (~torch.isfinite(out)).nonzero()[0].tolist()
        note = f"non-finite {out[tuple(where)].item()} at {where}"
        return Closeness(name, math.inf, 0.0, math.inf, 0.0, note)
    rms_floor, max_floor = floors(dtype)
    rms = float(truth.square().mean().sqrt()) or 1.0
    top = float(truth.abs().max()) or 1.0
    got, allowed = out - truth, reference - truth
    return Closeness(
        name,
        float(got.square().mean().sqrt()) / rms,
        factor * float(allowed.square().mean().sqrt()) / rms + rms_floor,
        float(got.abs().max()) / top,
        MAX_FACTOR * factor * float(allowed.abs().max()) / top + max_floor,
    )


def assert_close_to_oracle(
    name: str, out: Tensor, truth: Tensor, reference: Tensor, factor: float = FACTOR
) -> Closeness:
    """Raise AssertionError unless `out` errs at most `factor` times (rms) as much as `reference` does."""
    result = measure(name, out, truth, reference, factor)
    if not result.ok:
        raise AssertionError(str(result))
    return result


def assert_bound_bites(
    name: str,
    out: Tensor,
    truth: Tensor,
    reference: Tensor,
    bug: Callable[[Tensor], Tensor],
    factor: float = FACTOR,
) -> None:
    """Show that the bound is not vacuous: `out` passes, `bug(out)` (a plausible mistake) must not."""
    assert_close_to_oracle(name, out, truth, reference, factor)
    wrong = measure(f"{name} with a bug put in", bug(out.detach().clone()), truth, reference, factor)
    if wrong.ok:
        raise AssertionError(f"{name}: the bound is vacuous, it lets a known bug pass: {wrong}")


def _as_bytes(tensor: Tensor) -> Tensor:
    # A copy: one element may have any stride, and then has no view as bytes.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def assert_bitwise_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Raise AssertionError naming the first differing coordinate, its bytes and both values.

    nan equals nan only with the same payload, and -0 differs from 0: what is compared is bytes.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{name}: {tuple(got.shape)} {got.dtype} is not {tuple(want.shape)} {want.dtype}")
    if got.numel() == 0:
        return
    got_bytes, want_bytes = _as_bytes(got), _as_bytes(want)
    wrong = (got_bytes != want_bytes).any(dim=1)
    if not bool(wrong.any()):
        return
    first = int(wrong.nonzero()[0])
    where = [int(i) for i in torch.unravel_index(torch.tensor(first), got.shape)]
    value_got = got.detach().reshape(-1)[first].to(torch.float64).item()
    value_want = want.detach().reshape(-1)[first].to(torch.float64).item()
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {got.numel()} elements differ; first at {where}: "
        f"got {value_got!r} (0x{_hex(got_bytes[first])}), want {value_want!r} (0x{_hex(want_bytes[first])})"
    )


def _hex(raw: Tensor) -> str:
    return "".join(f"{b:02x}" for b in reversed(raw.tolist()))
