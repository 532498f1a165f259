"""The benchmark helpers on fakes: order, clocks, errors, result files, documents."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, kernels, modules, report
from te_lite.testing import bench, results

ROOT = Path(__file__).resolve().parents[1]


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
    returned = results.write_results(path, "r", rows, tree="abc", device="cpu", note="x")
    content = json.loads(path.read_text())
    assert content == returned
    assert set(results.RESULT_FIELDS) <= set(content)
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
    assert results.tree_hash(tmp_path) == expected
    (tmp_path / "b.py").write_text("x = 2\n")
    assert results.tree_hash(tmp_path) != expected


def test_shapes_match_the_published_times():
    """A published bf16 Linear is three GEMMs hidden -> ffn: at other sizes its rate would be impossible."""
    published, _, _ = report.load_published()
    for shape in modules.SHAPES:
        for module in modules.MODULES:
            rate = bench.tflops(
                modules.step_flops(module, shape), published[shape.name, module, "bf16"]["gpu_us"]
            )
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


def fake_results(folder, device="NVIDIA H200"):
    shape = {"name": "small", "tokens": 512, "hidden": 2048, "ffn": 5632}
    keys = [("te_lite", "delayed", 81.4), ("torch", "bf16", 70.0), ("gemms", "fp8", 60.0)]
    rows = [
        {"shape": "small", "module": "Linear", "candidate": c, "recipe": r, "gpu_us": us, "host_us": 300.0}
        | {"wall_us": 310.0, "kept_mib": -0.0001, "tflops": 400.0, "samples": 20, "exposed": 0, "error": None}
        for c, r, us in keys
    ]
    content = results.write_results(
        folder / "modules.json", "modules", rows, tree="f" * 40, device="cpu", shapes=[shape]
    )
    content["device"] = device
    (folder / "modules.json").write_text(json.dumps(content))


def test_report_renders_between_markers(tmp_path):
    fake_results(tmp_path)
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- results:modules -->\nold 12345\n<!-- /results:modules -->\nafter\n")
    assert report.main(["--results", str(tmp_path), "--check", str(document)]) == 1
    assert report.main(["--results", str(tmp_path), str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "12345" not in text
    # te_lite, its rate, the GEMMs and their share, torch, the published time and the ratio to it
    assert "| small | Linear | delayed | 81 | 400 | 60 | 0.74 | 70 | 99 | 0.82 |" in text
    assert "-0" not in text.replace("-0-", "")
    assert report.main(["--results", str(tmp_path), "--check", str(document)]) == 0


def test_report_refuses_cpu_results_and_unknown_tables(tmp_path):
    fake_results(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="measured on a CPU"):
        report.rendered("<!-- results:summary -->\n<!-- /results:summary -->\n", tmp_path)
    with pytest.raises(ValueError, match="no such table"):
        report.rendered("<!-- results:speed -->\n<!-- /results:speed -->\n", tmp_path)


def test_documents_match_the_committed_results():
    assert report.main(["--check"]) == 0, "run python benchmarks/report.py and commit what it writes"


def test_gpu_check_counts_tests_and_fails_when_one_fails(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')\n"
    )
    common = ["--stages", "tests", "demo", "--device", "cpu", "--out", str(tmp_path), "--tree-hash", "t"]
    assert gpu_check.main([*common, "--pytest-args", str(file)]) == 1
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(results.RESULT_FIELDS) <= set(content)
    counts = content["tests"]
    assert (counts["passed"], counts["failed"], counts["skipped"], counts["errors"]) == (1, 1, 1, 0)
    assert len(counts["failures"]) == 1 and counts["failures"][0].endswith("test_b")
    assert [(row["stage"], row["status"]) for row in content["rows"]] == [
        ("tests", "failed"),
        ("demo", "skipped"),
    ]
    assert str(tmp_path) not in (tmp_path / "gpu_check.json").read_text()


def test_gpu_check_stops_a_command_at_its_limit(monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE_S", 2.0)
    command = [sys.executable, "-c", "import time\nprint('started', flush=True)\ntime.sleep(60)"]
    status, seconds, lines = gpu_check.run_command(command, 2.0, echo=False)
    assert status is None and seconds < 20 and lines[0] == "started"
    assert gpu_check.outcome(status) == "timeout"


def test_gpu_check_keeps_multicast_off():
    script = (
        "import os; print(os.environ['NCCL_NVLS_ENABLE'], os.environ['TORCH_SYMM_MEM_DISABLE_MULTICAST'])"
    )
    status, _, lines = gpu_check.run_command([sys.executable, "-c", script], 30.0, echo=False)
    assert (status, lines) == (0, ["0 1"])
