"""What a _C.Sequence asks of the driver, seen by a driver that only writes it down."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import te_lite

CSRC = Path(te_lite.__file__).parent / "csrc"
# Of the driver's functions those that give something, or are looked at. A function's handle says how many parameters it
# has; FUSED: two, the second FusedArguments.
BODIES = """
#include <cstdint>
#include <cstdio>
#include <cstring>
using word = unsigned long long;
static constexpr word kFused = 0xff;
extern "C" {
int cuCtxGetCurrent(word* context) { *context = 1; return 0; }
int cuDevicePrimaryCtxRetain(word* context, int) { *context = 1; return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuModuleLoadData(word* module, const void*) { *module = 7; return 0; }
int cuModuleGetFunction(word* function, word, const char*) { *function = kFused; return 0; }
int cuEventCreate(word* event, unsigned) { *event = 0x77; return 0; }
int cuEventRecord(word event, word stream) { return printf("record %llx on %llx\\n", event, stream) < 0; }
int cuStreamWaitEvent(word stream, word event, unsigned) {
  return printf("%llx waits for %llx\\n", stream, event) < 0;
}
int cuMemsetD8Async(word at, unsigned char, size_t bytes, word stream) {
  return printf("zeros %llx %zu on %llx\\n", at, bytes, stream) < 0;
}
int cuTensorMapEncodeTiled(void*, int, unsigned, word at, const void*, const void*, const void*, const void*, int, int,
                           int, int) { return printf("map %llx\\n", at) < 0; }
int cuLaunchKernelEx(const char* config, word function, word** parameters, void*) {
  word stream;
  memcpy(&stream, config + 32, sizeof stream);
  printf("launch %u on %llx:", *reinterpret_cast<const unsigned*>(config), stream);
  if (function == kFused) {
    for (int i = 0; i < 35; ++i) printf(" %llx", parameters[1][i]);
  } else {
    for (word i = 0; i < function; ++i) printf(" %llx", *parameters[i]);
  }
  return printf("\\n") < 0;
}
"""
RUN = """
import ctypes, struct, torch
from te_lite import _C

x, made, block = (torch.zeros(64) for _ in range(3))
sequence = _C.Sequence(6)  # x, made, block, what stays, two numbers
kernel = _C.Kernel(5, 64, 0, "pp-ilp", False)
sequence.add_kernel(kernel, 9, (0, 0, "constant", 5, 6, 0), [(0, 0, 16), (1, 2, 512), (5, 3, 0xABC0)], [(3, 5)])
sequence.add_wait(0x99, 0)
sequence.on(0x99)
sequence.add_zeros(128, 1, 64)
sequence.add_kernel(kernel, 3, (0, None, "constant", 5, 2**40 + 1, 0), [(0, 1, 0)], [])
sequence.on(0)
sequence.add_wait(0, 0x99)
fused = _C.FusedGemm(0, b"", True, 2, 256, False, False, False, 2)
arguments = struct.pack("=29Q11i4x", *range(200, 229), 7, 256, 512, 64, 0, 2, 1, 0, 1, 2, 0)
words = [0x10, 0x20, 0x30, 0, 0x40, 0x50, *struct.unpack("=35Q", arguments)]
sequence.add_fused(fused, 2, (2, 0, 0), words, [(0, 0, 0), (4, 1, 256), (6 + 16, 2, 8)], [(6 + 29, 4)])
sequence.run(0x51, [x, made, block], [11, (1 << 32) + 0x22])
ctypes.CDLL(None).fflush(None)
print(*(t.data_ptr() for t in (x, made, block)))
"""


pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch opens the real driver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with a libcuda.so.1 whose other functions do nothing."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("driver")
    entries = re.findall(r'X\((cu\w+), "(\w*)"', (CSRC / "driver.h").read_text())
    assert len(entries) > 30
    rest = [name + version for name, version in entries if f"int {name + version}(" not in BODIES]
    (folder / "driver.cpp").write_text(BODIES + "".join(f"int {name}() {{ return 0; }}\n" for name in rest) + "}\n")
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.cpp")]
    subprocess.run(command, check=True)
    return folder


def test_steps_reach_the_driver_with_this_calls_addresses_and_numbers(driver):
    environment = {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(CSRC.parents[1]), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", RUN]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    *said, last = ran.stdout.splitlines()
    x, made, block = map(int, last.split())
    arguments = [*range(200, 216), block + 8, *range(217, 229), 11 + (256 << 32), 512 + (64 << 32), 2 << 32]
    arguments += [1, 1 + (2 << 32), 0]
    assert said == [
        f"launch 9 on 51: {x + 16:x} {block + 512:x} 22 6 abc0",
        "record 77 on 51",
        "99 waits for 77",
        f"zeros {made + 64:x} 128 on 99",
        f"launch 3 on 99: {made:x} 0 5 {2**40 + 1:x} 0",
        "record 77 on 99",
        "51 waits for 77",
        *[f"map {at:x}" for at in (x, 0x20, 0x30, made + 256, 0x50)],
        f"launch 2 on 51: {' '.join(f'{word:x}' for word in arguments)}",
    ]
