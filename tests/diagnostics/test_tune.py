"""te_lite tune: what it measures is what a run with "auto" finds."""

import itertools
import json
from pathlib import Path

import te_lite
from te_lite import doctor
from te_lite.overlap.choice import MARGIN
from te_lite.testing.distributed import launch

SCRIPT = Path(te_lite.__file__).with_name("tune.py")
SIZES = ("--hidden", "64", "--ffn", "128", "--device", "cpu")


def test_a_run_finds_what_was_measured(tmp_path: Path) -> None:
    """Eight exchanges of a layer, for each recipe and token count; the second run times nothing."""
    args = (*SIZES, "--tokens", "32", "64", "--recipes", "bf16", "mxfp8")
    env = {"TE_LITE_CACHE": str(tmp_path)}
    said = launch(SCRIPT, *args, ranks=2, timeout=120, env=env)
    assert said.count("auto: collective ") == 2 * 2 * 8 and said.rstrip().endswith(f"kept in {tmp_path}/overlap.json")
    measured = json.loads((tmp_path / "overlap.json").read_text())
    # qkv and fc1 gather x of one shape into GEMMs of different width, proj and fc2 differ in K, and so on.
    assert len(measured) > 2 * 2 * 5 and all(set(times) == {"collective", "ring"} for times in measured.values())
    assert launch(SCRIPT, *args, ranks=2, timeout=120, env=env) == said
    assert json.loads((tmp_path / "overlap.json").read_text()) == measured


def test_biases_residuals_and_narrow_sums_are_other_problems(tmp_path: Path) -> None:
    """Biases: of forwards, as those of modules with bias=True would be, and fc2's dgrad, which then makes no gradient
    of h. Residuals: of proj's and fc2's forward. Narrow sums: of those and of the dgrads that scatter.
    """
    env = {"TE_LITE_CACHE": str(tmp_path)}
    args = (*SIZES, "--tokens", "32", "--recipes", "bf16")
    kept: list[dict] = []
    for options in ((), ("--bias",), ("--residual",), ("--residual", "--fp8-buf")):
        launch(SCRIPT, *args, *options, ranks=2, timeout=120, env=env)
        kept.append(json.loads((tmp_path / "overlap.json").read_text()))
    assert all(before.items() <= after.items() for before, after in itertools.pairwise(kept))
    without, bias, residual, narrow = (set(measured) for measured in kept)
    new = bias - without
    assert len(new) == 5
    assert sum("of a gradient" in problem for problem in without) == 1 and not any("gradient" in p for p in new)
    assert sum("bias True" in problem for problem in bias) == 4 and not any("bias True" in p for p in without)
    new = residual - bias
    assert len(new) == 2 and all("scatter" in problem and "and residual" in problem for problem in new)
    assert len(narrow - residual) == 4 and all("narrow scatter" in problem for problem in narrow - residual)


def test_other_numbers_of_pieces_are_timed(tmp_path: Path) -> None:
    """Of scatters, where the rows can be cut; what was fastest is said."""
    env = {"TE_LITE_CACHE": str(tmp_path)}
    said = launch(SCRIPT, *SIZES, "--tokens", "1024", "--recipes", "bf16", ranks=2, timeout=120, env=env)
    measured = json.loads((tmp_path / "overlap.json").read_text())
    for problem, times in measured.items():
        assert set(times) == {"collective", "ring"} | ({"ring by 2", "ring by 4"} if ": scatter" in problem else set())
        best = min(times, key=times.__getitem__)
        way = best if times[best] < MARGIN * times["collective"] else "collective"
        assert ", ".join(f"{name} {us:.0f} us" for name, us in times.items()) + f": {way}" in said


def test_it_asks_for_ranks(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert doctor.main(["tune", *SIZES, "--tokens", "32"]) == 2
    assert "start it under torchrun" in capsys.readouterr().err
