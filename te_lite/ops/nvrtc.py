"""Kernels in CUDA that are compiled when they are first used, for the types and sizes that they are used with.

CUDA and not Triton 3.6, which has neither clusters that share an operand nor warps that store one tile, piece by piece,
while others multiply the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from te_lite import kept
from te_lite.ops.gemm import FP8

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
# As the sources name them.
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", FP8[0]: "e4m3", FP8[1]: "e5m2"}


@cache
def unavailable(device: torch.device) -> str:
    """Why the kernels cannot run on a device, or ""."""
    if device.type != "cuda" or not torch.cuda.is_available():  # fake tensors may say that they are a GPU's
        return "fused kernels need a GPU"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "fused kernels are written for compute capability 9.0"
    with suppress(ImportError, RuntimeError, OSError):  # no bindings, or none of the library that they bind
        from cuda.bindings import nvrtc  # takes long to import

        if nvrtc.nvrtcVersion()[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return ""
    return "fused kernels are compiled at run time: pip install cuda-bindings"


def compiled(names: Sequence[str], macros: Sequence[str]) -> bytes:
    """A kernel as a cubin, compiled once for these sources, macros and this compiler, and kept in a file.

    names: of files of csrc/, the kernel's and those that it includes.

    RuntimeError with the compiler's words."""
    from cuda.bindings import nvrtc  # takes long to import

    sources = {name: (SOURCES / name).read_bytes() for name in names}
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *macros]
    version = _checked(*nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((sources, options, version)).encode()).hexdigest()
    path = kept.folder() / f"{names[0]}-{key}.cubin"
    with suppress(OSError):
        digest, cubin = (content := path.read_bytes())[:32], content[32:]
        if hashlib.sha256(cubin).digest() == digest:
            return cubin
    cubin = _compile(sources, options)
    kept.write(path, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _checked(result: Any, *values: Any) -> Any:
    """What a call of NVRTC gives beside its result."""
    if result.value:
        raise RuntimeError(f"compiling a kernel of csrc: {result.name}")
    return values if len(values) > 1 else values[0] if values else None


def _compile(sources: dict[str, bytes], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    (main, source), *headers = sources.items()
    names, texts = [name.encode() for name, _ in headers], [text for _, text in headers]
    program = _checked(*nvrtc.nvrtcCreateProgram(source, main.encode(), len(headers), texts, names))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if result.value:
        log = b" " * _checked(*nvrtc.nvrtcGetProgramLogSize(program))
        _checked(*nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"compiling a kernel of csrc: {result.name}\n{log.decode()}")
    cubin = b" " * _checked(*nvrtc.nvrtcGetCUBINSize(program))
    _checked(*nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(*nvrtc.nvrtcDestroyProgram(program))
    return cubin
