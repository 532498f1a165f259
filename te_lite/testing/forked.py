"""Ranks on this host, forked from a process that has imported te_lite and torch: that takes longer than most tests.

    python -m te_lite.testing.forked RANKS FOLDER SCRIPT [ARGUMENT ...]

Each rank's output goes to FOLDER/RANK/stdout.log and stderr.log. Exit status 1, and no rank is left, as soon as one
fails. Unlike torchrun's, ranks have one seed of hash() in common, and a variable that te_lite reads when it is
imported must be there before.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

import torch.distributed as dist

import te_lite  # noqa: F401  so that ranks find it imported

PR_SET_PDEATHSIG = 1  # of Linux


def end_with_parent() -> None:
    """In a child: SIGTERM when its parent dies. Else ranks would stay on the GPUs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def become_rank(rank: int, ranks: int, folder: Path, port: int) -> None:
    """In a child: the environment that torchrun gives, and its files for output."""
    end_with_parent()
    (folder / str(rank)).mkdir()
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / str(rank) / f"{stream}.log", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    names: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    # The store is this process's parent's, so that no rank has to outlive the others.
    names |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in names.items()})


def end(children: set[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)


def main() -> int:
    ranks, folder, *arguments = sys.argv[1:]
    told, tell = os.pipe()  # ranks are forked before the store has threads, and told its port
    children: set[int] = set()
    for rank in range(int(ranks)):
        if not (child := os.fork()):
            os.close(tell)
            become_rank(rank, int(ranks), Path(folder), int(os.read(told, 5)))
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
            return 0
        children.add(child)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, f"{store.port:5}".encode() * int(ranks))
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            print(f"a rank has ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            end(children)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
