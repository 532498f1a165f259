"""The model of the overlap schedules (benchmarks/overlap_times.py): its laws, its errors, the tables made of it."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import overlap_model, overlap_times
from benchmarks.overlap_times import Machine, Problem, collective, copies, fused, gemm, limit, ring, us

ROOT = Path(__file__).resolve().parents[1]
SCHEDULES = (collective, ring, fused)
# tokens, k, n: large, short, narrow, ragged against every tile, and less than a tile a rank.
SIZES = ((8192, 8192, 2560), (2048, 4096, 7168), (4096, 1024, 320), (1008, 584, 1000), (256, 512, 64))
PROBLEMS = [
    Problem(op, tp, *size, dtype)
    for op, tp, size, dtype in itertools.product(("AG", "RS"), (2, 4, 8, 16), SIZES, ("bf16", "fp8"))
]
# Nothing but the tiles takes time.
TILES_ONLY = Machine(bandwidth=math.inf, transfer=0.0, wait=0.0, nccl=0.0, memory=math.inf, reduction=math.inf)
QKV = Problem("AG", 4, 8192, 8192, 2560, "bf16")

# docs/overlap.md states the errors. Outliers are measured far above what the model says that their kernel should reach,
# for reasons that it does not contain.
BOUNDS = {"gemm": 0.05, "copies": 0.04, "collective": 0.04, "ring": 0.1, "fused": 0.1}
OUTLIERS = {"fused": ("AG qkv 70b", "RS ")}


@pytest.mark.parametrize("schedule", [*SCHEDULES, copies, limit])
def test_more_bandwidth_never_costs(schedule) -> None:
    for p in PROBLEMS:
        times = [schedule(replace(Machine(), bandwidth=b), p) for b in (10.0, 45.0, 200.0, 389.0, 1e3, math.inf)]
        assert times == sorted(times, reverse=True), (p, times)


def test_slow_links_decide() -> None:
    """At 1 GB/s the bytes are all there is: within 10% of them, so time falls strictly with bandwidth."""
    for schedule in SCHEDULES:
        slow = replace(Machine(), bandwidth=1.0, nccl_share=1.0)
        assert schedule(slow, QKV) == pytest.approx(us(3 * QKV.shard_bytes, 1.0), rel=0.1)


@pytest.mark.parametrize("bandwidth", [45.0, 389.0, 1e4])
def test_nothing_beats_the_limit(bandwidth: float) -> None:
    machine = replace(Machine(), bandwidth=bandwidth)
    for p in PROBLEMS:
        for schedule in (*SCHEDULES, copies):
            floor = limit(machine, p) if schedule is not copies else us((p.tp - 1) * p.shard_bytes, bandwidth)
            assert schedule(machine, p) >= floor, (schedule, p)


def test_the_limit_is_near() -> None:
    """Or any small number would be a bound."""
    long = Problem("AG", 4, 8192, 8192, 14336, "bf16")
    assert limit(Machine(), long) > 0.95 * fused(Machine(), long)


def test_ring_without_links_is_its_cut_gemms() -> None:
    for p in PROBLEMS:
        pieces = p.tp * gemm(TILES_ONLY, p, p.rows)
        assert ring(TILES_ONLY, p) == pytest.approx(pieces + TILES_ONLY.launch)
        assert pieces >= gemm(TILES_ONLY, p)
    assert ring(TILES_ONLY, QKV) > 1.05 * gemm(TILES_ONLY, QKV)  # cuts cost whole waves


def test_waves() -> None:
    """132 tiles of 128 x 256 take one wave; one more takes at least a small tile longer."""
    full, more = (Problem("AG", 2, 128 * rows, 16384, 256 * 12, "bf16") for rows in (11, 12))
    one = overlap_times.tile(Machine(), full, 128, 256)
    assert gemm(Machine(), full) == pytest.approx(Machine().launch + one)
    assert gemm(Machine(), more) > 1.2 * gemm(Machine(), full)  # 1.09 times the work


def test_ring_timeline_by_hand() -> None:
    """tp 2, times in us: a cut GEMM of 10 and a push of 25 or 4 + 1, the shapes chosen for round numbers."""
    p = Problem("AG", 2, 256, 1024, 256, "bf16")
    machine = replace(TILES_ONLY, transfer=1.0, wait=0.5)
    cut = gemm(machine, p, p.rows)
    for push in (25.0, cut / 2):
        machine = replace(machine, bandwidth=p.shard_bytes / (push * 1e3))
        there = 0.5 + 1.0 + push  # room, a push and its flag
        assert ring(machine, p) == pytest.approx(max(0.5 + cut, there) + 0.5 + cut + machine.launch)
    rs = replace(p, op="RS")
    machine = replace(machine, bandwidth=rs.shard_bytes / 25e3)
    # The push begins when the other's rows are done; the own ones are computed meanwhile.
    assert ring(machine, rs) == pytest.approx(0.5 + cut + max(1.0 + 25.0, cut) + 0.5 + machine.launch)


def test_pieces_of_the_fused_gather() -> None:
    """Where links decide, finer pieces are sooner of use, unless each costs as much as to move it."""
    free = [fused(replace(Machine(), transfer=0.0, bandwidth=200.0), QKV, pieces) for pieces in (1, 2, 4, 8)]
    assert free == sorted(free, reverse=True) and free[3] < 0.95 * free[0]
    assert fused(Machine(), QKV, 8) > 1.2 * fused(Machine(), QKV, 2)


def test_fused_scatter_adds_what_the_others_store() -> None:
    p = Problem("RS", 4, 8192, 2048, 8192, "bf16")
    summed = us(p.rows * p.n * overlap_times.WIRE * 3, Machine().reduction)
    apart = replace(Machine(), bandwidth=math.inf)
    assert fused(apart, p) - fused(replace(apart, reduction=math.inf), p) == pytest.approx(summed, rel=0.1)


def measured() -> dict[str, overlap_model.Pairs]:
    content = json.loads((ROOT / "benchmarks" / "results" / "overlap_gemms.json").read_text())
    return overlap_model.compare(Machine(), content)


@pytest.mark.parametrize("candidate", BOUNDS)
def test_error_against_the_committed_rows(candidate: str) -> None:
    pairs = measured()[candidate]
    outliers = {name for name in pairs if name.startswith(OUTLIERS.get(candidate, ()))}
    held = {name: pair for name, pair in pairs.items() if name not in outliers}
    assert len(held) >= 6
    median, worst, where = overlap_model.errors(held)
    assert worst < BOUNDS[candidate], where
    assert median < BOUNDS[candidate] / 2
    for name in outliers:
        predicted, took = pairs[name]
        assert predicted < took, f"{name} takes {took} us, less than predicted: it is no outlier any more"


def test_error_check_can_fail() -> None:
    """With GEMMs that know no waves or pushes that cost nothing the bounds do not hold."""
    found = {name: overlap_model.errors(pairs)[1] for name, pairs in measured().items()}
    content = json.loads((ROOT / "benchmarks" / "results" / "overlap_gemms.json").read_text())
    for candidate, change in (("copies", {"transfer": 0.0}), ("ring", {"memory": math.inf}), ("gemm", {"sms": 100})):
        wrong = overlap_model.compare(replace(Machine(), **change), content)[candidate]
        assert overlap_model.errors(wrong)[1] > max(BOUNDS[candidate], found[candidate]), candidate


def test_document_has_these_numbers() -> None:
    text = (ROOT / "docs" / "overlap.md").read_text()
    for row in (*overlap_model.error_rows(measured()), *overlap_model.sweep(8192)):
        line = "| " + " | ".join(row) + " |"
        assert line in text, f"docs/overlap.md lacks {line}; run benchmarks/overlap_model.py and bring its tables over"


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    assert overlap_model.main(["--tokens", "512", "--plot", str(tmp_path / "model.png")]) == 0
    assert "AG qkv 70b bf16 tp 4" in capsys.readouterr().out
    assert (tmp_path / "model.png").stat().st_size > 10_000
