"""te_lite._C's device memory and CUDA executor on a GPU, which is its own peer through a second mapping."""

import os
import sys
import time

import pytest
import torch
import triton
import triton.language as tl

import te_lite._C as _C
from te_lite.ops.flags import compiled_wait
from tests.csrc.ranks import Memory, script


@pytest.mark.gpu
def test_views_of_device_memory() -> None:
    mine = _C.CudaMemory.vmm(0, 5000)
    assert mine.bytes >= 5000 and mine.bytes % (1 << 21) == 0
    view = torch.utils.dlpack.from_dlpack(_C.dlpack(mine.address, mine.bytes, 0, mine))
    assert str(view.device) == "cuda:0" and view.data_ptr() == mine.address and not view.any()
    fd = mine.export_fd()
    theirs = _C.CudaMemory.import_fd(0, fd, 5000)
    os.close(fd)
    other = torch.utils.dlpack.from_dlpack(_C.dlpack(theirs.address, theirs.bytes, 0, theirs))
    view[4999] = 3
    assert other[4999] == 3 and other.data_ptr() != view.data_ptr()
    del mine
    assert view.sum() == 3  # the view keeps the memory


@pytest.mark.gpu
def test_vmm_memory_goes_back_to_the_device() -> None:
    """Together more than the device has; what is free now cannot be asked where others use it too."""
    size = torch.cuda.get_device_properties(0).total_memory // 16
    for _ in range(20):
        memory = _C.CudaMemory.vmm(0, size)
        del memory


class OnGpu:
    """Two mappings of one arena on device 0: flags in the first page, data behind it. `here` waits, `there` is set."""

    def __init__(self, timeout: float = 20.0, wait_kernel: _C.Kernel | None = None) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.memory = _C.CudaMemory.vmm(0, 1 << 21)
        fd = self.memory.export_fd()
        self.peer = _C.CudaMemory.import_fd(0, fd, 1 << 21)
        os.close(fd)
        self.here, self.there = self.memory.address, self.peer.address
        words = torch.utils.dlpack.from_dlpack(_C.dlpack(self.here, 1 << 21, 0, self.memory)).view(torch.int32)
        self.flags, self.data = words[:1024], words[1024:]
        self.control = Memory(1).control(0, timeout=timeout)
        self.stream = torch.cuda.Stream()
        kernel = wait_kernel or compiled_wait(torch.device("cuda", 0))
        self.executor = _C.Executor(0, self.control, self.stream.cuda_stream, self.here, 2048, kernel)
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.executor.close()
        self.control.close()


@pytest.mark.gpu
def test_copies_and_flags_between_two_mappings() -> None:
    g = OnGpu()
    source, n = torch.arange(4096, dtype=torch.int32, device="cuda"), 4096
    got = torch.zeros_like(source)
    use = _C.Program("buffer")
    use.wait(g.here + 4, -1, 0, "room at")
    use.after(1)
    use.copy(1, g.there + 4096, 0, 0, 4 * n)
    use.set(1, g.there, 0)
    use.wait(g.here, 0, 0, "data from")
    use.copy(0, got.data_ptr(), 1, 0, 4 * n)
    use.set(0, g.there + 4, 0)
    start = 2**32 - 10
    g.flags[:2] = start - 1 - 2**32
    torch.cuda.synchronize()
    main = torch.cuda.current_stream().cuda_stream
    for i in range(40):
        source.add_(i)
        got.zero_()
        g.executor.issue(use, 0, (start + i) % 2**32, main, (source.data_ptr(), g.here + 4096))
        assert torch.equal(got, source), i
    assert g.flags[:2].tolist() == [29, 29]
    g.close()
    assert g.control.broken is None


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 48, 5])
def test_a_copy_of_rows_on_a_gpu(width: int) -> None:
    g = OnGpu()
    source = torch.randint(0, 255, (100, width), dtype=torch.uint8, device="cuda")
    use = _C.Program("buffer")
    use.after(1)
    use.copy(1, g.there + 4096 + 2 * width, 0, 0, width, 100, 4 * width)
    n, flat = source.numel(), 500 * width
    use.copy(1, g.there + 4096 + flat, 0, 0, n)
    use.after(0)
    g.executor.issue(use, 0, 1, torch.cuda.current_stream().cuda_stream, (source.data_ptr(),))
    data = g.data.view(torch.uint8)
    got = data[: 400 * width].view(100, 4, width)
    assert torch.equal(got[:, 2], source) and not got[:, [0, 1, 3]].any()
    assert torch.equal(data[flat : flat + n], source.view(-1)) and not data[flat + n :].any()
    g.close()


ON_GPU_RELEASE = """
import os, sys, time, torch
import te_lite._C as _C
from tests.csrc.test_userbuffers_gpu import OnGpu
g = OnGpu(timeout=2.0)
g.control.announce("linear", 1)
use = _C.Program("buffer")
use.wait(g.here, 0, 0, "data from")
g.data[:16].add_(0)  # a kernel's first launch loads it, which waits for every stream, and the driver with it
torch.cuda.synchronize()
begin = time.monotonic()
g.executor.issue(use, 0, 5, torch.cuda.current_stream().cuda_stream, ())
g.data[:16].add_(1)  # behind the wait
torch.cuda.synchronize()
took = time.monotonic() - begin
assert 2 < took < 15, took
time.sleep(0.5)
print(g.control.broken)
assert g.flags[0] == 0 and g.data[0] == 1  # the wait ends, the flag stays
g.close()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["1", "8"])
def test_an_overdue_wait_is_released_on_a_gpu(connections: str) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = script(ON_GPU_RELEASE, **env)
    assert said.startswith("operation 1 (linear), buffer buffer: rank 0 has waited 2.")
    assert "data from rank 0: epoch 5 is expected, 0 is seen" in said


@triton.jit(do_not_specialize=["stride", "mask", "delta"])
def wait_kernel(flag, word, stride, mask, delta, abort):
    """As te_lite's, of one flag."""
    target = tl.load(word) + delta
    missing = tl.load(flag, volatile=True) - target < 0
    while missing:
        missing = (tl.load(flag, volatile=True) - target < 0) & (tl.load(abort, volatile=True) == 0)


@pytest.mark.gpu
def test_a_captured_program_follows_the_epoch_word() -> None:
    """Each replay sets a flag from the word, and waits for another that the host sets from the side."""
    epoch = torch.full((1,), 2**31 - 3, dtype=torch.int32, device="cuda")  # wraps around as an int32
    ready = wait_kernel[(1,)](epoch, epoch, 0, 1, -1, epoch, num_warps=1)
    g = OnGpu(wait_kernel=_C.Kernel(ready.function, 32, ready.metadata.shared, "ppiiip"))
    g.flags[:2] = 2**31 - 3
    source = torch.zeros(1024, dtype=torch.int32, device="cuda")
    use = _C.Program("buffer")
    use.after(1)
    use.copy(1, g.there + 4096, 0, 0, 4096)
    use.set(1, g.there, 0)
    use.after(0)
    use.wait(g.here, 0, 0, "data from")
    use.wait(g.here + 4, -1, 0, "data from")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        with pytest.raises(RuntimeError, match="epoch_word"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
            g.executor.issue(use, 0, 1, side.cuda_stream, (source.data_ptr(),))
        with torch.cuda.graph(graph, stream=side):
            epoch.add_(1)
            g.executor.issue(use, 0, 1, side.cuda_stream, (source.data_ptr(),), epoch.data_ptr())
            got = g.data[:1024].clone()
    for i in range(6):
        source.fill_(i + 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
            end = side.record_event()
        # The first replay finds the flag there (delta -1), the others are held until it follows.
        time.sleep(0.1)
        assert end.query() == (i == 0), i
        with torch.cuda.stream(g.stream):
            g.flags[1:2].add_(i > 0)
        torch.cuda.synchronize()
        assert g.flags[0] == epoch[0] and torch.all(got == i + 1), i
    assert epoch[0] < 0  # it did wrap
    g.close()
    assert g.control.broken is None
