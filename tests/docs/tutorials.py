"""Runs the code of a tutorial as a reader would, and renews the outputs that the page shows.

    python tests/docs/tutorials.py docs/tutorials/*.md        # writes what the programs print into the pages

A page consists of fenced blocks. ```python blocks run one after the other in one interpreter; one with a title is a
file instead. ```console blocks are commands, a line each. The ```text block behind a block is what that one prints.
All of it runs on the CPU.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # an installed te_lite is not needed

from te_lite.testing.distributed import launch  # noqa: E402

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
MARK = "-- end of a block --"
ON_CPU = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Block:
    """kind: "session" (a part of the interpreter's program), "file" or "command". output: where the page shows what
    it prints, as a range of the page's text; None where nothing is shown."""

    kind: str
    code: str
    title: str | None
    output: range | None


def blocks(page: str) -> Iterator[Block]:
    found = list(FENCE.finditer(page))
    for i, fence in enumerate(found):
        language, title, code = fence.groups()
        follows = i + 1 < len(found) and found[i + 1].group(1) == "text"
        output = range(*found[i + 1].span(3)) if follows else None
        if language == "python":
            yield Block("session" if title is None else "file", code, title, output)
        elif language == "console":
            yield Block("command", code, None, output)


def run_command(line: str, folder: Path) -> str:
    """What rank 0 prints under `line`, a torchrun command. Variables may stand in front, as in a shell."""
    words = shlex.split(line)
    env = dict(ON_CPU)
    while "=" in words[0]:
        name, _, env[name] = words.pop(0).partition("=")
    assert words[:2] == ["torchrun", "--nproc-per-node"], f"{line}: tutorials start torchrun --nproc-per-node only"
    return launch(folder / words[3], *words[4:], ranks=int(words[2]), env=env, torchrun=True)


def run_session(session: list[Block]) -> list[str]:
    """What each block prints, run one after the other in one interpreter."""
    program = "".join(f"{block.code}\nprint({MARK!r}, flush=True)\n" for block in session)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "session.py").write_text(program)
        command = [sys.executable, "session.py"]
        done = subprocess.run(command, cwd=folder, env=os.environ | ON_CPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"the program ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.split(f"{MARK}\n")[:-1]


def outputs(page: str) -> list[tuple[range, str]]:
    """For each shown output of the page where it stands, and what the program really prints."""
    session = [block for block in blocks(page) if block.kind == "session"]
    printed = run_session(session) if session else []
    found = [(block.output, text) for block, text in zip(session, printed, strict=True) if block.output is not None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for block in blocks(page):
            if block.kind == "file":
                (folder / block.title).write_text(block.code)
            elif block.kind == "command":
                text = "".join(run_command(line, folder) for line in block.code.splitlines())
                if block.output is not None:
                    found.append((block.output, text))
    return found


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        page = path.read_text()
        for place, text in sorted(outputs(page), key=lambda pair: -pair[0].start):
            page = page[: place.start] + text + page[place.stop :]
        path.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
