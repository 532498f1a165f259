"""Named random number states, so that tensor-parallel ranks draw alike in some places and differently in others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CudaRNGStatesTracker:
    """Generator states by name; fork(name) runs a block with that state and keeps what it has become.

    Serves the current CUDA device where there is one and the CPU generator otherwise.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy: name -> generator state (uint8)."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replaces all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state `name` started from `seed`; both must be new."""
        if name in self._states:
            raise ValueError(f"RNG state {name!r} exists already; choose another name or reset() first")
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} is used by another RNG state: both would draw the same numbers; choose another"
            )
        self._seeds.add(seed)
        before = self._read()
        torch.cuda.manual_seed(seed) if _default_device().type == "cuda" else torch.manual_seed(seed)
        self._states[name] = self._read()
        self._write(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draws inside come from state `name`; outside nothing has happened."""
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            raise ValueError(f"RNG state {name!r} is not known (there are: {known}); add({name!r}, seed) first")
        before = self._read()
        self._write(self._states[name])
        try:
            yield
        finally:
            self._states[name] = self._read()
            self._write(before)

    @staticmethod
    def _read() -> Tensor:
        return torch.cuda.get_rng_state() if _default_device().type == "cuda" else torch.get_rng_state()

    @staticmethod
    def _write(state: Tensor) -> None:
        torch.cuda.set_rng_state(state) if _default_device().type == "cuda" else torch.set_rng_state(state)
