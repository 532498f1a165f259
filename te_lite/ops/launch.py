"""Launching a Triton kernel with little host time.

`kernel[grid](...)` inspects every argument again on each call, and a compiled kernel's own launcher is Python too:
60 and 28 us in a training step on an H200's host. Here the compiled kernel is looked up by all that Triton
specialises on (types, integers, constants, "all pointers are multiples of 16") and launched through te_lite._C,
which packs the arguments in C++. Triton's launch hooks are not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from te_lite import _C
from te_lite.ops.recorder import OPEN

_COMPILED: dict[tuple | None, Any] = {}
_KERNELS: dict[int, Any] = {}  # by id, which no other kernel can get while one is held here
_MOST = 4096  # entries; each token count makes some, and a run with ever new ones must not fill the memory


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which has no inline assembly
_WAIT = tl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")
_LET_NEXT = tl.constexpr("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@triton.jit
def after_previous():
    """Waits for the kernel before on this stream; then all that it wrote may be read. Every kernel calls this or
    begin(): from compute capability 9.0 on it starts before that one has ended."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(_WAIT, "=r,~{memory}", [], tl.int32, False, 1)


@triton.jit
def begin():
    """As after_previous(), and lets the next kernel start. Not in a kernel that waits for other ranks or streams: the
    next one might occupy the multiprocessors that those need."""
    after_previous()
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(_LET_NEXT, "=r,~{memory}", [], tl.int32, False, 1)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """For GEMMs that take turns; one for all, because cuBLAS keeps a workspace for each stream that it has seen.

    One host thread at a time issues to it: its users wait for it, and would wait for each other's work too.
    """
    return torch.cuda.Stream(device)


def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """stream.wait_stream(other), which a recording sees."""
    stream.wait_stream(other)
    if OPEN.recorder is not None:
        OPEN.recorder.waits(stream, other)


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 132 (H200) where there is none: fake tensors, the interpreter."""
    known = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if known else 132


def launch(
    kernel: Any, programs: int, unaligned: Sequence[Tensor | None], tensors: tuple[Tensor, *tuple[Tensor | None, ...]],
    numbers: tuple[int | float, ...], constants: tuple[Any, ...], num_warps: int, registers: int | None = None,
) -> None:  # fmt: skip
    """kernel[(programs,)](*unaligned, *tensors, *numbers, *constants) on their device's current stream; nothing where
    there are no programs.

    The kernel's parameters come in that order. unaligned: pointers that it declares with
    do_not_specialize_on_alignment. constants: its tl.constexpr parameters, all of them, hashable. registers: at most so
    many a thread (ptxas also schedules differently when told).
    """
    if not programs:
        return
    device = tensors[0].device
    if device.index is not None and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, programs, unaligned, tensors, numbers, constants, num_warps, registers)
        return
    addresses = [None if t is None else t.data_ptr() for t in (*unaligned, *tensors)]
    types = tuple([None if t is None else t.dtype for t in (*unaligned, *tensors)])
    bits = 0
    for address in addresses[len(unaligned) :]:
        if address is not None:
            bits |= address
    # None is never stored: tensors that lie off 16 bytes go through Triton, and are not recorded.
    key = None if bits & 15 else (id(kernel), device, types, numbers, constants, num_warps, registers)
    ready, recorder = _COMPILED.get(key), OPEN.recorder
    if recorder is not None:
        recorder.kernel(ready, programs, (*unaligned, *tensors), (*numbers, *constants), len(unaligned))
    if ready is not None:
        ready.launch(programs, torch._C._cuda_getCurrentRawStream(device.index), (*addresses, *numbers, *constants))
        return
    options = {"num_warps": num_warps} if registers is None else {"num_warps": num_warps, "maxnreg": registers}
    compiled = kernel[(programs,)](*unaligned, *tensors, *numbers, *constants, **options)
    if key is not None and compiled is not None:  # the interpreter compiles nothing
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key], _KERNELS[id(kernel)] = launchable(compiled), kernel


class _ThroughTriton:
    """A compiled kernel launched by Triton itself."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def launch(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        self.compiled[(programs, 1, 1)](*arguments, stream=stream)


_LETTERS = {"i32": "i", "u32": "i", "i64": "l", "u64": "l", "fp32": "f", "f32": "f", "constexpr": "-"}


CONVENTION_READ = ("3.6.", "3.7.")  # versions of Triton


def launchable(compiled: Any) -> _C.Kernel | _ThroughTriton:
    """`compiled` launched by te_lite._C, where its calling convention is one that was read in Triton's source.

    Parameters in order, constants left out (also None, and integers that are 1), then two scratch pointers that no
    kernel here needs; one block of 32 * num_warps threads a program, no cluster, no cooperative launch, for which no
    kernel here asks.
    """
    data = compiled.metadata
    types = [str(kind) for kind in compiled.src.signature.values()]
    known = all(kind in _LETTERS or kind.startswith("*") for kind in types)
    scratch = data.global_scratch_size or data.profile_scratch_size
    if not (triton.__version__.startswith(CONVENTION_READ) and known) or scratch:
        return _ThroughTriton(compiled)
    kinds = "".join("p" if kind.startswith("*") else _LETTERS[kind] for kind in types)
    early = "griddepcontrol.wait" in compiled.asm["ptx"]
    return _C.Kernel(compiled.function, 32 * data.num_warps, data.shared, kinds, early)
