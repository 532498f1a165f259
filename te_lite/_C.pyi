"""What Python cannot do, in C++. Importing it opens no driver; the first call that needs one does."""

from typing import TypedDict

class Device(TypedDict):
    name: str
    ordinal: int  # numbered from 0 after CUDA_VISIBLE_DEVICES, as torch numbers them
    compute_capability: tuple[int, int]
    total_memory: int  # bytes
    multiprocessors: int
    uuid: str  # 8-4-4-4-12 hexadecimal digits, as torch writes it

class DriverInfo(TypedDict):
    available: bool  # the driver works and shows a device
    reason: str  # why not available; empty when it is
    driver_version: int  # 1000 * major + 10 * minor of the newest CUDA it serves; 0 when unknown
    devices: list[Device]

def driver_info() -> DriverInfo:
    """The CUDA driver and its devices. Raises nothing for a machine without them."""

def can_access_peer(a: int, b: int) -> bool:
    """Whether device a can reach memory of device b; True for a == b.

    RuntimeError where the driver is unavailable, ValueError for an ordinal that does not exist.
    """

class Kernel:
    """A compiled kernel with what its launches have in common.

    function: CUfunction handle. threads: a program (block). kinds: a letter for each argument of launch(): "p" address
    (an int, or None for null), "i" int32, "l" int64, "f" fp32, "-" passed over: not a parameter of the compiled kernel.
    """

    def __init__(self, function: int, threads: int, shared_bytes: int, kinds: str) -> None: ...
    def launch(self, programs: int, stream: int, arguments: tuple[int | float | None, ...]) -> None:
        """Launches (programs, 1, 1) on the stream handle. RuntimeError when the driver refuses."""
