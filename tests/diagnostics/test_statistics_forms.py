"""collect_statistics for people: the note of delayed scaling's first step, and the plot."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from tests.diagnostics.test_statistics import BF16, by_operand, data, make, step


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize(("recipe", "notes"), [("delayed", ["initial scale 1", "", ""]), ("current", ["", "", ""])])
def test_the_first_delayed_step_says_that_scales_start_at_one(recipe, notes, device):
    """Step 1, step 2, both: only rows whose calls all used the initial scale say so; w is drawn to underflow by it."""
    module = make("LayerNormMLP", device)
    x, dy = data(module, device)
    stats = []
    for _ in range(2):
        with te.collect_statistics() as collected:
            step(module, x, 2.0**-16 * dy, recipe)
        stats.append(collected)
    module = make("LayerNormMLP", device)
    with te.collect_statistics() as both:
        for _ in range(2):
            step(module, x, 2.0**-16 * dy, recipe)
    for collected, note in zip((*stats, both), notes, strict=True):
        assert {row["note"] for row in collected.rows()} == {note}
        assert f"dy, {note})" in collected.log_line() if note else "initial" not in collected.log_line()
        assert str(collected).count("initial scale 1") == (len(collected.rows()) if note else 0)


def test_a_scale_of_one_that_is_no_initial_one_has_no_note():
    """Current scaling of an amax of 448 has the scale 1 too."""
    module = make("Linear", "cpu")
    x, dy = data(module, "cpu")
    x = (x.float() * (448 / x.float().abs().max())).to(BF16)
    with te.collect_statistics() as stats:
        step(module, x, dy, "current")
    row = by_operand(stats)["x"]
    assert (row["scale_min"], row["scale_max"], row["note"]) == (1, 1, "")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("layers", "recipe"), [(1, "current"), (1, "mxfp8"), (2, "delayed"), (12, "rowwise"), (3, "zero")]
)
def test_each_line_of_the_plot_has_one_entry_in_the_legend(layers, recipe, tmp_path, monkeypatch):
    """Looks are distinct, and where an operand is a point its entry shows no line. "zero": no amax can be drawn."""
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, path: (figures.append(self), save(self, path)))

    options = {"params_dtype": BF16, "device": "cpu"}
    pairs = [(te.Linear(64, 64, **options), te.LayerNormMLP(64, 96, **options)) for _ in range(layers)]
    model = torch.nn.Sequential(*(module for pair in pairs for module in pair))
    with te.collect_statistics(model) as stats, te.autocast(recipe="current" if recipe == "zero" else recipe):
        x = torch.randn(32, 64, dtype=BF16) * (recipe != "zero")
        model(x).backward(torch.randn(32, 64, dtype=BF16))
    stats.plot(tmp_path / "stats.png")
    (figure,) = figures
    count = {}
    for row in stats.rows():
        name = f"{row['operand']} {row['format']}"
        count[name] = count.get(name, 0) + 1
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(count)
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.lines}
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines}
        assert lines.keys() == count.keys() and len(looks) == len(lines)
        for name, line in lines.items():
            assert len(line.get_xdata()) == count[name] and (line.get_linestyle() == "None") == (count[name] == 1)
        assert axes is figure.axes[0] or axes.get_ylim()[0] == 0
