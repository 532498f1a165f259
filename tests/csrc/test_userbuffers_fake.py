"""te_lite._C's device memory and CUDA executor against a fake libcuda: what the driver is asked, and given back."""

from pathlib import Path

import pytest

from tests.csrc.ranks import script
from tests.csrc.test_driver import FAKE_SOURCE, build

# What a script finds: the extension, without torch, and what the fake driver saw.
PREAMBLE = """
import ctypes, gc, importlib.util, mmap, os, sys, threading, time
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_calls.restype = ctypes.c_char_p
def live():
    gc.collect()
    return fake.fake_live()
def refused(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
words = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(words))
def word(i):
    return ctypes.c_uint32.from_address(at + 4 * i)
record = (ctypes.c_uint64 * 10)()
fake.fake_wait_kernel(record)
def wait_kernel():
    return _C.Kernel(ctypes.addressof(record), 32, 0, "ppiiip-")
def group(timeout=20.0):
    size = 2 * _C.CONTROL_BYTES
    blocks = mmap.mmap(-1, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(blocks))
    control = _C.Control(0, 2, [base, base + _C.CONTROL_BYTES], blocks, timeout)
    return control, _C.Executor(1, control, 0x11, at, 64, wait_kernel())
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake_driver"), FAKE_SOURCE)


MAPPED_TWICE = """
mine = _C.CudaMemory.vmm(1, 70000)
fd = mine.export_fd()
theirs = _C.CudaMemory.import_fd(0, fd, 70000)
os.close(fd)
assert mine.bytes == theirs.bytes == 131072 and mine.address != theirs.address  # two granules
assert ctypes.string_at(mine.address, mine.bytes) == bytes(mine.bytes)
word_of = ctypes.c_uint32.from_address
word_of(mine.address + 69996).value = 7
assert word_of(theirs.address + 69996).value == 7
del mine
word_of(theirs.address).value = 8  # the mapping keeps the memory
print(refused(_C.CudaMemory.vmm, 0, 0))
del theirs
assert live() == 0
"""


def test_memory_is_mapped_twice_and_given_back(fake_driver: Path) -> None:
    assert script(PREAMBLE + MAPPED_TWICE, fake_driver).splitlines() == [
        "ValueError: device memory of 0 bytes: at least 1 is needed",
    ]


FAILS = """
entry = os.environ["FAKE_CUDA_FAIL"]
fd = os.memfd_create("peer")
os.ftruncate(fd, 65536)
blocks = mmap.mmap(-1, _C.CONTROL_BYTES)
base = ctypes.addressof(ctypes.c_char.from_buffer(blocks))
control = _C.Control(0, 1, [base], blocks, 1.0)
makers = [
    lambda: _C.CudaMemory.vmm(0, 1),
    lambda: _C.CudaMemory.import_fd(0, fd, 1),
    lambda: _C.Executor(0, control, 0x11, at, 64, wait_kernel()),
]
failed = [refused(make) for make in makers]
assert live() == 0, failed
print([error is not None and entry in error for error in failed].count(True))
"""
# An entry that fails: how many of the makers above need it.
TAKES = {
    "cuDevicePrimaryCtxRetain": 3,
    "cuMemGetAllocationGranularity": 2,
    "cuMemCreate": 1,
    "cuMemImportFromShareableHandle": 1,
    "cuMemAddressReserve": 2,
    "cuMemMap": 2,
    "cuMemSetAccess": 2,
    "cuMemsetD8": 1,
    "cuMemHostAlloc": 1,
    "cuEventCreate": 1,
    "cuStreamCreateWithPriority": 1,
}


@pytest.mark.parametrize("entry", TAKES)
def test_what_fails_halfway_is_given_back(fake_driver: Path, entry: str) -> None:
    assert int(script(PREAMBLE + FAILS, fake_driver, FAKE_CUDA_FAIL=entry)) == TAKES[entry]


PROGRAM = """
control, executor = group()
source = ctypes.create_string_buffer(b"xy" * 8)
target = ctypes.create_string_buffer(24)
p = _C.Program("buffer")
p.wait(at, -1, 1, "room at")
p.wait(at + 40, -1, 1, "room at")
p.wait(at + 24, -1, 1, "room at")  # three flags 24 and 40 bytes apart: one launch, 8 bytes a bit
p.after(1)
p.copy(1, ctypes.addressof(target) + 8, 1, 0, 16)
p.copy(1, ctypes.addressof(target) + 4, 1, 0, 1, 2, 8)  # xy to bytes 4 and 12
p.set(1, at + 4, 0)
p.set(1, at + 8, 1)
p.set(0, at + 16, 1)
p.wait(at, 0, 1, "data from")
p.wait(at + 4, -1, 1, "data from")  # of another epoch: a launch of its own
p.cut()
p.after(0)
p.set(0, at + 12, 0)
word(0).value = word(6).value = word(10).value = 2**32 - 1
executor.issue(p, 0, 2**32 - 1, 0x5, (0, ctypes.addressof(source)))
executor.issue(p, 1, 2**32 - 1, 0x7, (0, 0))
assert target.raw == bytes(4) + b"x" + bytes(3) + b"xyxyyyxyxyxyxyxy"
assert [word(i).value for i in (1, 2, 3, 4)] == [2**32 - 1, 0, 2**32 - 1, 0]
print(fake.fake_calls().decode(), end="")
outside = _C.Program("buffer")
outside.wait(at + 64, 0, 1, "data from")
print(refused(executor.issue, outside, 0, 0, 0, ()).replace(str(at + 64), "A").replace(str(at), "B")[:80])
for wrong in ((at, 62, wait_kernel()), (at, 64, None), (at, 64, _C.Kernel(1, 32, 0, "pp"))):
    print(refused(_C.Executor, 1, control, 0x11, *wrong).replace(str(at), "B"))
executor.close()
executor.close()
del executor
control.close()
assert live() == 0 and control.broken is None
"""


def test_a_program_as_the_driver_sees_it(fake_driver: Path) -> None:
    assert script(PREAMBLE + PROGRAM, fake_driver).splitlines() == [
        f"wait {0x5} {0b101001}",
        f"record {0x5} {0x800}",
        f"await {0x11} {0x800}",
        f"copy {0x11} 16",
        f"copy2d {0x11} 2",
        f"batch {0x11} 2",
        f"batch {0x5} 1",
        f"wait {0x5} 1",
        f"wait {0x5} 1",
        f"record {0x11} {0x800}",
        f"await {0x7} {0x800}",
        f"batch {0x7} 1",
        "ValueError: a wait for the flag at A, outside of the 64 bytes at B of flags: nob",
        "ValueError: flags of 62 bytes at B: both must be multiples of 4, and bytes above 0",
        "ValueError: a CUDA executor without a wait kernel: pass wait_kernel",
        "ValueError: a wait kernel with arguments 'pp': it takes flag p, word p, stride i, mask i, delta i and abort p",
    ]


# Both kinds of copy.
COPIES = """
control, executor = group()
source, target = ctypes.create_string_buffer(b"abcdefgh"), ctypes.create_string_buffer(16)
p = _C.Program("buffer")
p.copy(1, ctypes.addressof(target), 0, 0, 4)
p.copy(1, ctypes.addressof(target) + 4, 0, 1, 2, 3, 4)
executor.issue(p, 0, 9, 0, (ctypes.addressof(source),))
assert target.raw[:14] == b"abcdbc" + bytes(2) + b"de" + bytes(2) + b"fg", target.raw
print(fake.fake_calls().decode(), end="")
"""


def test_one_row_and_several_are_copied(tmp_path: Path) -> None:
    folder = build(tmp_path, FAKE_SOURCE)
    assert script(PREAMBLE + COPIES, folder).splitlines() == [f"copy {0x11} 4", f"copy2d {0x11} 3"]


CAPTURE = """
control, executor = group()
fake.fake_capture(1)
p = _C.Program("buffer")
p.wait(at, -200, 1, "data from")
p.set(1, at + 4, 0)
p.cut()
p.set(1, at + 4, 1)
print(refused(executor.issue, p, 0, 9, 0x5, ()))
word(40).value = 77
executor.issue(p, 0, 9, 0x5, (), at + 160)
assert list(record)[3:6] == [0x5, at, at + 160] and [word % 2**32 for word in record[6:9]] == [0, 1, 2**32 - 200]
assert record[9] == executor.abort_address
assert word(1).value == 77
print(refused(executor.issue, p, 1, 9, 0x5, (), at + 160))
"""


def test_a_capture_needs_an_epoch_word(fake_driver: Path) -> None:
    said = script(PREAMBLE + CAPTURE, fake_driver).splitlines()
    assert [line[: line.index(":", 14)] for line in said] == [
        "RuntimeError: a program is issued to a stream under capture, which would freeze its epoch",
        "ValueError: a set of epoch + 1 with an epoch word",
    ]


# The fake's streams hold the thread that issues, as a full queue does.
RELEASE = """
control, executor = group(timeout=TIMEOUT)
control.announce("linear 8192x3072", 1)
p = _C.Program("buffer")
p.wait(at, -1, 1, "room at")  # there
EXPECT or p.wait(at + 4, 0, 1, "data from")
EXPECT and p.expect(at + 4, 0, 1, "data from")
p.wait(at + 4, 1, 1, "data from")
p.copy(1, at + 200, 0, 0, 4)
word(0).value = word(1).value = 4
word(51).value = 9
if BREAK:
    threading.Timer(0.3, control.break_group, ("enough",)).start()
begin = time.monotonic()
executor.issue(p, 0, 5, 0x5, (at + 204,))
took = time.monotonic() - begin
abort = ctypes.c_uint32.from_address(executor.abort_address)
assert (word(0).value, word(1).value, word(50).value, abort.value) == (4, 4, 9, 1), "only the abort word"
print(control.broken)
print(took)
print(refused(executor.issue, p, 0, 6, 0x5, ()).split(":")[0])
executor.close()
del executor
assert live() == 0
"""


@pytest.mark.parametrize(("broken", "expected"), [(False, False), (True, False), (False, True)])
def test_an_overdue_or_broken_wait_is_released(fake_driver: Path, broken: bool, expected: bool) -> None:
    """expected: the caller's own kernel waits, and only the time that it takes is watched."""
    values = f"BREAK, TIMEOUT, EXPECT = {broken}, {20.0 if broken else 1.5}, {expected}\n"
    reason, took, error = script(PREAMBLE + values + RELEASE, fake_driver).splitlines()
    if broken:
        assert reason == "enough" and float(took) < 3
    else:
        said = "operation 1 (linear 8192x3072), buffer buffer: rank 0 has waited "
        assert reason.startswith(said) and 1.5 < float(took) < 5
        assert "s for data from rank 1: epoch 5 is expected, 4 is seen" in reason
    assert error == "GroupBroken"
