"""Where this process stands: its rank, its device and its tensor and data parallel groups.

Three ways to start are told apart from the environment:

    torchrun            RANK, WORLD_SIZE, MASTER_ADDR are set       rendezvous through env://
    mpirun + mpi4py     an MPI launcher's variables are set         rank and size from COMM_WORLD
    python              neither                                     one process, no process group
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


class RefusedError(ValueError):
    """The run cannot start or go on as asked: its options, text, checkpoint or loss. Raised on all ranks alike."""


@dataclass(frozen=True)
class Mesh:
    """Ranks are laid out tensor parallel fastest: rank = dp_rank * tp_size + tp_rank.

    A group of one rank is None.
    """

    launcher: str
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agree(self, problem: str | None) -> None:
        """Raises the same RefusedError on all ranks if any has a problem, so that none waits for a dead one."""
        problems: list[str | None] = [problem]
        if self.world_size > 1:
            problems = [None] * self.world_size
            dist.all_gather_object(problems, problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise RefusedError(text if self.world_size == 1 else f"rank {rank}: {text}")

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def detect_launcher() -> str:
    """ "torchrun", "mpirun" or "python"."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torchrun"
    if any(name in os.environ for name in MPI_VARIABLES):
        return "mpirun"
    return "python"


def mpi_world() -> Any:
    """mpi4py's COMM_WORLD."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            f"started by an MPI launcher, but mpi4py does not import ({error}); the ranks find each other "
            "through it. Run `pip install mpi4py`, or start with torchrun instead."
        ) from error
    world = MPI.COMM_WORLD
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        started = int(os.environ.get(name, world.Get_size()))
        if started != world.Get_size():
            raise RuntimeError(
                f"the launcher started {started} ranks ({name}), but mpi4py's COMM_WORLD has {world.Get_size()}: "
                f"mpi4py is bound to another MPI ({MPI.Get_library_version().strip().splitlines()[0]}). "
                "Start with that MPI's mpirun, or with torchrun."
            )
    return world


def place() -> tuple[str, int, int, int]:
    """(launcher, rank, world_size, local_rank) without any communication of torch's."""
    launcher = detect_launcher()
    if launcher == "torchrun":
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return launcher, rank, world_size, int(os.environ.get("LOCAL_RANK", rank))
    if launcher == "mpirun":
        world = mpi_world()
        from mpi4py import MPI

        local = world.Split_type(MPI.COMM_TYPE_SHARED)
        return launcher, world.Get_rank(), world.Get_size(), local.Get_rank()
    return launcher, 0, 1, 0


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """wanted is "auto", "cpu" or "cuda"; a GPU rank takes the device of its local rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RefusedError(f"--device {wanted}: torch sees no GPU here. Use --device cpu or --device auto.")
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {local_rank} has no GPU of its own: this host has {torch.cuda.device_count()}. "
            "Start at most one rank per GPU, or pass --device cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def mpi_store(rank: int, world_size: int) -> dist.TCPStore:
    """A rendezvous store on rank 0, which binds a free port first and broadcasts the one it got, so that nobody
    else can take it in between."""
    world = mpi_world()
    hosts = world.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = None
    if rank == 0:
        store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False)
    port = world.bcast(store.port if store is not None else None, root=0)
    return store or dist.TCPStore(address, port, world_size, is_master=False)


def connect(tp_size: int, device: str) -> Mesh:
    """Joins the process group (gloo on CPUs, nccl on GPUs) and cuts the world into tensor parallel groups of
    tp_size neighbours; the ranks at the same place of each group are data parallel."""
    launcher, rank, world_size, local_rank = place()
    if tp_size < 1 or world_size % tp_size:
        raise RefusedError(
            f"--tp {tp_size} does not divide the {world_size} rank(s) started by {launcher}. "
            f"Start a multiple of that (`torchrun --nproc-per-node {max(tp_size, 1)} ...`), or change --tp."
        )
    chosen = choose_device(device, local_rank)
    if world_size > 1:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        if launcher == "mpirun":
            dist.init_process_group(backend, store=mpi_store(rank, world_size), rank=rank, world_size=world_size)
        else:
            dist.init_process_group(backend)
    dp_size = world_size // tp_size
    tp_group = dp_group = None
    # every rank must take part in the creation of every group, in the same order
    if tp_size > 1:
        for first in range(0, world_size, tp_size):
            group = dist.new_group(list(range(first, first + tp_size)))
            tp_group = group if first <= rank < first + tp_size else tp_group
    if dp_size > 1:
        for tp_rank in range(tp_size):
            group = dist.new_group(list(range(tp_rank, world_size, tp_size)))
            dp_group = group if rank % tp_size == tp_rank else dp_group
    return Mesh(
        launcher,
        rank,
        world_size,
        rank % tp_size,
        tp_size,
        rank // tp_size,
        dp_size,
        tp_group,
        dp_group,
        chosen,
    )


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_all_ranks() -> None:
    """Ends the other ranks of an MPI job, which would wait for this one for ever; torchrun does it unasked."""
    if detect_launcher() == "mpirun":
        world = mpi_world()
        if world.Get_size() > 1:
            world.Abort(1)
