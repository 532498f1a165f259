"""What gpu_check.py reads from the logs of training runs, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

DEMO_BOUND = 0.03  # as of training: two roundings of the same model


def training_numbers(log: Path) -> dict[str, object]:
    """How far the run that is farthest from bf16 ends from it."""
    if not log.exists():
        return {}
    content = json.loads(log.read_text())
    cut = "ep" if "ep" in content["runs"][0] else "tp"
    distances = {
        f"{row['recipe']} {cut} {row[cut]}": max(abs(row[key] - 1) for key in ("train_ratio", "held_out_ratio"))
        for row in content["runs"]
    }
    farthest = max(distances, key=distances.__getitem__)
    numbers = {"runs": len(distances), "steps": content["steps"], "farthest": farthest}
    return numbers | {"off_bf16": round(distances[farthest], 5), "bound": content["bound"]}


def demo_mistakes(detail: dict, without: dict | None) -> list[str]:
    """What is wrong with a run that ended. without: the numbers of the run without overlap, for a run with it."""
    wrong = []
    loss, entropy = detail.get("held_out_loss"), detail.get("unigram_entropy")
    if not (loss and entropy and loss < entropy):  # nan is not below, too
        wrong.append(f"held-out loss {loss} is not below the text's unigram entropy {entropy}")
    if without is None:
        return wrong
    if not detail.get("gemms_overlapped") or detail["gemms_collective"]:
        wrong.append("exchanges were left to collectives although overlap was asked for")
    other = without.get("held_out_loss")
    if not (loss and other and abs(loss / other - 1) < DEMO_BOUND):
        wrong.append(f"held-out loss {loss}, without overlap {other}: more than {DEMO_BOUND:.0%} apart")
    return wrong


def demo_numbers(log: Path) -> dict[str, float]:
    """Losses and schedules of the log that the example wrote; the log itself goes."""
    if not log.exists():
        return {}
    content = json.loads(log.read_text())
    log.unlink()
    wanted = ("steps", "train_loss", "held_out_loss", "unigram_entropy")
    numbers = {name: round(content["summary"][name], 4) for name in wanted if name in content["summary"]}
    schedules = [row["schedule"] for row in content["gemms"]]
    numbers["gemms_overlapped"] = sum(schedule not in ("local", "collective") for schedule in schedules)
    return numbers | {"gemms_collective": schedules.count("collective")}
