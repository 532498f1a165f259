"""The model of the overlap schedules (benchmarks/overlap_times.py): its laws, its errors, the tables made of it."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import overlap_model, overlap_times
from benchmarks.overlap_times import (
    ITEMSIZE,
    Machine,
    Problem,
    collective,
    copies,
    fused,
    gemm,
    limit,
    push_others,
    ring,
    us,
)
from te_lite.overlap.ring import cuts

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = (collective, ring, fused)
# tokens, k, n: large, short, narrow, ragged against every tile, and less than a tile a rank.
SIZES = ((8192, 8192, 2560), (2048, 4096, 7168), (4096, 1024, 320), (1008, 584, 1000), (256, 512, 64))
PROBLEMS = [
    Problem(op, tp, *size, dtype)
    for op, tp, size, dtype in itertools.product(("AG", "RS"), (2, 4, 8, 16), SIZES, ("bf16", "fp8"))
]
# Nothing but the tiles and launches takes time.
TILES_ONLY = replace(
    Machine(),
    bandwidth=math.inf,
    start=0.0,
    transfer=0.0,
    flag=0.0,
    wait=0.0,
    nccl=0.0,
    memory=math.inf,
    reduction=math.inf,
)
QKV = Problem("AG", 4, 8192, 8192, 2560, "bf16")

# By tp; docs/notebook/overlap-model.md states the errors. Those at tp 2 were set before anything was measured there.
# The copies of fc1 small in fp8 took 49 to 52 us in five runs of the same code, so 0.04 would be a matter of luck.
BOUNDS = {
    4: {"gemm": 0.05, "copies": 0.06, "collective": 0.06, "ring": 0.12, "fused": 0.08},
    2: {"gemm": 0.05, "copies": 0.08, "collective": 0.1, "ring": 0.12, "fused": 0.1},
}
# Rows that the model misses, as docs/notebook/overlap-model.md says: failures that are expected, under the same bounds.
MISSED = [
    (2, "ring", "AG fc1 small bf16"),
    (2, "ring", "AG fc1 small fp8"),
    (2, "ring", "RS fc2 small fp8"),
    (4, "fused", "RS fc2 small fp8"),
]


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


def test_schedules_without_links_are_their_gemms() -> None:
    """A scatter's are cut by rank and by piece; a gather's fill up each other's waves, so cutting costs little."""
    for p in PROBLEMS:
        if p.op == "RS":
            pieces = [p.rows // cut for cut in cuts(p.tp, p.rows, p.n, p.k * ITEMSIZE[p.dtype]) for _ in range(cut)]
            took = sum(gemm(TILES_ONLY, p, rows) for rows in (*pieces, p.rows))
            assert ring(TILES_ONLY, p) == pytest.approx(took + TILES_ONLY.launch)
        else:
            took = p.tp * gemm(TILES_ONLY, p, p.rows)
            assert gemm(TILES_ONLY, p) <= ring(TILES_ONLY, p) <= took * (1 + 1e-9)
    whole_waves = Problem("AG", 4, 4 * 128 * 11, 8192, 256 * 12, "bf16")
    assert ring(TILES_ONLY, whole_waves) == pytest.approx(4 * gemm(TILES_ONLY, whole_waves, 128 * 11))
    assert ring(TILES_ONLY, QKV) > 1.05 * gemm(TILES_ONLY, QKV)  # a tile that fills the waves of a shard is slower
    short = Problem("AG", 8, 8192, 4096, 10240, "bf16")
    assert ring(TILES_ONLY, short) < 0.95 * short.tp * gemm(TILES_ONLY, short, short.rows)


def test_waves() -> None:
    """132 tiles of 128 x 256 take one wave; one more takes at least a small tile longer."""
    full, more = (Problem("AG", 2, 128 * rows, 16384, 256 * 12, "bf16") for rows in (11, 12))
    one = overlap_times.tile(Machine(), full, 128, 256)
    assert gemm(Machine(), full) == pytest.approx(Machine().launch + one)
    assert gemm(Machine(), more) > 1.2 * gemm(Machine(), full)  # 1.09 times the work


def test_ring_timeline_by_hand() -> None:
    """tp 2, times in us: a cut GEMM of 10 and a push of 25 or 4 + 1 + 2, the shapes chosen for round numbers."""
    p = Problem("AG", 2, 256, 1024, 256, "bf16")
    machine = replace(TILES_ONLY, start=2.0, transfer=1.0, wait=0.5)
    cut = gemm(machine, p, p.rows)
    for push in (25.0, cut / 2):
        machine = replace(machine, bandwidth=p.shard_bytes / (push * 1e3))
        there = 0.5 + 2.0 + 1.0 + push  # room, to the copy stream, a push and its flag
        assert ring(machine, p) == pytest.approx(max(0.5 + cut, there) + 0.5 + cut)
    rs = replace(p, op="RS")
    machine = replace(machine, bandwidth=rs.shard_bytes / 25e3)
    # The push begins when the other's rows are done; the own ones are computed meanwhile.
    assert ring(machine, rs) == pytest.approx(0.5 + cut + max(2.0 + 1.0 + 25.0, cut) + 0.5 + machine.launch)
    assert push_others(machine, rs) == (pytest.approx(0.5 + cut), [[pytest.approx(0.5 + cut + 28.0)]])


def test_pieces_of_a_scatter() -> None:
    """A piece sets all the flags of its share of the rows, and copies begin with the first piece."""
    p = Problem("RS", 4, 8192, 1024, 8192, "bf16")
    pieces = cuts(4, p.rows, p.n, 2 * p.k)
    assert pieces == (2, 1, 2)
    _, flags = push_others(Machine(), p)
    (first, second), (whole, same), (third, last) = flags
    assert first < second < whole == same < third < last
    half = gemm(Machine(), p, p.rows // 2)
    moved = Machine().start + Machine().transfer + us(p.shard_bytes / 2, Machine().bandwidth)
    assert first == pytest.approx(Machine().wait + half + moved)


def test_fused_gather_by_hand() -> None:
    """33 pairs of tiles a shard for 66 clusters. Half of them have nothing to do until rank+1's shard comes."""
    p = Problem("AG", 4, 4 * 256, 4096, 256 * 33, "bf16")
    each = overlap_times.tile(TILES_ONLY, p, 128, 256)
    assert fused(TILES_ONLY, p) == pytest.approx(TILES_ONLY.launch + 2 * each)
    # Shard i comes i / 2 tiles after the kernel's begin: half of the clusters end at 2, the others at 2.5.
    halves = replace(TILES_ONLY, start=TILES_ONLY.launch, bandwidth=us(p.shard_bytes, each / 2))
    assert fused(halves, p) == pytest.approx(TILES_ONLY.launch + 2.5 * each)
    slow = replace(TILES_ONLY, bandwidth=1.0)
    assert fused(slow, p) == pytest.approx(us(3 * p.shard_bytes, 1.0) + each)


def test_fused_gather_takes_the_kernels_tiles() -> None:
    """Of fc1 small 8 x 32 pairs of 224 columns, 4 rounds; of 256 columns they would be as many."""
    p = Problem("AG", 4, 2048, 4096, 7168, "bf16")
    narrow = overlap_times.tile(TILES_ONLY, p, 128, 224)
    assert fused(TILES_ONLY, p) == pytest.approx(TILES_ONLY.launch + 4 * narrow)


def test_fused_scatter_by_hand() -> None:
    """A block of 3 rounds of others' tiles and one of own ones, which wait for the block with their products ready."""
    p = Problem("RS", 4, 4 * 256, 4096, 256 * 66, "bf16")
    each = overlap_times.tile(TILES_ONLY, p, 128, 256)
    assert fused(TILES_ONLY, p) == pytest.approx(TILES_ONLY.launch + 4 * each)
    slots = us(256 * 256 * 66 * overlap_times.WIRE * 3, 1000.0)
    assert fused(replace(TILES_ONLY, memory=1000.0), p) == pytest.approx(TILES_ONLY.launch + 4 * each + slots)
    assert fused(replace(TILES_ONLY, flag=each), p) == pytest.approx(TILES_ONLY.launch + 4.75 * each)
    slow = replace(TILES_ONLY, bandwidth=1.0)
    sent = us(3 * p.shard_bytes, 1.0 * slow.stores)
    assert fused(slow, p) == pytest.approx(TILES_ONLY.launch + each + sent)


def test_fused_scatter_has_own_pairs_some_blocks_behind() -> None:
    """Two blocks of 99 others' pairs and 33 own ones, which follow two behind: none is left to hide the last flag."""
    p = Problem("RS", 4, 4 * 512, 4096, 256 * 33, "bf16")
    each = overlap_times.tile(TILES_ONLY, p, 128, 256)
    assert fused(TILES_ONLY, p) == pytest.approx(TILES_ONLY.launch + 4 * each)
    # Own ones of block 1 are multiplied in round 4, beside those of block 0, until the flag of what round 3 has made.
    assert fused(replace(TILES_ONLY, flag=each), p) == pytest.approx(TILES_ONLY.launch + 4.75 * each)


@pytest.mark.parametrize("op", ["AG", "RS"])
def test_a_ring_where_there_is_no_kernel(op: str) -> None:
    p = Problem(op, 16, 8192, 4096, 4096, "bf16")
    assert fused(Machine(), p) == ring(Machine(), p)


def measured(tp: int, **changes: float) -> dict[str, overlap_model.Pairs]:
    contents = [content for content in overlap_model.read(overlap_model.MEASURED) if content["tp"] == tp]
    return overlap_model.compare(contents, lambda tp: replace(overlap_model.on_one_host(tp), **changes))


@pytest.mark.parametrize(("tp", "candidate"), [(tp, candidate) for tp in BOUNDS for candidate in BOUNDS[tp]])
def test_error_against_the_committed_rows(tp: int, candidate: str) -> None:
    pairs, bound = measured(tp)[candidate], BOUNDS[tp][candidate]
    assert len(pairs) >= 16
    assert overlap_model.errors(pairs)[0] < bound / 2
    missed = {f"{row} tp {tp}" for known, name, row in MISSED if (known, name) == (tp, candidate)}
    _, worst, where = overlap_model.errors({row: pair for row, pair in pairs.items() if row not in missed})
    assert worst < bound, where


def test_error_of_partial_sums_in_fp8() -> None:
    """Measured at tp 2 alone, by reduce-scatters, and no constant is fitted to them."""
    pairs = measured(2)["fused narrow"]
    assert len(pairs) == 8 and overlap_model.errors(pairs)[0] < 0.05 and overlap_model.errors(pairs)[1] < 0.1


@pytest.mark.xfail(strict=True, reason="the model misses this row: docs/notebook/overlap-model.md, Not explained")
@pytest.mark.parametrize(("tp", "candidate", "row"), MISSED)
def test_error_of_a_row_that_is_missed(tp: int, candidate: str, row: str) -> None:
    name = f"{row} tp {tp}"
    assert overlap_model.errors({name: measured(tp)[candidate][name]})[1] < BOUNDS[tp][candidate]


def test_error_check_can_fail() -> None:
    """With copies that begin at once, long waits or fewer SMs the bounds do not hold."""
    found = {name: overlap_model.errors(pairs)[1] for name, pairs in measured(4).items() if pairs}
    for candidate, change in (("copies", {"start": 0.0}), ("ring", {"wait": 20.0}), ("gemm", {"sms": 100})):
        wrong = measured(4, **change)[candidate]
        assert overlap_model.errors(wrong)[1] > max(BOUNDS[4][candidate], found[candidate]), candidate


def test_rows_of_several_files(tmp_path: Path) -> None:
    """Each file has its tp; one that is not there is passed over."""
    row = {"op": "RS", "shape": "s", "dtype": "fp8", "m": 8192, "k": 1024, "n": 8192, "candidate": "gemm"}
    paths = [tmp_path / f"{tp}.json" for tp in (4, 2, 8)]
    for path in paths[:2]:
        path.write_text(json.dumps({"tp": int(path.stem), "rows": [row | {"gpu_us": 100.0}, row | {"gpu_us": None}]}))
    found = overlap_model.compare(overlap_model.read(paths))
    assert list(found["gemm"]) == ["RS s fp8 tp 4", "RS s fp8 tp 2"]
    assert [row[:4] for row in overlap_model.error_rows(found)] == [["gemm", "RS", tp, "1"] for tp in ("2", "4")]


def test_document_has_these_numbers() -> None:
    text = (ROOT / "docs" / "notebook" / "overlap-model.md").read_text()
    found = overlap_model.compare(overlap_model.read(overlap_model.MEASURED))
    played = overlap_model.played_rows(overlap_model.read([overlap_model.RESULTS / "overlap_played.json"]))
    for row in (*overlap_model.error_rows(found), *played, *overlap_model.sweep(8192), *overlap_model.edges()):
        line = "| " + " | ".join(row) + " |"
        assert line in text, f"overlap-model.md lacks {line}: bring over what benchmarks/overlap_model.py prints"


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    assert overlap_model.main(["--tokens", "512", "--plot", str(tmp_path / "model.png")]) == 0
    assert "AG qkv 70b bf16 tp 4" in capsys.readouterr().out
    assert (tmp_path / "model.png").stat().st_size > 10_000
