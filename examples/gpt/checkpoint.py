"""Checkpoints: one file a tensor or expert parallel rank, written so that a crash at any moment loses nothing.

    DIR/step_00000100/tp_0_of_2.pt      model, optimizer, random states, losses, identity of the run; with experts
                                        over several ranks ep_0_of_2.pt
    DIR/latest.json                     {"step": 100}: replaced last, when all ranks' files are complete

Every file is written under a temporary name and renamed. Older steps are kept: delete what is not wanted.
Files hold plain tensors, numbers and strings, and load with weights_only=True.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from .mesh import Mesh
from .optimizer import MasterAdamW

VERSION = 1
Identity = dict[str, object]


@dataclass
class History:
    """losses[i] is the loss of step i + 1 before its update; held_out maps steps done to a held-out loss."""

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    seconds: float = 0.0


def latest_step(directory: Path) -> int | None:
    """The newest complete checkpoint's step, or None where there is none."""
    pointer = directory / "latest.json"
    return int(json.loads(pointer.read_text())["step"]) if pointer.is_file() else None


def rank_file(directory: Path, step: int, rank: int, size: int, cut: str = "tp") -> Path:
    return directory / f"step_{step:08d}" / f"{cut}_{rank}_of_{size}.pt"


def write_atomically(path: Path, write) -> None:
    """write(stream) into a temporary neighbour of path, flushed to the disk, then renamed onto it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: MasterAdamW,
    history: History,
    identity: Identity,
    mesh: Mesh,
) -> None:
    """Collective. Of the ranks that hold the same state the first writes it."""
    problem = None
    if mesh.writes:
        state = {
            "version": VERSION,
            "step": step,
            "identity": identity,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "losses": torch.tensor(history.losses, dtype=torch.float64),
            "held_out": history.held_out,
            "cpu_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if mesh.device.type == "cuda" else None,
        }
        try:
            path = rank_file(directory, step, *mesh.piece)
            write_atomically(path, lambda stream: torch.save(state, stream))
        except OSError as error:
            problem = f"checkpoint of step {step} could not be written: {error}. The older ones are untouched."
    mesh.agree(problem)
    if mesh.is_main:
        pointer = json.dumps({"step": step}).encode()
        write_atomically(directory / "latest.json", lambda stream: stream.write(pointer))
    mesh.barrier()


def differences(saved: Identity, wanted: Identity) -> str | None:
    """What makes `wanted` another run than the one that was saved, or None."""
    lines = [
        f"--{key.replace('_', '-')}: the checkpoint has {saved.get(key)}, this run asks for {value}"
        for key, value in wanted.items()
        if saved.get(key) != value
    ]
    return "; ".join(lines) or None


def resume_problem(directory: Path, step: int | None, identity: Identity, mesh: Mesh) -> str | None:
    """Why this run cannot continue the checkpoint in `directory`, with the remedy, or None."""
    if step is None:
        return f"--resume: no checkpoint in {directory} (no latest.json). Check the path, or drop --resume."
    path = rank_file(directory, step, *mesh.piece)
    if not path.is_file():
        held = sorted(path.parent.glob("*_of_*.pt"))
        if any(other.name[:2] == path.name[:2] and other.name[4:] == path.name[4:] for other in held) or not held:
            return f"{path} is missing, so the checkpoint of step {step} is not whole. Restore the file."
        path = held[0]  # written with another --tp or --ep: the comparison below says with which
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if saved["version"] != VERSION:
        return (
            f"{path} has version {saved['version']}, this program reads {VERSION}. "
            "Use the version of this program that wrote it."
        )
    different = differences(saved["identity"], identity)
    if different is not None:
        return (
            f"{path.parent} belongs to another run ({different}). Resume with the checkpoint's values, or "
            "start a new run in another --checkpoint-dir. The checkpoint is untouched."
        )
    return None


def load(
    directory: Path, model: nn.Module, optimizer: MasterAdamW, identity: Identity, mesh: Mesh
) -> tuple[int, History]:
    """Collective. Restores everything; (steps done, their history). Refuses on all ranks if one must."""
    step = latest_step(directory)
    mesh.agree(resume_problem(directory, step, identity, mesh))
    path = rank_file(directory, step, *mesh.piece)
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["cpu_rng"])
    if mesh.device.type == "cuda" and state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"])
    return int(state["step"]), History(state["losses"].tolist(), dict(state["held_out"]))
