"""Ranks whose calls do not fit, without userbuffers: all raise the same error, nobody dies and nobody waits."""

from pathlib import Path

import pytest

from te_lite.testing.distributed import rank_device_params
from tests.distributed.faults import VICTIM, outputs, start_ranks
from tests.distributed.run_unlike_ranks import KINDS
from tests.harness import RECIPES

SCRIPT = Path(__file__).with_name("run_unlike_ranks.py")
LIMIT_S = 120  # until the ranks have ended, on a busy machine
SOON_S = 10  # until they raise
SAME = "RuntimeError: the ranks of a group do not run the same: ranks "


def lines_of(suite: str, ranks: int, device: str) -> dict[str, str]:
    """case -> what every rank saw, which is the same on all but for the seconds."""
    checks = {} if device == "cpu" else {"TE_LITE_CHECK_RANKS": "1"}  # on the CPU they are always on
    ended = start_ranks(suite, ranks, device, limit=LIMIT_S, script=SCRIPT, **checks)
    assert [one.status for one in ended] == [0] * ranks, outputs(ended)
    found = [{name: what.partition("] ")[2] for name, what in one.lines if what.startswith("[")} for one in ended]
    assert all(one == found[0] for one in found), outputs(ended)
    seconds = [float(what[1:].partition(" s]")[0]) for one in ended for _, what in one.lines if what.startswith("[")]
    assert max(seconds) < SOON_S and all(one.saw("alike") == ["ok"] for one in ended), outputs(ended)
    return found[0]


def check_tokens(found: dict[str, str], ranks: int) -> None:
    others = [rank for rank in range(ranks) if rank != VICTIM]
    for kind in KINDS:
        sums, whole = kind == "row", ranks if kind == "row" else 1
        moved = "fprop's reduce-scatter, bfloat16" if sums else "fprop's all-gather, bfloat16"
        columns = 256 if sums else 128
        for name, m in {"one more": 17, "many more": 256, "none": 0}.items():
            text = found[f"{kind}, {name}"]
            assert text.startswith(SAME) and "pad the shorter ones" in text, text
            assert f"ranks {others}: {moved} [{16 * whole}, {columns}]" in text, text
            assert f"ranks [{VICTIM}]: {moved} [{m * whole}, {columns}]" in text, text
        text = found[f"{kind}, backward"]
        assert text.startswith(SAME) and "dgrad's " in text, text
    text = found["row, no multiple"]
    assert text.startswith(SAME) and "fprop's reduce-scatter" in text, text
    assert f"ranks [{VICTIM}]: Linear with sequence parallelism got {16 * ranks + 1} in dimension 0" in text, text


@pytest.mark.parametrize("device", rank_device_params(2))
def test_two_ranks(device: str) -> None:
    """Token counts in both directions, dtypes, widths, recipes, sets of gradients."""
    found = lines_of("all", 2, device)
    check_tokens(found, 2)
    for kind in KINDS:
        text = found[f"{kind}, dtype"]
        assert text.startswith(SAME) and "bfloat16 [" in text and "float32 [" in text, text
    assert "bfloat16 [16, 128]" in found["column, features"] and "bfloat16 [16, 144]" in found["column, features"]
    for recipe in RECIPES:
        assert recipe == "bf16" or found[f"bf16 and {recipe}"].startswith(SAME), found[f"bf16 and {recipe}"]
    text = found["gradients"]
    assert text.startswith(SAME) and "float32 [256]" in text and "float32 [128]" in text, text


@pytest.mark.parametrize("device", rank_device_params(4))
def test_four_ranks(device: str) -> None:
    check_tokens(lines_of("tokens", 4, device), 4)
