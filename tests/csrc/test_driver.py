"""te_lite._C's driver probe: against a fake libcuda everywhere, against torch's own answers on a GPU."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import te_lite._C as _C

FAKE_SOURCE = Path(__file__).with_name("fake_libcuda.cpp")

# Loads the extension from its file and nothing else, so what the process maps is the extension's doing.
CHILD = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
def mapped(name):
    return name in open("/proc/self/maps").read()
out = {"mapped_by_import": [n for n in ("libcuda", "libtorch", "libc10", "libcudart") if mapped(n)]}
for name, expression in json.loads(sys.argv[2]).items():
    try:
        out[name] = eval(expression)
    except Exception as error:
        out[name] = f"{type(error).__name__}: {error}"
out["mapped_after"] = [n for n in ("libcuda", "libtorch", "libc10", "libcudart") if mapped(n)]
print(json.dumps(out))
"""


def evaluate(library_folder: Path, expressions: dict[str, str], **env: str) -> dict:
    """Evaluate each expression over `_C` in a fresh process that finds libcuda.so.1 in library_folder."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, _C.__file__, json.dumps(expressions)],
        env={**os.environ, **env, "LD_LIBRARY_PATH": str(library_folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def build(folder: Path, source: Path, *options: str) -> Path:
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-shared", "-fPIC", *options, str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake_driver"), FAKE_SOURCE)


def test_import_maps_neither_driver_nor_torch(fake_driver: Path) -> None:
    out = evaluate(fake_driver, {"info": "_C.driver_info()"})
    assert out["mapped_by_import"] == []
    # The first assertion can fail: a call that needs the driver does map it.
    assert out["mapped_after"] == ["libcuda"]


def test_info_counts_devices(fake_driver: Path) -> None:
    info = evaluate(fake_driver, {"info": "_C.driver_info()"})["info"]
    assert info == {"available": True, "reason": "", "driver_version": 13000, "devices": 2}


def test_failed_call_names_call_error_and_text(fake_driver: Path) -> None:
    out = evaluate(fake_driver, {"info": "_C.driver_info()"}, FAKE_CUDA_FAIL="cuDeviceGetCount")
    message = "cuDeviceGetCount failed: CUDA_ERROR_NOT_INITIALIZED (3): initialization error"
    assert out["info"] == f"RuntimeError: {message}"


# One launch of a kernel with a pointer, a null pointer, an int32, an argument to pass over and a float.
LAUNCH = (
    "(lambda c: (lambda r: ("
    "_C.Kernel(c.addressof(r), 256, 4096, 'ppi-f').launch(7, 99, (2**40 + 8, None, -3, 'x', 1.5)),"
    " list(r)))((c.c_uint64 * 10)(*[5] * 10)))(__import__('ctypes'))"
)


def test_launch_packs_grid_stream_and_arguments(fake_driver: Path) -> None:
    record = evaluate(fake_driver, {"out": LAUNCH})["out"][1]
    assert record[:4] == [711, 256 * 100 + 11, 4096, 99]
    assert record[4:6] == [2**40 + 8, 0]
    assert record[6] & 0xFFFFFFFF == 2**32 - 3
    assert record[7] == struct.unpack("<I", struct.pack("<f", 1.5))[0]
    assert record[8:] == [0, 0]  # Triton's two scratch pointers


def test_a_launch_may_begin_before_the_kernel_before_has_ended(fake_driver: Path) -> None:
    """By one attribute, which the stand-in for the driver counts: programmatic stream serialization, 6, set."""
    record = evaluate(fake_driver, {"out": LAUNCH.replace("'ppi-f')", "'ppi-f', early=True)")})["out"][1]
    assert record[:4] == [711, 256 * 100 + 11, 4096 + 6_001_000_000, 99]


def test_a_refused_launch_names_the_call(fake_driver: Path) -> None:
    out = evaluate(fake_driver, {"out": LAUNCH}, FAKE_CUDA_FAIL="cuLaunchKernelEx")["out"]
    assert out == "RuntimeError: cuLaunchKernelEx failed: CUDA_ERROR_NOT_INITIALIZED (3): initialization error"


REFUSED = {
    "count": "_C.Kernel(1, 32, 0, 'pi').launch(1, 0, (0,))",
    "type": "_C.Kernel(1, 32, 0, 'pi').launch(1, 0, (0, 'seven'))",
    "letter": "_C.Kernel(1, 32, 0, 'pq')",
}


def test_launch_refuses_what_does_not_fit(fake_driver: Path) -> None:
    out = evaluate(fake_driver, REFUSED)
    assert out["count"] == "ValueError: a launch with 1 arguments: the kernel takes 2"
    assert out["type"].startswith("TypeError")
    assert "each must be one of" in out["letter"]


@pytest.mark.gpu
def test_a_thread_without_a_context_can_launch() -> None:
    """A kernel built on this thread is launched on a new one, as torch's backward thread does."""
    from te_lite.ops.cast import amax
    from te_lite.ops.source import plain

    x = torch.randn(64, 64, device="cuda")
    want = amax(plain(x)).max()
    got = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: got.append(amax(plain(x))))
        thread.start()
        thread.join()
    assert got and got[0].max() == want


def test_failed_cuinit_is_a_reason_and_is_tried_again(fake_driver: Path) -> None:
    expressions = {
        "first": "_C.driver_info()",
        "memory": "_C.CudaMemory.vmm(0, 1)",
        "repaired": "__import__('os').unsetenv('FAKE_CUDA_FAIL')",
        "second": "_C.driver_info()",
    }
    out = evaluate(fake_driver, expressions, FAKE_CUDA_FAIL="cuInit")
    reason = "cuInit failed: CUDA_ERROR_NOT_INITIALIZED (3): initialization error"
    assert out["first"] == {"available": False, "reason": reason, "driver_version": 13000, "devices": 0}
    assert out["memory"] == f"RuntimeError: {reason}"
    assert out["second"]["available"] is True


def test_old_driver_is_a_reason(tmp_path: Path) -> None:
    source = tmp_path / "old.cpp"
    source.write_text(FAKE_SOURCE.read_text().replace("cuStreamBatchMemOp_v2", "cuStreamBatchMemOp"))
    info = evaluate(build(tmp_path, source), {"info": "_C.driver_info()"})["info"]
    assert info["available"] is False
    assert "no symbol cuStreamBatchMemOp_v2" in info["reason"] and "update the driver" in info["reason"]


def test_unreadable_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    out = evaluate(tmp_path, {"info": "_C.driver_info()", "memory": "_C.CudaMemory.vmm(0, 1)"})
    if out["mapped_after"]:
        pytest.skip("the loader went on to a real libcuda.so.1 of this machine")
    assert out["info"]["available"] is False and out["info"]["driver_version"] == 0
    assert out["info"]["reason"].startswith("libcuda.so.1 cannot be opened (")
    assert out["memory"] == f"RuntimeError: {out['info']['reason']}"


@pytest.mark.gpu
def test_info_agrees_with_torch() -> None:
    info = _C.driver_info()
    assert info["available"] and info["reason"] == ""
    assert info["devices"] == torch.cuda.device_count()
