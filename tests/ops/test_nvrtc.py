"""Kernels that are compiled at run time: each once, and kept in a file."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from te_lite.ops import gemm_fused, nvrtc
from te_lite.ops.gemm_fused import Kind
from tests.ops.fused import BF16


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The options of each compilation; a compiler of version 13.0 stands in for NVRTC."""
    made: list[list[str]] = []

    def compile(sources: dict[str, bytes], options: list[str]) -> bytes:
        made.append(options)
        return b"cubin %d" % len(made)

    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (SimpleNamespace(value=0), 13, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(nvrtc, "_compile", compile)
    monkeypatch.setenv("TE_LITE_CACHE", str(tmp_path / "kept"))
    return made


KIND = Kind(True, BF16, BF16, "none", BF16, 4, False, 128)


def compiled(kind: Kind = KIND, names: tuple[str, ...] = gemm_fused._NAMES) -> bytes:
    return nvrtc.compiled(names, kind.macros)


def test_a_compilation_is_kept_for_other_processes(compilations):
    assert [compiled() for _ in range(3)] == [b"cubin 1"] * 3
    assert compiled(KIND._replace(columns=256)) == b"cubin 2"
    sys.modules["cuda.bindings"].nvrtc.nvrtcVersion = lambda: (SimpleNamespace(value=0), 13, 1)
    assert compiled() == b"cubin 3"
    assert compiled(names=gemm_fused._NAMES[:-1]) == b"cubin 4"  # other sources


def test_a_damaged_file_is_compiled_again(compilations, tmp_path):
    compiled()
    (path,) = (tmp_path / "kept").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert compiled() == b"cubin 2"
    assert compiled() == b"cubin 2"


def test_a_folder_that_cannot_be_written_is_no_error(compilations, monkeypatch):
    monkeypatch.setenv("TE_LITE_CACHE", "/dev/null/no folder")
    assert [compiled() for _ in range(2)] == [b"cubin 1", b"cubin 2"]


@pytest.mark.gpu
def test_what_nvrtc_compiled_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TE_LITE_CACHE", str(tmp_path))
    cubin = compiled()
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert compiled() == cubin and cubin[:4] == b"\x7fELF"
