"""What every recipe is: a frozen value, with the number formats and options that its fields hold."""

from __future__ import annotations

import reprlib
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch


class FormatRange(NamedTuple):
    """Largest finite magnitude of the forward and of the backward type."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """fp8 formats: E4M3 and E5M2 everywhere, or HYBRID: E4M3 forward, E5M2 for gradients."""

    E4M3 = FormatRange(448.0, 448.0)
    E5M2 = FormatRange(57344.0, 57344.0)
    HYBRID = FormatRange(448.0, 57344.0)

    @property
    def forward_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Format.E4M3 else torch.float8_e5m2


def _check_types(made: Any) -> None:
    """A field whose default is a bool, an int ... holds nothing else: True is no length, "no" is no bool. Other numbers
    become floats where that is one: a kernel is compiled for the kind of number that it was first given."""
    for item in fields(made):
        value, kind = getattr(made, item.name), type(item.default)
        fits = type(value) is kind or kind is float and type(value) is not bool and isinstance(value, Real)
        if not fits and kind in (bool, int, float, str, MMParams):
            given = f"{type(made).__name__}({item.name}={reprlib.repr(value)})"
            raise TypeError(f"{given}: must be {kind.__name__}; the default is {item.default!r}")
        if kind is float and type(value) is not float:
            object.__setattr__(made, item.name, float(value))


@dataclass(frozen=True)
class QParams:
    """How one operand is scaled: powers of two only, and the smallest amax that is believed."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0.0 <= self.amax_epsilon < float("inf"):
            raise ValueError(f"amax_epsilon={self.amax_epsilon!r}: must be finite and >= 0; pass 0.0 for none")

    def __str__(self) -> str:
        kind = "powers of 2" if self.power_2_scale else "fp32"
        return f"{kind} from {self.amax_epsilon}" if self.amax_epsilon else kind


@dataclass(frozen=True)
class MMParams:
    """How one GEMM accumulates: split (promoted to fp32 as it goes) or fast."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        _check_types(self)


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. A new one must say its name, its factory and a summary.

    factory: "module:function", called as function(recipe, site) for the quantizers of one linear. summary: what it is
    for. memory: bytes kept for backward per element of x and w, and of a w that is_first_microbatch caches.
    formats: what fp8_format may be. token_multiple: tokens on a rank for which nothing is padded. feature_multiple:
    features on a rank that the GEMMs take. capability, below, cuda: what a CUDA device and torch's build must have.
    """

    name: ClassVar[str]
    factory: ClassVar[str]
    summary: ClassVar[str]
    memory: ClassVar[str] = "x 1, w 0 (cached 2)"
    formats: ClassVar[tuple[Format, ...]] = (Format.E4M3, Format.HYBRID)
    token_multiple: ClassVar[int] = 16
    feature_multiple: ClassVar[int] = 16
    capability: ClassVar[tuple[int, int]] = (8, 9)  # fp8 tensor cores
    below: ClassVar[tuple[int, int] | None] = None  # capabilities from here on lack what it needs
    cuda: ClassVar[tuple[int, int]] = (0, 0)
    is_fp8: ClassVar[bool] = True
    _kind: ClassVar[str] = ""  # the name of the first class that has one: what delayed() and the others ask for

    def __init_subclass__(cls) -> None:
        cls._kind = cls._kind or vars(cls).get("name", "")
        cls.is_fp8 = cls._kind != "bf16"

    def __post_init__(self) -> None:
        """Refuses what no recipe can mean; then by the subclass's own rules."""
        _check_types(self)
        for name in ("fp8_dpa", "fp8_mha"):
            if getattr(self, name, False):
                raise ValueError(
                    f"{type(self).__name__}({name}=True): te_lite has no fp8 attention; leave {name}=False and run "
                    "attention in bf16 between the modules"
                )
        if (format := getattr(self, "fp8_format", self.formats[0])) not in self.formats:
            names = " or ".join(f"te.recipe.Format.{one.name}" for one in self.formats)
            raise ValueError(
                f"{type(self).__name__}(fp8_format={format!r}): must be {names} (E5M2 has too few mantissa bits "
                "for x and w, where E4M3 has range enough); leave it out"
            )
        self._check()

    def _check(self) -> None:
        """A subclass's own rules, after those of all recipes; it may also settle fields that were left open."""

    @property
    def needs(self) -> str:
        """What a CUDA device and torch's build must have, in words."""
        cuda = " and a torch built for CUDA {}.{} or higher".format(*self.cuda) if self.cuda > (0, 0) else ""
        below = "or higher" if self.below is None else "to below {}.{}".format(*self.below)
        return "compute capability {}.{} ".format(*self.capability) + below + cuda

    def __str__(self) -> str:
        """In words that are the same in every process: the name, and what differs from the defaults but functions."""
        usual = self
        if not any(MISSING is item.default is item.default_factory for item in fields(self)):
            # Of the fields' defaults and what _check makes of them. A subclass may have another constructor.
            usual = object.__new__(next(one for one in type(self).__mro__ if "__dataclass_fields__" in vars(one)))
            for item in fields(self):
                made = item.default if item.default_factory is MISSING else item.default_factory()
                object.__setattr__(usual, item.name, made)
            usual._check()
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        said = [f"{name}={v}" for name, v in given.items() if v != getattr(usual, name) and not callable(v)]
        return f"{self.name}({', '.join(said)})" if said else self.name

    @property
    def stateless(self) -> bool:
        """Whether a call computed again later has the same numbers; of a recipe of your own only if it says so."""
        return self.name in ("bf16", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")

    def delayed(self) -> bool:
        return self._kind == "delayed"

    def float8_current_scaling(self) -> bool:
        return self._kind == "current"

    def float8_per_tensor_scaling(self) -> bool:
        return self._kind in ("delayed", "current")

    def mxfp8(self) -> bool:
        return self._kind == "mxfp8"

    def float8_block_scaling(self) -> bool:
        return self._kind == "blockwise"

    def custom(self) -> bool:
        return self._kind == "custom"
