"""Quantizers of the user's own: the worked example of docs/how-to/write-a-quantizer.md, and an int8 format."""

import ast
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import te_lite as te
from examples import stochastic_rounding as example
from te_lite import recipe as recipes
from te_lite.ops.source import Source, plain, produce_ref
from te_lite.quantize.identity import Calibrating, Identity
from te_lite.quantize.per_tensor import FORMATS, Delayed
from te_lite.quantize.qtensor import QTensor, TensorFormat
from te_lite.quantize.quantizer import Quantizer
from te_lite.recipe import CustomRecipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "write-a-quantizer.md").read_text()
FILE = (ROOT / "examples" / "stochastic_rounding.py").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LINE = next(block for block in BLOCKS if block.startswith("    "))  # the one line of te_lite/recipe.py's table

ONCE_IN = 1e-9  # how rarely an honest rounding may fail a statistical test


# The page and the file


def test_the_code_on_the_page_is_the_files():
    """Every block stands in the file, and every class and function of the file stands on the page."""
    blocks = [block for block in BLOCKS if block is not LINE]
    for block in blocks:
        assert block in FILE, block
    for node in ast.parse(FILE).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            source = ast.get_source_segment(FILE, node)
            assert any(source in block for block in blocks), f"{node.name} is not on the page"


@pytest.fixture
def named(monkeypatch):
    """The one line added to the table."""
    for name, value in ast.literal_eval("{" + LINE + "}").items():
        monkeypatch.setitem(recipes._BY_NAME, name, value)


def test_the_line_makes_a_name(named):
    assert recipes.from_name("stochastic") == example.StochasticRounding()
    assert "unbiased" in str(recipes.available()["stochastic"])
    assert te.check_recipe_support("stochastic", "cpu") == (True, "")
    with pytest.raises(ValueError, match="stochastic"):
        recipes.from_name("stochastics")


# Rounding


def e4m3_values() -> Tensor:
    """All finite E4M3 numbers in ascending order, from the definition: 4 exponent bits, bias 7, 3 mantissa bits."""
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    positive = [m / 8 * 2.0**-6 for m in range(1, 8)] + normal
    return torch.tensor([-v for v in reversed(positive)] + [0.0] + positive)


def neighbours(v: Tensor) -> tuple[Tensor, Tensor]:
    """(largest number <= v, smallest number >= v)."""
    grid, v = e4m3_values(), v.contiguous()
    return grid[torch.searchsorted(grid, v, right=True) - 1], grid[torch.searchsorted(grid, v)]


def many_sizes(count: int) -> Tensor:
    """Both signs, every binade of E4M3 and below."""
    return torch.randn(count).sign() * torch.rand(count).add(0.5) * 2.0 ** torch.randint(-13, 9, (count,)).float()


def rounded(v: Tensor) -> Tensor:
    return example.round_at_random(v, torch.Generator().manual_seed(int(torch.randint(2**31, (1,))))).float()


def test_rounding_gives_a_neighbour():
    v = many_sizes(20000).clamp(-448, 448)
    low, high = neighbours(v)
    q = rounded(v)
    assert bool(((q == low) | (q == high)).all())
    assert bool((q == low)[low < high].any()) and bool((q == high)[low < high].any())
    grid = e4m3_values()
    assert torch.equal(rounded(grid), grid)  # what is representable stays


def test_rounding_of_values_without_neighbours():
    v = torch.tensor([math.inf, -math.inf, 500.0, -500.0, 0.0])
    assert rounded(v).tolist() == [448.0, -448.0, 448.0, -448.0, 0.0]
    assert bool(rounded(torch.tensor([math.nan])).isnan().all())


def biases(round_: object, v: Tensor, times: int) -> Tensor:
    """(mean over `times` roundings - v) in units of the spacing at v, fp64."""
    low, high = neighbours(v)
    mean = round_(v.expand(times, -1)).double().mean(0)
    return (mean - v.double()) / (high - low).double()


def hoeffding(draws: int, comparisons: int = 1) -> float:
    """What the mean of `draws` independent values, each within an interval of length 1, is off by less often than
    ONCE_IN in any of the comparisons (Hoeffding's inequality)."""
    return math.sqrt(math.log(2 * comparisons / ONCE_IN) / (2 * draws))


def test_rounding_is_unbiased():
    """Each value by itself, and all together; rounding to nearest and always down fail both or one of them."""
    v = many_sizes(1000).clamp(-448, 448)
    low, high = neighbours(v)
    v, times = v[low < high], 4000
    each, together = hoeffding(times, len(v)), hoeffding(times * len(v))
    off = biases(rounded, v, times)
    assert float(off.abs().max()) < each
    assert abs(float(off.mean())) < together
    nearest = biases(lambda t: t.to(torch.float8_e4m3fn).float(), v, 1)
    assert float(nearest.abs().max()) > 5 * each
    coarse = biases(lambda t: rounded(t + 2.0**-7 * (neighbours(t)[1] - neighbours(t)[0])), v, times)
    assert abs(float(coarse.mean())) > together  # the mean of all sees a bias of a hundredth of the spacing


# The quantizer


def test_again_makes_the_same_numbers():
    source = plain(torch.randn(40, 48))
    quantizer = example.StochasticQuantizer()
    q, sums = quantizer.quantize(source, row=True, bias_grad=torch.float32)
    torch.testing.assert_close(sums, produce_ref(source).sum(0))
    again = quantizer.again(source, q.seed_only())
    assert q.col is None and again.row is None
    assert torch.equal(again.col.view(torch.uint8)[:, :40], q.row.view(torch.uint8).t())
    assert torch.equal(again.col_scale, q.row_scale)
    other, _ = quantizer.quantize(source, row=True)
    assert not torch.equal(other.row.view(torch.uint8), q.row.view(torch.uint8))


def within_accumulation(got: Tensor, a: Tensor, b: Tensor) -> bool:
    """got = a[m, k] @ b[n, k]^T in fp32: each product and each sum, and both scales, round once."""
    a, b = a.double(), b.double()
    bound = (a.shape[1] + 4) * 2.0**-24 * (a.abs() @ b.abs().t())
    return bool(((got.double() - a @ b.t()).abs() <= bound).all())


def test_forward_and_backward_use_the_numbers_it_made(monkeypatch):
    """x, w and dy are rounded once each; y, dx and dw are products of just these numbers."""
    made = []
    cast = example.StochasticQuantizer._cast

    def spy(self, *args, **kwargs):
        made.append(cast(self, *args, **kwargs))
        return replace(made[-1])  # a copy: the library may drop a layout of its own

    monkeypatch.setattr(example.StochasticQuantizer, "_cast", spy)
    module = te.Linear(64, 48, bias=False, params_dtype=torch.float32, device="cpu")
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48)
    with te.autocast(recipe=example.StochasticRounding()):
        y = module(x)
    y.backward(dy)
    assert len(made) == 4  # x, w, dy, and w's col layout again
    forward, backward = made[:2], made[2:]
    xq, wq = (next(q for q in forward if q.shape == shape) for shape in ((32, 64), (48, 64)))
    dyq, again = (next(q for q in backward if q.shape == shape) for shape in ((32, 48), (48, 64)))
    assert torch.equal(again.col.view(torch.uint8)[:, :48], wq.row.view(torch.uint8).t())
    for q, exact in ((xq, x), (wq, module.weight), (dyq, dy)):
        v = exact.detach() * (448.0 / exact.detach().abs().max())
        low, high = neighbours(v.clamp(-448, 448))
        data = (q.row if q.row is not None else q.col[:, : q.shape[0]].t()).float()
        assert bool(((data == low) | (data == high)).all())
    xv, wv, dyv = (q.row.double() * q.row_scale.double() for q in (xq, wq, dyq))
    assert within_accumulation(y.detach(), xv, wv)
    assert within_accumulation(x.grad, dyv, wv.t())
    assert within_accumulation(module.weight.grad, dyv.t(), xv.t())
    nearest = (x.detach() * (448.0 / x.detach().abs().max())).to(torch.float8_e4m3fn).double() * xq.row_scale
    assert not within_accumulation(y.detach(), nearest, wv)


def test_a_checkpointed_call_repeats_its_numbers():
    module = te.LayerNormMLP(32, 64, params_dtype=torch.float32, device="cpu")
    x = torch.randn(16, 32)
    grads = []
    for run in (module, lambda leaf: te.checkpoint(module, leaf)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        with te.autocast(recipe=example.StochasticRounding()):
            out = run(leaf)
        out.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def losses(module: torch.nn.Module, recipe: object, steps: int = 40) -> list[float]:
    """A small regression, trained."""
    torch.manual_seed(11)
    x, target = torch.randn(64, 32), torch.randn(64, 32)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def make_mlp(name: str | None = None) -> torch.nn.Module:
    torch.manual_seed(3)
    return te.LayerNormMLP(32, 64, params_dtype=torch.float32, device="cpu", name=name)


def reported(name: str) -> list[dict]:
    return [row for row in te.overlap_report() if row["module"] == name]


def test_a_module_trains_under_the_new_name(named):
    module = make_mlp("by name")
    seen, plainly = losses(module, "stochastic"), losses(make_mlp(), None)
    assert seen[-1] < 0.5 * seen[0] and abs(seen[-1] - plainly[-1]) < 0.1 * plainly[0]
    assert seen != plainly
    rows = reported("by name")
    assert len(rows) == 6
    assert all(row["recipe"] == "stochastic" and row["operands"] == "e4m3 x e4m3" for row in rows)


def test_calibrating_quantizes_nothing():
    x = torch.randn(16, 32)
    module = make_mlp()
    expected = module(x)
    for recipe in (example.StochasticRounding(), CustomRecipe(example.gradients_at_random)):
        with te.autocast(enabled=False, calibrating=True, recipe=recipe):
            assert torch.equal(module(x), expected)


# A format that no GEMM multiplies


@dataclass(frozen=True, slots=True)
class Int8Format(TensorFormat):
    """v = data * scale, one fp32 scale a tensor."""

    @property
    def label(self) -> str:
        return "int8"

    def dequantize(self, q: QTensor, layout: str | None = None) -> Tensor:
        if q.row is not None:
            return (q.row * q.row_scale).to(q.dtype)
        return (q.col.t() * q.col_scale).to(q.dtype)

    def make_col(self, q: QTensor) -> tuple[Tensor, Tensor]:
        return q.row.t().contiguous(), q.row_scale


@dataclass(frozen=True, slots=True)
class Int8Quantizer(Quantizer):
    format: TensorFormat = Int8Format()

    def quantize(
        self, source: Source, *, row: bool = True, col: bool = False, bias_grad: torch.dtype | None = None
    ) -> tuple[QTensor, Tensor | None]:
        v = produce_ref(source)
        scale = v.abs().max().clamp(min=1e-30).view(1) / 127
        q = QTensor(self.format, (source.rows, source.cols), source.dtype, (v / scale).round().to(torch.int8), scale)
        if col:
            q.col, q.col_scale = self.format.make_col(q)
        if not row:
            q.row = q.row_scale = None
        return q, None if bias_grad is None else v.sum(0).to(bias_grad)

    def again(self, source: Source, earlier: QTensor) -> QTensor:
        return self.quantize(source, row=False, col=True)[0]


def int8(role):
    return Int8Quantizer()


def test_a_format_without_a_gemm_is_dequantized():
    """y is the product of the int8 numbers, and differs from the unquantized one by what rounding explains."""
    module = te.Linear(64, 48, bias=False, params_dtype=torch.float32, device="cpu")
    x = torch.randn(32, 64)
    with te.autocast(recipe=CustomRecipe(int8)):
        y = module(x)
    xv, wv = (Int8Quantizer().quantize(plain(t.detach()))[0].dequantize() for t in (x, module.weight))
    assert within_accumulation(y.detach(), xv, wv)
    assert not within_accumulation(y.detach(), x, module.weight.detach())


def test_int8_trains():
    module = make_mlp("int8")
    seen, plainly = losses(module, CustomRecipe(int8)), losses(make_mlp(), None)
    assert seen[-1] < 0.5 * seen[0] and abs(seen[-1] - plainly[-1]) < 0.1 * plainly[0]
    assert {row["operands"] for row in reported("int8")} == {"int8 x int8"}


def test_int8_weight_gradients_accumulate():
    """main_grad gets the product of the int8 numbers of dy and x, added to what was there."""
    module = te.Linear(64, 48, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.float32, device="cpu")
    x, dy, before = torch.randn(32, 64), torch.randn(32, 48), torch.randn(48, 64)
    module.weight.main_grad = before.clone()
    with te.autocast(recipe=CustomRecipe(int8)):
        module(x).backward(dy)
    xv, dyv = (Int8Quantizer().quantize(plain(t))[0].dequantize() for t in (x, dy))
    one = torch.eye(48)  # before + dy^T @ x as one product, for one bound
    assert within_accumulation(
        module.weight.main_grad, torch.cat((dyv.t(), one), 1), torch.cat((xv.t(), before.t()), 1)
    )


def test_a_gemm_makes_nothing_for_a_quantizer_with_a_quantize_of_its_own():
    """What a fused GEMM may leave counts where it is what quantize() would have given."""

    class Own(Identity):
        def quantize(self, source, **wanted):
            return Identity.quantize(self, source, **wanted)

    class Named(Identity):
        pass

    assert Identity().wants_from_gemm(torch.bfloat16) == Named().wants_from_gemm(torch.bfloat16) == "high precision"
    assert Own().wants_from_gemm(torch.bfloat16) == Identity().wants_from_gemm(torch.float16) == ""
    assert Calibrating().wants_from_gemm(torch.bfloat16) == ""
    assert all(Delayed(format).wants_from_gemm(torch.bfloat16) == "fp8" for format in FORMATS.values())
