"""accelerate's fp8 over te_lite: its way of converting, its recipes, its evaluation and its checkpoints.

accelerate asks for a GPU only where there is one: on CPUs it trains in fp8 as it stands.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FP8RecipeKwargs, TERecipeKwargs
from accelerate.utils.transformer_engine import apply_fp8_autowrap, convert_model, has_transformer_engine_layers
from torch import nn

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.aliased.net import (
    Net,
    assert_same_parameters,
    loss_of,
    optimizer_of,
    recipes_run,
    token_batches,
    train,
    twin,
)

DELAYED, E4M3 = te.recipe.DelayedScaling, te.recipe.Format.E4M3
# How fp8 is asked for -> the recipe that it stands for. Environment variables are those of `accelerate launch`.
ASKED: dict[str, tuple[Callable[[], list[Any]], dict[str, str], te.recipe.Recipe]] = {
    "nothing said": (lambda: [], {}, DELAYED()),
    "te": (lambda: [TERecipeKwargs()], {}, DELAYED()),
    "fields": (
        lambda: [TERecipeKwargs(fp8_format="E4M3", margin=1, interval=1, amax_history_len=4, amax_compute_algo="max")],
        {},
        DELAYED(fp8_format=E4M3, margin=1, amax_history_len=4),
    ),
    "older name": (lambda: [FP8RecipeKwargs(backend="te", fp8_format="E4M3")], {}, DELAYED(fp8_format=E4M3)),
    "mxfp8": (lambda: [TERecipeKwargs(use_mxfp8_block_scaling=True)], {}, te.recipe.MXFP8BlockScaling()),
    "environment": (lambda: [], {"ACCELERATE_FP8_BACKEND": "TE"}, DELAYED()),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate's settings are of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(net: nn.Module, handlers: list[Any], accumulate: int = 1) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=handlers, gradient_accumulation_steps=accumulate,
        cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    return accelerator, *accelerator.prepare(net, optimizer_of(net))


def run(accelerator: Accelerator, net: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in batches:
        with accelerator.accumulate(net):
            loss = loss_of(net, tokens.to(accelerator.device))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training through accelerate has the bits of a loop of te_lite's modules, recipe and torch's autocast."""
    if how == "nothing said" and find_spec("torchao"):
        pytest.skip("accelerate takes torchao where it is installed")
    handlers, environment, recipe = ASKED[how]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    net, batches = Net(), token_batches(8)
    accelerator, model, optimizer = prepared(copy.deepcopy(net), handlers(), accumulate=2)
    device = accelerator.device
    alone = twin(net, torch.float32, device)
    losses = run(accelerator, model, optimizer, batches)
    name = "mxfp8" if recipe.mxfp8() else "delayed"
    assert {ran for ran, _ in recipes_run()} == {name}

    @contextmanager
    def context() -> Iterator[None]:
        with torch.autocast(device.type, torch.bfloat16), te.autocast(recipe=recipe):
            yield

    expected = train(alone, [b.to(device) for b in batches], context, accumulate=2, clip=1.0)
    assert losses == expected and losses[-1] < 0.95 * losses[0]
    assert_same_parameters(accelerator.unwrap_model(model), alone)


@pytest.mark.parametrize("how", ASKED)
def test_training_is_that_of_a_plain_loop(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(how, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ASKED)
def test_training_on_a_gpu(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(how, monkeypatch)


@pytest.mark.parametrize("during_eval", [False, True])
def test_evaluation(during_eval: bool) -> None:
    """In high precision unless fp8 is asked for; then its amaxes count for the next step, as in Transformer Engine."""
    accelerator, net, optimizer = prepared(Net(), [TERecipeKwargs(use_autocast_during_eval=during_eval)])
    batches = token_batches(3)
    run(accelerator, net, optimizer, batches)
    before = copy.deepcopy(net.state_dict())
    net.eval()
    with torch.no_grad():
        loss = loss_of(net, batches[0])
    assert recipes_run() == ({("delayed", "e4m3 x e4m3"), ("delayed", "e5m2 x e4m3")} if during_eval else {
        ("bf16", "bf16 x bf16")})  # fmt: skip
    moved = [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]
    assert all(name.endswith("_extra_state") for name in moved) and bool(moved) == during_eval
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), te.autocast(during_eval):
        assert loss.item() == loss_of(accelerator.unwrap_model(net, keep_fp32_wrapper=False), batches[0]).item()


@pytest.mark.parametrize("how", ["te", "mxfp8"])
def test_resume_is_bitwise(how: str, tmp_path: Any) -> None:
    """save_state holds the scales too."""
    start, batches = Net(), token_batches(6)
    accelerator, net, optimizer = prepared(copy.deepcopy(start), ASKED[how][0]())
    run(accelerator, net, optimizer, batches[:3])
    accelerator.save_state(tmp_path)
    losses = run(accelerator, net, optimizer, batches[3:])
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, resumed, optimizer = prepared(Net(), ASKED[how][0]())
    accelerator.load_state(tmp_path)
    assert run(accelerator, resumed, optimizer, batches[3:]) == losses
    assert_same_parameters(resumed, net)
    start.load_state_dict(te.plain_state_dict(accelerator.unwrap_model(resumed)))  # strictly


def test_convert_model() -> None:
    net = Net()
    Accelerator(mixed_precision="fp8", cpu=True)  # convert_model asks the process's settings
    assert not has_transformer_engine_layers(net)
    converted = copy.deepcopy(net)
    with torch.no_grad():
        convert_model(converted)
    assert has_transformer_engine_layers(converted)
    assert {type(part) for part in (converted.mlp[0], converted.mlp[2], converted.head)} == {te.Linear}
    assert type(converted.norm) is te.LayerNorm
    assert_same_parameters(converted, net)
    only = copy.deepcopy(net)
    with torch.no_grad():
        convert_model(only, _convert_linear=False)
    assert type(only.norm) is te.LayerNorm and type(only.head) is nn.Linear


def test_autowrap_of_a_model_that_has_te_lites_modules() -> None:
    """apply_fp8_autowrap alone, without an Accelerator; no handler: the default recipe."""
    net, tokens = twin(Net(), torch.float32), token_batches(1)[0]
    with te.autocast():
        expected = loss_of(copy.deepcopy(net), tokens)
    assert_bitwise_equal("loss", loss_of(apply_fp8_autowrap(net, None), tokens), expected)
    assert ("delayed", "e4m3 x e4m3") in recipes_run()


def test_what_te_lite_lacks_is_refused() -> None:
    for handler, error, words in (
        (TERecipeKwargs(fp8_format="E5M2"), ValueError, "E5M2"),
        (TERecipeKwargs(override_linear_precision=(False, False, True)), NotImplementedError, "override_linear"),
    ):
        with pytest.raises(error, match=words):
            apply_fp8_autowrap(Net(), handler)
