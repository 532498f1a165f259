"""csrc's host tests with te_lite._C built for g++'s address and thread sanitizers: `make sanitize`.

    python tests/csrc/sanitized_extension.py [address,undefined | thread ...]

The extension goes to build/sanitized/, never over te_lite/_C*.so. Python and torch are not built for the sanitizers:
leaks are left to sanitized.cpp, and the thread sanitizer takes no notice of calls that come from their libraries.
As a pytest plugin (-p tests.csrc.sanitized_extension) this file puts that extension in the place of te_lite._C.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/csrc/test_{name}.py" for name in ("control", "driver", "userbuffers", "userbuffers_fake")]
# quarantine: small, since a test counts this process's pages. die_after_fork: tests fork ranks, which start threads.
OPTIONS = {
    "address,undefined": ("libasan.so libubsan.so libstdc++.so", "ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=1"
                          ":thread_local_quarantine_size_kb=16"),
    "thread": ("libtsan.so", "TSAN_OPTIONS", "die_after_fork=0:ignore_noninstrumented_modules=1"),
}  # fmt: skip
COMPILER = os.environ.get("CXX", "g++").split()
PLACED = "TE_LITE_SANITIZED"  # the path of the extension that takes te_lite._C's place


def place(path: str) -> None:
    """te_lite._C is the extension at `path`, before anything imports it."""
    spec = importlib.util.spec_from_file_location("te_lite._C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["te_lite._C"] = module


if PLACED in os.environ:
    place(os.environ[PLACED])


def build(sanitizer: str) -> Path:
    import pybind11

    folder = ROOT / "build" / "sanitized" / sanitizer.replace(",", "-")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wno-tsan", f"-fsanitize={sanitizer}"]
    include = [f"-I{path}" for path in (sysconfig.get_paths()["include"], pybind11.get_include())]

    def compile(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        subprocess.run([*COMPILER, *flags, *include, "-c", source, "-o", made], check=True)
        print(f"{sanitizer}: {source.name} is compiled", flush=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile, sorted((ROOT / "te_lite" / "csrc").glob("*.cpp"))))
    extension = folder / "_C.so"
    subprocess.run([*COMPILER, "-shared", f"-fsanitize={sanitizer}", *objects, "-ldl", "-o", extension], check=True)
    return extension


def run(sanitizer: str) -> int:
    """pytest's exit status. A report of a sanitizer in any process, of a forked rank too, is a failure."""
    extension = build(sanitizer)
    libraries, variable, options = OPTIONS[sanitizer]
    found = [
        subprocess.run([*COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in libraries.split()
    ]
    reports = extension.parent / "report"
    for old in extension.parent.glob("report.*"):
        old.unlink()
    env = {
        **os.environ, "LD_PRELOAD": " ".join(found), variable: f"{options}:log_path={reports}",
        "UBSAN_OPTIONS": f"log_path={reports}:print_stacktrace=1", PLACED: str(extension),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    plugins = ["-p", "tests.csrc.sanitized_extension", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *plugins, *TESTS], cwd=ROOT, env=env)
    said = [path.read_text(errors="replace") for path in sorted(extension.parent.glob("report.*"))]
    print("\n".join(said) if said else f"{sanitizer}: no report", flush=True)
    return done.returncode or bool(said)


if __name__ == "__main__":
    sys.exit(max([run(sanitizer) for sanitizer in sys.argv[1:] or OPTIONS]))
