"""Documents rendered from results, and the check on GPUs with its commands faked."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import commands as run_commands
from benchmarks import gpu_check, report, result_files, tables, tables_ranks

ROOT = Path(__file__).resolve().parents[2]


def fake_results(folder, device="NVIDIA H200"):
    shape = {"name": "small", "tokens": 512, "hidden": 2048, "ffn": 5632}
    keys = [("te_lite", "delayed", 81.4), ("torch", "bf16", 70.0), ("gemms", "fp8", 60.0)]
    rows = [
        {"shape": "small", "module": "Linear", "candidate": c, "recipe": r, "gpu_us": us, "host_us": 300.0}
        | {"wall_us": 310.0, "kept_mib": -0.0001, "tflops": 400.0, "samples": 20, "exposed": 0, "error": None}
        for c, r, us in keys
    ]
    content = result_files.write_results(
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


def write_fake(folder, name, rows, **extra):
    content = result_files.write_results(folder / f"{name}.json", name, rows, tree="f" * 40, device="cpu", **extra)
    content["device"] = "NVIDIA H200"
    (folder / f"{name}.json").write_text(json.dumps(content))


def page(*names):
    return "".join(f"<!-- results:{name} -->\n<!-- /results:{name} -->\n" for name in names)


def test_report_renders_what_recipes_cost(tmp_path):
    errors = {f"{kind}_{t}_pct": 3.0 + i for kind in ("rows", "columns") for i, t in enumerate(("y", "dx", "dw"))}
    common = {**errors, "samples": 4, "exposed": 0}
    rows = [
        {"recipe": "bf16", **common, "gpu_us": 2000.0, "wall_us": 2100.0, "kept_mib": 300.0, "error": None},
        {"recipe": "mxfp8", **common, "gpu_us": 2500.0, "wall_us": 2600.0, "kept_mib": 200.0, "error": None},
    ]
    shape = {"name": "8b", "tokens": 8192, "hidden": 4096, "ffn": 14336}
    write_fake(tmp_path, "recipes", rows, sizes=[2048, 4096, 4096], shape=shape)
    shards = [{**row, "tp": 4, **{f"{k}_y_pct": 1.5 for k in ("even", "uneven")}} for row in rows]
    write_fake(tmp_path, "per_shard", shards, sizes=[8192, 4096, 14336])
    gemm = {"m": 8192, "k": 4096, "n": 14336, "gpu_us": 10.0, "tflops": 700.0}
    write_fake(tmp_path, "gemms", [{**gemm, "gemm": "rowwise", "of_bf16": 1.8, "of_torch": None}])
    text = report.rendered(page("recipes", "per_shard", "gemms"), tmp_path)
    assert "| mxfp8 | 3.00 | 4.00 | 5.00 | 3.00 | 4.00 | 5.00 | 2500 | 0.80 | 2600 | 200 |" in text
    assert "| mxfp8 | 1.50 |  |  | 1.50 |  |  | 2500 | 0.80 | 2600 |" in text and "on 4 ranks" in text
    assert "| 8192 x 4096 x 14336 | rowwise | 10.0 | 700 | 1.80 |  |" in text


def test_the_front_page_has_gpu_times_of_large_shapes_and_wall_times_of_small_ones():
    rows = [
        {
            "shape": shape,
            "module": module,
            "recipe": "delayed",
            "call": call,
            "candidate": name,
            "gpu_us": us,
            "wall_us": 2 * us,
        }
        for shape, module, first in (("8b", "LayerNormMLP", 100), ("8b", "Linear", 200), ("small", "Linear", 300))
        for call, more in (("main_grad", 0), ("cached", 50))
        for name, us in (("te_lite", first + more + 1), ("te", first + more + 2), ("gemms", first + more + 3))
    ]
    known = dict.fromkeys(("device", "driver", "cuda", "torch", "triton", "python", "date", "tree"), "known")
    text = report.render_summary({**known, "shapes": [], "rows": rows})
    assert (
        "| 8b | LayerNormMLP | delayed | 101 | 102 | 103 |" in text
        and "| small | Linear | delayed | 602 | 604 |" in text
    )
    assert text.count("delayed") == 2


def test_how_far_apart_losses_are():
    assert tables.losses_apart([[1.0, 2.0]], [[1.0, 4.0]]) == 2**0.5
    assert tables.losses_apart([[1.0, 2.0], [1.0, 4.0]], [[1.0, 4.0]]) == 1.0


def test_report_says_what_was_not_measured(tmp_path):
    text = report.rendered(page(*report.RENDERERS), tmp_path)
    assert text.count("Not measured yet") == len(report.RENDERERS)
    document = tmp_path / "page.md"
    document.write_text(text)
    assert report.main(["--results", str(tmp_path), "--check", str(document)]) == 0


def test_report_refuses_cpu_results_and_unknown_tables(tmp_path):
    fake_results(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="measured on a CPU"):
        report.rendered("<!-- results:modules -->\n<!-- /results:modules -->\n", tmp_path)
    with pytest.raises(ValueError, match="no such table"):
        report.rendered("<!-- results:speed -->\n<!-- /results:speed -->\n", tmp_path)


def test_documents_match_the_committed_results():
    assert report.main(["--check"]) == 0, "run python benchmarks/report.py and commit what it writes"


def test_gpu_check_counts_tests_and_fails_when_one_fails(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')\n")
    common = ["--stages", "tests", "demo", "--device", "cpu", "--out", str(tmp_path), "--tree-hash", "t"]
    assert gpu_check.main([*common, "--pytest-args", str(file)]) == 1
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(result_files.RESULT_FIELDS) <= set(content)
    counts = content["tests"]
    assert (counts["passed"], counts["failed"], counts["skipped"], counts["errors"]) == (1, 1, 1, 0)
    assert len(counts["failures"]) == 1 and counts["failures"][0].endswith("test_b")
    assert [(row["stage"], row["status"]) for row in content["rows"]] == [
        ("tests", "failed"),
        ("demo", "skipped"),
    ]
    assert str(tmp_path) not in (tmp_path / "gpu_check.json").read_text()


def test_gpu_check_stops_a_command_at_its_limit(monkeypatch):
    monkeypatch.setattr(run_commands, "GRACE_S", 2.0)
    command = [sys.executable, "-c", "import time\nprint('started', flush=True)\ntime.sleep(60)"]
    status, seconds, lines = gpu_check.run_command(command, 2.0, echo=False)
    assert status is None and seconds < 20 and lines[0] == "started"
    assert run_commands.outcome(status) == "timeout"


def test_gpu_check_keeps_multicast_off():
    script = "import os; print(os.environ['NCCL_NVLS_ENABLE'], os.environ['TORCH_SYMM_MEM_DISABLE_MULTICAST'])"
    status, _, lines = gpu_check.run_command([sys.executable, "-c", script], 30.0, echo=False)
    assert (status, lines) == (0, ["0 1"])


def fake_commands(monkeypatch, run):
    """Stages call run(command) instead of starting it: its exit status."""

    def run_command(command, limit_s, *, echo=True, **variables):
        return run(command), 1.0, []

    monkeypatch.setattr(gpu_check, "run_command", run_command)


def stage_rows(folder, *options):
    status = gpu_check.main(["--device", "cpu", "--out", str(folder), "--tree-hash", "t", *options])
    return status, json.loads((folder / "gpu_check.json").read_text())["rows"]


def test_gpu_check_trains_beside_the_tests(tmp_path, monkeypatch):
    """And writes what has ended while others run."""
    training = threading.Event()

    def written():
        path = tmp_path / "gpu_check.json"
        for _ in range(200):
            if path.exists() and '"training"' in path.read_text():
                return True
            time.sleep(0.1)
        return False

    def run(command):
        if "pytest" in command:
            (tmp_path / "junit_tests.xml").write_text("<testsuite><testcase classname='a' name='b'/></testsuite>")
            return 0 if training.wait(20) and written() else 1
        training.set()
        off = {"tp": 1, "train_ratio": 0.99, "held_out_ratio": 1.02, "recipe": "mxfp8"}
        runs = [{"tp": 1, "train_ratio": 1.0, "held_out_ratio": 1.0, "recipe": "bf16"}, off]
        log = {"steps": 200, "bound": 0.03, "runs": runs}
        (tmp_path / "training.json").write_text(json.dumps(log))
        return 0

    fake_commands(monkeypatch, run)
    status, rows = stage_rows(tmp_path, "--stages", "training", "tests")
    assert status == 0 and [row["stage"] for row in rows] == ["tests", "training"]
    expected = {"runs": 2, "steps": 200, "farthest": "mxfp8 tp 1", "off_bf16": 0.02, "bound": 0.03}
    assert rows[1]["detail"] == expected


def test_gpu_check_times_nothing_beside_other_work(tmp_path, monkeypatch):
    """And the demo trains by itself, last: beside other work its runs reach their limit."""
    running, order = set(), []

    def run(command):
        script = next(part for part in command if part.endswith(".py"))
        order.append(script)
        alone = not running
        running.add(script)
        time.sleep(0.1)
        running.discard(script)
        return 0 if alone or script.startswith("tests/") else 1

    fake_commands(monkeypatch, run)
    _, rows = stage_rows(tmp_path, "--stages", "demo", "kernels", "matrix", "matrix_tp2", "--ranks", "2")
    assert order[:2] == ["tests/distributed/run_overlap.py"] * 2
    assert order[2:] == ["benchmarks/kernels.py"] + ["examples/train_gpt.py"] * 5
    assert next(row["status"] for row in rows if row["stage"] == "kernels") == "passed"
    assert not set(gpu_check.BESIDE_TESTS) & {"demo", "kernels"}


def test_gpu_check_fails_when_no_curve_was_compared(tmp_path, monkeypatch):
    (tmp_path / "training.json").write_text("{}")  # of an earlier call
    fake_commands(monkeypatch, lambda command: 0)
    status, rows = stage_rows(tmp_path, "--stages", "training")
    assert status == 1 and rows[0]["status"] == "failed"


def test_gpu_check_starts_ranks_where_there_are_some(tmp_path, monkeypatch):
    commands = []
    fake_commands(monkeypatch, lambda command: commands.append(command) or 0)
    assert stage_rows(tmp_path, "--stages", "per_shard")[1][0]["status"] == "skipped" and not commands
    assert stage_rows(tmp_path, "--stages", "per_shard", "--ranks", "4")[1][0]["detail"] == {"tp": 4}
    assert "--nproc-per-node=4" in commands[0] and commands[0][-1] == "cpu"


@pytest.mark.parametrize("there", [True, False])
def test_gpu_check_compares_with_peers_that_are_installed(tmp_path, monkeypatch, there):
    commands = []
    fake_commands(monkeypatch, lambda command: commands.append(command) or 0)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: there or None)
    status, rows = stage_rows(tmp_path, "--stages", "llama", "peers")
    assert status == 0 and [row["stage"] for row in rows] == ["peers", "llama"]
    if there:
        assert [command[1] for command in commands] == ["benchmarks/peers.py", "benchmarks/llama.py"]
    else:
        assert not commands and [row["status"] for row in rows] == ["skipped"] * 2
        assert rows[0]["detail"] == {"reason": "transformer_engine is not installed"}
    assert not set(gpu_check.BY_NAME) & set(gpu_check.parse([]).stages)


def test_gpu_check_ends_before_the_machine_does(tmp_path, monkeypatch):
    args = gpu_check.parse(["--device", "cpu", "--tree-hash", "t", "--total-limit", "50", "--kernels-limit", "20"])
    assert gpu_check.limit("kernels", args) == 20 and 40 < gpu_check.limit("tests", args) < 50
    commands = []
    fake_commands(monkeypatch, lambda command: commands.append(command) or 0)
    status, rows = stage_rows(tmp_path, "--stages", "modules", "gemms", "--total-limit", "0")
    assert status == 1 and not commands and [row["status"] for row in rows] == ["timeout"] * 2
    # Ten minutes of a machine, with the time to stop a stage and to copy the results.
    assert gpu_check.TOTAL_S + run_commands.GRACE_S < 540


def test_gpu_check_adds_up_over_calls_on_one_tree(tmp_path, monkeypatch):
    fake_commands(monkeypatch, lambda command: 0)
    stage_rows(tmp_path, "--stages", "kernels", "gemms")
    assert [row["stage"] for row in stage_rows(tmp_path, "--stages", "gemms", "modules")[1]] == [
        "kernels",
        "modules",
        "gemms",
    ]
    assert [row["stage"] for row in stage_rows(tmp_path, "--stages", "gemms", "--tree-hash", "u")[1]] == ["gemms"]


def test_nothing_outlives_a_command(tmp_path):
    """Also what the command has started in a session of its own, as torchrun starts its ranks."""
    pid = tmp_path / "pid"
    script = (
        "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True); "
        f"open({str(pid)!r}, 'w').write(str(p.pid))"
    )
    assert gpu_check.run_command([sys.executable, "-c", script], 20.0, echo=False)[0] == 0
    state = Path(f"/proc/{pid.read_text()}/stat")

    def gone() -> bool:
        try:
            return ") Z " in state.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    end = time.monotonic() + 20  # a process that has been killed may take a moment
    while not gone() and time.monotonic() < end:
        time.sleep(0.05)
    assert gone()


def test_times_measured_twice():
    row = {"op": "RS", "shape": "proj 70b", "dtype": "fp8", "candidate": "ring", "gpu_us": 100.0}
    rows = [row | {"again_us": 101.0}, row | {"again_us": 99.0}, row | {"candidate": "fused", "again_us": 96.0}]
    said = tables_ranks.measured_twice([*rows, row | {"gpu_us": None, "again_us": 5.0}])
    assert "1.0% apart (median), 4.0% at RS proj 70b fp8, fused." in said
    assert tables_ranks.measured_twice([row]) == ""


def test_exchanges_of_two_trees(tmp_path):
    common = {"old_share": 0.956, "new_share": 0.9, "error": None}
    rows = [common | {"row": f"RS proj 70b fp8 8192 2048 8192 {name}"} for name in ("ring", "fused")]
    criteria = {"no share of the limit lower by more than 0.01": False, "pairs >= 2": True}
    write_fake(tmp_path, "two_trees_tp4", rows, old_tree="a" * 40, pairs=2, criteria=criteria)
    text = report.rendered(page("two_trees_tp4"), tmp_path)
    assert "| RS | proj 70b | fp8 | 8192, 2048, 8192 | 0.956, 0.900 | 0.956, 0.900 |" in text
    assert "No share of the limit lower by more than 0.01: no; pairs >= 2: yes." in text and "`aaaaaaaaaaaa`" in text


def test_verbs_beside_their_peers(tmp_path):
    """Slower than a peer is bold, torch's scatters of symmetric inputs are not compared, failures are named."""
    who = {"shape": "fc1 8b", "dtype": "bf16", "gpu_us": 100.0, "against_nccl": 0.874, "against_symm_mem": 1.25}
    who |= {"verb": "all_gather", "error": None}
    rows = [who | {"candidate": "te_lite"}, who | {"candidate": "te_lite graph", "gpu_us": 90.0, "against_nccl": None}]
    rows += [who | {"candidate": "symm_mem symmetric", "gpu_us": 80.0}]
    wrong = who | {"verb": "reduce_scatter", "gpu_us": None, "against_nccl": None, "against_symm_mem": None}
    rows += [who | {"verb": "reduce_scatter", "candidate": "te_lite"}]
    rows += [who | {"verb": "reduce_scatter", "candidate": "symm_mem symmetric", "gpu_us": 1.0}]
    rows += [wrong | {"candidate": "symm_mem symmetric graph", "error": "wrong: by 50"}]
    write_fake(tmp_path, "verbs", rows, tp=4)
    text = report.rendered(page("verbs"), tmp_path)
    assert "| all_gather | fc1 8b | bf16 | 100 | **0.87** | 1.25 | 90 |  | 1.25 |" in text
    assert "memory already: all_gather 0.80 to 0.80." in text
    assert "failed: reduce_scatter fc1 8b, symm_mem symmetric graph (wrong: by 50)." in text


def test_megatron_over_ranks(tmp_path):
    row = {"candidate": "te_lite", "recipe": "delayed", "overlap": "on", "error": None, "tokens_s": 1000.4}
    row |= {"spread": 0.05, "over_te": 1.25, "speedup": 0.876, "off": [0.1, 0.7, 0.1], "peak_gib": 6.29}
    cut = {"candidate": "te", "recipe": "bf16", "overlap": "on", "error": "the time was up", "peak_gib": None}
    sizes = {"tp": 4, "pp": 1, "dp": 1, "micro_batches": 1, "distributed_optimizer": True, "layers": 4, "steps": 40}
    sizes |= {"micro_batch": 1, "sequence": 4096, "peers": {"transformer_engine": "2.20.2"}, "left_out": []}
    write_fake(tmp_path, "megatron_tp4_pp1", [row, cut], **sizes)
    text = report.rendered(page("megatron_tp4_pp1"), tmp_path)
    assert "| te_lite | delayed | on | 1000 | 0.05 | 1.25 | 0.88 | 0.70 (step 2) | 0.41 | 6.3 |" in text
    assert "| te\\* | bf16 | on |  |  |  |  |  |  |  |" in text and "\\* te bf16, overlap on: the time was up." in text
    assert "distributed optimizer" in text and "4096 tokens a step" in text


def test_experts_over_ranks(tmp_path):
    runs = [{"recipe": "bf16", "ep": 1, "train_ratio": 1.0, "held_out_ratio": 1.0, "held_out_loss": 1.5}]
    runs += [runs[0] | {"recipe": "current", "ep": 2, "train_ratio": 0.98, "held_out_loss": 1.49}]
    log = {"device": "cuda", "steps": 200, "unigram_entropy": 3.08, "worst": 0.02, "bound": 0.03, "runs": runs}
    (tmp_path / "moe.json").write_text(json.dumps(log | {"options": {"experts": 8, "top_k": 2}}))
    text = report.rendered(page("moe"), tmp_path)
    assert "| bf16 | 1.500 (0.0%) |  |" in text and "| current |  | 1.490 (2.0%) |" in text and "above 3%" in text
