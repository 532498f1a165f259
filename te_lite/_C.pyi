"""What Python cannot do, in C++. Importing it opens no driver; the first call that needs one does."""

from collections.abc import Sequence as Sequence_
from typing import TypedDict

from torch import Tensor

class DriverInfo(TypedDict):
    available: bool  # the driver works and shows a device
    reason: str  # why not available; empty when it is
    driver_version: int  # 1000 * major + 10 * minor of the newest CUDA it serves; 0 when unknown
    devices: int  # as many as CUDA_VISIBLE_DEVICES lets it show

def driver_info() -> DriverInfo:
    """The CUDA driver. Raises nothing for a machine without one."""

class Kernel:
    """A compiled kernel with what its launches have in common.

    function: CUfunction handle. threads: a program (block). kinds: a letter for each argument of launch(): "p" address
    (an int, or None for null), "i" int32, "l" int64, "f" fp32, "-" passed over: not a parameter of the compiled kernel.
    early: it may begin before the kernel before it on its stream has ended, and waits for that itself.
    """

    def __init__(self, function: int, threads: int, shared_bytes: int, kinds: str, early: bool = False) -> None: ...
    def launch(self, programs: int, stream: int, arguments: tuple[int | float | None, ...]) -> None:
        """Launches (programs, 1, 1) on the stream handle. RuntimeError when the driver refuses."""

MOST_FUSED_RANKS: int

class FusedGemm:
    """csrc/gemm_fused.cu compiled for one kind of operands, loaded for a device, which need not be the current one.

    gather: compiled as an all-gather. element_bytes: of a and b. columns: of a tile. transposed: b lies as [K, N].
    grad: compiled for a gradient. narrow: for partials that travel as ops/narrow.py makes them. act_bytes: an element
    of `act` has so many.
    """

    def __init__(
        self,
        device: int,
        cubin: bytes,
        gather: bool,
        element_bytes: int,
        columns: int,
        transposed: bool,
        grad: bool,
        narrow: bool,
        act_bytes: int,
    ) -> None: ...
    def launch(
        self, programs: int, stream: int, a: int, b: int, other: int, h: int, to: Sequence_[int], act: Sequence_[int],
        act_t: Sequence_[int], arguments: bytes,
    ) -> None:  # fmt: skip
        """a to act_t: addresses of FusedMaps (csrc/gemm_fused.h), h may be 0. arguments: FusedArguments as it lies in
        memory. programs: even. RuntimeError when the driver refuses."""

MOST_GROUPED_OUTS: int

class GroupedGemm:
    """csrc/gemm_grouped.cu compiled for one kind of operands, loaded for a device, which need not be the current one.

    element_bytes: of a and b. columns: of a tile. tokens_first: a and b are [tokens, features].
    """

    def __init__(self, device: int, cubin: bytes, element_bytes: int, columns: int, tokens_first: bool) -> None: ...
    def launch(
        self, programs: int, stream: int, a: int, a_rows: int, a_cols: int, b: int, b_rows: int, b_cols: int,
        outs: Sequence_[int], arguments: bytes,
    ) -> None:  # fmt: skip
        """a, b, outs: addresses. arguments: GroupedArguments (csrc/gemm_grouped.h) as it lies in memory, behind outs.
        programs: even. RuntimeError when the driver refuses."""

def dlpack(address: int, bytes: int, device: int, owner: object) -> object:
    """A "dltensor" capsule: uint8 [bytes] at address, which owner keeps alive. device -1: CPU, else that CUDA device,
    also for memory of a peer that is mapped here."""

class CudaMemory:
    """Device memory, zero at first, that other processes can map. Freed with the object. RuntimeError where the driver
    refuses."""

    @staticmethod
    def vmm(device: int, bytes: int) -> CudaMemory:
        """Shared by file descriptor; bytes are rounded up to the device's granularity."""

    @staticmethod
    def import_fd(device: int, fd: int, bytes: int) -> CudaMemory:
        """Maps a peer's vmm() memory for use by device. fd stays the caller's."""

    def export_fd(self) -> int:
        """A descriptor that the caller closes."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

CONTROL_BYTES: int  # a rank's block of shared memory for Control

class GroupBroken(RuntimeError):
    """The group cannot go on, on any rank. The message is the first reason that any rank gave."""

class Control:
    """What the ranks of a group tell each other beside the work: that they live, what they run, why they stopped.

    addresses[r]: rank r's block in shared host memory that owner keeps alive and that began as zeros. timeout: seconds
    that a wait may take. silence: seconds that a peer may show no sign of life.
    names: what messages call the ranks (default: by index). A thread compares the operations that
    the ranks announce; a forked child has neither the thread nor a say.
    """

    def __init__(
        self, rank: int, size: int, addresses: list[int], owner: object, timeout: float, silence: float = 5.0,
        names: list[int] = [],
    ) -> None: ...  # fmt: skip
    def announce(self, operation: str, value: int) -> int:
        """The next operation begins: its text and a hash of what must agree, 64 bits with sign. Its number.
        GroupBroken."""

    def agree(self, operation: str, value: int) -> None:
        """As announce, and returns once all ranks have announced the same. GroupBroken, at the latest after the
        time-out, and on every rank."""

    def break_group(self, message: str) -> None:
        """Stops all ranks. The first message stays."""

    @property
    def broken(self) -> str | None: ...
    @property
    def told(self) -> bool:
        """Whether somebody here has met GroupBroken."""

    def check(self) -> None:
        """GroupBroken when broken."""

    def close(self) -> None:
        """This rank leaves in order; peers that still wait for it run into the time-out."""

class Program:
    """Steps over buffers and flags, written down once and issued a segment at a time.

    stream: 0 is the caller's, 1 the copy stream. A flag is an aligned 32-bit word that only grows, modulo 2^32.
    """

    def __init__(self, name: str) -> None: ...
    def copy(self, stream: int, to: int, argument: int, offset: int, bytes: int, rows: int = 1, pitch: int = 0) -> None:
        """`rows` rows of `bytes` bytes to the address `to`, there each a pitch (bytes) behind the one before; from the
        address that issue() gets as arguments[argument], `offset` bytes behind it, without gaps. ValueError."""

    def set(self, stream: int, flag_address: int, delta: int) -> None:
        """flag = epoch + delta, after what the stream did before."""

    def wait(self, flag_address: int, delta: int, rank: int, kind: str) -> None:
        """On the caller's stream, until flag has reached epoch + delta. For messages: kind ("data from", "room at") and
        who sets it."""

    def expect(self, flag_address: int, delta: int, rank: int, kind: str) -> None:
        """The caller's kernel waits for flag to reach epoch + delta: CUDA watches the time, nothing else happens."""

    def after(self, stream: int) -> None:
        """What follows on stream starts after all that was issued to the other one so far."""

    def cut(self) -> None:
        """Ends a segment; another begins."""

class Executor:
    """Issues programs. device -1: the host, where the caller's stream is the calling thread, synchronous, and a thread
    plays the copy stream. Else a CUDA device, with the raw handle of the copy stream and:

    flags, flag_bytes: the memory of the flags that this rank waits for. wait_kernel: what every wait launches: flag
    "p", word "p", stride "i", mask "i", delta "i", abort "p". A null word stands for 0.
    """

    def __init__(
        self, device: int, control: Control, copy_stream: int = 0, flags: int = 0, flag_bytes: int = 0,
        wait_kernel: Kernel | None = None,
    ) -> None: ...  # fmt: skip
    def issue(
        self, program: Program, segment: int, epoch: int, main_stream: int, arguments: tuple[int, ...],
        epoch_word: int = 0,
    ) -> None:  # fmt: skip
        """One segment for one epoch. GroupBroken; ValueError for what does not fit the program.

        epoch_word: the address of a device word with the epoch, needed under CUDA stream capture, where a number would
        be frozen: sets copy that word (their delta must be 0) and waits read it.
        """

    def synchronize(self) -> None:
        """Host: until the thread has done all that was issued, or dropped it because the group is broken. CUDA:
        nothing."""

    def close(self) -> None:
        """Ends the threads; what is issued and not done is dropped, so synchronize first."""

    @property
    def abort_address(self) -> int:
        """CUDA: a word in pinned host memory, for kernels that poll, that becomes 1 when the group
        breaks. A thread of the host writes it, so neither the driver nor a queue stands in its way."""

    def set_delays(self, seed: int, max_microseconds: int) -> None:
        """For tests, host: a random sleep before each queued copy and each wait; 0 is none."""

    def set_ignore_free(self, ignore: bool) -> None:
        """For tests: waits of the kind "room at" return at once."""

class Cublaslt:
    """cublasLt as this process has loaded it, with a handle for the current device. RuntimeError where it has not."""

    def __init__(self, soname: str) -> None: ...

class GemmPlan:
    """out[m, n] = a[m, k] @ b[n, k]^T, prepared. Types as cudaDataType_t, scales as cublasLtMatmulMatrixScale_t, -1 for
    operands that have none.

    a_turned, b_turned: the operand lies as [k, m], [k, n]. a_apart, b_apart: elements from one row to the next, as it
    lies. bias: bias[n], of out's type, is added; accumulate: out is. alignment: bytes of which all addresses but those
    of the scales are multiples. most_workspace: bytes that an algorithm may ask for. most_algorithms: to ask the
    heuristic for. RuntimeError where cublasLt has none.
    """

    workspace: int  # bytes that run() needs, by whichever algorithm
    algorithms: int  # how many the heuristic gave

    def __init__(
        self, library: Cublaslt, m: int, n: int, k: int, a_type: int, b_type: int, out_type: int, a_scale: int,
        b_scale: int, a_turned: bool, a_apart: int, b_turned: bool, b_apart: int, bias: bool, fast: bool,
        accumulate: bool, alignment: int, most_workspace: int, most_algorithms: int = 1,
    ) -> None: ...  # fmt: skip
    def choose(self, algorithm: int) -> None:
        """One of `algorithms`, for the runs that follow; until then it is 0. IndexError for what is none of them."""

    def run(self, a: int, b: int, out: int, a_scale: int, b_scale: int, bias: int, workspace: int, stream: int) -> None:
        """Addresses, and a stream handle. Any thread may call it. RuntimeError where cublasLt refuses."""

class Sequence:
    """What one call issues, each address and epoch from one of so many slots: those of tensors, then one that is 0,
    from which an address that stays is counted, then those of epochs."""

    def __init__(self, slots: int) -> None: ...
    def on(self, stream: int) -> None:
        """Later steps go to the stream of this handle; 0: to that of the call."""

    def add_kernel(
        self, kernel: Kernel, programs: int, values: tuple[int | float | None, ...],
        patches: Sequence_[tuple[int, int, int]], epochs: Sequence_[tuple[int, int]],
    ) -> None:  # fmt: skip
        """A launch of values, as Kernel.launch takes them. patches: (position in values, slot, offset in bytes).
        epochs: (position, slot) of 32-bit integers."""

    def add_gemm(self, plan: GemmPlan, patches: Sequence_[tuple[int, int, int]]) -> None:
        """A product. patches: (position among the seven addresses of GemmPlan.run, slot, offset); 0 elsewhere."""

    def add_zeros(self, bytes: int, slot: int, offset: int) -> None:
        """Zeros, so many bytes."""

    def add_fused(
        self, gemm: FusedGemm, programs: int, counts: tuple[int, int, int], values: Sequence_[int],
        patches: Sequence_[tuple[int, int, int]], epochs: Sequence_[tuple[int, int]],
    ) -> None:  # fmt: skip
        """A fused GEMM. values: a, b, other and h of FusedGemm.launch, then its to, act and act_t, of which there are
        `counts`, then its arguments as 64-bit words. epochs: of the lower half of a word."""

    def add_issue(
        self, executor: Executor, program: Program, segment: int, count: int, patches: Sequence_[tuple[int, int, int]],
        epochs: Sequence_[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Executor.issue of a segment with `count` arguments. Value 0 is the epoch, 1 + i argument i; 0 elsewhere."""

    def add_announce(self, control: Control, operation: str, value: int) -> None:
        """Control.announce."""

    def add_wait(self, waits: int, other: int) -> None:
        """What comes on a stream waits for what another has been given. Handles; 0: that of the call."""

    def run(self, stream: int, tensors: list[Tensor | None], epochs: Sequence_[int] = ()) -> None:
        """On the stream handle. tensors: what is in the first slots; epochs: in the last ones. RuntimeError where the
        driver or cublasLt refuses, GroupBroken as Executor.issue."""

def described(tensors: tuple[Tensor | None, ...]) -> bytes:
    """All that launches follow from: devices, dtypes, shapes, strides, addresses modulo 256, and which tensors begin at
    one address. RuntimeError for a tensor that DLPack cannot tell."""
