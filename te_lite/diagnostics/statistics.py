"""Statistics of quantization: what each GEMM operand loses, collected on request.

While they are collected, plans hold `Watched` quantizers. Those add up on the operand's device; the host waits for the
device only when somebody asks for the numbers.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_lite.ops.cast import transform
from te_lite.ops.source import Source, SumDtype
from te_lite.quantize.qtensor import Layout, QTensor
from te_lite.quantize.quantizer import GemmOperands, Quantized, Quantizer, observe, observer
from te_lite.tables import aligned

# A scale of amax / largest is rounded to fp32, so is its inverse, and so are products with them (2^-24 each): current
# scaling may seem to put the amax that far above the largest value.
_ROUNDING = 1 + 2.0**-20

Key = tuple[str, str, str]  # layer, operand, format
_noting = threading.Lock()  # threads may run modules of one name, or one module


class Sums:
    """One operand in one layout: extremes and counts over all calls, as tensors on its device.

    delayed: its scale comes from earlier steps, and is 1 before the first of them.
    """

    _extremes: Tensor  # like _counts, from the first call on
    _counts: Tensor

    def __init__(self, delayed: bool = False) -> None:
        self.delayed = delayed
        self.calls = self.elements = 0

    @torch.no_grad()
    def add(self, v: Tensor, q: QTensor, layout: Layout) -> None:
        """v fp32 [M, K], and what it was quantized to."""
        exact = replace(q.only(layout), dtype=torch.float32)
        data = getattr(exact, layout)
        largest = float((torch.finfo if data.is_floating_point() else torch.iinfo)(data.dtype).max)
        # What the largest value stands for, element by element: no format need be asked how its scales lie.
        full = torch.full(data.shape, largest, device=data.device).to(data.dtype)
        limit = (replace(exact, row=full) if layout == "row" else replace(exact, col=full)).dequantize()
        size, scale, used = v.abs(), largest / limit, v != 0  # the scale of a block of zeros says nothing
        extremes = torch.stack([size.amax(), scale.where(used, 0).amax(), -scale.where(used, torch.inf).amin()])
        counts = torch.stack([(used & (exact.dequantize() == 0)).sum(), (size > limit * _ROUNDING).sum()])
        with _noting:
            self._extremes = extremes if not self.calls else torch.maximum(self._extremes, extremes)
            self._counts = counts if not self.calls else self._counts + counts
            self.calls, self.elements = self.calls + 1, self.elements + v.numel()

    def read(self) -> dict[str, Any]:
        """The numbers and the note of Statistics.rows()."""
        (amax, scale_max, scale_min), counts = self._extremes.tolist(), self._counts.tolist()
        # A scale_max of 0: all values were zero, so that nothing was scaled.
        found = {"amax": amax, "scale_min": -scale_min, "scale_max": scale_max or math.inf}
        found |= {name: None for name, value in found.items() if not math.isfinite(value)}
        lost = {name: n / self.elements for name, n in zip(("underflow", "saturated"), counts, strict=True)}
        odd = "all zero" if amax == 0 else "" if math.isfinite(amax) else f"amax {amax}"
        note = odd or "initial scale 1" * (self.delayed and scale_max == -scale_min == 1)
        return {"calls": self.calls, **found, **lost, "note": note}


@dataclass(frozen=True, slots=True)
class Watched(Quantizer):
    """`inner`, whose results are noted in all_sums[key]. Its answers and its calls are the inner one's."""

    inner: Quantizer = field(kw_only=True)
    all_sums: dict[Key, Sums] = field(kw_only=True)
    key: Key = field(kw_only=True)

    def _note(self, source: Source, q: QTensor) -> None:
        if not source.rows * source.cols:
            return
        v = source.x.float() if source.kind == "plain" else transform(source, hp_dtype=torch.float32).hp
        assert v is not None
        layer, operand, label = self.key
        shared = self.format.col_from_row  # the col layout holds the same numbers
        if q.row is not None:
            self.all_sums[self.key].add(v, q, "row")
        if q.col is not None and not (shared and q.row is not None):
            key = self.key if shared else (layer, f"{operand}_col", label)
            self.all_sums.setdefault(key, Sums()).add(v, q, "col")

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        q, sums = self.inner.quantize(source, row=row, col=col, bias_grad=bias_grad)
        self._note(source, q)
        return q, sums

    def again(self, source: Source, earlier: QTensor) -> QTensor:
        q = self.inner.again(source, earlier)
        if not self.format.col_from_row:
            self._note(source, q)
        return q


class Statistics:
    """What collect_statistics() gives: numbers for each layer and quantized GEMM operand, of this rank."""

    def __init__(self, model: nn.Module | None) -> None:
        named = model.named_modules() if model is not None else ()
        self._names = weakref.WeakKeyDictionary({module: name for name, module in named if name})
        self._sums: dict[Key, Sums] = {}

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            name, taken = getattr(module, "name", None) or type(module).__name__, set(self._names.values())
            names = (name, *(f"{name}#{i}" for i in range(2, len(taken) + 2)))
            self._names[module] = next(name for name in names if name not in taken)
        return self._names[module]

    def watch(self, operands: GemmOperands, module: nn.Module, linear: str) -> GemmOperands:
        """`operands` of one linear of `module`, watched; high precision stays as it is.

        One wrapper for each quantizer of a tensor: callers compare quantizers with `is`.
        """
        with _noting:
            layer = self._name(module)
        prefix, made = f"{linear}." if linear else "", {}

        def of(tensor: str, quantizer: Quantizer | None) -> Quantizer | None:
            if quantizer is None or not quantizer.format.label:
                return quantizer
            key = (layer, prefix + tensor, quantizer.format.label)
            # Rows come in the order of the table, whatever runs first.
            self._sums.setdefault(key, Sums(delayed=getattr(quantizer, "state", None) is not None))
            if (tensor, id(quantizer)) not in made:
                carried = {item.name: getattr(quantizer, item.name) for item in fields(Quantizer)}
                made[tensor, id(quantizer)] = Watched(**carried, inner=quantizer, all_sums=self._sums, key=key)
            return made[tensor, id(quantizer)]

        gemms = {}
        for name, a, b in (("fprop", "x", "w"), ("dgrad", "dy", "w"), ("wgrad", "dy", "x")):
            plain = getattr(operands, name)
            gemms[name] = replace(plain, a=of(a, plain.a), b=of(b, plain.b))
        return GemmOperands(**gemms, output=of("y", operands.output), grad_input=of("dx", operands.grad_input))

    def rows(self) -> list[dict[str, Any]]:
        """One dict an operand: layer, operand ("x", "fc1.dy", "x_col" where columns have scales of their own), format,
        calls, amax, scale_min, scale_max (v * scale is what is rounded; of blocks that are not zero), underflow
        (fraction of elements that are not zero and became zero), saturated (fraction beyond the largest value), note.

        Numbers are finite; amax and scales that are not, or that nothing had, are None. note, where there is one:
        "initial scale 1" (each call was scaled by the 1 with which delayed scaling begins), "all zero", "amax inf" or
        "amax nan"."""
        used = {key: sums for key, sums in self._sums.copy().items() if sums.calls}
        return [{"layer": key[0], "operand": key[1], "format": key[2], **sums.read()} for key, sums in used.items()]

    def log_line(self) -> str:
        """One line for a training log: the worst underflow and saturation, and where."""
        rows = self.rows()
        line = f"{len(rows)} quantized operands"
        for key in ("underflow", "saturated") if rows else ():
            worst = max(rows, key=lambda row: row[key])
            where = ", ".join(filter(None, (f"{worst['layer']} {worst['operand']}", worst["note"])))
            line += f", {key} at most {worst[key]:.2%} ({where})"
        return line

    def __str__(self) -> str:
        specs = {"layer": "", "operand": "", "format": "", "calls": "", "amax": ".4g", "scale_min": ".4g"}
        specs |= {"scale_max": ".4g", "underflow": ".3%", "saturated": ".3%", "note": ""}
        cells = ([(row[key], spec) for key, spec in specs.items()] for row in self.rows())
        return aligned([[*specs], *(["-" if v is None else format(v, spec) for v, spec in row] for row in cells)])

    def plot(self, path: str | Path) -> None:
        """amax, underflow and saturation over the layers, one line an operand, written to `path` (.png, .pdf, .svg).

        An operand of one layer is a point, and so is its entry in the legend. Columns with scales of their own (x_col)
        are circles in the colour of the rows. amax has no point where it is zero or not finite.
        Raises RuntimeError where matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise RuntimeError("stats.plot() needs matplotlib: pip install matplotlib, or take stats.rows()") from error
        rows = self.rows()
        layers = list(dict.fromkeys(row["layer"] for row in rows))
        tensors = sorted({(row["operand"].removesuffix("_col"), row["format"]) for row in rows})
        figure = Figure(figsize=(max(6.0, 0.3 * len(layers)), 9.0), layout="constrained")
        for axes, key in zip(figure.subplots(3, sharex=True), ("amax", "underflow", "saturated"), strict=True):
            for line in sorted({(row["operand"], row["format"]) for row in rows}):
                points = [row for row in rows if (row["operand"], row["format"]) == line]
                at = [layers.index(row["layer"]) for row in points]
                i, col = tensors.index((line[0].removesuffix("_col"), line[1])), line[0].endswith("_col")
                style = ("-", "--", ":", "-.")[i // 10 % 4] if len(points) > 1 else ""
                look = {"fillstyle": "none" if col else "full", "label": " ".join(line), "clip_on": False}
                axes.plot(at, [row[key] for row in points], f"C{i % 10}{'.o'[col]}{style}", **look)
            axes.set(ylabel=key, **({} if key == "amax" else {"ylim": (0, None)}))
        axes.set_xticks(range(len(layers)), layers, rotation=90)
        figure.axes[0].set_yscale("log", nonpositive="mask")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", ncols=1 + len(tensors) // 30)
        figure.savefig(path)


@contextmanager
def collect_statistics(model: nn.Module | None = None) -> Iterator[Statistics]:
    """Inside, every te_lite module notes what quantization does to its GEMM operands; results stay the same bits. Those
    of groups note nothing, and warn.

    model: its module names name the layers; otherwise each module's own `name`, or its class, does. Read at any time,
    also afterwards: stats.rows(), print(stats), stats.log_line(), stats.plot(path). RuntimeError inside of another,
    TypeError where model is no nn.Module.
    """
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"collect_statistics({type(model).__name__}): must be an nn.Module or None; pass the model")
    if observer() is not None:
        raise RuntimeError("collect_statistics() inside of another: leave the outer block first, or use its statistics")
    collected = Statistics(model)
    observe(collected)
    try:
        yield collected
    finally:
        observe(None)
