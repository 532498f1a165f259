"""The unsharded oracle of every te_lite module, in plain torch; te_lite is not imported.

One program serves twice: in fp64 without rounding it is the truth; in fp32 with every tensor that an
implementation writes out rounded to the module's type (and partial sums rounded before they are added, where
a tensor-parallel one would communicate them) it is the low-precision reference that bounds are made of.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emulation import Operands, Quantize, identity, operands

LINEAR, LN_LINEAR, LN_MLP = "Linear", "LayerNormLinear", "LayerNormMLP"


@dataclass(frozen=True)
class Arithmetic:
    """compute: type of the arithmetic. store: type in which tensors are written, None for no rounding."""

    compute: torch.dtype
    store: torch.dtype | None
    tensor_cores: bool = False

    def round(self, t: Tensor) -> Tensor:
        return t if self.store is None else t.to(self.store).to(self.compute)


TRUTH = Arithmetic(torch.float64, None)


def stored_in(dtype: torch.dtype, tensor_cores: bool = False) -> Arithmetic:
    return Arithmetic(torch.float32, dtype, tensor_cores)


@dataclass(frozen=True)
class Spec:
    """What a module is. `tp` and `mode` only say how an implementation splits the work: the result is that of
    the unsharded module. mode of LayerNormMLP: "column" then "row" when tp > 1."""

    kind: str
    normalization: str = "LayerNorm"
    zero_centered: bool = False
    activation: str = "gelu"
    bias: bool = True
    eps: float = 1e-5
    mode: str | None = None
    tp: int = 1
    sequence_parallel: bool = False
    returns_norm: bool = False  # the norm's output is wanted, so it is written in the module's type

    @property
    def token_shards(self) -> int:
        return self.tp if self.sequence_parallel else 1


class _Store(torch.autograd.Function):
    """Written to memory on the way forward (unless not `value`), and its gradient (unless not `grad`) back."""

    @staticmethod
    def forward(ctx, t: Tensor, arith: Arithmetic, value: bool = True, grad: bool = True) -> Tensor:
        ctx.arith, ctx.grad = arith, grad
        return arith.round(t) if value else t.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.arith.round(grad) if ctx.grad else grad, None, None, None


def _add(parts: list[Tensor], arith: Arithmetic) -> Tensor:
    """parts[0] + parts[1] + ..., each part and each sum stored; a single part is left to its consumer."""
    if len(parts) == 1:
        return parts[0]
    total = arith.round(parts[0])
    for part in parts[1:]:
        total = arith.round(total + arith.round(part))
    return total


def _tensor_core_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as fp8 tensor cores add: 32 products at a time, the running sum cut to 14 significant bits.

    For low-precision references where a GPU's results are judged; the CPU adds in fp32.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"  # at real sizes a core takes a minute for it
    a, b = a.to(device), b.to(device)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=device)
    for k in range(0, a.shape[1], 32):
        mantissa, exponent = torch.frexp(total + a[:, k : k + 32] @ b[k : k + 32])
        total = torch.ldexp(torch.trunc(mantissa * 2**14) * 2.0**-14, exponent)
    total = total.cpu()
    # One realisation of a noise of that size: which values it tips over an fp8 rounding boundary is chance.
    return total * (1 + 2.0**-14 * (2 * torch.rand(total.shape, dtype=total.dtype) - 1))


def _matmul(a: Tensor, b: Tensor, quantized: bool, arith: Arithmetic) -> Tensor:
    return _tensor_core_matmul(a, b) if quantized and arith.tensor_cores else a @ b


def _other_view(v: Tensor, quantize: Quantize | None, same: Tensor, arith: Arithmetic) -> Tensor:
    """The operand of the second GEMM that reads v; `same` is that of the first. Unquantized, it is stored."""
    if quantize is None:
        return same
    return arith.round(v) if quantize is identity else quantize(v)


class _Linear(torch.autograd.Function):
    """y[M,N] = q(x)[M,K] q(w)[N,K]^T; dx = q(dy) q'(w); dw = q'(dy)^T q'(x); sums split as ranks split them.

    q: the operand quantized for one GEMM; q': for the other GEMM that reads it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, q: Operands, arith: Arithmetic, mode: str | None, tp: int) -> Tensor:
        xq, wq = q.x(x), q.w(w)
        ctx.save_for_backward(_other_view(x, q.x_wgrad, xq, arith), _other_view(w, q.w_dgrad, wq, arith))
        ctx.setup = (q, arith, mode, tp)
        pieces = tp if mode == "row" else 1
        pairs = zip(xq.chunk(pieces, 1), wq.chunk(pieces, 1), strict=True)
        return _add([_matmul(a, b.t(), q.quantized, arith) for a, b in pairs], arith)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x_wgrad, w_dgrad = ctx.saved_tensors
        q, arith, mode, tp = ctx.setup
        dyq = q.dy(dy)
        pieces = tp if mode == "column" else 1
        pairs = zip(dyq.chunk(pieces, 1), w_dgrad.chunk(pieces, 0), strict=True)
        dx = _add([_matmul(a, b, q.quantized, arith) for a, b in pairs], arith)
        dy_wgrad = _other_view(dy, q.dy_wgrad, dyq, arith)
        dw = arith.round(_matmul(dy_wgrad.t(), x_wgrad, q.wgrad_quantized, arith))
        return dx, dw, None, None, None, None


def _per_token_shard(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, p: Tensor, shards: int, arith) -> Tensor:
    """fn(x, p) for a parameter that every token shard uses: the shards' gradients are stored, then added."""
    return torch.cat([fn(piece, _Store.apply(p, arith)) for piece in x.chunk(shards)]) if len(x) else fn(x, p)


def norm(x: Tensor, gamma: Tensor, beta: Tensor | None, spec: Spec, arith: Arithmetic) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gamma + beta over the last dim; RMSNorm: no mean, no beta."""
    if spec.normalization == "LayerNorm":
        centred = x - x.mean(-1, keepdim=True)
    else:
        centred = x
    unit = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + spec.eps)
    centre = 1.0 if spec.zero_centered else 0.0
    out = _per_token_shard(lambda u, g: u * (g + centre), unit, gamma, spec.token_shards, arith)
    if beta is not None:
        out = _per_token_shard(lambda o, b: o + b, out, beta, spec.token_shards, arith)
    return out


def _gelu(t: Tensor) -> Tensor:
    return F.gelu(t, approximate="tanh")


def _qgelu(t: Tensor) -> Tensor:
    return t * torch.sigmoid(1.702 * t)


def _srelu(t: Tensor) -> Tensor:
    return F.relu(t).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu, "qgelu": _qgelu, "relu": F.relu, "srelu": _srelu, "silu": F.silu,
}  # fmt: skip


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def _times_up(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: of(gate) * up


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "geglu": _times_up(_gelu), "qgeglu": _times_up(_qgelu), "reglu": _times_up(F.relu), "sreglu": _times_up(_srelu),
    "glu": _times_up(torch.sigmoid), "swiglu": _times_up(F.silu), "clamped_swiglu": clamped_swiglu,
}  # fmt: skip
ALL_ACTIVATIONS = (*ACTIVATIONS, *GATED)


def activate(h: Tensor, name: str, tp: int = 1) -> Tensor:
    """[M, F] (glu kinds: [M, 2F], gate half first) -> [M, F].

    A rank's shard holds a gate and an up half of its own, so with tp > 1 the columns of h are
    [gate_0 | up_0 | gate_1 | up_1 | ...].
    """
    if name in ACTIVATIONS:
        return ACTIVATIONS[name](h)
    parts = []
    for shard in h.chunk(tp, -1):
        gate, up = shard.chunk(2, -1)
        parts.append(GATED[name](gate, up))
    return torch.cat(parts, -1)


def _bias(y: Tensor, b: Tensor | None, shards: int, arith: Arithmetic) -> Tensor:
    return y if b is None else _per_token_shard(lambda t, v: t + v, y, b, shards, arith)


@dataclass
class Quantization:
    """The operands of each linear of a module, by GEMM; state (delayed scaling) lives in here."""

    gemms: list[Operands] = field(default_factory=lambda: [Operands(), Operands()])

    def update(self) -> None:
        for gemm in self.gemms:
            gemm.update()

    def fuses(self, gemm: int) -> bool:
        """The operand is quantized as it is computed: the output of a norm or an activation is not written first."""
        return self.gemms[gemm].quantized


def quantization(recipe: str, spec: Spec, **options) -> Quantization:
    modes = [spec.mode]
    if spec.kind == LN_MLP:
        modes = ["column", "row"] if spec.tp > 1 else [None, None]
    return Quantization([operands(recipe, mode, spec.tp, spec.token_shards, **options) for mode in modes])


def forward(spec: Spec, p: dict[str, Tensor], x: Tensor, q: Quantization, arith: Arithmetic) -> tuple[Tensor, Tensor]:
    """(out, output of the norm or x) of the module with full, unsharded parameters p; tokens x [M, K]."""

    def store(t: Tensor, value: bool = True, grad: bool = True) -> Tensor:
        return _Store.apply(t, arith, value, grad)

    hidden = store(x)  # x is exact already: this stores its gradient
    if spec.kind != LINEAR:
        hidden = norm(hidden, p["layer_norm_weight"], p.get("layer_norm_bias"), spec, arith)
        hidden = store(hidden, value=spec.returns_norm or not q.fuses(0))
    if spec.kind in ("LayerNorm", "RMSNorm"):
        return hidden, hidden
    if spec.kind != LN_MLP:
        y = _Linear.apply(hidden, p["weight"], q.gemms[0], arith, spec.mode, spec.tp)
        shards = spec.token_shards if spec.mode == "row" else 1
        return store(_bias(y, p.get("bias"), shards, arith)), hidden
    column, row = ("column", "row") if spec.tp > 1 else (None, None)
    h = _Linear.apply(hidden, p["fc1_weight"], q.gemms[0], arith, column, spec.tp)
    h = store(_bias(h, p.get("fc1_bias"), 1, arith), grad=not q.fuses(0))
    a = store(activate(h, spec.activation, spec.tp), value=not q.fuses(1))
    y = _Linear.apply(a, p["fc2_weight"], q.gemms[1], arith, row, spec.tp)
    return store(_bias(y, p.get("fc2_bias"), spec.token_shards, arith)), hidden


def run(
    spec: Spec,
    parameters: dict[str, Tensor],
    x: Tensor,
    dy: Tensor | None,
    q: Quantization | None = None,
    arith: Arithmetic = TRUTH,
) -> dict[str, Tensor]:
    """Forward and backward: {"out", "ln_out", "dx", and the gradient of each parameter under its name}."""
    q = q or quantization("bf16", spec)
    p = {k: v.detach().to(arith.compute).requires_grad_() for k, v in parameters.items()}
    tokens = x.detach().reshape(-1, x.shape[-1]).to(arith.compute).requires_grad_()
    out, ln_out = forward(spec, p, tokens, q, arith)
    result = {"out": out.detach(), "ln_out": ln_out.detach()}
    if dy is not None:
        out.backward(dy.detach().reshape(out.shape).to(arith.compute))
        result["dx"] = tokens.grad
        result.update({k: arith.round(v.grad) for k, v in p.items()})
    return result


def make_parameters(
    spec: Spec, k: int, n: int, ffn: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Full parameters under te_lite's names, from a seed; Linear: n x k; LayerNormMLP: k, ffn.
    Norm gains are near 1 (0 when zero-centered); everything else is large enough to show when left out."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=gen) * scale).to(dtype)

    p: dict[str, Tensor] = {}
    if spec.kind != LINEAR:
        p["layer_norm_weight"] = (rand(k, scale=0.2).float() + (0.0 if spec.zero_centered else 1.0)).to(dtype)
        if spec.normalization == "LayerNorm":
            p["layer_norm_bias"] = rand(k, scale=0.3)
    if spec.kind in (LINEAR, LN_LINEAR):
        p["weight"] = rand(n, k, scale=k**-0.5)
        if spec.bias:
            p["bias"] = rand(n, scale=0.5)
    if spec.kind == LN_MLP:
        wide = 2 * ffn if spec.activation in GATED else ffn
        p["fc1_weight"] = rand(wide, k, scale=k**-0.5)
        p["fc2_weight"] = rand(k, ffn, scale=ffn**-0.5)
        if spec.bias:
            p["fc1_bias"], p["fc2_bias"] = rand(wide, scale=0.3), rand(k, scale=0.5)
    return p


def make_tokens(m: int, k: int, seed: int = 1, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """[M, K] normal, rows of different size so that a token in the wrong place shows."""
    gen = torch.Generator().manual_seed(seed)
    rows = torch.exp(0.5 * torch.randn(m, 1, generator=gen))
    return (torch.randn(m, k, generator=gen) * rows * scale).to(dtype)


FAR = 2.0**-18  # beside a value of 1 in the same block, E4M3 rounds this to 0


def levels(count: int, seed: int) -> Tensor:
    """fp32 [count]: runs of 1 and runs of FAR in turn, 4 to 48 long, so that some blocks hold both and some one."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 49, (count // 4 + 1,), generator=gen)
    return torch.where(torch.arange(len(lengths)) % 2 == 0, 1.0, FAR).repeat_interleave(lengths)[:count]


def spread_parameters(spec: Spec, p: dict[str, Tensor]) -> dict[str, Tensor]:
    """p with powers of two along the features; with spread_tokens they cancel inside of every GEMM's sums.

    Scales that are powers of two leave most values alone whichever block they are taken from. So that a wrong block
    shows, magnitudes must differ by more than fp8's range, and all must count in the result.
    """
    first, last = ("fc1_weight", "fc2_weight") if spec.kind == LN_MLP else ("weight", "weight")
    along_in, along_out = levels(p[first].shape[1], 1), levels(p[last].shape[0], 2)
    if spec.zero_centered:
        along_in = torch.ones_like(along_in)  # a gain of 1 + weight near FAR is not to be had
    factors = {
        "layer_norm_weight": along_in,
        "layer_norm_bias": along_in,
        last.replace("weight", "bias"): 1 / along_out,
    }
    q = {name: v * factors.get(name, 1) for name, v in p.items()}
    q[first] = q[first] / along_in
    q[last] = q[last] / along_out[:, None]
    return {name: v.to(p[name].dtype) for name, v in q.items()}


def spread_tokens(spec: Spec, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] and dy [M, N] to go with spread_parameters. A norm would undo what is done to its input."""
    wide = dy * levels(dy.shape[1], 2)
    if spec.kind != LINEAR:
        return x, wide.to(dy.dtype)
    tokens = levels(len(x), 3)[:, None]
    return (x * tokens * levels(x.shape[1], 1)).to(x.dtype), (wide / tokens).to(dy.dtype)
