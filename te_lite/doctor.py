"""`te_lite doctor`: what this machine can do for te_lite, by trying where that is possible, and remedies for the rest.

    te_lite doctor            (or: python -m te_lite.doctor)

Exit status 0 when all that this machine has can be used, 1 when something is broken. A machine without a GPU is a
machine for CPU ranks, and what a GPU does not support is said, not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import triton

import te_lite as te
from te_lite import _C, tune
from te_lite.ops import nvrtc
from te_lite.ops.source import plain
from te_lite.overlap.buffers import Gather
from te_lite.overlap.userbuffers import groups
from te_lite.quantize.identity import Identity
from te_lite.tables import aligned

OK, NOTE, BROKEN = "ok", "note", "BROKEN"
TRIAL_S = 120.0  # for ranks to start, import torch and pass a few kilobytes
COPY_MIB = 256  # a copy long enough that its launch does not count
COPIES = 10


@dataclass(frozen=True)
class Finding:
    """One line. state: OK, NOTE (said, not counted) or BROKEN. remedy: what to do, where there is something to do."""

    what: str
    state: str
    text: str
    remedy: str = ""


# Versions and devices


def versions() -> list[Finding]:
    """What runs here."""
    found = [
        Finding("te_lite", OK, f"{te.__version__}, extension {os.path.basename(_C.__file__)}"),
        Finding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("torch", OK, f"{torch.__version__}, built for CUDA {torch.version.cuda or '(none: CPU only)'}"),
        Finding("triton", OK, triton.__version__),
    ]
    if importlib.util.find_spec("mpi4py") is None:
        found.append(
            Finding("mpi4py", NOTE, "absent: ranks start with torchrun, not with mpirun", "pip install mpi4py")
        )
    for name in ("TE_LITE_UB_TIMEOUT", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            found.append(Finding(name, NOTE, f"set to {os.environ[name]!r}"))
    return found


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def seen_devices(count: int) -> tuple[list[Any], str]:
    """(properties of torch's devices, why there are none although it counts some)."""
    try:
        return [torch.cuda.get_device_properties(i) for i in range(count)], ""
    except (RuntimeError, AssertionError) as error:  # a driver that is too old for this torch, a device that is broken
        return [], str(error)


def driver(info: _C.DriverInfo, torch_cuda: str | None, devices: Sequence[Any], error: str = "") -> list[Finding]:
    """The driver and its devices against what torch sees of them: their properties, or why it cannot use them."""
    if not info["available"]:
        return [
            Finding("driver", NOTE, f"no GPU to use: {info['reason']}", "CPU ranks work: --device cpu, backend gloo")
        ]
    newest = _cuda_version(info["driver_version"])
    found = [Finding("driver", OK, f"serves CUDA up to {newest}, {info['devices']} device(s)")]
    if torch_cuda is None:
        rule = "this torch is built without CUDA: it sees no GPU, but the driver does"
        found.append(Finding("torch and driver", BROKEN, rule, "install torch's CUDA build (pytorch.org)"))
    elif len(devices) != info["devices"]:
        text = error or f"torch sees {len(devices)} of the driver's {info['devices']} device(s)"
        remedy = f"torch is built for CUDA {torch_cuda}, the driver serves {newest}: update the driver or change torch"
        found.append(Finding("torch and driver", BROKEN, text, remedy))
    for ordinal, device in enumerate(devices):
        text = (
            f"{device.name}, compute capability {device.major}.{device.minor}, {device.total_memory / 2**30:.0f} GiB, "
            f"{device.multi_processor_count} SMs"
        )
        found.append(Finding(f"device {ordinal}", OK, text))
    return found


def recipes(devices: Sequence[str], support: Any = te.check_recipe_support) -> list[Finding]:
    """Which recipes run on each device, by te.check_recipe_support."""
    found = []
    for device in devices:
        answers = {name: support(name, device) for name in te.recipe.available()}
        good = [name for name, (supported, _) in answers.items() if supported]
        found.append(Finding(f"recipes on {device}", OK, ", ".join(good)))
        for name, (supported, reason) in answers.items():
            if not supported:
                found.append(Finding(f"recipe {name} on {device}", NOTE, reason, "use one of those above"))
    return found


# GPUs among themselves


def peers(devices: int, can_access: Any = torch.cuda.can_device_access_peer) -> list[Finding]:
    """Which devices reach each other's memory."""
    if devices < 2:
        return []
    missing = [(a, b) for a in range(devices) for b in range(devices) if a != b and not can_access(a, b)]
    if not missing:
        return [Finding("peer access", OK, f"between all {devices} devices")]
    text = "not from " + ", ".join(f"{a} to {b}" for a, b in missing)
    return [
        Finding(
            "peer access",
            NOTE,
            f"{text}: groups with these devices run without overlap",
            "give each tensor-parallel group devices that reach each other; in virtual machines and containers all "
            "GPUs of the NVLink domain must be passed through together",
        )
    ]


def fused(devices: int, unavailable: Any = nvrtc.unavailable) -> list[Finding]:
    """Whether exchanges can be fused with their GEMMs."""
    reasons = {i: reason for i in range(devices) if (reason := unavailable(torch.device("cuda", i)))}
    if not reasons:
        return [Finding("fused kernels", OK, "can be compiled and run")]
    text = "; ".join(f"cuda:{i}: {reason}" for i, reason in reasons.items())
    return [Finding("fused kernels", NOTE, text, "none needed: rings run in its place")]


def bandwidth(devices: int) -> list[Finding]:
    """Measured copies between devices, GB/s, from row to column."""
    if devices < 2:
        return []
    table = [["from \\ to", *map(str, range(devices))]]
    slowest = float("inf")
    for a in range(devices):
        speeds = [None if a == b else _copy_speed(a, b) for b in range(devices)]
        slowest = min([slowest, *(s for s in speeds if s is not None)])
        table.append([str(a), *("-" if s is None else f"{s:.0f}" for s in speeds)])
    indented = "\n".join(f"    {line}" for line in aligned(table).splitlines())
    return [Finding("peer copies", OK, f"{slowest:.0f} GB/s at least, medians of {COPIES}:\n{indented}")]


def _copy_speed(a: int, b: int) -> float:
    """GB/s from device a to device b."""
    source = torch.empty(COPY_MIB << 20, dtype=torch.uint8, device=f"cuda:{a}")
    target = torch.empty(COPY_MIB << 20, dtype=torch.uint8, device=f"cuda:{b}")
    times = []
    with torch.cuda.device(a):
        for _ in range(COPIES + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return source.nbytes / statistics.median(times[2:]) / 1e6


# Ranks that try


def _try_gather(rank: int, ranks: int, device: torch.device) -> str:
    """A gather through a userbuffer: "" or what is wrong. The arena exists."""
    (group,) = groups()
    shard = torch.full((16, 64), float(rank + 1), dtype=torch.bfloat16, device=device)
    for _ in range(5):  # more than there are slots
        with group.operation("a gather of the doctor"):
            gather = Gather(group, Identity().quantize(plain(shard))[0], "row", own=True)
            got = gather.whole().dequantize().clone()
            gather.close()
    wanted = torch.arange(1, ranks + 1).repeat_interleave(16)[:, None].expand(-1, 64)
    return "" if torch.equal(got.cpu().float(), wanted.float()) else "the gathered tensor is wrong"


def _trial_rank(rank: int, ranks: int, kind: str, store: str, answer: Connection) -> None:
    """One rank of trial(): sends "" or why it failed."""
    try:
        torch.set_num_threads(1)
        device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        te.initialize_ub([16 * ranks, 64], ranks, device=device, strict=True)
        said = _try_gather(rank, ranks, device)
        te.destroy_ub()
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip()
    answer.send(said)


def trial(kind: str, ranks: int, seconds: float = TRIAL_S) -> list[str]:
    """`ranks` processes that share memory and gather through it; what each says, "" or why it failed. kind: "cpu" or
    "cuda"."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="te_lite_doctor_") as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(ranks)]
        started = [
            context.Process(
                target=_trial_rank, args=(rank, ranks, kind, os.path.join(folder, "store"), pairs[rank][1]), daemon=True
            )
            for rank in range(ranks)
        ]
        for process, (_, sender) in zip(started, pairs, strict=True):
            process.start()
            sender.close()  # so that a rank that dies ends its pipe
        end = time.monotonic() + seconds
        said = [_answer(receiver, end) for receiver, _ in pairs]
        for process in started:
            process.join(10)
            if process.is_alive():
                process.kill()
    return said


def _answer(receiver: Connection, end: float) -> str:
    if not wait([receiver], max(0.0, end - time.monotonic())):
        return "no answer in time"
    try:
        return receiver.recv()
    except EOFError:
        return "the process ended without an answer"


def userbuffers(kind: str, said: Sequence[str]) -> Finding:
    """What the ranks of a trial found."""
    what = f"userbuffers on {kind}"
    text = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(said) if error)
    if not text:
        return Finding(what, OK, f"{len(said)} ranks gathered through shared memory")
    remedy = (
        "needs memfd_create and Unix sockets between processes of one user: check the container's seccomp profile, and "
        "GLOO_SOCKET_IFNAME where torch.distributed itself fails"
        if kind == "cpu"
        else "all ranks must run on one host, as one user and in one IPC and PID namespace, with peer access; without "
        "userbuffers te_lite runs the same modules without overlap"
    )
    return Finding(what, BROKEN, text, remedy)


def examine() -> list[Finding]:
    """All findings about this machine."""
    info = _C.driver_info()
    gpus = torch.cuda.device_count() if info["available"] else 0
    found = versions() + driver(info, torch.version.cuda, *seen_devices(gpus))
    found += recipes(["cpu", *(f"cuda:{i}" for i in range(gpus))])
    found.append(userbuffers("cpu", trial("cpu", 2)))
    if gpus:
        found += peers(gpus) + bandwidth(gpus) + fused(gpus)
    if gpus == 1:
        found.append(Finding("userbuffers on cuda", NOTE, "one device: nothing to overlap between"))
    elif gpus and not hasattr(_C, "CudaMemory"):
        found.append(Finding("userbuffers on cuda", NOTE, "this build of te_lite._C has no GPU arena", "pip install ."))
    elif gpus:
        found.append(userbuffers("cuda", trial("cuda", gpus)))
    return found


def verdict(found: Iterable[Finding]) -> tuple[str, bool]:
    """(the last line, whether all is well)."""
    broken = [finding.what for finding in found if finding.state == BROKEN]
    return (f"broken: {', '.join(broken)}", False) if broken else ("this machine can run te_lite", True)


def format_findings(found: Sequence[Finding]) -> str:
    """One line each; remedies below in their order."""
    width = max(len(finding.what) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.state:<6}  {finding.what:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<6}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="te_lite", description="te_lite's tools.")
    help_text = "doctor: examine this machine; tune: measure what overlaps best (tune --help)"
    parser.add_argument("command", nargs="?", choices=("doctor", "tune"), default="doctor", help=help_text)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["tune"]:
        return tune.main(given[1:])
    parser.parse_args(given)
    found = examine()
    last, good = verdict(found)
    print(format_findings(found), last, sep="\n", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
