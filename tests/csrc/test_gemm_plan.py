"""GemmPlan's algorithms, by a cublasLt that only writes down which one it was called with."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from te_lite import _C

CSRC = Path(__file__).parents[2] / "te_lite" / "csrc"
SONAME = "libcublasLt.so.98"  # a version of its own: the real one may be loaded too


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> _C.Cublaslt:
    built = tmp_path_factory.mktemp("fake") / SONAME
    source = Path(__file__).with_name("fake_cublaslt.cpp")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", f"-Wl,-soname,{SONAME}"]
    subprocess.run([*command, str(source), "-o", str(built)], check=True)
    ctypes.CDLL(str(built))  # te_lite opens what is loaded
    return _C.Cublaslt(SONAME)


def plan(library: _C.Cublaslt, **more: int) -> _C.GemmPlan:
    return _C.GemmPlan(
        library, 16, 16, 16, 28, 28, 14, 0, 0, False, 16, False, 16, False, True, False, 256, 1024, **more
    )


def called(made: _C.GemmPlan) -> tuple[int, int]:
    """(algorithm, bytes of workspace) of a run."""
    out = (ctypes.c_uint64 * 2)()
    made.run(256, 256, ctypes.addressof(out), 256, 256, 0, 256, 0)
    return out[0], out[1]


def test_the_first_is_used_until_another_is_chosen(library: _C.Cublaslt) -> None:
    """One that failed is none of them. The workspace is enough for each."""
    made = plan(library, most_algorithms=8)
    assert (made.algorithms, made.workspace) == (3, 48)
    seen = [called(made)]
    for i in (2, 1, 0):
        made.choose(i)
        seen.append(called(made))
    assert seen == [(100, 0), (103, 48), (101, 16), (100, 0)]
    with pytest.raises(IndexError):
        made.choose(3)
    assert called(made) == (100, 0)


def test_one_where_no_more_are_asked_for(library: _C.Cublaslt) -> None:
    made = plan(library)
    assert (made.algorithms, made.workspace) == (1, 0) and called(made) == (100, 0)
