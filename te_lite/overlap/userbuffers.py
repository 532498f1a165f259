"""initialize_ub and destroy_ub, and which exchanges a linear gets from them."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite import epoch
from te_lite.arguments import checked_device, flag
from te_lite.ops.source import DTYPES
from te_lite.overlap.bootstrap import BootstrapError, Rendezvous, check_agreement
from te_lite.overlap.collective import Collective
from te_lite.overlap.config import Config, LayerMethods, UserBufferQuantizationMode, layer_methods
from te_lite.overlap.exchange import Place
from te_lite.overlap.exchanges import EXCHANGES
from te_lite.overlap.group import Group
from te_lite.overlap.symmetric import SymmetricMemory
from te_lite.parallel import TensorParallel, ranks_of
from te_lite.watch import check_world, watch, watches

UB_FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")


# Of ranks. A str: userbuffers that could not be made, and why; the group's modules run Collective.
_groups: dict[tuple[int, ...], Group | str] = {}


def initialised() -> bool:
    """Whether initialize_ub has run and destroy_ub has not."""
    return bool(_groups)


def _device(device: torch.device | str | None) -> torch.device:
    device = checked_device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: must be 'cpu' or 'cuda', where the activations are")
    return torch.empty(0, device=device).device  # as tensors say it: an index on CUDA, none on the CPU


def _checked(shape: Sequence[int], dtype: torch.dtype, ub_cfgs: Any, modes: Any) -> LayerMethods:
    """The methods of the layers. Checks what this rank can judge by itself of initialize_ub's arguments; of the modes
    only the type and the number count here."""
    if not isinstance(shape, Sequence) or len(shape) != 2 or not all(isinstance(n, Integral) and n > 0 for n in shape):
        raise ValueError(f"shape={shape!r}: must be [tokens, hidden], both positive integers")
    if dtype not in DTYPES:
        raise TypeError(f"dtype={dtype}: must be one of {DTYPES}")
    modes = list(modes) if isinstance(modes, Sequence) else [modes]
    for mode in modes:
        if not isinstance(mode, UserBufferQuantizationMode):
            raise TypeError(f"quantization_modes holds {mode!r}: each must be a te.UserBufferQuantizationMode")
    if not modes:
        raise ValueError("quantization_modes is empty: give at least one te.UserBufferQuantizationMode")
    return layer_methods(ub_cfgs, len(modes))


def initialize_ub(
    shape: Sequence[int], tp_size: int, use_fp8: bool = False, quantization_modes: Any = None,
    dtype: torch.dtype = torch.bfloat16, ub_cfgs: Config | Sequence[Config] | None = None,
    bootstrap_backend: str | None = None, *, tp_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None, strict: bool = False, cuda_graphs: bool = False,
    symmetric_bytes: int = 0,
) -> None:  # fmt: skip
    """Makes the buffers by which modules with ub_* flags hide their communication behind GEMMs. Collective.

    shape: [tokens of all ranks (sequence * batch), hidden], the largest of the run; calls that need more run without
    overlap. tp_group: its ranks (default: the world in blocks of tp_size neighbours); call once for each group.
    use_fp8, quantization_modes: as Transformer Engine's; one set of buffers serves every number format here.
    dtype: the widest that travels. ub_cfgs: "fc1_fprop" -> {"method": ...}, see docs/reference/overlap.md.
    bootstrap_backend: "gloo", "nccl" or "mpi" for the exchange of handles (default: torch.distributed as it is).
    strict: an overlap that is asked for and does not happen is an error instead of a line in overlap_report().
    cuda_graphs: slots of their own for calls captured in CUDA graphs; twice the memory.
    symmetric_bytes: a rank's space for the tensors of symmetric_empty().

    Where the ranks cannot map each other's memory (several hosts, no peer access) the first of them warns once and all
    run without overlap; with strict all raise RuntimeError. ValueError and TypeError for arguments out of range or
    different between ranks; RuntimeError when called twice for a group or without torch.distributed.
    """
    wrong = None
    try:
        for name, value in (("use_fp8", use_fp8), ("strict", strict), ("cuda_graphs", cuda_graphs)):
            flag("initialize_ub", name, value)
        check_world()
        place = _device(device)
        modes = UserBufferQuantizationMode.NONE if quantization_modes is None else quantization_modes
        layers = _checked(shape, dtype, ub_cfgs, modes)
        tokens, hidden = map(int, shape)
        if type(symmetric_bytes) is not int or symmetric_bytes < 0:
            raise ValueError(f"symmetric_bytes={symmetric_bytes!r}: must be an integer, at least 0")
        options: dict[str, Any] = {"shape": [tokens, hidden], "dtype": dtype, "strict": strict}
        options |= {"cuda_graphs": cuda_graphs, "symmetric_bytes": symmetric_bytes}
        options |= {"device": place.type, **layers.methods, "fp8_buf": sorted(layers.narrow)}
        said = tuple(f"{name}={value}" for name, value in options.items())
    except Exception as error:  # of whatever kind: the other ranks wait for this one
        if not dist.is_initialized():
            raise
        wrong = error  # raised once every rank knows of it
    exchange = Rendezvous(tp_size, tp_group, bootstrap_backend)
    ranks = exchange.ranks
    try:
        if ranks in _groups:
            wrong = RuntimeError(f"initialize_ub was called twice for the ranks {list(ranks)}: call destroy_ub() first")
        check_agreement(ranks, exchange.all(said if wrong is None else (f"{type(wrong).__name__}: {wrong}",)))
        if wrong is not None:
            raise wrong
        try:
            options = {"strict": strict, "graphs": cuda_graphs, "symmetric": symmetric_bytes}
            group = Group(exchange, place, tokens, hidden, dtype, layers, **options)
            _groups[ranks] = group
            watch(ranks, group)
        except BootstrapError as error:
            if strict:
                raise
            _groups[ranks] = str(error)
            if exchange.rank == 0:
                warnings.warn(f"no userbuffers, overlap is off: {error}", RuntimeWarning, stacklevel=2)
        epoch.advance()
    finally:
        exchange.close()


def destroy_ub() -> None:
    """Ends all userbuffers of this process; modules run without overlap from here on. Nothing to do is no error."""
    while _groups:
        ranks, group = _groups.popitem()
        watches.pop(ranks, None)
        if isinstance(group, Group):
            group.close()
        epoch.advance()


atexit.register(destroy_ub)


def groups() -> list[Group]:
    """The userbuffers that exist."""
    return [group for group in _groups.values() if isinstance(group, Group)]


def group_of(group: dist.ProcessGroup, device: torch.device) -> Group | str:
    """The userbuffers of exactly these ranks, for tensors on `device`, or why there are none."""
    check_world()
    ranks = ranks_of(group)
    found = _groups.get(ranks, f"no userbuffers for the ranks {[*ranks]}: call initialize_ub(..., tp_group=...)")
    if isinstance(found, Group) and found.device != device:
        return f"activations are on {device}, userbuffers on {found.device}: call initialize_ub(..., device=...)"
    return found


def symmetric_empty(
    shape: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device | str | None = None
) -> tuple[Tensor, SymmetricMemory]:
    """(a tensor that every rank of the group has and can map, its handle: views of the peers', put, signal, wait).

    Collective: every rank of the group calls it with the same arguments. The values are undefined. Space comes from
    initialize_ub(..., symmetric_bytes=...), and goes back with destroy_ub(); a tensor in use keeps its memory mapped.
    device: that of initialize_ub, with the same default: the current GPU, or the CPU where there is none.

    RuntimeError where the group has no userbuffers on that device, or too little space is left; TypeError and
    ValueError for arguments out of range.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"symmetric_empty(group={group!r}): must be a process group; pass that of initialize_ub")
    if not isinstance(shape, Sequence) or not all(isinstance(n, Integral) and n >= 0 for n in shape):
        raise ValueError(f"symmetric_empty({shape!r}): the shape must be a sequence of integers, none below 0")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"symmetric_empty(dtype={dtype!r}): must be a torch.dtype")
    found = group_of(group, _device(device))
    if isinstance(found, str):
        raise RuntimeError(f"symmetric_empty needs userbuffers: {found}; with symmetric_bytes=..., the same device")
    return found.symmetric.take(shape, dtype)


GEMMS = ("fprop", "dgrad", "wgrad")
Exchanges = tuple[Collective, ...]  # of a linear's GEMMs, in the order of GEMMS


def _methods(
    mode: str, flags: Mapping[str, bool], layers: LayerMethods, layer: str
) -> tuple[dict[str, str], dict[str, str]]:
    """(GEMM -> method, GEMM -> remark for the report) of one linear. mode: "column" or "row"."""
    methods = {gemm: layers.methods[f"{layer}_{gemm}"] for gemm in GEMMS}
    asked, remarks = {}, {}
    if mode == "column":
        bulks = [flag for flag in ("ub_bulk_dgrad", "ub_bulk_wgrad") if flags[flag]]
        scatters = flags["ub_overlap_rs_dgrad"] or (bulks and methods["dgrad"] not in ("bulk", "auto"))
        if flags["ub_overlap_ag"]:
            asked["fprop"] = methods["fprop"]
        if scatters:
            asked["dgrad"] = "auto" if methods["dgrad"] == "bulk" else methods["dgrad"]
            asked["wgrad"] = "external"
            if bulks:
                remarks["wgrad"] = f"{' and '.join(bulks)} without effect: dgrad scatters its own output"
        else:
            asked |= {flag.removeprefix("ub_bulk_"): "bulk" for flag in bulks}
    else:
        if flags["ub_overlap_rs"]:
            asked["fprop"] = methods["fprop"]
        if flags["ub_overlap_ag"]:
            asked["dgrad"], asked["wgrad"] = methods["dgrad"], "external"
    # Of no GEMM that scatters its own output: what is gathered travels as the recipe has it, a bulk scatter as always.
    sums = "fprop" if mode == "row" else "dgrad" if asked.get("dgrad") != "bulk" else ""
    wide = [f"{name}.fp8_buf" for name in sorted(layers.narrow) if name != f"{layer}_{sums}"]
    for name in (*layers.ignored, *wide):
        gemm, option = name.removeprefix(f"{layer}_").split(".")
        if gemm in asked and name.startswith(f"{layer}_"):
            remarks[gemm] = "; ".join(filter(None, (remarks.get(gemm), f"option {option} has no effect here")))
    return asked, remarks


def exchanges_for(
    tp: TensorParallel, flags: Mapping[str, bool], layer: str, name: str | None, device: torch.device, strict: bool,
    recipe: str = "",
) -> tuple[Exchanges, str]:  # fmt: skip
    """(the exchanges of one linear; why they do not overlap as asked, or ""). name: of its module.
    device: of its activations. strict: that is an error. recipe: in words, on which the ranks must agree."""
    found: Group | str = ""
    if any(flags.values()):
        if not tp.active:
            found = "tensor parallelism is off"
        elif not tp.sequence_parallel:
            found = "sequence parallelism is off"
        else:
            found = group_of(tp.group, device)
    if isinstance(found, str):
        if strict and found:
            what = layer or "a linear"
            raise RuntimeError(f"{what}: overlap was asked for and does not happen: {found}; or leave out strict=True")
        return tuple([Collective(Place(tp, gemm)) for gemm in GEMMS]), found
    assert tp.mode is not None
    methods, remarks = _methods(tp.mode, flags, found.layers, layer)
    label = layer if name in (None, layer) else f"{name} {layer}"
    recipe = f", recipe {recipe}" if recipe else ""
    exchanges: list[Collective] = []
    for gemm in GEMMS:
        method, narrow = methods.get(gemm, ""), f"{layer}_{gemm}" in found.layers.narrow
        remark = remarks.get(gemm, "")
        place = Place(tp, gemm, found, method, label, recipe, strict or found.strict, narrow, remark)
        exchanges.append(EXCHANGES[method](place) if method else Collective(place))
    return tuple(exchanges), ""
