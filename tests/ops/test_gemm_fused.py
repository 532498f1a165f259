"""csrc/gemm_fused.cu, read from the compiler on any machine that has one."""

import re
import struct

import pytest
import torch

from te_lite.ops import gemm_fused
from te_lite.ops.activation import ACTIVATIONS, Activation
from te_lite.ops.gemm_fused import FP8, Arguments, Kind
from te_lite.ops.nvrtc import SOURCES
from tests.ops.fused import BF16, E4M3, E5M2, FP16
from tests.ops.nvcc import spilled

# a, b, scales, out, ranks, b_t. ALWAYS has every value but bf16, which takes TURNS, as a row's scales of 8 ranks do.
ALWAYS = [
    (FP16, FP16, "none", FP16, 8, True), (E4M3, E4M3, "tensor", BF16, 4, False), (E4M3, E5M2, "row", FP16, 2, False),
]  # fmt: skip
TURNS = [
    (BF16, BF16, "none", BF16, 4, False), (BF16, BF16, "none", BF16, 4, True), (BF16, BF16, "none", BF16, 8, False),
]  # fmt: skip
SCALES_OF_8 = (E4M3, E4M3, "row", BF16, 8, False)
# gather, columns, split, act (or what else is at the end), grad
SCHEDULES = [
    (True, 128, False, "", False), (True, 192, False, "", False), (True, 224, False, "", False),
    (True, 256, False, "", False), (True, 256, False, "high precision", False), (True, 256, False, "amax", False),
    (True, 256, False, "fp8", False), (False, 128, False, "", False), (False, 256, False, "", False),
    (False, 128, True, "", False), (False, 128, False, "narrow", False), (False, 256, False, "narrow", False),
    (False, 128, True, "narrow", False), (False, 128, False, "residual", False), (False, 256, False, "residual", False),
    (False, 128, True, "residual", False),
    (True, 128, True, "", False), (True, 128, True, "amax", True), (True, 128, True, "fp8", True),
    (True, 128, False, "high precision", True), (True, 128, False, "fp8", True), (True, 128, False, "amax", True),
    (True, 128, True, "high precision", True),
]  # fmt: skip
ACTS = [one for one in map(Activation.of, ACTIVATIONS) if one.fused]


def kinds() -> list[Kind]:
    """Every schedule with every value of every other option where the most registers are taken: with an activation at
    the end, every one that has parameters where it is a gradient, and of narrow sums. Others with some, in turns."""
    found = []
    for turn, (gather, columns, split, act, grad) in enumerate(SCHEDULES):
        narrow, residual = act == "narrow", act == "residual"
        act = "" if narrow or residual else act
        some = [ALWAYS[turn % 3], ALWAYS[1], TURNS[turn % 3], *[SCALES_OF_8] * (split or turn % 2)]
        every = [*ALWAYS, *(TURNS if narrow or split else [TURNS[turn % 3]]), SCALES_OF_8]
        for i, types in enumerate(every if act or narrow else dict.fromkeys(some)):
            a, b, scales, out, ranks, b_t = types
            ranks = 1 if act and ranks < 8 else ranks  # overlap/one_rank.py
            if (b_t and columns % 64) or (split and a not in FP8):
                continue  # not offered
            most = [one for one in ACTS if grad and one.parameters]
            for one in dict.fromkeys([ACTS[(turn + i) % len(ACTS)], *most] if act else [gemm_fused.SWIGLU]):
                fp8 = b if b in FP8 else E4M3
                options = (split, act, grad, fp8, narrow, residual, one)
                found.append(Kind(gather, a, b, scales, out, ranks, b_t, columns, *options))
                if act == "fp8" and not grad:
                    found.append(found[-1]._replace(act_t=False))
    return found


def name_of(kind: Kind) -> str:
    return "-".join(str(getattr(value, "name", value)).removeprefix("torch.") for value in kind)


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_it_compiles(kind, tmp_path):
    """No wgmma waits for the one before, and hardly a register is spilled."""
    count, said = spilled("gemm_fused.cu", kind.macros, tmp_path)
    # With 256 columns all registers are taken; narrow ones also hold the slots of seven others. Not in the loop over K.
    # The fourth warpgroup keeps some of what two clamps compare, and nobody waits for it.
    few = kind.gather or kind.columns == 128
    most = 80 if kind.grad and kind.activation.parameters else 104 if kind.narrow else 0 if few else 64
    assert count <= most, said
    assert "0 bytes stack frame" in said or count, said


def fields_of(struct_name: str) -> list[tuple[str, bool]]:
    """(name, whether it is a pointer or an array of them) of each field of a struct in gemm_fused.h."""
    text = re.sub(r"//.*", "", (SOURCES / "gemm_fused.h").read_text())
    body = re.search(rf"struct {struct_name} {{(.*?)}};", text, re.DOTALL)[1]
    found = []
    for line in filter(None, map(str.strip, body.split(";"))):
        *kind, first = line.partition(",")[0].split()
        names = [first, *line.split(",")[1:]]
        found += [(name.strip().partition("[")[0], "*" in "".join(kind)) for name in names]
    return found


def test_arguments_are_those_of_the_kernel():
    """By name and order, and each of a value of its own comes out where the struct has it."""
    fields = fields_of("FusedArguments")
    assert [name for name, _ in fields] == list(Arguments.__slots__) and len(fields) == 26
    assert [name for name, pointer in fields if pointer] == list(Arguments.__slots__[:15])
    tensors = {name: torch.zeros(1) for name in Arguments.__slots__[2:15]}
    numbers = {name: 100 + i for i, name in enumerate(Arguments.__slots__[15:])}
    packed = Arguments(arrived=[1, 2, 3], scales_to=range(11, 19), **tensors, **numbers).packed()
    addresses = [t.data_ptr() for t in tensors.values()]
    assert len(packed) == 29 * 8 + 11 * 4 + 4  # to a multiple of 8
    want = [1, 2, 3, 0, 0, 0, 0, 0, *range(11, 19), *addresses, *numbers.values()]
    assert list(struct.unpack("=29Q11i4x", packed)) == want
    numbers["delta"] = 2**32 - 1  # which wraps around
    assert struct.unpack_from("=i", Arguments(**tensors, **numbers).packed(), 29 * 8) == (-1,)
