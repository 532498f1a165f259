"""Named random number states, so that tensor-parallel ranks draw alike in some places and differently in others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CudaRNGStatesTracker:
    """Generator states by name; fork(name) runs a block with that state and keeps what it has become.

    Serves the CPU's generator and, where there is one, the current CUDA device's. states_, seeds_: what there is, under
    the names of Transformer Engine's.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """A copy: name -> generator state (uint8)."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replaces all states by copies of what get_states gave. TypeError for anything else."""
        parts = states.values() if isinstance(states, dict) else [states]
        wrong = [type(s).__name__ for s in parts if not (isinstance(s, Tensor) and s.dtype == torch.uint8 and s.is_cpu)]
        if wrong or not isinstance(states, dict):
            raise TypeError(f"states hold {wrong}: must be a dict, name -> uint8 tensor; pass what get_states() gave")
        self.states_ = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """A new state `name` started from `seed`; both must be new."""
        if name in self.states_:
            raise ValueError(f"RNG state {name!r} exists already; choose another name or reset() first")
        if seed in self.seeds_:
            raise ValueError(
                f"seed {seed} is used by another RNG state: both would draw the same numbers; choose another"
            )
        self.seeds_.add(seed)
        before = self._read()
        torch.random.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)
        self.states_[name] = self._read()
        self._write(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draws inside come from state `name`; outside nothing has happened."""
        if name not in self.states_:
            known = ", ".join(sorted(self.states_)) or "none"
            raise ValueError(f"RNG state {name!r} is not known (there are: {known}); add({name!r}, seed) first")
        before = self._read()
        self._write(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = self._read()
            self._write(before)

    @staticmethod
    def _read() -> Tensor:
        """uint8: the CPU generator's state, then the CUDA generator's where there is one."""
        states = [torch.get_rng_state()]
        if torch.cuda.is_available():
            states.append(torch.cuda.get_rng_state())
        return torch.cat(states)

    @staticmethod
    def _write(state: Tensor) -> None:
        size = torch.get_rng_state().numel()
        torch.set_rng_state(state[:size])
        if torch.cuda.is_available() and state.numel() > size:
            torch.cuda.set_rng_state(state[size:])
