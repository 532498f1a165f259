"""csrc's concurrent parts under g++'s sanitizers, driven by sanitized.cpp: ranks as threads and as processes.

Leaks count under the address sanitizer. No suppression is needed: nothing but csrc, the C++ library and the fake
driver runs. The thread sanitizer sees the threads of one process; what processes share is the same code.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "te_lite" / "csrc"
SOURCES = ("control.cpp", "driver.cpp", "host_executor.cpp", "cuda_executor.cpp")
SCENARIOS = ["processes", "killed", "forked", "threads", "mismatch", "breaking", "closing", "cuda"]
SANITIZERS = ("address,undefined", "thread")
# -Wno-tsan: a fence, which this sanitizer does not model; what it orders in control.cpp are atomics only.
FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-sanitize-recover=all", "-Wno-tsan"]
LIMIT_S = 200  # of a compilation, of a run; the program ends by itself after 100


def compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def compiled(folder: Path, sanitizer: str, output: str, *inputs: object) -> None:
    command = [*compiler(), *FLAGS, f"-fsanitize={sanitizer}", *map(str, inputs), "-o", str(folder / output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]


def build(folder: Path, sanitizer: str) -> Path:
    """The program, beside its objects and its libcuda.so.1."""
    folder.mkdir()
    parts = [*(CSRC / name for name in SOURCES), HERE / "sanitized.cpp"]
    made = [folder / f"{part.stem}.o" for part in parts]
    library = "libcuda.so.1", "-shared", "-fPIC", HERE / "fake_libcuda.cpp"
    objects = [(out.name, "-c", part, f"-I{CSRC}") for out, part in zip(made, parts, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda arguments: compiled(folder, sanitizer, *arguments), [library, *objects]))
    return link(folder, sanitizer, made, folder)


def link(folder: Path, sanitizer: str, objects: list[Path], library: Path) -> Path:
    compiled(folder, sanitizer, "program", *objects, library / "libcuda.so.1", "-ldl", "-pthread")
    return folder / "program"


def run(program: Path, library: Path, *scenarios: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "TSAN_OPTIONS": "", "ASAN_OPTIONS": ""}
    return subprocess.run([*BARE, program, *scenarios], env=env, capture_output=True, text=True, timeout=LIMIT_S)


def runs_sanitized(folder: Path, sanitizer: str, prefix: list[str]) -> str:
    """Why a program with two threads does not run under the sanitizer; "" where it does."""
    source = folder / "probe.cpp"
    source.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    command = [*compiler(), f"-fsanitize={sanitizer}", "-pthread", str(source), "-o", str(folder / "probe")]
    for step in (command, [*prefix, str(folder / "probe")]):
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=LIMIT_S)
        except OSError as error:
            return str(error)
        if done.returncode:
            return f"{' '.join(step[:2])}: {done.stderr.strip()[-300:] or f'status {done.returncode}'}"
    return ""


BARE: list[str] = []  # what a sanitized program is started by


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(the sanitizer, the program)."""
    folder = tmp_path_factory.mktemp("sanitized")
    reason = runs_sanitized(folder, request.param, BARE)
    if reason and shutil.which("setarch"):  # g++ 12's cannot live with every randomisation of addresses
        BARE[:] = ["setarch", os.uname().machine, "-R"]
        reason = runs_sanitized(folder, request.param, BARE)
    if reason:
        pytest.skip(f"no program runs under -fsanitize={request.param} here: {reason}")
    return request.param, build(folder / "built", request.param)


def test_nothing_is_found(program: tuple[str, Path]) -> None:
    """A data race, memory used after its end or never freed, undefined behaviour; nor does anything hang."""
    done = run(program[1], program[1].parent)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr[-6000:]
    assert re.findall(r"^(\w+) [\d.]+ s$", done.stdout, re.M) == SCENARIOS


# Faults put into a copy of one file: sanitizer, file, what stands there, what is put in its place, what is said.
FAULTS = {
    "a flag without release": (
        "thread", "host_executor.cpp", "step.value, __ATOMIC_RELEASE", "step.value, __ATOMIC_RELAXED", "data race",
    ),
    "a queue without its lock": (
        "thread", "host_executor.cpp", "std::lock_guard<std::mutex> lock(lane_->mutex);\n        lane_->queue",
        "lane_->queue", "data race",
    ),
    "a plain counter in shared memory": (
        "thread", "control.cpp", "own_.heartbeat.fetch_add(1, std::memory_order_relaxed)",
        "++reinterpret_cast<uint32_t&>(own_.heartbeat)", "data race",
    ),
    "a text that ends behind its buffer": (
        "address,undefined", "control.cpp", "static_cast<char*>(to)[length] = 0;",
        "static_cast<char*>(to)[capacity] = 0;", "stack-buffer-overflow",
    ),
    "a queue that is leaked": (
        "address,undefined", "host_executor.cpp", "override { close(); }",
        "override { close(), (void)lane_.release(); }", "detected memory leaks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(program: tuple[str, Path], tmp_path: Path, fault: str) -> None:
    """By the ranks as threads; each sanitizer is given the faults of its kind."""
    sanitizer, name, before, after, says = FAULTS[fault]
    if sanitizer != program[0]:
        pytest.skip("of the other sanitizer")
    text, changed, built = (CSRC / name).read_text(), tmp_path / name, program[1].parent
    assert text.count(before) == 1
    changed.write_text(text.replace(before, after))
    compiled(tmp_path, sanitizer, "changed.o", "-c", changed, f"-I{CSRC}")
    others = [path for path in built.glob("*.o") if path.stem != changed.stem]
    done = run(link(tmp_path, sanitizer, [tmp_path / "changed.o", *others], built), built, "threads")
    assert done.returncode != 0 and says in done.stderr, done.stdout + done.stderr[-4000:]
