"""collect_statistics: the numbers against counts made here, and that collecting changes nothing."""

import json
import sys
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.diagnostics import statistics
from te_lite.quantize.quantizer import observer
from te_lite.testing.distributed import device_params, launch, rank_device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import under

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = list(te.recipe.available())
OPERANDS = ["x", "w", "dy"]


def make(kind, device, **extra):
    """A module whose tokens have 256 features, made of the same numbers at every call."""
    torch.manual_seed(11)
    options = {"params_dtype": BF16, "device": device, **extra}
    if kind == "LayerNormMLP":
        return te.LayerNormMLP(256, 384, activation="swiglu", normalization="RMSNorm", **options)
    return getattr(te, kind)(256, 384, **options)


def data(module, device, tokens=160, spread=3.0):
    """(x, dy): magnitudes over many powers of two, so that something underflows in every format."""
    generator = torch.Generator().manual_seed(5)
    width = 256 if hasattr(module, "fc1_weight") else 384

    def draw(features):
        sizes = torch.exp(spread * torch.randn(tokens, features, generator=generator))
        return (torch.randn(tokens, features, generator=generator) * sizes).to(device, BF16)

    return draw(256), draw(width)


def step(module, x, dy, recipe, **forward):
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with under(recipe):
        out = module(x, **forward)
    out.backward(dy)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, **grads, "state": module.get_extra_state().clone()}


def by_operand(stats):
    return {row["operand"]: row for row in stats.rows()}


def fp8(v, dtype):
    """|v| saturated and rounded to nearest."""
    largest = torch.finfo(dtype).max
    return v.abs().clamp(max=largest).to(dtype).float()


# ---- nothing changes ----


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("recipe", NAMES)
def test_collecting_changes_no_bit(recipe, kind, device):
    """Four steps, the middle two watched; delayed scaling's histories and scales are part of the result."""
    plain, watched = make(kind, device), make(kind, device)
    for i in range(4):
        x, dy = (t * (1 + i) for t in data(plain, device))
        expected = step(plain, x, dy, recipe)
        if i in (1, 2):
            with te.collect_statistics() as stats:
                got = step(watched, x, dy, recipe)
            assert bool(stats.rows()) == te.recipe.from_name(recipe).is_fp8
        else:
            got = step(watched, x, dy, recipe)
        for name, value in expected.items():
            assert_bitwise_equal(f"step {i} {name}", got[name], value)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_cached_weights_and_quantized_outputs_change_no_bit(recipe):
    results = []
    for collect in (False, True):
        module = make("Linear", "cpu")
        x, dy = data(module, "cpu")
        with te.collect_statistics() if collect else under("bf16") as stats:
            for first in (True, False):
                got = step(module, x, dy, recipe, is_first_microbatch=first, fp8_output=True, fp8_grad=True)
        results.append({name: v.dequantize() if hasattr(v, "dequantize") else v for name, v in got.items()})
    rows = by_operand(stats)
    assert (rows["x"]["calls"], rows["w"]["calls"], rows["y"]["calls"], rows["dx"]["calls"]) == (2, 1, 2, 2)
    for name, value in results[0].items():
        assert_bitwise_equal(name, results[1][name].to(value.dtype), value)


def test_calibration_changes_no_bit_and_shows_no_rows():
    states = []
    for collect in (False, True):
        module = make("Linear", "cpu")
        x, _ = data(module, "cpu")
        with te.collect_statistics() if collect else under("bf16") as stats, te.autocast(False, calibrating=True):
            module(x)
        states.append(module.get_extra_state())
    assert_bitwise_equal("state", *states)
    assert states[0].numel() and stats.rows() == [] and stats.log_line() == "0 quantized operands"


@pytest.mark.parametrize("recipe", NAMES)
def test_one_wrapper_for_each_quantizer(recipe):
    """A linear asks by identity whether two GEMMs read the same quantized tensor."""

    def same(module):
        p, d, w = (getattr(module._planned[1][0].operands, gemm) for gemm in ("fprop", "dgrad", "wgrad"))
        return p.a is w.b, p.b is d.b, d.a is w.a

    module = make("Linear", "cpu")
    x, dy = data(module, "cpu")
    step(module, x, dy, recipe)
    expected = same(module)
    with te.collect_statistics():
        step(module, x, dy, recipe)
        assert same(module) == expected
        watched = module._planned
    step(module, x, dy, recipe)
    assert module._planned is not watched
    assert not isinstance(module._planned[1][0].operands.fprop.a, statistics.Watched)


@pytest.mark.parametrize("device", rank_device_params(2))
def test_two_ranks(device):
    """Sequence parallelism, any recipe: the same bits, and each rank's rows are those of its shard."""
    script = Path(__file__).parent / "ranks_statistics.py"
    assert "all the same" in launch(script, "--device", device, ranks=2)


# ---- numbers ----


@pytest.mark.parametrize("device", device_params())
def test_current_scaling_against_counts(device):
    module = make("Linear", device)
    x, dy = data(module, device)
    with te.collect_statistics() as stats:
        for _ in range(3):
            step(module, x, dy, "current")
    rows = by_operand(stats)
    assert list(rows) == OPERANDS
    for name, v, dtype in (("x", x, E4M3), ("w", module.weight.detach(), E4M3), ("dy", dy, E5M2)):
        v, row = v.float(), rows[name]
        scale = torch.finfo(dtype).max / v.abs().max()
        assert row["calls"] == 3 and row["amax"] == v.abs().max()
        assert row["scale_min"] == row["scale_max"] == pytest.approx(float(scale), rel=2**-21)
        assert row["underflow"] == ((v != 0) & (fp8(v * scale, dtype) == 0)).sum().item() / v.numel()
        assert row["saturated"] == 0
    assert rows["x"]["underflow"] > 0.01


@pytest.mark.parametrize("device", device_params())
def test_delayed_scaling_against_counts(device):
    """Scales are the last step's: twice larger values saturate."""
    module = make("Linear", device)
    x, dy = data(module, device, spread=1.0)
    step(module, x, dy, "delayed")
    with te.collect_statistics() as stats:
        step(module, 2 * x, 4 * dy, "delayed")
    rows = by_operand(stats)
    for name, v, factor, dtype in (("x", x, 2, E4M3), ("dy", dy, 4, E5M2)):
        scale = torch.finfo(dtype).max / v.float().abs().max()
        scaled, row = v.float() * factor * scale, rows[name]
        assert row["amax"] == factor * v.abs().max()
        assert row["scale_max"] == pytest.approx(float(scale), rel=2**-21)
        assert row["underflow"] == ((scaled != 0) & (fp8(scaled, dtype) == 0)).sum() / v.numel()
        assert row["saturated"] == (scaled.abs() > torch.finfo(dtype).max).sum() / v.numel() > 0


def test_extremes_are_over_all_steps_and_fractions_are_means():
    module = make("Linear", "cpu")
    x, dy = data(module, "cpu")
    large = torch.where(x.abs() > x.abs().median(), 4 * x, 0)
    seen = []
    for steps in ([x], [large], [x, large]):
        with te.collect_statistics() as stats:
            for t in steps:
                step(module, t, dy, "current")
        seen.append(by_operand(stats)["x"])
    one, other, both = seen
    assert both["amax"] == other["amax"] == 4 * one["amax"]
    assert (both["scale_min"], both["scale_max"]) == (other["scale_min"], one["scale_max"])
    assert both["underflow"] == pytest.approx((one["underflow"] + other["underflow"]) / 2)
    assert other["underflow"] < one["underflow"]


# Blocks [rows, columns] of x in the row and in the col layout, and whether scales are powers of two rounded up (MX).
BLOCKS = {
    "mxfp8": ((1, 32), (32, 1)),
    "blockwise": ((1, 128), (128, 1)),
    "rowwise": ((1, None), (None, 1)),
}


def block_scales(v, block):
    """Per element, fp8_max / amax of its block: what the scale is up to a power-of-2 rounding, and 0 where v is 0."""
    rows, cols = (size or full for size, full in zip(block, v.shape, strict=True))
    grid = v.view(v.shape[0] // rows, rows, v.shape[1] // cols, cols)
    amax = grid.abs().amax((1, 3), keepdim=True).expand_as(grid).reshape(v.shape)
    return torch.where(v != 0, 448.0 / amax, torch.nan)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", BLOCKS)
def test_scales_of_blocks_against_their_maxima(recipe, device):
    """Both layouts have rows; scales are powers of two within a factor of two of fp8_max / amax; nothing saturates."""
    module = make("Linear", device)
    x, dy = data(module, device, tokens=256)
    x[:, 64:96] = 0
    with te.collect_statistics() as stats:
        step(module, x, dy, recipe)
    rows = by_operand(stats)
    for name, block in zip(("x", "x_col"), BLOCKS[recipe], strict=True):
        ideal, row = block_scales(x.float(), block), rows[name]
        for bound, extreme in (
            ("scale_min", ideal.nan_to_num(torch.inf).min()),
            ("scale_max", ideal.nan_to_num(0).max()),
        ):
            mantissa, _ = torch.frexp(torch.tensor(row[bound]))
            assert mantissa == 0.5 and extreme / 2 < row[bound] <= extreme
        floor = 2.0**-10  # half of E4M3's smallest number; ties go to zero
        scale = 2.0 ** torch.floor(torch.log2(ideal.double()))
        zeros = (x.double().abs() * scale <= floor) & (x != 0)
        assert row["underflow"] == zeros.sum() / x.numel() and row["saturated"] == 0
        assert row["amax"] == x.abs().max() and row["calls"] == 1
    assert rows["x"]["underflow"] != rows["x_col"]["underflow"]


def test_a_weight_that_each_gemm_reads_otherwise_has_two_rows():
    """rowwise_with_gw_hp: dgrad reads the weight with one scale a tensor, wgrad reads nothing quantized."""
    module = make("Linear", "cpu")
    x, dy = data(module, "cpu")
    with te.collect_statistics() as stats:
        step(module, x, dy, "rowwise_with_gw_hp")
    rows = stats.rows()
    assert [row["operand"] for row in rows] == ["x", "w", "dy", "w_col"]
    assert rows[1]["scale_min"] < rows[1]["scale_max"]
    assert rows[3]["scale_min"] == rows[3]["scale_max"]


def test_nothing_nan_and_zeros():
    module = make("Linear", "cpu")
    x, dy = data(module, "cpu")
    with te.collect_statistics() as stats:
        step(module, x[:0], dy[:0], "current")
    assert list(by_operand(stats)) == ["w"]
    with te.collect_statistics() as stats:
        step(module, torch.zeros_like(x), dy, "current")
    row = by_operand(stats)["x"]
    assert (row["amax"], row["underflow"], row["saturated"]) == (0, 0, 0)
    assert (row["scale_min"], row["scale_max"], row["note"]) == (None, None, "all zero")
    assert str(stats).splitlines()[1].split()[4:] == ["0", "-", "-", "0.000%", "0.000%", "all", "zero"]
    for value in (torch.inf, torch.nan):
        bad = x.clone()
        bad[3, 5] = value
        with te.collect_statistics() as stats:
            step(module, bad, dy, "current")
        row = by_operand(stats)["x"]
        assert (row["amax"], row["note"]) == (None, f"amax {value}") and f"amax {value}" in str(stats)
        assert row["saturated"] > 0 or value != torch.inf
        json.dumps(stats.rows(), allow_nan=False)  # loggers refuse inf and nan
        assert "note" in str(stats)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", NAMES)
def test_the_host_does_not_wait(recipe):
    module = make("LayerNormMLP", "cuda")
    x, dy = data(module, "cuda")
    with te.collect_statistics():
        step(module, x, dy, recipe)  # kernels are compiled, plans built
        x = x.clone().requires_grad_()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with under(recipe):
                out = module(x)
            out.backward(dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- names and forms ----


def test_names_come_from_the_model_or_the_modules():
    def run(stats):
        for module in model:
            with te.autocast(recipe="current"):
                module(torch.ones(16, 64))
        return list(dict.fromkeys(row["layer"] for row in stats.rows()))

    model = torch.nn.Sequential(*(te.Linear(64, 64, device="cpu", name=name) for name in (None, "head", None)))
    with te.collect_statistics(model) as stats:
        assert run(stats) == ["0", "1", "2"]
    with te.collect_statistics() as stats:
        assert run(stats) == ["Linear", "head", "Linear#2"]
        assert run(stats) == ["Linear", "head", "Linear#2"]


def test_mlp_operands_and_forms(tmp_path):
    module = make("LayerNormMLP", "cpu", name="mlp")
    x, dy = data(module, "cpu")
    with te.collect_statistics() as stats:
        step(module, x, dy, "current")
    rows = stats.rows()
    assert [row["operand"] for row in rows] == [f"fc{i}.{name}" for i in (1, 2) for name in OPERANDS]
    worst = max(rows, key=lambda row: row["underflow"])
    assert f"underflow at most {worst['underflow']:.2%} (mlp {worst['operand']})" in stats.log_line()
    lines = str(stats).splitlines()
    assert len(lines) == 7 and lines[0].split()[:3] == ["layer", "operand", "format"]
    assert lines[1].split()[:4] == ["mlp", "fc1.x", "e4m3", "1"]
    pytest.importorskip("matplotlib")
    stats.plot(tmp_path / "stats.png")
    assert (tmp_path / "stats.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    with te.collect_statistics() as stats:
        pass
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        stats.plot(tmp_path / "stats.png")


def test_one_block_at_a_time():
    with te.collect_statistics():
        with pytest.raises(RuntimeError, match="inside of another"), te.collect_statistics():
            pass
        assert observer() is not None
    with pytest.raises(KeyError), te.collect_statistics():
        raise KeyError
    assert observer() is None
