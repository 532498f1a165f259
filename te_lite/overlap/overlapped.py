"""Overlapped: the exchanges of one linear through userbuffers, behind its GEMMs, as its flags and ub_cfgs ask."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_lite.ops.narrow import BLOCK
from te_lite.ops.registry import capturing
from te_lite.overlap import fused, ring
from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.choice import MOST
from te_lite.overlap.collective import Collective
from te_lite.overlap.group import Group
from te_lite.overlap.schedule import Backward, Gradients, Note, Product
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor, TensorFormat

# Where dgrad hides a second gather of dy: it computes long enough (columns of dx), and more than a push's own price is
# moved (bytes of a shard).
COLUMNS_HIDE, COLUMNS_FROM = 3072, 4 << 20


class Overlapped(Collective):
    """methods: GEMM ("fprop", "dgrad", "wgrad") -> method; what is not named is Collective's. narrow: GEMMs whose
    partial sums travel as ops/narrow.py has them, where fused kernels send them and its blocks fit.

    column   fprop   x is gathered into the GEMM
             dgrad   "bulk": the gather of x that wgrad needs is hidden behind it; any other: dx is scattered out of it
             wgrad   "bulk": the reduce-scatter of dx is hidden behind it; "external": the gather of x behind dgrad
    row      fprop   y is scattered out of the GEMM
             dgrad   dy is gathered into the GEMM
             wgrad   "external": the second gather of dy, where its number format needs one, is hidden behind dgrad

    A call that does not fit the arena is Collective's on every rank, because shape and capacity decide alone; with
    strict it raises instead.
    """

    name = "local"  # of what has no method, until it has run

    def __init__(
        self, tp: TensorParallel, group: Group, label: str, methods: Mapping[str, str], remarks: Mapping[str, str],
        strict: bool, recipe: str = "", narrow: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(tp)
        self.recipe = f", recipe {recipe}" if recipe else ""
        self.group, self.label, self.strict = group, label, strict or group.strict
        self.methods, self.remarks, self.narrow = methods, remarks, narrow
        # Of a column-parallel backward: each exchange is hidden behind the GEMM that it has nothing to do with.
        self._bulk = methods.get("dgrad", "bulk") == "bulk"
        self._measured: dict[str, str] = {}  # GEMM -> what "auto" has measured
        # Problem -> what "auto" takes, and what it has measured; of no more problems than the group's Choices know.
        self._chosen: dict[tuple, tuple[str, str]] = {}

    def _text(self, what: str, q: QTensor | Tensor, by: str = "") -> str:
        """What the ranks must agree on. q: what is moved or multiplied, by what."""
        label = getattr(getattr(q, "format", None), "label", "") or str(q.dtype).removeprefix("torch.")
        return f"{self.label} {what}, {self.tp.mode}-parallel, {label} {list(q.shape)}{by}{self.recipe}"

    def _asked(self, gemm: str, refusal: str, rows: int) -> str:
        """The method of this call; "" where Collective runs it, for a reason that is noted, or raised if strict."""
        method = self.methods.get(gemm, "")
        if not method or not rows:
            return ""
        if refusal:
            if self.strict:
                raise RuntimeError(
                    f"{self.label} {gemm}: overlap by {method!r} was asked for and does not happen: {refusal}; or "
                    "leave out strict=True"
                )
            self.notes[gemm] = Note("collective", 0, refusal)
            return ""
        return method

    # forward

    def _ended(self, *gemms: str) -> bool:
        """Whether destroy_ub() has come since this schedule was made, say between a forward and its backward."""
        if not self.group.closed:
            return False
        for gemm in gemms:
            self._asked(gemm, "destroy_ub() has ended its userbuffers since the forward began", 1)
        return True

    def fprop(self, gemm: Product, x: QTensor) -> Tensor:
        if self._ended("fprop"):
            return super().fprop(gemm, x)
        scatters = self.tp.mode == "row"
        method = self._method("fprop", gemm, x, scatters=scatters)
        with self.group.operation(self._text("fprop", x, f" x {gemm.columns}")):
            return self._run("fprop", method, gemm, x, scatters=scatters)

    def _method(self, name: str, gemm: Product | None, a: QTensor, *, scatters: bool) -> str:
        """The method of the exchange of a, or of the product with a; "" where Collective runs it. gemm: None where a is
        gathered for wgrad alone."""
        if scatters:
            m = a.shape[0] // self.tp.size
            refusal = self.group.scatter_refusal(m, gemm.columns, gemm.dtype)
        else:
            m, refusal = a.shape[0], self.group.gather_refusal(a, "row")
        method = self._asked(name, refusal, m)
        return method if gemm is None else self._settled(name, method, gemm, a, scatters=scatters)

    def _run(self, name: str, method: str, gemm: Product, a: QTensor, *, scatters: bool) -> Tensor | None:
        """The GEMM with its exchange by `method`; "" is Collective's."""
        if not method:
            return self._gemm_sum(name, gemm, a) if scatters else gemm(self.gather(name, a, "row"))
        return (self._gemm_scatter if scatters else self._gather_gemm)(name, method, gemm, a)

    def _settled(self, name: str, method: str, gemm: Product, a: QTensor, *, scatters: bool) -> str:
        """The method, where "auto" is the fastest that was measured; "" for Collective's."""
        choices = self.group.choices
        if method != "auto" or not choices.measures:
            return method  # _way has a rule
        added, then = " and residual" * (gemm.residual is not None), gemm.then
        bias = f"{gemm.bias is not None or gemm.sum_bias is not None}{added}"
        wanted = f", then {then.want}{' of a gradient' * (then.h is not None)}" if then else ""
        refused = bool(fused.refusal(gemm, a, self.group))
        made = gemm.columns, gemm.b_layout, gemm.dtype, bias, gemm.fast_accum, wanted
        key = name, a.format, a.dtype, tuple(a.shape), made, refused
        if key not in self._chosen:
            best, called = (ring, "ring") if refused else (fused, "fused")
            counts = best.counts(gemm, a, self.tp.size) if scatters else ()
            names = tuple(dict.fromkeys(("collective", "ring", called, *(f"{called} by {count}" for count in counts))))
            text = "{} x {} {} to {}, bias {}, fast {}{}".format(list(a.shape), *made)
            label = f"{a.format.label or a.dtype}{', a scale a shard,' * (a.format.shard_multiple > 1)}"
            kind = ("narrow " * (name in self.narrow) + "scatter") if scatters else "gather"
            problem = f"{kind} {label} {text}"
            if not choices.knows(problem, names) and (choices.timed >= MOST or capturing()):
                self._measured.pop(name, None)
                return method
            self._chosen[key] = self._choose(name, problem, names, gemm, a, scatters=scatters)
        way, measured = self._chosen[key]
        self._measured[name] = measured
        if way == "collective":
            self.notes[name] = Note("collective", 0, measured)
        return "" if way == "collective" else way

    def _choose(
        self, name: str, problem: str, names: tuple[str, ...], gemm: Product, a: QTensor, *, scatters: bool
    ) -> tuple[str, str]:
        """(the fastest of the named ways, what was measured)."""
        choices, then = self.group.choices, gemm.then
        some_scale = None if choices.knows(problem, names) else torch.ones(1, device=self.group.device)

        def run(way: str) -> object:
            timed = replace(gemm, then=then and replace(then, some_scale=some_scale))
            with self.group.operation(f"auto: {way}, {problem}"):
                out = self._run(name, "" if way == "collective" else way, timed, a, scatters=scatters)
            if then and timed.then.result is None:
                timed.then.apart(out)
            return out

        self.group.announce(f"auto: {problem}")
        ways = {way: partial(run, way) for way in names}
        return choices.choose(problem, ways, self.tp.group, self.group.control.check)

    def _way(self, method: str, gemm: Product, a: QTensor) -> tuple[Any, str]:
        """(fused or ring, why not fused although it may be)."""
        if not method.startswith(("fused", "auto")):
            return ring, ""
        refusal = fused.refusal(gemm, a, self.group)
        return (ring if refusal else fused), "" if method == "auto" else refusal

    def _gather(self, name: str, method: str, gemm: Product, own: QTensor, whole: bool) -> tuple[Gather, Any]:
        """The gather of `own` for gemm, begun, and the module that multiplies it. whole: wgrad reads it too."""
        way, reason = self._way(method, gemm, own)
        gather = Gather(self.group, own, "row", own=whole, awaited=way is fused)
        self._note_way(name, method, way, gather.sent, reason)
        return gather, way

    def _note_way(self, name: str, method: str, way: Any, sent: int, reason: str) -> None:
        called = "fused" if way is fused else "pipeline" if method == "pipeline" else "ring"
        self.notes[name] = Note(called, sent, reason or self._measured.get(name, ""))

    def _gather_gemm(self, name: str, method: str, gemm: Product, own: QTensor) -> Tensor | None:
        gather, way = self._gather(name, method, gemm, own, whole=False)
        out = way.gather_gemm(gemm, own, gather)
        gather.close()
        return out

    def _gemm_scatter(self, name: str, method: str, gemm: Product, a: QTensor) -> Tensor:
        way, reason = self._way(method, gemm, a)
        count = int(method.partition(" by ")[2] or 0)  # as auto has found it
        scatter = way.begin_scatter(gemm, a, self.group, name in self.narrow, count)
        if name in self.narrow and scatter.dtype == gemm.dtype:
            what = f"multiples of {BLOCK}, not {list(scatter.shape)}" if way is fused else "fused kernels"
            reason = "; ".join(filter(None, (reason or self._measured.get(name), f"fp8_buf is for {what}")))
        self._note_way(name, method, way, scatter.sent, reason)
        return way.gemm_scatter(gemm, a, scatter)

    # backward

    def backward(self, of: Backward) -> Gradients:
        column = self.tp.mode == "column"
        for gemm in ("dgrad", "wgrad"):
            self.notes.pop(gemm, None)  # of the call before
        if self._ended("dgrad", "wgrad"):
            return super().backward(of)
        # What does not fit is said before any exchange has begun, so that a group that is strict can go on.
        ways = self._column_ways(of) if column else self._row_ways(of)
        wanted = " and ".join(name for name in ("dgrad", "wgrad") if getattr(of, name) is not None)
        text = self._text(f"backward for {wanted}", of.dy if of.dy is not None else of.dy_wgrad)
        with self.group.operation(text):
            return (self._column_backward if column else self._row_backward)(of, *ways)

    def _column_ways(self, of: Backward) -> tuple[str, str]:
        """Methods of the gather of x and of the scatter of dx; "" where Collective runs it or there is none."""
        dgrad, wgrad, dy, _, x = of
        bulk, gather, scatter = self._bulk, "", ""
        if self.strict and bulk and wgrad is None and dgrad is not None:
            self._asked("wgrad", "no weight gradient to hide the scatter of dx behind", dy.shape[0])
        if wgrad is not None:
            refusal = self.group.gather_refusal(x, x.regather_layout)
            gather = self._asked("dgrad" if bulk else "wgrad", refusal, x.shape[0])
        if dgrad is not None and (wgrad is not None or not bulk):
            scatter = self._method("wgrad" if bulk else "dgrad", dgrad, dy, scatters=True)
        return gather, scatter

    def _column_backward(self, of: Backward, gather_by: str, scatter_by: str) -> Gradients:
        dgrad, wgrad, dy, dy_wgrad, x = of
        # Beside which GEMM x and dx travel when Collective moves them, while the other may be hidden in bulk.
        bulk = wgrad is not None and self._bulk and bool(self.methods.keys() & {"dgrad", "wgrad"})
        x_at, dx_at = ("dgrad", "wgrad") if bulk else ("wgrad", "dgrad")
        gather = scatter = dx = dw = None
        if gather_by:
            gather = Gather(self.group, x, x.wgrad_layout, own=True)
            self.notes[x_at] = Note(gather_by, gather.sent)
        if dgrad is not None and scatter_by and not self._bulk:
            dx = self._gemm_scatter("dgrad", scatter_by, dgrad, dy)
        elif dgrad is not None:
            partial = dgrad(dy)
            m = dy.shape[0] // self.tp.size
            if scatter_by:
                scatter = Scatter(self.group, (m, dgrad.columns), dgrad.dtype)
                self.notes["wgrad"] = Note("bulk", scatter.sent)
                scatter.push_all(partial)
            else:
                if wgrad is None and self._bulk and "wgrad" in self.methods:
                    self.notes["dgrad"] = Note("collective", 0, "no weight gradient to hide the scatter of dx behind")
                dx = self._sum(dx_at, partial)
        if wgrad is not None:
            dw = wgrad(dy_wgrad, self._regather(x, x_at) if gather is None else gather.whole())
        if gather is not None:
            gather.close()
        if scatter is not None:
            dx = scatter.reduce(partial[self.group.rank * m : (self.group.rank + 1) * m], take=dgrad.take_slots)
        return dx, dw

    def gathers_columns(self, format: TensorFormat, rows: int, width: int, columns: int) -> bool:
        """Of a row-parallel linear, where dgrad hides both gathers: the transposition of the whole dy is spared."""
        hides = columns >= COLUMNS_HIDE and rows * width >= COLUMNS_FROM
        return self.tp.mode == "row" and "wgrad" in self.methods and hides and format.gathers_columns(rows)

    def _row_ways(self, of: Backward) -> tuple[str, str]:
        """Methods of the gather of dy for dgrad, and of one for wgrad where that needs, or had better have, its own."""
        dgrad, wgrad, dy, dy_wgrad, _ = of
        rows = columns = ""
        if dy is not None:
            rows = self._method("dgrad", dgrad, dy, scatters=False)
        apart = dgrad is not None and self.gathers_columns(dy.format, *dy.shape, dgrad.columns)
        if wgrad is not None and (apart or not of.one_gather):
            refusal = self.group.gather_refusal(dy_wgrad, dy_wgrad.wgrad_layout)
            columns = self._asked("wgrad", refusal, dy_wgrad.shape[0])
        return rows, columns

    def _row_backward(self, of: Backward, rows_by: str, columns_by: str) -> Gradients:
        (dgrad, wgrad, dy, dy_wgrad, x), one = of, of.one_gather and not columns_by
        rows = columns = dx = dw = None
        if dgrad is not None or one:
            if not rows_by:
                return super().backward(of)
            if dgrad is not None:
                rows, way = self._gather("dgrad", rows_by, dgrad, dy, one)
            else:
                rows = Gather(self.group, dy, "row", own=True)
                self.notes["dgrad"] = Note("external", rows.sent)
        if columns_by:
            columns = Gather(self.group, dy_wgrad, dy_wgrad.wgrad_layout, own=True)
            self.notes["wgrad"] = Note(columns_by, columns.sent)
        if dgrad is not None:
            dx = way.gather_gemm(dgrad, dy, rows)
        gathered = rows if one else columns  # for wgrad
        if rows is not None and not one:
            rows.close()  # now: behind wgrad, the close of columns would wait until this one's flags are set
        if wgrad is not None:
            dw = wgrad(self._regather(dy_wgrad) if gathered is None else gathered.whole(), x)
        if gathered is not None:
            gathered.close()
        return dx, dw
