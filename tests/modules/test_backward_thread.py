"""Where backward runs: on the calling thread where the process has one CUDA device, else where torch runs it."""

import threading

import pytest
import torch

from te_lite.modules import backward_thread as B


@pytest.fixture
def flag(monkeypatch):
    """The thread's autograd flag, kept in a list instead of torch."""
    state = [True]
    monkeypatch.setattr(torch._C, "_is_multithreading_enabled", lambda: state[0])
    monkeypatch.setattr(torch._C, "_set_multithreading_enabled", lambda value: state.__setitem__(0, value))
    return state


@pytest.mark.parametrize("devices, ranks, keep, enabled", [
    (1, False, "0", False), (4, True, "0", False), (4, False, "0", True), (1, False, "1", True), (4, True, "1", True),
])  # fmt: skip
def test_the_flag_follows_the_devices(devices, ranks, keep, enabled, flag, monkeypatch):
    monkeypatch.setenv("TE_LITE_BACKWARD_THREAD", keep)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks)
    B.backward_on_calling_thread()
    assert flag == [enabled]


@pytest.mark.gpu
def test_a_module_s_backward_runs_on_this_thread(monkeypatch):
    import te_lite as te

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    threads = []
    try:
        y = layer(x)
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()
    finally:
        torch._C._set_multithreading_enabled(True)
    assert threads == [threading.get_ident()]
