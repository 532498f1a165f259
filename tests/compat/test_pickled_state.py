"""Transformer Engine's pickled scales, which are read where that is allowed. The pickles are made here, of modules with
its names, as its modules write them."""

import enum
import io
import pickle
import struct
import sys
import tracemalloc
from collections import namedtuple
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.noticed import Runs
from tests.harness import has_scales

MAKE = {"Linear": (te.Linear, 1), "LayerNormMLP": (te.LayerNormMLP, 2)}
LENGTH, MARGIN = 8, 1
NAME = "transformer_engine.common.recipe"


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv("TE_LITE_PICKLED_STATE", "1")


@pytest.fixture
def recipes(monkeypatch):
    """A module of that name with classes of its own, which unpickling does not import."""
    module = ModuleType(NAME)
    helper = namedtuple("_FormatHelper", ["max_fwd", "max_bwd"], module=NAME)
    module._FormatHelper = helper
    module.Format = enum.Enum("Format", {"HYBRID": helper(448, 57344)}, module=NAME)

    @dataclass
    class DelayedScaling:
        margin: int = MARGIN
        fp8_format: object = module.Format.HYBRID
        amax_history_len: int = LENGTH

    @dataclass
    class Float8CurrentScaling:
        fp8_format: object = module.Format.HYBRID

    for kind in (DelayedScaling, Float8CurrentScaling):
        kind.__module__, kind.__qualname__ = NAME, kind.__name__
        setattr(module, kind.__name__, kind)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def numbers(gemms: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(gemms)
    made = {}
    for way, count in (("fwd", 3 * gemms), ("bwd", 2 * gemms)):
        made[f"amax_history_{way}"] = torch.rand(LENGTH, count, generator=generator)
        made[f"scale_{way}"] = 1 + torch.rand(count, generator=generator)
    return made


def as_uint8(value: object, protocol: int = 4) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8)


def written(recipe: object, gemms: int, **extra: object) -> dict:
    variables = {"fp8_checkpoint": True, "num_gemms": gemms, "fp8_max_fwd": 448, "fp8_max_bwd": 57344, **extra}
    return {"recipe": recipe, **numbers(gemms), "extra_fp8_variables": variables}


def module_of(kind: str) -> tuple[torch.nn.Module, int]:
    make, gemms = MAKE[kind]
    return make(64, 64, params_dtype=torch.bfloat16, device="cpu"), gemms


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("kind", MAKE)
def test_scales_and_histories_are_taken_over(kind, protocol, allowed, recipes):
    """Column for column, and used: a call by the same recipe quantizes with them."""
    module, gemms = module_of(kind)
    pickled = as_uint8(written(recipes.DelayedScaling(), gemms), protocol)
    del sys.modules[NAME]  # nothing of it is looked for
    result = module.load_state_dict(module.state_dict() | {"_extra_state": pickled})
    assert not result.missing_keys and not result.unexpected_keys
    with te.autocast(recipe=te.recipe.DelayedScaling(margin=MARGIN, amax_history_len=LENGTH)):
        module(torch.randn(16, 64, dtype=torch.bfloat16))
        live, want = module._scales._live, numbers(gemms)
        for way, short in (("forward", "fwd"), ("backward", "bwd")):
            assert_bitwise_equal(f"{way} scales", live[way].scale, want[f"scale_{short}"])
            assert_bitwise_equal(f"{way} history", live[way].history[1:], want[f"amax_history_{short}"][1:])


def test_a_margin_is_part_of_the_scales(allowed, recipes):
    """Under another margin the same amaxes give other scales, by that power of two."""
    module, gemms = module_of("Linear")
    module.load_state_dict(module.state_dict() | {"_extra_state": as_uint8(written(recipes.DelayedScaling(), gemms))})
    with te.autocast(recipe=te.recipe.DelayedScaling(margin=MARGIN + 2, amax_history_len=LENGTH)):
        module(torch.randn(16, 64, dtype=torch.bfloat16))
        scale = module._scales._live["forward"].scale
        assert_bitwise_equal("a quarter", scale, numbers(gemms)["scale_fwd"] / 4)


def test_other_recipes_have_no_scales(allowed, recipes):
    module, _ = module_of("Linear")
    pickled = as_uint8({"recipe": recipes.Float8CurrentScaling(), "extra_fp8_variables": {"num_gemms": 1}})
    module.load_state_dict(module.state_dict() | {"_extra_state": pickled})
    assert not has_scales(module.get_extra_state())


def test_an_older_state_without_a_recipe(allowed):
    module, _ = module_of("Linear")
    state = stated() | {"global_fp8_buffer": {"FWD_AMAX_1": [torch.ones(3)]}}
    module.load_state_dict(module.state_dict() | {"_extra_state": as_uint8(state)})
    assert module.get_extra_state()[4:6].tolist() == [448.0, 57344.0]


def test_it_is_refused_where_it_is_not_allowed(recipes, monkeypatch):
    monkeypatch.delenv("TE_LITE_PICKLED_STATE", raising=False)
    module, gemms = module_of("Linear")
    with pytest.raises(TypeError, match=r"TE_LITE_PICKLED_STATE=1 alone\); drop"):
        module.load_state_dict(
            module.state_dict() | {"_extra_state": as_uint8(written(recipes.DelayedScaling(), gemms))}
        )


def bad(**other: object) -> torch.Tensor:
    """A state that is right but for these."""
    return as_uint8({name: value for name, value in (stated() | other).items() if value is not None})


def stated() -> dict:
    state = written(None, 1)
    del state["recipe"]
    return state


class Spread:
    """A tensor of many values in a storage of one."""

    def __init__(self, *shape: int, stride: int = 0) -> None:
        self.shape, self.strides = shape, (stride,) * len(shape)

    def __reduce__(self):
        storage = torch.ones(1)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, self.strides, False, None)


def named(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"


REBUILD = named("torch._utils", "_rebuild_tensor_v2")
SET_DEFAULTS = b"N}\x8c\x0c__defaults__)s\x86b0}."
REFUSED = {
    "code": (as_uint8(Runs()), "it names tests"),
    "code in a state": (as_uint8({"scale_fwd": Runs()}), "it names tests"),
    "a class": (as_uint8({"scale_fwd": torch.optim.SGD}), "it names torch.optim"),
    "a function's defaults": (b"\x80\x04" + REBUILD + SET_DEFAULTS, "it sets what function holds"),
    "a class' attributes": (
        b"\x80\x04" + named("transformer_engine.x", "Y") + SET_DEFAULTS,
        "it sets what type holds",
    ),
    "no storage": (b"\x80\x04" + named("torch.storage", "_load_from_bytes") + b"N\x85R.", "a storage from NoneType"),
    "a tensor of no storage": (b"\x80\x04" + REBUILD + b"(K\x01K\x01))tR.", "a tensor of int"),
    "many values of one": (bad(scale_fwd=Spread(10**8), amax_history_fwd=Spread(LENGTH, 10**8)), "lie in the file"),
    "values outside of a storage": (bad(scale_fwd=Spread(3, stride=1)), "out of bounds"),
    "a key that takes years": (b"\x80\x04}K\x01" + b"2\x86" * 20 + b"K\x01s.", "has what no pickle"),
    "a tuple as a key": (b"\x80\x04}K\x01" + b"\x85" * 20 + b"K\x01s.", "key that is no string"),
    "half a state": (as_uint8({"scale_fwd": torch.ones(3)}), "extra_fp8_variables"),
    "a list": (as_uint8([1]), "no dict"),
    "an empty list": (as_uint8([]), "no dict"),
    "a number": (as_uint8(0), "no dict"),
    "False": (as_uint8(False), "no dict"),
    "pairs": (as_uint8([["a", 1]]), "no dict"),
    "a state dict": (as_uint8({"weight": torch.ones(3)}), "no dict with a recipe"),
    "no recipe": (as_uint8({"recipe": 1}), "__dict__"),
    "a backward history of another shape": (bad(amax_history_bwd=torch.zeros(2 * LENGTH, 1)), r"\(16, 1\)"),
    "complex scales": (bad(scale_fwd=torch.ones(3, dtype=torch.complex64)), "floating-point"),
    "no pickle": (torch.arange(40, dtype=torch.uint8), "no pickle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformer_engine_does_not_write_is_refused_and_never_run(name, allowed):
    state, why = REFUSED[name]
    before = torch._utils._rebuild_tensor_v2.__defaults__
    module, _ = module_of("Linear")
    with pytest.raises(ValueError, match=f"no pickle of Transformer Engine's scales.*{why}.*drop the"):
        module.set_extra_state(state)
    assert not Runs.ran and torch._utils._rebuild_tensor_v2.__defaults__ == before


def test_a_memo_is_as_long_as_what_is_in_it(allowed):
    """A pickle of seven bytes asks for 64 million entries."""
    module, _ = module_of("Linear")
    tracemalloc.start()
    try:
        module.set_extra_state(b"\x80\x04Nr" + struct.pack("<I", 1 << 26) + b".")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_from_0_12_to_1_13_torch_saved_it():
    """Which torch reads by itself, so that it need not be allowed."""
    module, _ = module_of("Linear")
    state, file = stated(), io.BytesIO()
    torch.save(state, file)
    module.load_state_dict(module.state_dict() | {"_extra_state": file})
    got = module.get_extra_state()
    assert got[4:6].tolist() == [448.0, 57344.0]
    assert_bitwise_equal("history", got[6:][: 3 * LENGTH], state["amax_history_fwd"].flatten())
    assert_bitwise_equal("scales", got[: 6 + 5 * (LENGTH + 1)][-2:], state["scale_bwd"])
    other = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, other)
    with pytest.raises(ValueError, match="no dict with a recipe"):
        module.set_extra_state(other)


def test_a_state_of_another_module_is_refused(allowed, recipes):
    module, _ = module_of("Linear")
    with pytest.raises(ValueError, match="load it into a module of the class"):
        module.set_extra_state(as_uint8(written(recipes.DelayedScaling(), 2)))
