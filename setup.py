"""Builds te_lite._C. Everything else about the package is in pyproject.toml.

The extension is plain C++17 behind pybind11. It links neither torch nor CUDA: the driver is opened at run
time and addresses and handles travel as integers, so one build serves every torch version and machine.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("TE_LITE_BUILD_JOBS").install()  # so many sources beside each other; one a core where it is not set

setup(
    ext_modules=[
        Pybind11Extension(
            "te_lite._C",
            sources=sorted(glob("te_lite/csrc/*.cpp")),
            depends=sorted(glob("te_lite/csrc/*.h")),
            cxx_std=17,
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            libraries=["dl"],  # part of libc since glibc 2.34, a library of its own before
        )
    ]
)
