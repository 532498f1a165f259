"""Which layers' GEMMs overlap by which method: Transformer Engine's ub_cfgs, checked."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any, NamedTuple

from te_lite.arguments import remedy
from te_lite.overlap.exchanges import EXCHANGES


class UserBufferQuantizationMode(enum.Enum):
    """What the layers that ub_cfgs is for run in; te_lite's buffers serve both at once."""

    NONE = "none"
    FP8 = "fp8"


LAYERS = {"column": ("qkv", "fc1"), "row": ("proj", "fc2")}  # parallel_mode -> names
LAYER_GEMMS = tuple(
    f"{layer}_{gemm}" for layers in LAYERS.values() for gemm in ("fprop", "dgrad", "wgrad") for layer in layers
)


def offered(name: str) -> tuple[str, ...]:
    """The methods that make sense for a GEMM, "layer_gemm": what travels there decides. The first is the default: the
    fastest where there is a choice, and Transformer Engine's elsewhere."""
    layer, gemm = name.split("_")
    column = layer in LAYERS["column"]
    if gemm == "wgrad":
        return ("bulk" if column else "external"), "auto"
    cut = [method for method, kind in EXCHANGES.items() if (kind.scatters if is_scatter(name) else kind.gathers)]
    return ("bulk", *cut) if column and gemm == "dgrad" else tuple(cut)


def is_scatter(name: str, method: str = "auto") -> bool:
    """Whether the exchange of this GEMM is a reduce-scatter. In bulk a column-parallel dgrad hides the gather of x."""
    layer, gemm = name.split("_")
    if layer in LAYERS["row"]:
        return gemm == "fprop"
    return gemm == "wgrad" or (gemm == "dgrad" and method != "bulk")


# Options of Transformer Engine's that have no meaning here: no SM is taken for communication.
IGNORED = (
    "num_sm", "cga_size", "set_sm_margin", "num_splits", "aggregate", "atomic_gemm", "use_ce", "comm_priority",
    "gemm_priority", "pipeline_rs_overlap_first_gemm",
)  # fmt: skip
OPTIONS = ("method", "is_reduce_scatter", "fp8_buf", *IGNORED)

Config = Mapping[str, Mapping[str, Any]]


class LayerMethods(NamedTuple):
    """Checked ub_cfgs. methods: "fc1_fprop" -> method. narrow: GEMMs with fp8_buf. ignored: options that were given and
    mean nothing here."""

    methods: Mapping[str, str]
    narrow: frozenset[str]
    ignored: tuple[str, ...]


def _method(name: str, options: Mapping[str, Any]) -> str:
    """The method that `options`, which are checked, give to the GEMM."""
    if not isinstance(options, Mapping):
        raise TypeError(f"ub_cfgs[{name!r}]={brief(options)}: must be a dict of options, such as {{'method': 'auto'}}")
    for option in options:
        if option not in OPTIONS:
            near = remedy("option", option, OPTIONS)
            raise ValueError(f"ub_cfgs[{name!r}] has the option {option!r}: must be one of {OPTIONS}; {near}")
    method = options.get("method", offered(name)[0])
    if method not in tuple(EXCHANGES):
        near = remedy("method", method, EXCHANGES)
        raise ValueError(f"ub_cfgs[{name!r}]: method {method!r} is none of {tuple(EXCHANGES)}; {near}")
    if method not in offered(name):
        raise ValueError(
            f"ub_cfgs[{name!r}]: method {method!r} does not fit this GEMM; choose one of {offered(name)}"
            + (" (pipeline is for reduce-scatters)" if method == "pipeline" else "")
        )
    scatters = options.get("is_reduce_scatter")
    if scatters is not None and bool(scatters) != is_scatter(name, method):
        raise ValueError(
            f"ub_cfgs[{name!r}]: is_reduce_scatter={scatters} with method {method!r}, but that GEMM "
            f"{'scatters its output' if is_scatter(name, method) else 'gathers its input'}; leave the option out"
        )
    if not isinstance(options.get("fp8_buf", False), bool):
        raise TypeError(f"ub_cfgs[{name!r}]: fp8_buf={options['fp8_buf']!r} must be True or False")
    return method


def layer_methods(ub_cfgs: Config | Sequence[Config] | None, modes: int) -> LayerMethods:
    """Checks what initialize_ub was given.

    ub_cfgs: "layer_gemm" -> options, or a list of such dicts, one a quantization mode (`modes` of them). te_lite's
    buffers serve all modes at once, so the dicts of a list must agree on the methods.
    Raises ValueError for unknown layers, options and methods (Transformer Engine passes over an unknown layer).
    """
    if ub_cfgs is not None and (isinstance(ub_cfgs, str) or not isinstance(ub_cfgs, Mapping | Sequence)):
        raise TypeError(f"ub_cfgs={brief(ub_cfgs)}: must be a dict, layer -> options, or a list of such dicts")
    configs = [ub_cfgs or {}] if ub_cfgs is None or isinstance(ub_cfgs, Mapping) else list(ub_cfgs)
    if len(configs) not in (1, modes):
        raise ValueError(f"ub_cfgs is a list of {len(configs)}: must have one entry for each of {modes} modes")
    methods: dict[str, str] = {}
    narrow: set[str] = set()
    ignored: list[str] = []
    for config in configs:
        if not isinstance(config, Mapping):
            raise TypeError(f"ub_cfgs holds {brief(config)}: each must be a dict, layer -> options")
        found = {name: offered(name)[0] for name in LAYER_GEMMS}
        for name, options in config.items():
            if name not in LAYER_GEMMS:
                near = remedy("layer", name, LAYER_GEMMS)
                raise ValueError(f"ub_cfgs names the layer {name!r}: must be one of {LAYER_GEMMS}; {near}")
            found[name] = _method(name, options)
            ignored += [f"{name}.{option}" for option in options if option in IGNORED]
        found_narrow = {name for name, options in config.items() if options.get("fp8_buf")}
        _settle_wgrad(found, config)
        if methods and (found, found_narrow) != (methods, narrow):
            differing = sorted({name for name in found if found[name] != methods[name]} | narrow ^ found_narrow)
            raise ValueError(
                f"ub_cfgs gives {differing} another method or fp8_buf in each quantization mode; give them one"
            )
        methods, narrow = found, found_narrow
    return LayerMethods(methods, frozenset(narrow), tuple(dict.fromkeys(ignored)))


def _settle_wgrad(methods: dict[str, str], given: Config) -> None:
    """A dgrad that scatters its own output leaves nothing for a bulk reduce-scatter behind wgrad."""
    for layer in LAYERS["column"]:
        dgrad, wgrad = f"{layer}_dgrad", f"{layer}_wgrad"
        if methods[dgrad] not in ("bulk", "auto") and methods[wgrad] == "bulk":
            if wgrad in given:
                raise ValueError(
                    f"ub_cfgs: {dgrad} by {methods[dgrad]!r} scatters the input gradient itself, so {wgrad} cannot be "
                    f"'bulk'; leave {wgrad} out, or make both 'bulk'"
                )
            methods[wgrad] = "none"
