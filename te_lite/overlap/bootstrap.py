"""What ranks tell each other before a userbuffer exists: small objects, file descriptors, and whether all went well."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from te_lite.parallel import ranks_of

T = TypeVar("T")

BACKENDS = (None, "gloo", "nccl", "mpi")
SOCKET_TIMEOUT_S = TIMEOUT_S = 60.0
ENDING_S = 5.0  # how long after its connections a killed process may take to count as ended


def timeout_s() -> float:
    """Seconds that a wait for a peer may take: TE_LITE_UB_TIMEOUT, default 60."""
    word = os.environ.get("TE_LITE_UB_TIMEOUT") or str(TIMEOUT_S)
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"TE_LITE_UB_TIMEOUT={word!r}: must be seconds, more than 0; leave it out for {TIMEOUT_S}")
    return seconds


class BootstrapError(RuntimeError):
    """A step of the set-up failed on at least one rank; every rank raises it, with every rank's reason."""


class Rendezvous:
    """all_gather of small Python objects among the ranks of one tensor-parallel group, and among no others: a group
    that gives up must not leave another waiting.

    tp_group None: the world is cut into blocks of tp_size neighbours, and every rank of the world takes part.
    backend: "gloo", "nccl" (torch.distributed), "mpi" (mpi4py, with the world's ranks) or None: what is there.
    """

    def __init__(self, tp_size: int, tp_group: dist.ProcessGroup | None, backend: str | None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "userbuffers need torch.distributed: start under torchrun or mpirun and call "
                "torch.distributed.init_process_group first"
            )
        self._group, self._communicator, self._made = tp_group, None, ExitStack()
        world, rank = dist.get_world_size(), dist.get_rank()
        if tp_group is not None and dist.get_rank(tp_group) < 0:
            raise ValueError(f"tp_group does not contain this rank, {rank}; pass the group that it belongs to")
        self.ranks = everyone = tuple(range(world)) if tp_group is None else ranks_of(tp_group)
        self._places: dict[int, tuple[str, int]] = {}  # rank -> host and process
        said = self._gather(((host_identity(), os.getpid()), f"tp_size={tp_size}", f"bootstrap_backend={backend!r}"))
        self._places = {one: place for one, (place, *_) in zip(everyone, said, strict=True)}
        check_agreement(everyone, [items for _, *items in said])
        if type(tp_size) is not int:
            raise TypeError(f"tp_size={tp_size!r}: must be an int, the number of ranks of a group")
        if backend not in BACKENDS:
            raise ValueError(f"bootstrap_backend={backend!r}: must be one of {BACKENDS}")
        if backend == "nccl" and not dist.is_nccl_available():
            raise RuntimeError("bootstrap_backend='nccl': this torch was built without NCCL; pass 'gloo'")
        if tp_group is not None and len(self.ranks) != tp_size:
            raise ValueError(f"tp_size={tp_size} but tp_group has {len(self.ranks)} ranks; pass its size")
        if tp_group is None:
            if tp_size < 1 or world % tp_size:
                raise ValueError(f"tp_size={tp_size} does not divide the world of {world} ranks; pass tp_group")
            first = rank // tp_size * tp_size
            self.ranks = tuple(range(first, first + tp_size))
        self.rank, self.size = self.ranks.index(rank), tp_size
        if backend == "mpi":
            self._communicator = _communicator(self.ranks)
            self._made.callback(self._communicator.Free)
            return
        other = backend is not None and backend not in str(dist.get_backend(tp_group))
        if other or (tp_group is None and tp_size != world):
            self._group = self._new_group(backend)
            self._made.callback(dist.destroy_process_group, self._group)

    def _new_group(self, backend: str | None) -> dist.ProcessGroup:
        """A process group of these ranks. Every rank of the world makes every group, in the same order: what torch has
        for members alone hangs where a group of the same ranks was made before."""
        blocks = sorted(set(self._gather(self.ranks, everywhere=True)))
        limit = timedelta(seconds=min(timeout_s(), 1e6))  # all are here; torch's own limit is for ranks that come late
        with self._naming():
            return {ranks: dist.new_group(list(ranks), limit, backend) for ranks in blocks}[self.ranks]

    def all(self, value: T) -> list[T]:
        """`value` of every rank of the group, in the order of its ranks. Collective."""
        if self._communicator is not None:
            return self._communicator.allgather(value)
        return self._gather(value)

    def _gather(self, value: T, everywhere: bool = False) -> list[T]:
        """As all(), by torch.distributed; over the world with `everywhere`."""
        group = None if everywhere else self._group
        gathered: list[Any] = [None] * dist.get_world_size(group)
        with self._naming():
            dist.all_gather_object(gathered, value, group=group)
        return gathered

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Around what fails when a rank has died: says whose process has ended. The kernel closes a killed process's
        sockets before it counts as ended, so that is waited for, up to ENDING_S."""
        try:
            yield
        except RuntimeError as error:
            deadline, dead = time.monotonic() + ENDING_S, list[int]()
            while self._places and not dead and time.monotonic() < deadline:
                time.sleep(0.01)
                dead = [rank for rank, place in self._places.items() if _ended(*place)]
            who = f"the process of ranks {dead} has ended" if dead else "a rank is gone"
            raise RuntimeError(f"{who} while userbuffers were set up, see its output: {error}") from error

    def step(self, what: str, run: Callable[[], T]) -> T:
        """run() on every rank; where it fails on any, BootstrapError on all of them. Collective."""
        error: str | None = None
        try:
            result = run()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        failed = [f"rank {r} ({text})" for r, text in zip(self.ranks, self.all(error), strict=True) if text is not None]
        if failed:
            raise BootstrapError(f"{what} failed on {'; '.join(failed)}")
        return result

    def close(self) -> None:
        """Gives back what was made for the exchange."""
        self._made.close()


def check_agreement(ranks: Sequence[int], said: Sequence[Sequence[str]]) -> None:
    """ValueError that names who said what, of what not all said, unless all said the same."""
    if len(set(map(tuple, said))) > 1:
        common = set.intersection(*map(set, said))
        texts = (", ".join(item for item in items if item not in common) for items in said)
        differing = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
        raise ValueError(f"initialize_ub got different arguments on the ranks of one group: {differing}")


def _communicator(ranks: tuple[int, ...]) -> Any:
    """MPI's communicator of these ranks of the world. Collective among them."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            f"bootstrap_backend='mpi' needs mpi4py ({error}); install it, or pass 'gloo': plain torchrun is enough"
        ) from error
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (dist.get_rank(), dist.get_world_size()):
        raise RuntimeError(
            f"bootstrap_backend='mpi', but this is rank {world.rank} of {world.size} to MPI and rank {dist.get_rank()} "
            f"of {dist.get_world_size()} to torch.distributed; start under mpirun with the same ranks, or pass 'gloo'"
        )
    return world.Create_group(world.group.Incl(list(ranks)))


def host_identity() -> str:
    """Equal for processes that can share memory: the running kernel and the host's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _ended(host: str, process: int) -> bool:
    """Whether a process is known to have ended: of this host, and gone or not yet waited for by its parent."""
    if host != host_identity() or not Path("/proc/self/stat").exists():
        return False
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class Doorway:
    """A listening Unix socket by which peers send file descriptors. Its name is random and in no file system."""

    def __init__(self, size: int) -> None:
        self.name = f"\0te_lite-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SOCKET_TIMEOUT_S)
        self.socket.bind(self.name)
        self.socket.listen(size)

    def send(self, rank: int, names: list[str], fd: int) -> None:
        """This rank's descriptor to every other rank's doorway."""
        for name in names[:rank] + names[rank + 1 :]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(SOCKET_TIMEOUT_S)
                connection.connect(name)
                socket.send_fds(connection, [struct.pack("i", rank)], [fd])

    def receive(self, peers: int, received: dict[int, int]) -> None:
        """A descriptor from each of so many peers, by rank into `received`; the caller closes them."""
        for _ in range(peers):
            connection, _ = self.socket.accept()
            with connection:
                connection.settimeout(SOCKET_TIMEOUT_S)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                _, user, _ = struct.unpack("3i", credentials)  # process, user, group
                if user != os.getuid():
                    raise PermissionError(f"a process of user {user} connected to the ranks of user {os.getuid()}")
                message, fds, _, _ = socket.recv_fds(connection, 4, 1)
                (peer,) = struct.unpack("i", message)
                if not fds:
                    raise RuntimeError(f"rank {peer} sent no file descriptor")
                received[peer] = fds[0]


def share_fds(exchange: Rendezvous, fds: dict[int, int]) -> None:
    """This rank's file descriptor, in `fds` by its rank, to all ranks of the group, and theirs into `fds`. Collective.
    The caller closes what is there, also where this fails."""
    rank, doorway = exchange.rank, exchange.step("opening a Unix socket", lambda: Doorway(exchange.size))
    with doorway.socket:
        names = exchange.all(doorway.name)
        exchange.step("sending file descriptors", lambda: doorway.send(rank, names, fds[rank]))
        exchange.step("receiving file descriptors", lambda: doorway.receive(exchange.size - 1, fds))
