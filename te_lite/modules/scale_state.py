"""A module's delayed-scaling state: made when a recipe needs it, kept in checkpoints as one plain tensor.

Layout of the tensor (fp32, 1-D): [VERSION, history length, forward tensors nf, backward tensors nb, forward fp8_max,
backward fp8_max], then forward history [L, nf], forward scale [nf], backward history [L, nb], backward scale [nb], then
zeros up to the size that ROWS of history take. fp8_max is what the scales were made for, 2^-margin included. Without a
state the length and all after nb are 0. So a distributed checkpoint finds a tensor of the size to read into, also in a
module that has not run. Tensors without the zeros, which older versions wrote, and empty ones are read too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.registry import FakeTensor, makes_data
from te_lite.quantize.delayed import PoolKey, Pools, ScaleState
from te_lite.quantize.graph_scales import LIVE, changed
from te_lite.quantize.per_tensor import GRADS_PER_GEMM, INPUTS_PER_GEMM
from te_lite.recipe import DelayedScaling

# A little over 1, which int() reads. Transformer Engine's modules unpickle a state's bytes, up to the opcode "."; "N."
# is None, no state, so they load this one strictly and begin with fresh scales. Little endian, as GPUs' hosts are.
VERSION = struct.unpack("<f", b"N.\x80?")[0]
HEADER = 6
ROWS = DelayedScaling().amax_history_len
# Each reads what another library wrote as what te_lite writes, and gives anything else as it is. compat/ knows
# Transformer Engine's.
READERS: list[Callable[[Any], Any]] = []
_NAMES = ("history length", "count of forward tensors", "of backward tensors", "forward fp8_max", "backward fp8_max")


def _check(name: str, values: Tensor, good: Tensor, rule: str) -> None:
    """Refuses values that te_lite does not write. good: which of them it may have written."""
    if not good.all():
        at = tuple((~good).nonzero()[0].tolist())
        raise ValueError(
            f"extra state: {name}{list(at) or ''} is {values[at].item()}, must be {rule}; take another copy of the "
            "checkpoint, or drop its *_extra_state keys: a new module then starts with fresh scales"
        )


def as_tensor(state: Any) -> Tensor:
    """What a checkpoint holds, as the tensor described above; empty for no state, and for a tensor without data (meta,
    fake); anything else is refused."""
    for read in READERS:
        state = read(state)
    empty = isinstance(state, Tensor) and (state.is_meta or isinstance(state, FakeTensor) or not state.numel())
    if state is None or empty:
        return torch.empty(0, device="cpu")
    if not isinstance(state, Tensor) or state.dim() != 1 or state.dtype != torch.float32 or state.is_sparse:
        raise TypeError(
            f"extra state is {type(state).__name__}: must be the 1-D fp32 tensor that te_lite writes (Transformer "
            "Engine's pickled state is read with TE_LITE_PICKLED_STATE=1 alone); drop the *_extra_state keys from the "
            "state dict: a new module then starts with fresh scales"
        )
    if state.numel() < HEADER or float(state[0]) not in (1.0, VERSION):  # 1.0: written before
        raise ValueError(
            f"extra state of {state.numel()} numbers has version {float(state[0])}: this te_lite reads version "
            f"{int(VERSION)}, of at least {HEADER} numbers; update te_lite"
        )
    if not state[1] and not state[HEADER - 2 :].any():
        return torch.empty(0, device="cpu")
    for name, value in zip(_NAMES, state[1:HEADER], strict=False):
        whole = (value == value.floor()) | ("fp8_max" in name)
        _check(name, value, (value > 0) & value.isfinite() & whole, "positive and finite, a count a whole number")
    return state


class ScaleStates:
    """The forward and backward ScaleState of one module with `gemms` linears, or what a checkpoint said of them.

    version: another one after live states were replaced or dropped. What holds some asks for them anew."""

    def __init__(self, gemms: int) -> None:
        self.sizes = {"forward": INPUTS_PER_GEMM * gemms, "backward": GRADS_PER_GEMM * gemms}
        self._live: dict[str, ScaleState] = {}
        self._loaded = torch.empty(0, device="cpu")
        self.version = 0

    def fits(self, *asked: Any) -> bool:
        """Whether state(*asked) makes nothing in the place of another state."""
        state = self._live.get(asked[-1])
        return state is None or state.key == self._key(*asked)

    def fixed(self) -> bool:
        """Whether a CUDA graph holds them."""
        return any([state.pool.fixed for state in self._live.values()])

    def holds(self, states: tuple[ScaleState, ...]) -> bool:
        """Whether these are the live ones."""
        return [*self._live.values()] == [*states]

    @staticmethod
    def _key(
        recipe: DelayedScaling, group: dist.ProcessGroup | None, device: torch.device, owner: Pools, direction: str
    ) -> PoolKey:
        formats = recipe.fp8_format.value
        fp8_max = (formats.max_fwd if direction == "forward" else formats.max_bwd) * 2.0**-recipe.margin
        if not (recipe.reduce_amax and group is not None and dist.get_world_size(group) > 1):
            group = None
        return PoolKey(direction, recipe.amax_history_len, fp8_max, recipe.amax_compute_algo, group, device, owner)

    def state(
        self, recipe: DelayedScaling, group: dist.ProcessGroup | None, device: torch.device, owner: Pools,
        direction: str,
    ) -> ScaleState:  # fmt: skip
        """The live state, remade when the recipe's numbers or the group changed, or the thread that runs the module.
        Where tensors have no data (meta, fake) one of its own, which leaves the live ones and what a checkpoint said
        alone."""
        key = self._key(recipe, group, device, owner, direction)
        if not makes_data(device):
            return ScaleState(key._replace(direction="none"), self.sizes[direction])
        with LIVE:
            state = self._live.get(direction)
            if state is not None and state.key == key:
                return state
            if state is not None and state.pool.fixed:
                raise RuntimeError(
                    "a CUDA graph uses this module's scales or those beside them, so that another thread, another "
                    "recipe, group or device cannot replace them; call copy.deepcopy(module), whose scales are its own"
                )
            made = ScaleState(key, self.sizes[direction], like=state)
            if state is None and self._loaded.numel():
                made.load(*self._parse(self._loaded, direction))
            self._live[direction] = made
            self.version += state is not None
        changed()
        return made

    def step_taken(self) -> None:
        """After states have come from another thread's pools: the step that the backward scales wait for."""
        state = self._live["backward"]
        state.pool.touched = True
        state.key.owner.step_taken()

    def dump(self) -> Tensor:
        """What load() takes, of the same size before a module has run and after."""
        compact = self._compact()
        if not compact.numel():
            compact = torch.tensor([VERSION, 0.0, *self.sizes.values(), 0.0, 0.0], dtype=torch.float32, device="cpu")
        return torch.nn.functional.pad(compact, (0, max(0, self._numbers(ROWS) - compact.numel())))

    def _numbers(self, length: int) -> int:
        """In the tensor of a state with histories of this length."""
        return HEADER + (length + 1) * sum(self.sizes.values())

    def _compact(self) -> Tensor:
        """dump() without the zeros at its end, or what was loaded; empty where there is no state."""
        if len(self._live) < len(self.sizes):
            return self._loaded.clone()
        states = [self._live[direction] for direction in self.sizes]
        sizes, largest = [state.n for state in states], [state.key.fp8_max for state in states]
        header = torch.tensor([VERSION, states[0].key.length, *sizes, *largest], dtype=torch.float32, device="cpu")
        numbers = [part for state in states for part in (state.history.reshape(-1), state.scale)]
        return torch.cat([header.to(numbers[0].device), *numbers])

    def load(self, state: Any) -> None:
        """Takes what dump() gave, from which states are made when a recipe needs them. Nothing (another recipe's
        checkpoint): fresh scales."""
        tensor = as_tensor(state)
        parsed = {direction: self._parse(tensor, direction) for direction in self.sizes if tensor.numel()}
        self._loaded = tensor.detach().clone()
        self._loaded[:1] = VERSION  # older files have 1
        before, self._live = self._live, {way: state for way, state in self._live.items() if state.pool.fixed}
        self.version += len(before) - len(self._live)
        for direction, state in self._live.items():  # a CUDA graph reads them where they lie
            fresh = torch.zeros_like(state.history[:1]), torch.ones_like(state.scale), state.key.fp8_max
            state.load(*parsed.get(direction, fresh))

    def _parse(self, tensor: Tensor, direction: str) -> tuple[Tensor, Tensor, float]:
        """(history, scale, the fp8_max they were made for)."""
        length, *sizes = (int(value) for value in tensor[1 : HEADER - 2].tolist())
        expected = list(self.sizes.values())
        numbers = self._numbers(length)
        if sizes != expected or tensor.numel() not in (numbers, self._numbers(max(length, ROWS))):
            raise ValueError(
                f"extra state holds {sizes} forward and backward tensors in {tensor.numel()} numbers, this module has "
                f"{expected}; load it into a module of the class that wrote it"
            )
        rest = tensor[numbers:]  # of a state whose length was damaged it holds numbers
        _check("number after the last scale", rest, rest == 0, "0")
        index = list(self.sizes).index(direction)
        parts = tensor[HEADER:numbers].split([n for size in sizes for n in (length * size, size)])
        history, scale = parts[2 * index : 2 * index + 2]
        history = history.view(length, sizes[index])
        now, past = history[0], history[1:]
        _check(f"{direction} amax of this step", now, now >= 0, "at least 0")  # inf where a value was inf or nan
        _check(f"{direction} amax of an earlier step", past, (past >= 0) & past.isfinite(), "finite and at least 0")
        _check(f"{direction} scale", scale, (scale > 0) & scale.isfinite(), "finite and positive")
        return history, scale, tensor[HEADER - 2 + index].item()

    def fix(self) -> None:
        """Before a CUDA graph captures a call."""
        for state in list(self._live.values()):
            state.fix()

    def __getstate__(self) -> dict[str, Any]:
        """The numbers without the live states, for copying and pickling."""
        return {"sizes": self.sizes, "_live": {}, "_loaded": self._compact(), "version": 0}
