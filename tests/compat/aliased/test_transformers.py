"""transformers' Trainer over te_lite: converted models, accelerate's fp8, activation checkpointing, resuming."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.transformer_engine import convert_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import te_lite as te
from tests.compat.aliased.net import assert_same_parameters, optimizer_of, recipes_run

SEQUENCE, STEPS, BATCH = 32, 6, 8
GPU = torch.cuda.is_available()
# What gradient_checkpointing_kwargs says.
CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "none": None,
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "te's": {"use_reentrant": False, "context_fn": te.checkpoint_context_fn},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate's settings are of the process, and transformers makes them early."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As `ACCELERATE_FP8_BACKEND=TE accelerate launch --mixed_precision fp8` starts a script: tests/compat/
    test_frameworks.py starts one so."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    return monkeypatch


def llama(tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQUENCE, tie_word_embeddings=tied,
    ))  # fmt: skip


def converted(tied: bool = False) -> LlamaForCausalLM:
    model = llama(tied)
    te.convert_to_float8_training(model, minimum_size=0)
    return model


def rows() -> list[dict[str, Tensor]]:
    """Of 16 bytes alone, which a model soon learns."""
    tokens = torch.randint(16, (BATCH * STEPS, SEQUENCE))
    return [{"input_ids": row, "labels": row} for row in tokens]


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def fit(model: nn.Module, data: Any, folder: Path, how: str = "none", *, resume: Any = None, **options: Any) -> Any:
    """(losses, batches) of a Trainer's steps. Every batch is kept as the data collator made it."""
    batches: list[dict[str, Tensor]] = []

    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batches.append({name: torch.stack([item[name] for item in items]) for name in items[0]})
        return batches[-1]

    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, lr_scheduler_type="constant", use_cpu=not GPU,
        logging_steps=1, save_steps=STEPS // 2, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        gradient_checkpointing=CHECKPOINTING[how] is not None, gradient_checkpointing_kwargs=CHECKPOINTING[how],
        **options,
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=data, data_collator=collate, compute_loss_func=loss_of,
        optimizers=(optimizer_of(model), None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], batches


def plain(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    """The loop that Trainer with bf16=True stands for."""
    optimizer, losses = optimizer_of(model), []
    device = next(model.parameters()).device
    for batch in batches[:STEPS]:
        with torch.autocast(device.type, torch.bfloat16):
            outputs = model(input_ids=batch["input_ids"].to(device))
        loss = loss_of(outputs, batch["labels"].to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(how: str, folder: Path) -> None:
    """A converted model's training has the bits of a plain loop, with activation checkpointing too."""
    model = converted()
    alone = copy.deepcopy(model)
    losses, batches = fit(model, rows(), folder, how, bf16=True)
    assert {ran for ran, _ in recipes_run()} == {"current"}
    assert losses == plain(alone.to(model.device), batches) and losses[-1] < 0.95 * losses[0]
    assert_same_parameters(model, alone)


@pytest.mark.parametrize("how", CHECKPOINTING)
def test_training_is_that_of_a_plain_loop(how: str, tmp_path: Path) -> None:
    compare(how, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("how", CHECKPOINTING)
def test_training_on_a_gpu(how: str, tmp_path: Path) -> None:
    compare(how, tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_resume_is_bitwise(tied: bool, tmp_path: Path) -> None:
    """The checkpoint has the keys of the model before conversion, which loads it. Tied weights stay tied."""
    model, data = converted(tied), rows()
    again = copy.deepcopy(model)
    losses, _ = fit(model, data, tmp_path / "whole", bf16=True)
    half = tmp_path / "whole" / f"checkpoint-{STEPS // 2}"
    assert fit(again, data, tmp_path / "resumed", resume=str(half), bf16=True)[0] == losses
    assert_same_parameters(again, model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    loaded, said = LlamaForCausalLM.from_pretrained(half.with_name(f"checkpoint-{STEPS}"), output_loading_info=True)
    assert not any(said.values()), said
    assert_same_parameters(loaded, model)


@pytest.mark.usefixtures("fp8")
def test_accelerates_fp8_with_activation_checkpointing(tmp_path: Path) -> None:
    """Delayed scaling: te_lite's context for the recomputation gives the same bits; torch's own checkpoint is refused,
    for its second run would not know the scales of the first."""
    model, data = llama(), rows()
    others = {how: copy.deepcopy(model) for how in CHECKPOINTING if how != "none"}
    losses, _ = fit(model, data, tmp_path)
    assert {ran for ran, _ in recipes_run()} == {"delayed"} and losses[-1] < 0.95 * losses[0]
    for how, other in others.items():
        if how == "te's":
            assert fit(other, data, tmp_path / how, how)[0] == losses
            assert_same_parameters(other, model)
        else:
            with pytest.raises(RuntimeError, match="context_fn=te.checkpoint_context_fn"):
                fit(other, data, tmp_path / how, how)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_accelerates_fp8_without_state_resumes_bitwise(how: str, fp8: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fp8.setenv("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "true")
    model, data = llama(), rows()
    again = copy.deepcopy(model)
    losses, _ = fit(model, data, tmp_path / "whole", how)
    half = tmp_path / "whole" / f"checkpoint-{STEPS // 2}"
    assert fit(again, data, tmp_path / "resumed", how, resume=str(half))[0] == losses
    assert {ran for ran, _ in recipes_run()} == {"mxfp8"} and losses[-1] < 0.95 * losses[0]


@pytest.mark.usefixtures("fp8")
def test_scales_of_a_checkpoint(tmp_path: Path) -> None:
    """Trainer loads before accelerate converts: delayed scaling starts with fresh scales, unless the model was
    converted before. The scales are in the file."""
    model, data = llama(), rows()
    late, early = copy.deepcopy(model), copy.deepcopy(model)
    losses, _ = fit(model, data, tmp_path / "whole")
    half = str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}")
    found, _ = fit(late, data, tmp_path / "late", resume=half)
    assert found[: STEPS // 2] == losses[: STEPS // 2] and found != losses
    with torch.no_grad():
        convert_model(early)
    found, _ = fit(early, data, tmp_path / "early", resume=half)
    assert found == losses
    assert_same_parameters(early, model)


@pytest.mark.gpu
@pytest.mark.usefixtures("fp8")
@pytest.mark.parametrize("how", ["none", "te's"])
def test_accelerates_fp8_on_a_gpu(how: str, tmp_path: Path) -> None:
    model = llama()
    losses, _ = fit(model, rows(), tmp_path, how)
    assert {ran for ran, _ in recipes_run()} == {"delayed"} and losses[-1] < 0.95 * losses[0]
