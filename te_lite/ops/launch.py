"""Launching a Triton kernel with little host time.

`kernel[grid](...)` inspects every argument again on each call (10 to 15 us). Here the compiled kernel is
looked up by all that Triton specialises on: types, integers, constants, "all pointers are multiples of 16".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple, Any] = {}
_MOST = 4096  # entries; each token count makes some, and a run with ever new ones must not fill the memory


@lru_cache(maxsize=64)
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 132 (H200) where there is none: fake tensors, the interpreter."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return _sm_count(torch.cuda.current_device() if device.index is None else device.index)


def launch(
    kernel: Any,
    programs: int,
    unaligned: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> None:
    """kernel[(programs,)](*unaligned, *tensors, *numbers, *constants) on their device's current stream.

    The kernel's parameters come in that order. unaligned: pointers that it declares with
    do_not_specialize_on_alignment. constants: its tl.constexpr parameters, all of them, hashable.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, unaligned, tensors, numbers, constants, num_warps)
        return
    addresses: list[int | None] = [None if t is None else t.data_ptr() for t in unaligned]
    types: list[Any] = [None if t is None else t.dtype for t in unaligned]
    bits = 0
    for t in tensors:
        if t is None:
            addresses.append(None)
            types.append(None)
        else:
            address = t.data_ptr()
            bits |= address
            addresses.append(address)
            types.append(t.dtype)
    key = None if bits & 15 else (id(kernel), device, tuple(types), numbers, constants, num_warps)
    compiled = _COMPILED.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*addresses, *numbers, *constants)
        return
    compiled = kernel[(programs,)](*unaligned, *tensors, *numbers, *constants, num_warps=num_warps)
    if key is not None and compiled is not None:  # the interpreter compiles nothing
        if len(_COMPILED) >= _MOST:
            _COMPILED.clear()
        _COMPILED[key] = compiled
