"""Auto: of the exchanges that a call may take the one that is fastest here, as choice.py has measured.

Where nothing is measured, by rule: Fused, or Ring where it refuses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from te_lite.ops.registry import capturing
from te_lite.overlap.choice import MOST, fastest
from te_lite.overlap.collective import Collective
from te_lite.overlap.epilogues import Activate, run_unfused
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.fused import Fused, refusal
from te_lite.overlap.ring import Ring
from te_lite.quantize.qtensor import Layout, QTensor


class Auto(Ring):
    """Wraps others; itself it moves nothing."""

    name = "auto"

    def _fallback(self, a: QTensor, gemm: Gemm | None, layout: Layout | None) -> Collective:
        found = super()._fallback(a, gemm, layout)
        if found is not self:
            return found
        assert gemm is not None
        choices, place = self.group.choices, self.place
        best: type[Ring] = Ring if refusal(gemm, a, self.group) else Fused
        rule = best(place)
        if not choices.measures:
            return rule
        candidates: dict[str, Collective] = {"collective": Collective(place), "ring": Ring(place), best.name: rule}
        if layout is None:
            candidates |= {f"{best.name} by {count}": best(place, count=count) for count in rule.counts(gemm, a)}
        problem = self._problem(a, gemm, layout)
        times = choices.known(problem, candidates)
        if times is None and (choices.timed >= MOST or capturing()):
            return rule
        if times is None:  # which is so on all ranks: they share what was measured and what was read
            self.group.announce(f"auto: {problem}")
            timed = self._to_be_timed(gemm)
            runs = {
                name: partial(self._run, exchange, f"{name}, {problem}", a, timed, layout)
                for name, exchange in candidates.items()
            }
            times = choices.measure(problem, runs, self.tp.group, self.group.control.check)
        name = fastest(times)
        candidates[name].reason = f"auto: {', '.join(f'{one} {us:.0f} us' for one, us in times.items())}: {name}"
        return candidates[name]

    def _problem(self, a: QTensor, gemm: Gemm, layout: Layout | None) -> str:
        """In words, the same in every process that has it."""
        added, epilogue, wanted = " and residual" * (gemm.residual is not None), gemm.epilogue, ""
        if isinstance(epilogue, Activate) and epilogue.want:
            wanted = f", then {epilogue.want}{' of a gradient' * (epilogue.h is not None)}"
            wanted += f" by {epilogue.activation.name}"
        label = f"{a.format.label or a.dtype}{', a scale a shard,' * (a.format.shard_multiple > 1)}"
        kind = ("narrow " * self.place.narrow + "scatter") if layout is None else "gather"
        product = f"{gemm.columns} {gemm.layout} to {gemm.dtype}, bias {gemm.bias is not None}{added}"
        return f"{kind} {label} {list(a.shape)} x {product}, fast {gemm.fast_accum}{wanted}"

    def _to_be_timed(self, gemm: Gemm) -> Gemm:
        """gemm without what no exchange computes for it, and without touching a quantizer's state."""
        epilogue = gemm.epilogue
        if not isinstance(epilogue, Activate) or not epilogue.want:
            return replace(gemm, epilogue=None)
        return replace(gemm, epilogue=replace(epilogue, some_scale=torch.ones(1, device=self.group.device)))

    def _run(self, exchange: Collective, text: str, a: QTensor, gemm: Gemm, layout: Layout | None) -> None:
        epilogue = gemm.epilogue
        with self.group.operation(f"auto: {text}"):
            if layout is None:
                out = exchange.gemm_reduce_scatter(gemm, a)
            else:
                gathering = exchange.all_gather(a, layout, multiplied=True, whole=False)
                out = exchange.all_gather_gemm(gemm, gathering)
                gathering.close()
        if isinstance(epilogue, Activate):
            run_unfused(epilogue, out[1] if epilogue.h is None else out)
