"""Lightning's TransformerEnginePrecision over te_lite, from both of its packages, and Fabric's."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import transformer_engine.common.recipe as te_recipe
import transformer_engine.pytorch as tep
from torch import Tensor, nn

import te_lite as te
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

BF16, DELAYED, E4M3 = torch.bfloat16, te.recipe.DelayedScaling, te.recipe.Format.E4M3
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# What the plugin or the precision is given -> the recipe that it stands for, and the weights' dtype.
ASKED: dict[str, tuple[Any, te.recipe.Recipe, torch.dtype]] = {
    "precision": ("transformer-engine", DELAYED(), BF16),
    "precision fp16": ("transformer-engine-float16", DELAYED(), torch.float16),
    "fp32 weights": ({"weights_dtype": torch.float32}, DELAYED(), torch.float32),
    "dict": (
        {"weights_dtype": BF16, "recipe": {"fp8_format": "E4M3", "amax_history_len": 4, "margin": 1, "interval": 1}},
        DELAYED(fp8_format=E4M3, amax_history_len=4, margin=1),
        BF16,
    ),
    "delayed": (
        {"weights_dtype": BF16, "recipe": te_recipe.DelayedScaling(fp8_format=te_recipe.Format.E4M3)},
        DELAYED(fp8_format=E4M3),
        BF16,
    ),
    "mxfp8": ({"weights_dtype": BF16, "recipe": te_recipe.MXFP8BlockScaling()}, te.recipe.MXFP8BlockScaling(), BF16),
}
GPU = torch.cuda.is_available()


def plugin(package: str, **options: Any) -> Any:
    return import_module(f"{package}.plugins").TransformerEnginePrecision(**options)


def lit(pl: ModuleType, net: nn.Module, late: bool) -> Any:
    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.dtypes = net, [], set()

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            if not self.losses:
                self.net.head.register_forward_hook(lambda *given: self.dtypes.add(given[-1].dtype))
            loss = loss_of(self.net, tokens)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, tokens: Tensor, _: int) -> None:
            loss_of(self.net, tokens)

        def configure_model(self) -> None:
            if not late:  # before a checkpoint is loaded, whose scales need a place
                self.trainer.precision_plugin.convert_module(self)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    return Lit()


def fit(
    package: str, asked: Any, net: nn.Module, batches: list[Tensor], *, resume: Any = None, late: bool = True,
    **options: Any,
) -> Any:  # fmt: skip
    """(Trainer, module) after one step a batch; `asked` as in ASKED. late: Lightning itself converts the module."""
    pl = import_module(package)
    how = {"precision": asked} if isinstance(asked, str) else {"plugins": [plugin(package, **asked)]}
    trainer = pl.Trainer(
        accelerator="gpu" if GPU else "cpu", devices=1, max_steps=len(batches), logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **how, **options,
    )  # fmt: skip
    module = lit(pl, net, late)
    loaders = [torch.utils.data.DataLoader(batches, batch_size=None)] * 2
    trainer.fit(module, *loaders[: 1 + ("val_check_interval" in options)], ckpt_path=resume)
    return trainer, module


def compare(package: str, how: str) -> None:
    """Training through Lightning has the bits of a loop of te_lite's modules under te_lite's autocast."""
    asked, recipe, dtype = ASKED[how]
    net, batches = Net(), token_batches(6)
    device = "cuda" if GPU else "cpu"
    alone = twin(net, dtype, device)
    _, module = fit(package, asked, copy.deepcopy(net), batches)
    assert type(module.net.norm) is te.LayerNorm and type(module.net.head) is te.Linear

    @contextmanager
    def context() -> Iterator[None]:
        with torch.autocast("cuda", dtype, enabled=GPU), te.autocast(recipe=recipe):
            yield

    expected = train(alone, [tokens.to(device) for tokens in batches], context)
    assert module.losses == expected and module.losses[-1] < module.losses[0] and module.dtypes == {dtype}
    assert_same_parameters(module.net.to(device), alone)
    assert {ran for ran, _ in recipes_run()} == {"mxfp8" if recipe.mxfp8() else "delayed"}


@pytest.mark.parametrize("how", ASKED)
def test_training_is_that_of_a_plain_loop(how: str) -> None:
    compare("lightning.pytorch", how)


@pytest.mark.parametrize("how", ["precision", "dict"])
def test_training_by_the_other_package(how: str) -> None:
    compare("pytorch_lightning", how)


@pytest.mark.gpu
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("how", ASKED)
def test_training_on_a_gpu(package: str, how: str) -> None:
    compare(package, how)


@pytest.mark.gpu
def test_fallback_dtype_on_a_gpu() -> None:
    """The dtype of torch's autocast around fp8 is the outputs'; Lightning has that autocast for CUDA alone."""
    asked = {"weights_dtype": BF16, "fallback_compute_dtype": torch.float16}
    _, module = fit("lightning.pytorch", asked, Net(), token_batches(6))
    assert module.dtypes == {torch.float16} and module.net.head.weight.dtype is BF16
    assert module.losses[-1] < module.losses[0]


def test_fallback_dtype_is_the_plugins() -> None:
    made = plugin("lightning.pytorch", weights_dtype=BF16, fallback_compute_dtype=torch.float16)
    assert (made.weights_dtype, made.fallback_compute_dtype) == (BF16, torch.float16)


def test_validation_runs_in_fp8_and_training_goes_on() -> None:
    """In inference mode, as Lightning has it. Its amaxes count for the next step, as in Transformer Engine."""
    net, batches = Net(), token_batches(6)
    alone = twin(net, BF16)
    _, module = fit("lightning.pytorch", "transformer-engine", net, batches, val_check_interval=3)
    optimizer, expected = optimizer_of(alone), []
    for step, tokens in enumerate(batches):
        with te.autocast():
            loss = loss_of(alone, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        for held_out in batches if step == 2 else ():
            with torch.inference_mode(), te.autocast():
                loss_of(alone, held_out)
    assert module.losses == expected


@pytest.mark.parametrize("how", ["dict", "mxfp8"])
def test_resume_is_bitwise(how: str, tmp_path: Any) -> None:
    """configure_model converts before Lightning loads, so the scales are restored too. The file has plain tensors."""
    net, batches = Net(), token_batches(8)  # of a period that divides 4: Lightning starts its loader anew
    _, whole = fit("lightning.pytorch", ASKED[how][0], copy.deepcopy(net), batches, late=False)
    trainer, _ = fit("lightning.pytorch", ASKED[how][0], copy.deepcopy(net), batches[:4], late=False)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    _, resumed = fit("lightning.pytorch", ASKED[how][0], Net(), batches, resume=tmp_path / "half.ckpt", late=False)
    assert resumed.losses == whole.losses[4:]
    assert_same_parameters(resumed.net, whole.net)


def test_a_checkpoint_of_an_unconverted_module_is_refused(tmp_path: Any) -> None:
    """Without configure_model Lightning loads into torch's modules, which have no scales: it says so."""
    asked, batches = ASKED["dict"][0], token_batches(4)
    trainer, _ = fit("lightning.pytorch", asked, Net(), batches)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(RuntimeError, match="Unexpected key.*_extra_state"):
        fit("lightning.pytorch", asked, Net(), batches, resume=tmp_path / "one.ckpt")


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_builds_te_lites_modules(package: str) -> None:
    fabric = import_module(package).Fabric(
        accelerator="cpu", devices=1, plugins=plugin(package, weights_dtype=BF16, replace_layers=True)
    )
    with fabric.init_module():
        net = Net(linear=lambda *args, **kwargs: nn.Linear(*args, **kwargs), norm=lambda size: nn.LayerNorm(size))
    assert type(net.head) is te.Linear and type(net.norm) is te.LayerNorm and net.head.weight.dtype is BF16
    alone, batches = copy.deepcopy(net), token_batches(4)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    losses = []
    for tokens in batches:
        loss = loss_of(model, tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == train(alone, batches, te.autocast)


def test_convert_module() -> None:
    """A model that holds Transformer Engine's modules stays as it is, and te_lite's are those."""
    convert = plugin("lightning.pytorch", weights_dtype=BF16).convert_module
    mixed = convert(nn.Sequential(tep.LayerNormMLP(64, 128, device="cpu"), nn.Linear(64, 64)))
    assert type(mixed[1]) is nn.Linear and mixed[0].fc1_weight.dtype is mixed[1].weight.dtype is BF16
    kept = plugin("lightning.pytorch", weights_dtype=BF16, replace_layers=False).convert_module(Net())
    assert type(kept.head) is nn.Linear and kept.head.weight.dtype is BF16
    with pytest.warns(UserWarning, match="divisible by 8 and 16"):
        odd = convert(nn.Sequential(nn.Linear(64, 10), nn.Linear(64, 64)))
    assert type(odd[0]) is nn.Linear and type(odd[1]) is te.Linear


def test_what_te_lite_lacks_is_refused() -> None:
    for given, error in (({"fp8_format": "E5M2"}, ValueError), ({"fp8_dpa": True}, ValueError)):
        with pytest.raises(error, match=next(iter(given))):
            plugin("lightning.pytorch", weights_dtype=BF16, recipe=given)
