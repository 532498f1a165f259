"""The table of compiled kernels, with a stand-in for Triton: what may share an entry and what must not."""

from types import SimpleNamespace

import pytest
import torch

from te_lite.ops import launch as L


class Compiled:
    def __init__(self, launched):
        self.launched = launched

    def launch(self, programs, stream, arguments):
        self.launched.append((programs, stream, arguments))


class Kernel:
    """kernel[grid](...) compiles; what it returns launches by compiled.launch(programs, stream, arguments)."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*args, num_warps):
            self.compiled.append((grid, args))
            return Compiled(self.launched)

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(L, "_COMPILED", {})
    monkeypatch.setattr(L, "_KERNELS", {})
    monkeypatch.setattr(L, "launchable", lambda compiled: compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return Kernel()


def _tensor(offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    base = torch.empty(64, dtype=dtype)
    assert base.data_ptr() % 16 == 0
    return base[offset : offset + 16]


def test_the_second_launch_passes_addresses_in_the_kernel_s_order(kernel):
    x, y, loose = _tensor(), _tensor(), _tensor(1)
    for programs in (3, 7):
        L.launch(kernel, programs, (loose,), (x, None, y), (5, 0.5), ("plain", True), 4)
    assert len(kernel.compiled) == 1 and kernel.compiled[0][0] == (3,)
    assert kernel.launched == [(7, 77, (loose.data_ptr(), x.data_ptr(), None, y.data_ptr(), 5, 0.5, "plain", True))]


CALLS = {
    "another type": ((_tensor(dtype=torch.bfloat16),), (5,), ("plain",), 4),
    "absent": ((_tensor(), None), (5,), ("plain",), 4),
    "another integer": ((_tensor(),), (6,), ("plain",), 4),
    "another constant": ((_tensor(),), (5,), ("norm",), 4),
    "other warps": ((_tensor(),), (5,), ("plain",), 8),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_specialisation_compiles_again(name, kernel):
    L.launch(kernel, 1, (), (_tensor(),), (5,), ("plain",), 4)
    tensors, numbers, constants, num_warps = CALLS[name]
    L.launch(kernel, 1, (), tensors, numbers, constants, num_warps)
    assert len(kernel.compiled) == 2 and not kernel.launched
    other = Kernel()
    L.launch(other, 1, (), (_tensor(),), (5,), ("plain",), 4)
    assert len(other.compiled) == 1


def test_unaligned_pointers_never_take_what_was_compiled_for_aligned_ones(kernel):
    for offset in (0, 1, 1, 0):
        L.launch(kernel, 1, (), (_tensor(offset),), (), (), 4)
    assert len(kernel.compiled) == 3 and len(kernel.launched) == 1


@pytest.mark.parametrize("ptx", ["griddepcontrol.wait;", "ret;"])
def test_a_kernel_that_waits_for_the_one_before_is_launched_early(ptx, monkeypatch):
    data = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, num_warps=4, shared=0)
    source = SimpleNamespace(signature={"x": "*fp32", "n": "i32"})
    monkeypatch.setattr(L, "_C", SimpleNamespace(Kernel=lambda *args: args))
    monkeypatch.setattr(L.triton, "__version__", "3.6.0")
    made = L.launchable(SimpleNamespace(metadata=data, src=source, asm={"ptx": ptx}, function=5))
    assert made == (5, 128, 0, "pi", "wait" in ptx)


def test_the_table_stays_small(kernel, monkeypatch):
    monkeypatch.setattr(L, "_MOST", 4)
    for m in range(11):
        L.launch(kernel, 1, (), (_tensor(),), (m,), (), 4)
    assert len(L._COMPILED) <= 4


def test_no_kernel_takes_the_entry_of_one_that_is_gone(kernel):
    """Entries go by id, which a new object may have from one that was freed."""
    for _ in range(8):
        other = Kernel()
        L.launch(other, 1, (), (_tensor(),), (5,), ("plain",), 4)
        assert len(other.compiled) == 1
        del other
