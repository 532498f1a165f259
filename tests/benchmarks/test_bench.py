"""The benchmark helpers on fakes: order, clocks, errors, result files, documents."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import bench, gemms, kernels, modules, recipes, report, result_files, timeline
from te_lite.testing.distributed import launch

ROOT = Path(__file__).resolve().parents[2]


class FakeClock:
    """A clock whose device is done with a step when the fake says so; it logs what it was asked to time."""

    def __init__(self, gpu_us, host_us=10.0, exposed_below=0.0):
        self.gpu_us, self.host_us, self.exposed_below = gpu_us, host_us, exposed_below
        self.holds = []

    def synchronize(self):
        pass

    def sample(self, step, hold_us):
        name = step()
        self.holds.append(hold_us)
        times = self.gpu_us[name]
        gpu_us = times.pop(0) if len(times) > 1 else times[0]
        return bench.Sample(gpu_us, self.host_us, hold_us < self.exposed_below)


def logged(name, log, reset_log=None):
    def step():
        log.append(name)
        return name

    reset = None if reset_log is None else lambda: reset_log.append(name)
    return bench.Candidate(name, step, reset)


def test_interleave_rotates():
    order = [c.name for c in bench.interleave([logged(n, []) for n in "abc"], 4)]
    assert order == list("abcbcacababc")


def test_candidates_alternate_while_they_are_timed():
    log = []
    clock = FakeClock({"a": [1.0], "b": [2.0]})
    bench.time_interleaved([logged("a", log), logged("b", log)], clock, rounds=6, warmup=1, wall_rounds=0)
    timed = log[-12:]
    assert timed == list("abbaabbaabba")
    # A run of one candidate after the other would show a distance of 6 between the first a and the first b.
    assert all({timed[i], timed[i + 1]} == {"a", "b"} for i in range(0, 12, 2))


def test_median_and_spread_ignore_an_outlier():
    # One sample to find the hold without any, one with it, then the rounds.
    times = [0.0, 0.0, 100.0, 102.0, 98.0, 9000.0, 101.0]
    timing = bench.time_interleaved([logged("a", [])], FakeClock({"a": times}), rounds=5, wall_rounds=0)["a"]
    assert timing.gpu_us == 101.0 and timing.host_us == 10.0 and timing.samples == 5
    assert timing.wall_us is None and timing.error is None


def test_reset_runs_before_every_step():
    steps, resets = [], []
    candidate = logged("a", steps, resets)
    bench.time_interleaved([candidate], FakeClock({"a": [5000.0]}), rounds=3, warmup=2, wall_rounds=2)
    assert len(resets) == len(steps) + 1  # and once at the end, so that no gradient stays


def test_hold_doubles_until_the_host_is_hidden():
    clock = FakeClock({"a": [1.0]}, host_us=10.0, exposed_below=700.0)
    timing = bench.time_interleaved([logged("a", [])], clock, rounds=3, wall_rounds=0)["a"]
    assert clock.holds == [0.0, 220.0, 440.0, 880.0, 880.0, 880.0, 880.0]
    assert timing.exposed == 0


def test_a_step_that_synchronises_is_reported_as_exposed():
    clock = FakeClock({"a": [1.0]}, exposed_below=float("inf"))
    timing = bench.time_interleaved([logged("a", [])], clock, rounds=4, wall_rounds=0)["a"]
    assert timing.exposed == timing.samples == 4 and max(clock.holds) == bench.MAX_HOLD_US


def test_wall_time_counts_a_block_of_steps():
    log = []
    clock = FakeClock({"a": [4000.0]})
    timing = bench.time_interleaved([logged("a", log)], clock, rounds=1, warmup=0, wall_rounds=3)["a"]
    assert timing.wall_us > 0
    # To find the hold, the round, and three blocks of 60 ms / 4 ms after the steps that warm the host up.
    assert len(log) == 2 + 1 + 3 * (bench.WARM_STEPS + 15)


def test_a_failing_candidate_costs_one_row():
    def fail():
        raise RuntimeError("no kernel image")

    candidates = [bench.Candidate("bad", fail), logged("good", [])]
    timings = bench.time_interleaved(candidates, FakeClock({"good": [3.0]}), rounds=2, wall_rounds=1)
    assert timings["bad"].error == "RuntimeError: no kernel image" and timings["bad"].gpu_us is None
    assert timings["good"].gpu_us == 3.0


def test_bad_arguments_are_named():
    twice = [logged("a", []), logged("a", [])]
    with pytest.raises(ValueError, match="unique"):
        bench.time_interleaved(twice, FakeClock({"a": [1.0]}))
    with pytest.raises(ValueError, match="rounds=0"):
        bench.time_interleaved(twice[:1], FakeClock({"a": [1.0]}), rounds=0)


def test_rates():
    assert bench.tflops(2e12, 1000.0) == pytest.approx(2000.0)
    assert bench.gbps(4.27e12, 1e6) == pytest.approx(4270.0)
    assert bench.tflops(1.0, None) is None and bench.gbps(1.0, None) is None


def test_result_file_has_every_field(tmp_path):
    path = tmp_path / "new" / "r.json"
    rows = [{"name": "a", "gpu_us": 1.23456, "wall_us": None, "samples": 3}]
    returned = result_files.write_results(path, "r", rows, tree="abc", device="cpu", note="x")
    content = json.loads(path.read_text())
    assert content == returned
    assert set(result_files.RESULT_FIELDS) <= set(content)
    assert content["tree"] == "abc" and content["note"] == "x" and content["device"] == "cpu"
    assert content["torch"] == torch.__version__
    assert content["rows"] == [{"name": "a", "gpu_us": 1.235, "wall_us": None, "samples": 3}]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
def test_tree_hash_is_gits(tmp_path):
    files = {"b.py": "x = 1\n", "b/c.py": "", "b.d/e.txt": "e", "run": "#!/bin/sh\n", "z": "\u00e9"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True) if name != "b/c.py" else (tmp_path / "b").mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "run").chmod(0o755)

    def git(*command):
        done = subprocess.run(("git", *command), cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    expected = git("write-tree")
    shutil.rmtree(tmp_path / ".git")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "b.pyc").write_text("built")
    (tmp_path / "_C.so").write_text("built")
    (tmp_path / "empty").mkdir()
    assert result_files.tree_hash(tmp_path) == expected
    (tmp_path / "b.py").write_text("x = 2\n")
    assert result_files.tree_hash(tmp_path) != expected


def test_shapes_match_the_published_times():
    """A published bf16 Linear is three GEMMs hidden -> ffn: at other sizes its rate would be impossible."""
    published, _, _ = report.load_published()
    for shape in modules.SHAPES:
        for module in modules.MODULES:
            rate = bench.tflops(modules.step_flops(module, shape), published[shape.name, module, "bf16"]["gpu_us"])
            assert 400 < rate < 850, (shape.name, module, rate)


def test_modules_smoke_times_torch_and_gemms(tmp_path, capsys):
    shape = modules.SMOKE_SHAPES[0]
    args = modules.parse(["--device", "cpu", "--rounds", "2", "--wall-rounds", "1"])
    rows = modules.measure("LayerNormMLP", shape, [], bench.HostClock(), args)
    assert [(r["candidate"], r["recipe"]) for r in rows] == [
        ("torch", "bf16"),
        ("gemms", "bf16"),
        ("gemms", "fp8"),
    ]
    assert all(r["error"] is None and r["gpu_us"] > 0 and r["wall_us"] > 0 for r in rows), rows
    assert "LayerNormMLP" in modules.summary(rows)


@pytest.mark.parametrize("module", modules.MODULES)
@pytest.mark.parametrize("recipe", modules.RECIPES)
def test_modules_smoke_runs_te_lite(module, recipe):
    torch.manual_seed(0)
    work = modules.module_step(module, modules.SMOKE_SHAPES[0], recipe, "cpu")
    work.step()
    assert work.x.grad is not None and all(p.grad is not None for p in work.module.parameters() if p.numel())
    work.reset()
    assert work.x.grad is None and all(p.grad is None for p in work.module.parameters())


def test_kernels_smoke(tmp_path):
    assert kernels.main(["--device", "cpu", "--rounds", "1", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "kernels.json").read_text())
    names = {row["kernel"] for row in content["rows"]}
    assert {"copy bf16", "cast row+col, delayed", "transpose fp8", "rmsnorm backward", "swiglu"} <= names


def test_gemms_smoke(tmp_path):
    assert gemms.main(["--device", "cpu", "--rounds", "5", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gemms.json").read_text())["rows"]
    assert {"bf16", "mxfp8", "tensorwise", "rowwise", "blockwise"} <= {row["gemm"] for row in rows}
    assert all(row["of_bf16"] > 0 for row in rows)  # medians: one call may be interrupted for a hundred times as long


def test_row_error_counts_small_rows_as_much_as_large_ones():
    oracle = torch.randn(4, 64, dtype=torch.float64) * torch.tensor([[1e4], [1.0], [1.0], [1e-4]], dtype=torch.float64)
    out = oracle.clone()
    out[3] *= 1.1
    assert recipes.row_error(out, oracle) == pytest.approx(0.05)  # sqrt(0.1^2 / 4)


@pytest.mark.parametrize("kind", (*recipes.KINDS, *recipes.SHARD_KINDS))
def test_operands_are_reproducible_and_have_the_magnitudes_of_their_kind(kind):
    x, w, dy = recipes.operands(kind, (256, 128, 64), "cpu", shards=4)
    again = recipes.operands(kind, (256, 128, 64), "cpu", shards=4)
    assert all(torch.equal(a, b) for a, b in zip((x, w, dy), again, strict=True))
    x, w, dy = (t.float().square() for t in (x, w, dy))
    rows, columns = x.mean(1).sqrt().log2(), x.mean(0).sqrt().log2()
    spread = (columns.max() - columns.min()).item()
    # 128 or 256 normal numbers: their root mean square is 1 within a factor of 1.3, 0.4 in log2.
    if kind == "rows":
        assert 12 < rows.max() - rows.min() < 17 and 12 < dy.mean(1).sqrt().log2().diff().abs().max() < 17
    elif kind == "columns":
        assert (columns > 13).sum() == recipes.OUTLIERS and abs(spread - 14) < 1
        # w makes up for it: each column contributes alike to y.
        assert (x.mean(0) * w.mean(0) * 128).log2().abs().max() < 2
    elif kind == "uneven":
        quarters = x.view(4, -1).mean(1).sqrt().log2()
        assert (quarters - torch.tensor([0.0, -14 / 3, -28 / 3, -14.0])).abs().max() < 0.1
    else:
        assert rows.abs().max() < 0.5


def test_recipes_smoke(tmp_path, capsys):
    assert recipes.main(["--device", "cpu", "--rounds", "1", "--wall-rounds", "1", "--out", str(tmp_path)]) == 0
    rows = {row["recipe"]: row for row in json.loads((tmp_path / "recipes.json").read_text())["rows"]}
    assert set(rows) == {"bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp"}
    errors = {name: {k: v for k, v in row.items() if k.endswith("_pct")} for name, row in rows.items()}
    assert all(len(found) == 6 for found in errors.values())
    # One rounding of the result to bf16 is off by 2^-9 of it at most, one to E4M3 by 2^-4; two operands are rounded.
    assert all(error < 100 * 2**-9 for error in errors["bf16"].values())
    assert all(1 < error < 100 * 2**-3 for name in ("mxfp8", "blockwise", "rowwise") for error in errors[name].values())
    assert errors["delayed"] == errors["current"]  # its history knows the tensors by now
    assert errors["rowwise_with_gw_hp"]["columns_dw_pct"] == errors["bf16"]["columns_dw_pct"]
    # What finer scales are for: small tokens beside large ones, small features beside large ones.
    assert errors["rowwise"]["rows_y_pct"] < 0.9 * errors["current"]["rows_y_pct"]
    assert errors["mxfp8"]["columns_y_pct"] < 0.9 * errors["rowwise"]["columns_y_pct"]
    assert all(row["gpu_us"] > 0 and row["wall_us"] > 0 and row["error"] is None for row in rows.values())
    assert "rowwise_with_gw_hp" in capsys.readouterr().out


def test_a_recipe_that_fails_costs_its_own_row(monkeypatch, tmp_path):
    step = recipes.linear_step

    def failing(linear, recipe, *tensors):
        if recipe.name == "mxfp8":
            raise RuntimeError("no kernel image")
        return step(linear, recipe, *tensors)

    monkeypatch.setattr(recipes, "linear_step", failing)
    common = ["--device", "cpu", "--rounds", "1", "--wall-rounds", "0", "--out", str(tmp_path)]
    assert recipes.main([*common, "--recipes", "bf16", "mxfp8"]) == 1
    rows = json.loads((tmp_path / "recipes.json").read_text())["rows"]
    assert [row["error"] for row in rows] == [None, "RuntimeError: no kernel image"]


def test_per_shard_smoke(tmp_path):
    options = ("--part", "per_shard", "--device", "cpu", "--rounds", "2", "--wall-rounds", "1", "--out", str(tmp_path))
    launch(ROOT / "benchmarks" / "recipes.py", *options, ranks=2, timeout=120)
    rows = {row["recipe"]: row for row in json.loads((tmp_path / "per_shard.json").read_text())["rows"]}
    assert list(rows) == list(recipes.SHARD_RECIPES) and all(row["tp"] == 2 for row in rows.values())
    assert all(row["gpu_us"] > 0 and row["wall_us"] > 0 and row["error"] is None for row in rows.values())
    # Each rank's part of dx is rounded to bf16, and their sum again: 2^-9 of it at most, twice.
    assert all(value < 100 * 2**-8 for key, value in rows["bf16"].items() if key.endswith("_pct"))
    shared, own = rows["current"], rows["current, per_shard_scales"]
    # The shard with small numbers has few bits left under a scale that it shares with the large ones.
    assert own["uneven_y_pct"] < 0.9 * shared["uneven_y_pct"]
    assert own["even_y_pct"] == pytest.approx(shared["even_y_pct"], rel=0.05)


def test_overlap_smoke(tmp_path):
    """Each method moves what it says, and nothing that is compared is missing."""
    script = ROOT / "benchmarks" / "overlap_gemms.py"
    launch(script.with_name("overlap.py"), "--device", "cpu", "--rounds", "2", "--wall-rounds", "1",
           "--methods", "ring", "--recipes", "bf16", "--out", str(tmp_path), ranks=2, timeout=120)  # fmt: skip
    (row,) = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert (
        not row["error"] and row["gpu_us"] > 0 and "fc1_fprop ring" in row["took"] and "fc1_wgrad bulk" in row["took"]
    )
    launch(script, "--device", "cpu", "--rounds", "4", "--twice", "--out", str(tmp_path), ranks=2, timeout=120)
    rows = json.loads((tmp_path / "overlap_gemms.json").read_text())["rows"]
    assert [row["candidate"] for row in rows] == 4 * ["gemm", "copies", "collective", "ring"]
    for row in rows:
        assert not row["error"] and row["gpu_us"] > 0 and row["again_us"] > 0 and row["of_limit"] > 0
        # Two candidates may take the same time: only the collective's ratio to itself is known.
        assert row["against_collective"] == 1 if row["candidate"] == "collective" else row["against_collective"] > 0


def test_a_sample_of_ranks_is_the_slowest_ranks(monkeypatch):
    slowest = torch.tensor([5e6, 1.0, 1.0], dtype=torch.float64)

    def all_reduce(tensor, op=None):
        if op is not None:
            tensor.copy_(torch.maximum(tensor, slowest))

    monkeypatch.setattr(recipes.dist, "all_reduce", all_reduce)
    sample = recipes.RanksClock(torch.device("cpu")).sample(lambda: None, 0.0)
    assert sample.gpu_us == 5e6 and sample.host_us >= 1.0 and sample.exposed is True


def test_timeline_has_every_gemm_and_copy_of_every_rank(tmp_path):
    pytest.importorskip("matplotlib")
    options = ("--device", "cpu", "--shape", "64", "64", "128", "--warmup", "1", "--out", str(tmp_path))
    launch(ROOT / "benchmarks" / "timeline.py", *options, ranks=2, timeout=120, env={"TE_LITE_NVTX": "1"})
    rows = json.loads((tmp_path / "timeline.json").read_text())["rows"]
    assert all(row["begin_us"] < row["end_us"] for row in rows), [r for r in rows if r["begin_us"] >= r["end_us"]]
    once = dict.fromkeys([f"{layer} {gemm}" for layer in ("fc1", "fc2") for gemm in ("fprop", "dgrad", "wgrad")], 1)
    bulk = once | {"fc1 fprop": 2, "fc2 fprop": 2, "fc2 dgrad": 2}  # a piece for each rank
    gemms_of = {"collective": once, "bulk": bulk, "ring": bulk | {"fc1 dgrad": 2}}
    exchanges = {"fc1 all-gather": 2, "fc2 all-gather": 1, "fc1 reduce-scatter": 1, "fc2 reduce-scatter": 1}
    for method, expected in gemms_of.items():
        assert (tmp_path / f"timeline_{method}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        ranks = [[row for row in rows if row["method"] == method and row["rank"] == rank] for rank in range(2)]
        for rank, own in enumerate(ranks):

            def named(name, own=own):
                return [row for row in own if row["name"] == name]

            count = {kind: Counter(row["name"] for row in own if row["kind"] == kind) for kind in timeline.COLOURS}
            assert count["gemm"] == expected
            assert sum(count["other"].values()) > 0
            end_of_forward = named("forward")[0]["end_us"]
            assert max(row["end_us"] for row in named("fc2 fprop")) < end_of_forward
            assert min(row["begin_us"] for row in named("fc2 dgrad")) > end_of_forward
            if method == "collective":
                assert count["collective"] == exchanges and not (count["copy"] or count["wait"] or count["reduce"])
                continue
            rows1 = "fc1 rows of all" if method == "bulk" else f"fc1 rows of {1 - rank}"
            copies = {"fc1 gather": 2, "fc2 gather": 1, rows1: 1, f"fc2 rows of {1 - rank}": 1}
            assert count["copy"] == copies and not count["collective"]
            assert count["reduce"] == {"fc2 sum": 1} | ({} if method == "bulk" else {"fc1 sum": 1})  # or by the norm
            # The other's shard is sent for before this rank is through, and cannot be here before: one clock for all.
            assert named("fc1 gather")[0]["begin_us"] < named("fc1 fprop")[-1]["end_us"]
            sent = next(row for row in ranks[1 - rank] if row["name"] == "fc1 gather")
            assert sent["begin_us"] < named(f"fc1 for rank {1 - rank}")[0]["end_us"]


def test_timeline_draws_no_ring_under_the_name_of_fused():
    with pytest.raises(SystemExit, match="a ring would run"):
        timeline.main(["--device", "cpu", "--methods", "fused"])
