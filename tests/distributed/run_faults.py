"""A rank of the fault tests. Ranks are started one by one, not by torchrun, whose agent would stop the survivors.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 python tests/distributed/run_faults.py late

Each line on stdout is "name: what this rank saw"; the tests read them.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TE_LITE_AUTO"] = "rule"  # fused wherever that can be

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite import _C, watch  # noqa: E402
from te_lite.overlap import bootstrap, collective, userbuffers  # noqa: E402
from te_lite.overlap.buffers import Gather  # noqa: E402
from te_lite.testing.distributed import backend_for  # noqa: E402
from tests.distributed.failing_gemms import fails_before_an_amax, fails_while_auto_measures, gemm_fails  # noqa: E402
from tests.distributed.mismatches import (  # noqa: E402
    left,
    make,
    mismatch,
    mismatch_in_backward,
    mismatch_of_capacity,
    mismatch_over_capacity,
    order,
    recipes,
    refused_alone,
    said,
    say,
    step,
    unnoticed,
    victim,
)
from tests.distributed.overlapping import MLP, begin, check_pass, pair_of, rows_of  # noqa: E402
from tests.distributed.run_modules import new_groups  # noqa: E402
from tests.harness import under  # noqa: E402

DIST_TIMEOUT_S = 600  # torch.distributed's own: no test may need it
MANY_TOKENS = 8192  # an arena of 9 MiB


# faults after which all ranks go on


def mapping(device) -> None:
    """The victim cannot map its peers' memory: one warning, Collective everywhere, strict raises everywhere."""
    original = bootstrap.Rendezvous.step

    def fail(exchange, what, run):
        if victim() and what.startswith(("mapping", "opening the peers")):
            run = mock.Mock(side_effect=OSError("no access to a peer"))
        return original(exchange, what, run)

    size = dist.get_world_size()
    with mock.patch.object(bootstrap.Rendezvous, "step", fail), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        te.initialize_ub([64, 128], size, device=device)
        say("warnings", len([w for w in caught if "overlap is off" in str(w.message)]))
        pair = pair_of(MLP, "mxfp8", device, group=dist.group.WORLD)
        with under("mxfp8"):
            pair.module(pair.inputs(pair.batch(1, 8))[0]).sum().backward()
        rows = rows_of(pair).values()
        say("fallback", f"{ {row['schedule'] for row in rows} } {next(iter(rows))['reason']}")
        te.destroy_ub()
        said("strict", lambda: te.initialize_ub([64, 128], size, device=device, strict=True))
    say("left over", userbuffers.groups())
    te.destroy_ub()
    step(make(MLP, device))  # the next try works
    te.destroy_ub()


def arguments(device) -> None:
    """Ranks that disagree get the same error, which names what each has said; the next try works."""
    size, mine = dist.get_world_size(), victim()
    unknown = {"fc3_fprop": {}}
    ring = {"proj_fprop": {"method": "ring_exchange"}}
    cases = {
        "shape": {"shape": [64 + mine, 128]},
        "dtype": {"dtype": torch.float32 if mine else torch.bfloat16},
        "methods": {"ub_cfgs": ring if mine else None},
        "strict": {"strict": mine},
        "graphs": {"cuda_graphs": mine},
        "one unknown layer": {"ub_cfgs": unknown if mine else None},
        "tp_size": {"tp_size": 1 if mine else size},
        "backend": {"bootstrap_backend": "mpi" if mine else None},
        "all unknown": {"ub_cfgs": unknown},
        "unknown backend": {"bootstrap_backend": "smoke signals"},
        "no mpi": {"bootstrap_backend": "mpi"},
        "tp_size of the group": {"tp_size": 7, "tp_group": dist.group.WORLD},
        "tp_size of the world": {"tp_size": 7},
        "no number": {"tp_size": None},
        "infinite": {"shape": [float("inf"), 64] if mine else [64, 128]},
        "no dict": {"ub_cfgs": {3: {}}},
        "no mode": {"quantization_modes": 5},
    }
    for name, different in cases.items():
        given = {"shape": [64, 128], "tp_size": size, "device": device, **different}
        said(f"arguments, {name}", lambda given=given: te.initialize_ub(**given))
        assert not userbuffers.initialised()
    pair = make(MLP, device)
    said("twice", lambda: te.initialize_ub([64, 128], size, device=device))
    check_pass(pair, 1, 8)  # the first are as good as before
    te.destroy_ub()
    with mock.patch.dict(os.environ, TE_LITE_UB_TIMEOUT="inf"):  # no limit, also for blocks of the world
        te.initialize_ub([64, 128], size // 2, device=device, strict=True)
    te.destroy_ub()


def late(device) -> None:
    """The victim comes five seconds late, to a forward and to a backward: it is waited for."""
    pair = make(MLP, device)
    started = time.monotonic()
    if victim():
        time.sleep(5)
    call = pair.forward(pair.batch(1, 8))
    if victim():
        time.sleep(5)
    pair.backward(call)
    check_pass(pair, 1, 8)
    say("late", f"{time.monotonic() - started:.1f}")
    te.destroy_ub()


# faults that end the ranks


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(device, where: str) -> None:
    """The victim is killed in its second forward or backward."""
    pair = make(MLP, device)
    step(pair)
    dist.barrier()
    call = pair.forward(pair.batch(1, 8)) if where == "backward" else None
    if victim():
        Gather.shard = lambda *args: kill()

    def rest() -> None:
        if call is None:
            step(pair)
        else:
            pair.backward(call)
        if device.type == "cuda":  # what was issued ends, with garbage, and the call after says so
            torch.cuda.synchronize()
            step(pair)

    said("killed", rest)
    said("the next call", lambda: step(pair))


def killed_in_collective(device, recipe: str, m: int) -> None:
    """The victim is killed where its peers wait for it in torch.distributed: in front of an amax to be reduced, or in
    an exchange that does not fit."""
    pair = make(MLP, device, recipe=recipe)
    step(pair, m)
    dist.barrier()
    if victim():
        watch.dist.all_reduce = collective._all_gather_into = lambda *args, **kwargs: kill()
    said("killed", lambda: step(pair, m))
    said("the next call", lambda: step(pair, m))


def killed_at(device, name: str, count: int, tp_size: int) -> None:
    """The victim is killed when initialize_ub calls torch.distributed's `name` for the count-th time."""
    calls, original = [], getattr(dist, name)

    def count_and_kill(*args, **kwargs):
        calls.append(name)
        if victim() and len(calls) == count:
            time.sleep(1)  # all have met in main()
            kill()
        return original(*args, **kwargs)

    with mock.patch.object(dist, name, count_and_kill):
        said("killed", lambda: te.initialize_ub([64, 128], tp_size, device=device))


def killed_in_init(device) -> None:
    """The victim is killed when it has told its peers where to send, and before it has sent. As a dying process may,
    it hangs up before it counts as ended."""

    def hang_up_and_die(*args) -> None:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                connection = socket.socket(fileno=os.dup(fd))
                connection.getpeername()
            except OSError:  # no connection
                continue
            connection.shutdown(socket.SHUT_RDWR)
        time.sleep(1)
        kill()

    if victim():
        bootstrap.Doorway.send = hang_up_and_die
    said("killed", lambda: make(MLP, device))


# resources


def resources() -> tuple[int, int, int, int]:
    """(resident KiB, mapped KiB, file descriptors, threads) of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = (int(status[name].split()[0]) for name in ("VmRSS", "VmSize"))
    return *memory, len(os.listdir("/proc/self/fd")), int(status["Threads"])


def cycles(device) -> None:
    """50 times initialize_ub, a step, destroy_ub, for the world and for blocks of it; some set-ups fail half-way."""
    pair = make(MLP, device)
    te.destroy_ub()
    for cycle in range(60):
        if cycle % 5 == 4:
            with mock.patch.object(userbuffers.Group, "_watch", side_effect=bootstrap.BootstrapError("half-way")):
                try:
                    begin(MANY_TOKENS, 128, dist.group.WORLD, device, strict=True)
                except bootstrap.BootstrapError:
                    pass
        begin(MANY_TOKENS, 128, dist.group.WORLD, device)
        step(pair, 64)
        te.destroy_ub()
        te.initialize_ub([MANY_TOKENS, 128], dist.get_world_size() // 2, device=device)
        te.destroy_ub()
        if cycle in (9, 59):
            say("resources", " ".join(map(str, resources())))


def mpi(device) -> None:
    """Under mpirun: handles exchanged by mpi4py, for the world, blocks of it, and ranks that are not neighbours."""
    size = dist.get_world_size()
    begin(32 * size, 128, dist.group.WORLD, device, bootstrap_backend="mpi")
    check_pass(pair_of(MLP, "bf16", device), 1, 8)
    te.destroy_ub()
    te.initialize_ub([64, 128], size // 2, device=device, bootstrap_backend="mpi")
    say("blocks", userbuffers.groups()[0].ranks)
    te.destroy_ub()
    apart, _ = new_groups([[0, 2], [1, 3]])
    begin(64, 128, apart, device, bootstrap_backend="mpi")
    check_pass(pair_of(MLP, "mxfp8", device, group=apart), 1, 8)
    te.destroy_ub()


FAULTS: dict[str, tuple[Callable, ...]] = {
    "survived": (arguments, mapping, gemm_fails, mismatch, order, left, unnoticed),
    "late": (late,),
    "mismatches_over_capacity": (mismatch_over_capacity, mismatch_of_capacity, mismatch_in_backward, refused_alone),
    "mismatched_recipes": (recipes,),
    "fails_before_a_collective": (fails_before_an_amax, fails_while_auto_measures),
    "killed_in_forward": (lambda device: killed(device, "forward"),),
    "killed_in_backward": (lambda device: killed(device, "backward"),),
    "killed_before_an_amax": (lambda device: killed_in_collective(device, "current", 8),),
    "killed_in_an_exchange_over_capacity": (lambda device: killed_in_collective(device, "bf16", 200),),
    "killed_in_init": (killed_in_init,),
    "killed_in_the_first_gather": (lambda device: killed_at(device, "all_gather_object", 1, 4),),
    "killed_in_the_second_gather": (lambda device: killed_at(device, "all_gather_object", 2, 4),),
    "killed_in_new_group": (lambda device: killed_at(device, "new_group", 1, 2),),
    "cycles": (cycles,),
    "mpi": (mpi,),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    local = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(local)
    torch.set_num_threads(1)
    device = torch.device("cuda", local) if args.device == "cuda" else torch.device("cpu")
    dist.init_process_group(backend_for(args.device), timeout=datetime.timedelta(seconds=DIST_TIMEOUT_S))
    # A rank whose connections stand could go on, and end, while gloo still connects the others; NCCL stays as it was.
    dist.all_reduce(torch.zeros(1))
    assert issubclass(_C.GroupBroken, RuntimeError)
    for fault in FAULTS[args.fault]:
        fault(device)
    say("end", args.fault)
    if args.fault.startswith("killed"):
        sys.stdout.flush()
        os._exit(0)  # gloo's threads, which have lost a peer, now and then abort a process that ends in order
    return 0


if __name__ == "__main__":
    sys.exit(main())
