"""What a case has computed, as digests: dtype, shape and sha256 of every tensor's bytes, in the order of the run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARTS = ("_rowwise_data", "_rowwise_scale_inv")  # of a quantized tensor: its bytes and its scales


def plain_bytes(tensor: Tensor) -> bytes:
    """The bytes of `tensor` in row-major order. Every nan is the same nan: which one it is depends on vector widths."""
    flat = tensor.detach().cpu().contiguous()
    if flat.is_floating_point() and flat.element_size() > 1:
        flat = torch.where(flat.isnan(), torch.full((), float("nan"), dtype=flat.dtype), flat)
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


class Recorder:
    """Takes the named tensors of one case. folder: where they are written whole, to show where two trees differ.

    facts: what is said of the case and not computed, such as the schedules that it took; name -> text.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.tensors: dict[str, tuple[str, list[int], str]] = {}
        self.facts: dict[str, str] = {}
        self._folder = folder

    def add(self, name: str, value: Any) -> None:
        """Notes a tensor; of a quantized one its bytes, scales and values. None and what is no tensor is passed over.
        ValueError for a name that is there already."""
        if not isinstance(value, Tensor):
            return
        parts = {part: getattr(value, part, None) for part in PARTS}
        if not any(isinstance(part, Tensor) for part in parts.values()):
            self._note(name, value)
            return
        for part, tensor in parts.items():
            if isinstance(tensor, Tensor):
                self._note(f"{name}{part}", tensor)
        self._note(f"{name} dequantized", value.detach().dequantize())

    def _note(self, name: str, tensor: Tensor) -> None:
        if name in self.tensors:
            raise ValueError(f"{name!r} is recorded already: names must be unique within a case")
        digest = hashlib.sha256(plain_bytes(tensor)).hexdigest()
        self.tensors[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            kept = tensor.detach().cpu().clone()
            torch.save((name, kept), self._folder / f"{len(self.tensors):05d}.pt")
