"""Draws strata.svg and step.svg, the pictures of docs/background/architecture.md.

python docs/img/draw.py
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEXT = "#1f2933"
FILL = {"core": "#dbe7f6", "value": "#e9efe0", "room": "#f3e9dc", "op": "#dbe7f6", "kept": "#f3e9dc", "data": "#ffffff"}


def text(x: float, y: float, line: str, size: int = 13, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{TEXT}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(line)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str, lines: Sequence[str] = ()) -> str:
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{FILL[kind]}" stroke="#7b8794"/>'
    below = [text(x + 12, y + 39 + 17 * i, line, 12) for i, line in enumerate(lines)]
    return "\n".join([shape, text(x + 12, y + 21, title, 14, "bold"), *below])


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'{line} stroke="#52606d" stroke-width="1.5" marker-end="url(#head)"/>'


def picture(name: str, width: int, height: int, parts: Sequence[str]) -> None:
    marker = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" fill="#52606d"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, '
        f'sans-serif">\n<rect width="{width}" height="{height}" fill="white"/>\n{marker}'
    )
    (HERE / name).write_text("\n".join([head, *parts, "</svg>"]) + "\n")


def strata() -> None:
    """The strata, from the public names down to C++; who stands above, and the values that all may use."""
    levels = (
        ("modules/", "nn.Module: parameters, checks, state, plans", "Linear, LayerNormLinear, LayerNormMLP, norms"),
        ("functional/", "forward and backward, autograd.Function", "one linear; compositions around it; LinearPlan"),
        ("overlap/", "schedules: which rank sends what, and when", "Collective, ring, bulk, fused; userbuffers"),
        ("quantize/", "formats, quantizers, delayed scaling's state", "QTensor, TensorFormat, Quantizer, GemmOperands"),
        ("ops/", "kernels, each with its oracle and its op", "casts, norms, GEMMs; Source"),
        ("te_lite._C (csrc/)", "C++: CUDA driver, launches, cublasLt", "userbuffers: memory, copies, waits, control"),
    )
    parts = []
    for i, (name, what, holds) in enumerate(levels):
        y = 100 + 84 * i
        parts.append(box(40, y, 400, 66, "core", name, (what, holds)))
        if i:
            parts.append(arrow(240, y - 18, 240, y - 1))
    parts.append(box(40, 16, 192, 66, "room", "compat/", ("names of other libraries,", "conversion")))
    parts.append(box(248, 16, 192, 66, "room", "diagnostics/", ("statistics; beside it", "doctor.py, tune.py")))
    parts += [arrow(136, 82, 136, 99), arrow(344, 82, 344, 99)]
    values = ("recipe.py, parallel.py", "tables.py, kept.py,", "arguments.py", "", "plain values,", "for any stratum")
    parts.append(box(480, 184, 200, 150, "value", "values", values))
    parts.append(box(480, 100, 200, 66, "core", "beside modules", ("autocast.py", "checkpoint.py")))
    parts.append(text(480, 372, "An arrow points to what a stratum", 12))
    parts.append(text(480, 389, "may import: only downwards.", 12))
    picture("strata.svg", 700, 596, parts)


def step() -> None:
    """A LayerNormMLP under delayed scaling, forward and backward: ops down the middle, kept tensors between."""
    left, middle, right = 20, 300, 580
    forward = (
        ("norm_stats", ("rstd of x",)),
        ("transform", ("norm(x) -> fp8 row, col",)),
        ("gemm_fp8  fc1", ("h = norm(x) w1^T",)),
        ("transform", ("silu(gate) up -> fp8 row",)),
        ("gemm_fp8  fc2", ("y = act(h) w2^T",)),
    )
    backward = (
        ("norm_backward", ("dx, dgamma", "reads x, rstd, gamma")),
        ("gemm_fp8  wgrad, dgrad, wgrad", ("dw2 = dy^T act(h)", "dnorm = dh w1;  dw1 = dh^T norm(x)")),
        ("transform", ("dh -> fp8 row, col, db1;  act(h) -> col", "reads h, s3")),
        ("gemm_fp8  dgrad", ("da = dy w2", "reads w2, s4")),
        ("transform", ("dy -> fp8 row, col, db2", "reads nothing kept")),
    )
    kept = (
        ("x, rstd, gamma", ""),
        ("norm(x).col", "and its scale"),
        ("w1, s1", "s1: the seed"),
        ("h, s3", "s3: the seed of act(h)"),
        ("w2, s4", "s4: the seed"),
    )
    columns = ((left + 110, "forward"), (middle + 110, "kept"), (right + 130, "backward"))
    parts = [text(x, 30, title, 15, "bold", "middle") for x, title in columns]
    for i in range(5):
        y = 80 + 98 * i
        parts.append(box(left, y, 230, 66, "op", *forward[i]))
        title, line = kept[i]
        parts.append(box(middle, y, 220, 66, "kept", title, (line,)))
        parts.append(box(right, y, 260, 66, "op", *backward[i]))
        parts.append(arrow(left + 230, y + 33, middle - 1, y + 33))
        parts.append(arrow(left + 110, y - (32 if i else 22), left + 110, y - 1))
        if i:
            parts.append(arrow(right + 130, y - 1, right + 130, y - 31))
    end = 80 + 98 * 4 + 66
    parts += [text(left + 120, 56, "x", 13, "bold"), text(left + 120, end + 30, "y", 13, "bold")]
    parts += [arrow(left + 110, end, left + 110, end + 34), arrow(right + 130, end + 34, right + 130, end + 1)]
    parts += [arrow(right + 130, 79, right + 130, 48)]
    parts += [text(right + 140, end + 30, "dy", 13, "bold"), text(right + 140, 60, "dx", 13, "bold")]
    note = "Each transform also writes its amax into the history. When the outermost autocast ends, one update"
    more = "computes all new forward scales. At the end of the pass's backward one does so for all backward scales."
    parts += [text(left, end + 66, note, 12), text(left, end + 84, more, 12)]
    picture("step.svg", 860, end + 104, parts)


if __name__ == "__main__":
    strata()
    step()
