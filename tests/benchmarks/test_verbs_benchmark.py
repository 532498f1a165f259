"""benchmarks/verbs.py on CPU ranks; started by launch() this file is the ranks of its second test."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_check, ranks, report, result_files, verbs
from benchmarks.recipes import RanksClock
from te_lite.testing.distributed import init_ranks, launch, leave_ranks

ROOT = Path(__file__).resolve().parents[2]
BEHIND_GEMM = "beside a GEMM"


def test_smoke(tmp_path):
    """Every verb is compared with NCCL's way, its numbers are right, and what cannot run here is said."""
    options = ("--device", "cpu", "--rounds", "4", "--out", str(tmp_path))
    printed = launch(ROOT / "benchmarks" / "verbs.py", *options, ranks=2, timeout=120)
    assert "symm_mem is left out: it needs GPUs" in printed
    content = json.loads((tmp_path / "verbs.json").read_text())
    rows = result_files.keyed(content)
    calls = dict.fromkeys((row["verb"], row["dtype"]) for row in rows.values())
    gathers, scatters = ("all_gather_linear", "all_gather_linear, 2 weights"), ("linear_reduce_scatter",)
    expected = [(verb, dtype) for dtype in ("bf16", "fp8") for verb in gathers]
    expected += [("all_gather", "bf16"), (f"all_gather {BEHIND_GEMM}", "bf16")]
    expected += [(verb, dtype) for dtype in ("bf16", "fp8") for verb in scatters]
    expected += [("reduce_scatter", "bf16"), (f"reduce_scatter {BEHIND_GEMM}", "bf16")]
    assert list(calls) == expected
    symmetric = {verb for verb, _, _, candidate in rows if candidate.startswith("symm_mem symmetric")}
    assert symmetric == {"all_gather", f"all_gather {BEHIND_GEMM}"}, "torch's scatters of such inputs are not trusted"
    for (verb, _, dtype, candidate), row in rows.items():
        assert row["error"] is None
        if candidate.startswith("symm_mem") or candidate.endswith("graph"):
            assert row["left_out"] and row["gpu_us"] is row["against_nccl"] is None
            continue
        assert row["left_out"] is None and row["gpu_us"] > 0 and row["host_us"] > 0 and row["spread"] is not None
        assert row["against_nccl"] > 0 and (row["against_nccl"] == 1 or candidate != "nccl")
        assert row["against_symm_mem"] is None
        if candidate == "gemm":
            assert BEHIND_GEMM in verb
        elif verb.startswith("all_gather") and "linear" not in verb:
            assert row["relative_error"] == 0
        else:
            assert 0 < row["relative_error"] < (0.15 if dtype == "fp8" else 0.01)


def test_a_candidate_that_fails_on_one_rank_costs_its_row(tmp_path):
    """The others are timed on all ranks. Wrong results are an error, also where one rank alone has them."""
    launch(__file__, str(tmp_path), ranks=2, timeout=120)
    for rank in range(2):
        rows = {row["candidate"]: row for row in json.loads((tmp_path / f"{rank}.json").read_text())}
        assert "rank 1: RuntimeError: not here" in rows["raises"]["error"] and rows["raises"]["gpu_us"] is None
        assert "wrong: a relative error of" in rows["shifted"]["error"] and "nan" in rows["nan"]["error"]
        assert "must be [" in rows["short"]["error"]
        assert all(rows[name]["relative_error"] is None for name in ("raises", "shifted", "nan", "short"))
        assert rows["nccl"]["gpu_us"] > 0 and rows["te_lite"]["gpu_us"] > 0
        assert not rows["nccl"]["error"] and not rows["te_lite"]["error"] and not rows["symm_mem"]["error"]
        assert rows["symm_mem"]["left_out"] == "none today"


def fails_on_one_rank(folder: Path) -> None:
    rank, ranks, device = init_ranks("cpu")
    torch.manual_seed(rank)
    verbs.te.initialize_ub([64, 48], ranks, device=device)
    call = verbs.linear(verbs.SMOKE_SHAPES[0], "bf16", device)
    right = call.ways["nccl"]

    def changed(change):
        def step():
            (y,) = right()
            return [change(y) if dist.get_rank() else y]

        return step

    def raises(y):
        raise RuntimeError("not here")

    call.ways["raises"] = changed(raises)
    call.ways["shifted"] = changed(lambda y: y.roll(1, 0))
    call.ways["nan"] = changed(lambda y: y.index_fill(0, torch.tensor([3]), float("nan")))
    call.ways["short"] = changed(lambda y: y[1:])
    with torch.no_grad():
        rows = verbs.compare(call, "none today", RanksClock(device), 2)
    (folder / f"{rank}.json").write_text(json.dumps(rows))
    verbs.te.destroy_ub()
    leave_ranks()


def test_one_wrong_tile_is_seen():
    """A tile of the largest product, whose error in all rows together would be small."""
    exact = torch.randn(1024, 2048)
    right = exact.bfloat16()
    allowed = 2 * verbs.relative_error([right], [exact])
    wrong = right.clone()
    wrong[128:256, 256:512] = wrong[:128, 256:512]
    assert allowed < 2 * 2**-9 and verbs.relative_error([wrong], [exact]) > 10 * allowed


@pytest.mark.parametrize(("wanted", "why"), [(True, "it needs GPUs"), (False, "--no-symm-mem")])
def test_symmetric_memory_is_left_out_without_asking_the_ranks(wanted, why):
    assert verbs.symm_mem_refusal(1024, wanted, torch.device("cpu")) == why


def test_multicast_is_off(monkeypatch):
    for name in ranks.SAFE_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    found = {}
    monkeypatch.setattr(ranks, "init_ranks", lambda *_: found.update(os.environ) or (0, 1, torch.device("cpu")))
    with pytest.raises(SystemExit, match="verbs on 1 rank"):
        verbs.main(["--device", "cpu"])
    assert found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1" and found["NCCL_NVLS_ENABLE"] == "0"
    source = Path(verbs.__file__).read_text()
    assert "multimem" not in source


def test_gpu_check_has_a_stage(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu_check, "run_command", lambda command, *_, **__: commands.append(command) or (0, 1.0, []))
    options = ["--device", "cpu", "--out", str(tmp_path), "--tree-hash", "t", "--stages", "verbs"]
    assert gpu_check.main([*options, "--ranks", "4"]) == 0
    assert "--nproc-per-node=4" in commands[0] and "benchmarks/verbs.py" in commands[0]
    assert "verbs" in gpu_check.parse(["--tree-hash", "t"]).stages


def test_summary_has_a_line_for_each_call():
    row = {"verb": "all_gather", "shape": "fc1 8b", "dtype": "bf16", "gpu_us": 12.0, "error": None, "left_out": None}
    rows = [row | {"candidate": "nccl"}, row | {"candidate": "te_lite", "gpu_us": None, "error": "E: no"}]
    text = verbs.summary([*rows, row | {"candidate": "symm_mem", "gpu_us": None, "left_out": "it needs GPUs"}])
    lines = text.splitlines()
    assert len(lines) == 3 and report.number(12.0) in lines[1] and "E: no" in lines[1]
    assert lines[2] == "symm_mem is left out: it needs GPUs"


if __name__ == "__main__":
    fails_on_one_rank(Path(sys.argv[1]))
