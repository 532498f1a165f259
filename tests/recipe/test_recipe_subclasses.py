"""Subclasses of recipes: constructors, attributes, names and methods of their own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import te_lite as te
from te_lite import recipe as recipes
from te_lite.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, RowwiseScaling
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import leaf

BF16 = torch.bfloat16
SIZE = 64


class Config:
    fp8_margin = 1
    history = 4


class FromConfig(DelayedScaling):
    """As Megatron's: a constructor that takes something else."""

    def __init__(self, config: Config, fp8_format: Format) -> None:
        super().__init__(margin=config.fp8_margin, fp8_format=fp8_format, amax_history_len=config.history)


class Named(DelayedScaling):
    """Another name: it is delayed scaling all the same."""

    name: ClassVar[str] = "my delayed"


class Overriding(DelayedScaling):
    def delayed(self) -> bool:
        return True

    def float8_current_scaling(self) -> bool:
        return False


class More(Float8CurrentScaling):
    """Attributes beside the fields, and rules that need them."""

    def __init__(self, schedule: Callable[[], float], *, powers: bool) -> None:
        self.schedule, self.seen = schedule, []
        super().__init__(use_power_2_scales=powers)

    def _check(self) -> None:
        self.seen.append(self.schedule())
        super()._check()


class Asking(Float8CurrentScaling):
    name: ClassVar[str] = "asking"

    def __init__(self, wide: bool) -> None:
        self.wide = wide
        super().__init__(fp8_format=Format.HYBRID if wide else Format.E4M3)

    def float8_current_scaling(self) -> bool:
        return self.wide


class Blocks(Float8BlockScaling):
    def __init__(self, scale_dtype: torch.dtype) -> None:
        super().__init__(use_f32_scales=scale_dtype is torch.float32)


class Rows(RowwiseScaling):
    def __init__(self, mode: str) -> None:
        super().__init__(high_precision_wgrad=mode == "gw_hp")


class Own(te.recipe.CustomRecipe):
    def __init__(self) -> None:
        super().__init__(lambda role: None)


QUANT = "fp8_quant_fwd_inp={0}, fp8_quant_fwd_weight={0}, fp8_quant_bwd_grad={0}"
OF_CONFIG = "delayed(margin=1{}, amax_history_len=4)"
# (the subclass's recipe, the same without it, its words)
TABLE = [
    (
        FromConfig(Config(), Format.E4M3),
        DelayedScaling(1, Format.E4M3, 4),
        OF_CONFIG.format(", fp8_format=Format.E4M3"),
    ),
    (FromConfig(Config(), fp8_format=Format.HYBRID), DelayedScaling(1, amax_history_len=4), OF_CONFIG.format("")),
    (Named(amax_history_len=4), DelayedScaling(amax_history_len=4), "my delayed(amax_history_len=4)"),
    (Overriding(), DelayedScaling(), "delayed"),
    (More(lambda: 0.5, powers=False), Float8CurrentScaling(), "current"),
    (
        More(lambda: 0.5, powers=True),
        Float8CurrentScaling(use_power_2_scales=True),
        f"current({QUANT.format('powers of 2')}, use_power_2_scales=True)",
    ),
    (Asking(True), Float8CurrentScaling(), "asking"),
    (Asking(wide=False), Float8CurrentScaling(fp8_format=Format.E4M3), "asking(fp8_format=Format.E4M3)"),
    (Blocks(torch.bfloat16), Float8BlockScaling(), "blockwise"),
    (
        Blocks(torch.float32),
        Float8BlockScaling(use_f32_scales=True),
        f"blockwise({QUANT.format('fp32')}, use_f32_scales=True)",
    ),
    (Rows("gw_hp"), RowwiseScaling(high_precision_wgrad=True), "rowwise_with_gw_hp(high_precision_wgrad=True)"),
    (Own(), te.recipe.CustomRecipe(lambda role: None), "custom"),
]
IDS = [f"{type(one).__name__}{i}" for i, (one, _, _) in enumerate(TABLE)]
EACH = pytest.mark.parametrize("recipe, same, words", TABLE, ids=IDS)


def train(recipe, device, through=None, steps=3):
    """Outputs and gradients of three steps, and the module's scales."""
    torch.manual_seed(3)
    module = te.LayerNormMLP(SIZE, SIZE, params_dtype=BF16, device=device, name=f"{type(recipe)} {id(recipe)}")
    results = {}
    for i in range(steps):
        x = leaf(torch.randn(32, SIZE, dtype=BF16) * 3**i, device)
        with te.autocast(recipe=recipe):
            y = module(x) if through is None else through(module, x)
        y.backward(torch.randn(32, SIZE, dtype=BF16).to(device) * 2**i)
        results |= {f"y {i}": y.detach(), f"dx {i}": x.grad}
    results |= {name: p.grad for name, p in module.named_parameters()}
    return results | {"scales": module.get_extra_state()}, module


def assert_same(got, want):
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


@EACH
def test_words(recipe, same, words):
    """Of the fields that differ from their defaults, in the order of the fields; no constructor is called for them."""
    assert str(recipe) == str(recipe) == words
    if recipe.name == same.name:
        assert str(same) == words
    assert [recipe.delayed(), recipe.custom(), recipe.mxfp8(), recipe.is_fp8, recipe.float8_per_tensor_scaling()] == [
        same.delayed(), same.custom(), same.mxfp8(), same.is_fp8, same.float8_per_tensor_scaling()
    ]  # fmt: skip


@EACH
@pytest.mark.parametrize("device", device_params())
def test_training_and_the_report(recipe, same, words, device):
    """Bits and scales of the recipe that it stands for, backward scales too; the report has the subclass's name."""
    if not te.check_recipe_support(recipe, device)[0]:
        pytest.skip("not on this device")
    got, module = train(recipe, device)
    rows = [row for row in te.overlap_report() if row["module"] == module.name]
    assert len(rows) == 6 and {row["recipe"] for row in rows} == {recipe.name}
    assert_same(got, train(same, device)[0])


@EACH
@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(recipe, same, words, device, reentrant):
    if not te.check_recipe_support(recipe, device)[0]:
        pytest.skip("not on this device")
    got, _ = train(recipe, device, through=lambda m, x: te.checkpoint(m, x, use_reentrant=reentrant), steps=2)
    assert_same(got, train(same, device, steps=2)[0])


@EACH
def test_quantized_parameters(recipe, same, words):
    """The format of the recipe that it stands for, or its refusal."""
    weights = []
    for one in (recipe, same):
        torch.manual_seed(5)
        try:
            with te.quantized_model_init(recipe=one):
                weights.append(te.Linear(SIZE, SIZE, params_dtype=BF16, device="cpu").weight)
        except ValueError as error:
            weights.append(str(error).replace(one.name, ""))
    assert type(weights[0]) is type(weights[1])
    if isinstance(weights[0], str):
        assert weights[0] == weights[1]
    else:
        assert weights[0].q.format == weights[1].q.format
        assert_bitwise_equal("weight", weights[0].dequantize(), weights[1].dequantize())


@EACH
def test_conversion(recipe, same, words):
    outputs = []
    for one in (recipe, same):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(SIZE, SIZE, dtype=BF16))
        if one.delayed():
            with pytest.raises(ValueError, match="without state"):
                te.convert_to_float8_training(model, one, tokens=None)
            return
        assert one.name in str(te.convert_to_float8_training(model, one, tokens=None))
        outputs.append(model(torch.randn(32, SIZE, dtype=BF16)))
    assert_bitwise_equal("output", outputs[0], outputs[1])


def test_copies_and_comparison():
    """A subclass is another recipe than the class that it comes from; attributes beside the fields do not count."""
    one, two = FromConfig(Config(), Format.E4M3), FromConfig(Config(), Format.E4M3)
    assert one == two == copy.deepcopy(one) and hash(one) == hash(two)
    assert one != DelayedScaling(1, Format.E4M3, 4)


@dataclass(frozen=True)
class Listed(recipes.Recipe):
    """Defaults made by a factory, and a field that is settled."""

    name: ClassVar[str] = "listed"
    factory: ClassVar[str] = "te_lite.quantize.identity:operands"
    summary: ClassVar[str] = "for tests"
    layers: tuple[int, ...] = field(default_factory=lambda: (1, 2))
    scale: Any = None

    def _check(self) -> None:
        if self.scale is None:
            object.__setattr__(self, "scale", 2 * self.layers[0])


@dataclass(frozen=True, slots=True)
class Slotted(recipes.Recipe):
    name: ClassVar[str] = "slotted"
    factory: ClassVar[str] = "te_lite.quantize.identity:operands"
    summary: ClassVar[str] = "for tests"
    bits: int = 8


@dataclass(frozen=True)
class Required(Listed):
    name: ClassVar[str] = "required"
    bits: int = field(kw_only=True)


# (recipe, its words)
WORDS = [
    (Listed(), "listed"),
    (Listed(layers=(3,)), "listed(layers=(3,), scale=6)"),
    (Listed(scale=2), "listed"),
    (Listed(scale=5), "listed(scale=5)"),
    (Slotted(), "slotted"),
    (Slotted(bits=4), "slotted(bits=4)"),
    (Required(bits=4), "required"),
]


@pytest.mark.parametrize("recipe, words", WORDS, ids=[words for _, words in WORDS])
def test_words_of_recipes_with_factories_and_settled_fields(recipe, words):
    assert str(recipe) == words
