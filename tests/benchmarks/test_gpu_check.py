"""benchmarks/gpu_check.py: stages, their limits, and what a results file says of them."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import commands as run_commands
from benchmarks import gpu_check, result_files

CONFTEST = "from tests.conftest import pytest_collection_modifyitems, pytest_configure\n"


def test_gpu_check_counts_tests_and_fails_when_one_fails(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
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


def test_megatron_sees_all_gpus(tmp_path, monkeypatch):
    """It gives each of its processes one; a benchmark of modules sees one by itself."""
    seen = {}

    def run_command(command, limit_s, *, echo=True, **variables):
        seen[Path(command[1]).stem] = variables["CUDA_VISIBLE_DEVICES"]
        return 0, 1.0, []

    monkeypatch.setattr(gpu_check, "run_command", run_command)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    args = gpu_check.parse(["--device", "cpu", "--out", str(tmp_path), "--tree-hash", "t"])
    for name, script in (("megatron", "megatron_gpt"), ("modules", "")):
        gpu_check.benchmark_stage(name, args, script)
    assert seen == {"megatron_gpt": "2,3", "modules": "2"}


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
            with open(tmp_path / "outcomes_tests.txt", "a") as passed:
                passed.write("passed a::b\n")
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


SEVEN = """
import pathlib, pytest

@pytest.mark.parametrize("n", range(7))
def test_n(n):
    ran = pathlib.Path(__file__).with_name(f"ran_{n}")
    again, _ = ran.exists(), ran.write_text("")
    assert (again or n != 5) and n != 6
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_rest_of_the_tests(tmp_path, workers):
    """Those that have passed are not run again; the counts are of both calls; what failed once is named."""
    (tmp_path / "test_seven.py").write_text(SEVEN)
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def counts(*more, only=""):
        arguments = f"{tmp_path / 'test_seven.py'} {only}"
        status, [row] = stage_rows(
            tmp_path, "--stages", "tests", "--pytest-args", arguments, "--workers", workers, *more
        )
        detail, tests = row["detail"], json.loads((tmp_path / "gpu_check.json").read_text())["tests"]
        assert status == 1 and row["status"] == "failed"
        assert all(tests[name] == detail[name] for name in tests) and detail["errors"] == 0
        named = [[name.rpartition("::")[2] for name in detail[words]] for words in ("failures", "failed_once")]
        assert len(named[0]) == detail["failed"]
        return detail["passed"], sorted(named[0]), sorted(named[1])

    assert counts() == (5, ["test_n[5]", "test_n[6]"], [])
    assert counts("--rest") == (6, ["test_n[6]"], ["test_n[5]"])
    assert counts("--rest") == (6, ["test_n[6]"], ["test_n[5]"])
    assert counts("--rest", only="-k 6") == (0, ["test_n[6]"], []), "of other arguments nothing has passed"


def test_what_failed_and_was_not_run_again_has_failed(tmp_path, monkeypatch):
    """Where the time is up before it, and before pytest has written its report."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_two.py").write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    options = ["--stages", "tests", "--pytest-args", str(tmp_path), "--workers", "0"]
    assert stage_rows(tmp_path, *options)[0] == 1

    def run(command):
        with open(tmp_path / "outcomes_tests.txt", "a") as outcomes:
            outcomes.write("failed a.py::c\n")
        return 0

    fake_commands(monkeypatch, run)
    status, [row] = stage_rows(tmp_path, *options, "--rest")
    assert status == 1 and row["status"] == "failed" and (row["detail"]["failed"], row["detail"]["errors"]) == (2, 0)


def test_what_was_interrupted_has_not_passed(tmp_path):
    """Also where another process runs the tests: pytest's report has the one under way among those that passed."""
    interrupt = (
        "def pytest_runtest_logreport(report):\n"
        "    if hasattr(report, 'node') and 'test_b' in report.nodeid: raise KeyboardInterrupt\n"
    )
    (tmp_path / "conftest.py").write_text(CONFTEST + interrupt)
    file = tmp_path / "test_two.py"
    file.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n")
    _, [row] = stage_rows(tmp_path, "--stages", "tests", "--pytest-args", str(file), "--workers", "1")
    assert row["status"] == "failed" and row["detail"]["passed"] == 1


def test_no_test_is_left(tmp_path):
    file = tmp_path / "test_one.py"
    file.write_text("def test_it(): pass\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ["--stages", "tests", "--pytest-args", str(file), "--workers", "0"]
    for more in ([], ["--rest"]):
        status, [row] = stage_rows(tmp_path, *options, *more)
        assert status == 0 and row["detail"]["passed"] == 1
