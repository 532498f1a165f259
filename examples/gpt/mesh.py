"""Where this process stands: its rank, its device and its tensor and data parallel groups.

Three ways to start are told apart from the environment:

    torchrun            RANK, WORLD_SIZE, MASTER_ADDR are set       rendezvous through env://
    mpirun + mpi4py     an MPI launcher's variables are set         rank and size from COMM_WORLD
    python              neither                                     one process, no process group
"""

import os
import socket
from collections.abc import Iterable, Sequence
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

    ep_size data parallel neighbours share a model's experts; expert_group: the ranks that hold the same of them. A
    group of one rank is None.
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
    ep_size: int = 1
    ep_group: dist.ProcessGroup | None = None
    expert_group: dist.ProcessGroup | None = None

    @property
    def ep_rank(self) -> int:
        return self.dp_rank % self.ep_size

    @property
    def piece(self) -> tuple[int, int, str]:
        """Which piece of the model this rank holds: its number, how many there are, and what cuts them."""
        return (self.ep_rank, self.ep_size, "ep") if self.ep_size > 1 else (self.tp_rank, self.tp_size, "tp")

    @property
    def writes(self) -> bool:
        """Whether no rank before this one holds the same piece."""
        return self.dp_rank < self.ep_size

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


def own_group(groups: Iterable[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """A process group of those ranks among which this one is; None where they are one. Every rank takes part in the
    creation of every group, in the same order."""
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            own = group if rank in ranks else own
    return own


def connect(tp_size: int, device: str, ep_size: int = 1) -> Mesh:
    """Joins the process group (gloo on CPUs, nccl on GPUs) and cuts the world into tensor parallel groups of
    tp_size neighbours; the ranks at the same place of each group are data parallel. ep_size: with tp_size 1."""
    launcher, rank, world_size, local_rank = place()
    for option, size in (("--tp", tp_size), ("--ep", ep_size)):
        if size < 1 or world_size % size:
            raise RefusedError(
                f"{option} {size} does not divide the {world_size} rank(s) started by {launcher}. "
                f"Start a multiple of that (`torchrun --nproc-per-node {max(size, 1)} ...`), or change {option}."
            )
    chosen = choose_device(device, local_rank)
    if world_size > 1:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        if launcher == "mpirun":
            dist.init_process_group(backend, store=mpi_store(rank, world_size), rank=rank, world_size=world_size)
        else:
            dist.init_process_group(backend)
    neighbours = [range(first, first + tp_size) for first in range(0, world_size, tp_size)]
    tp_group = own_group(neighbours, rank)
    dp_group = own_group([range(first, world_size, tp_size) for first in range(tp_size)], rank)
    ep_group, expert_group = None, dp_group
    if ep_size > 1:
        ep_group = own_group([range(first, first + ep_size) for first in range(0, world_size, ep_size)], rank)
        expert_group = own_group([range(first, world_size, ep_size) for first in range(ep_size)], rank)
    tp_rank, dp_rank, dp_size = rank % tp_size, rank // tp_size, world_size // tp_size
    return Mesh(
        launcher, rank, world_size, tp_rank, tp_size, dp_rank, dp_size, tp_group, dp_group, chosen, ep_size, ep_group,
        expert_group,
    )  # fmt: skip


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_all_ranks() -> None:
    """Ends the other ranks of an MPI job, which would wait for this one for ever; torchrun does it unasked."""
    if detect_launcher() == "mpirun":
        world = mpi_world()
        if world.Get_size() > 1:
            world.Abort(1)
