"""The training loop: one function a step, one for the held-out loss, one that runs them."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te

from . import checkpoint
from .checkpoint import History
from .data import Corpus, held_out_batches, train_batch
from .mesh import Mesh, RefusedError
from .model import GPT, GPTConfig, init_weights
from .optimizer import MasterAdamW, learning_rate

LOG_EVERY_CUDA = 10  # reading a loss waits for the GPU, so it is not done every step there


def build_model(config: GPTConfig, seed: int, mesh: Mesh) -> GPT:
    """The model with its full-weight initialisation, and fp32 main_grad buffers where they are wanted."""
    torch.manual_seed(seed)
    model = GPT(config, mesh)
    init_weights(model, seed)
    for module in model.modules():
        if getattr(module, "fuse_wgrad_accumulation", False):
            weights = [p for p in module.parameters() if p.ndim > 1]
            sizes = [p.numel() for p in weights]
            # side by side: one GEMM adds to those of all experts
            buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=mesh.device)
            for p, part in zip(weights, buffer.split(sizes), strict=True):
                p.main_grad = part.view_as(p)
    return model


@contextmanager
def precision(recipe: te.recipe.Recipe, mesh: Mesh) -> Iterator[None]:
    """fp8 for the recipes that quantize. With data parallelism the amax is taken over all ranks, so that the
    replicas' scales stay equal; else over the tensor parallel group, which is the default."""
    group = dist.group.WORLD if mesh.dp_size > 1 else None
    with te.fp8_autocast(enabled=recipe.is_fp8, fp8_recipe=recipe if recipe.is_fp8 else None, fp8_group=group):
        yield


def mean_over_replicas(value: Tensor, mesh: Mesh) -> Tensor:
    if mesh.dp_group is not None:
        dist.all_reduce(value, group=mesh.dp_group)
        value /= mesh.dp_size
    return value


def train_step(
    model: GPT, optimizer: MasterAdamW, tokens: Tensor, targets: Tensor, lr: float, recipe: te.recipe.Recipe
) -> Tensor:
    """One update; returns the mean loss of this replica's batch, still on the device."""
    optimizer.zero_grad()
    with precision(recipe, model.mesh):
        loss = model(tokens, targets).mean()
    loss.backward()
    if model.config.sequence_parallel:
        te.reduce_sequence_parallel_grads(model, model.mesh.tp_group)
    optimizer.step(lr)
    return loss.detach()


@torch.no_grad()
def held_out_loss(model: GPT, batches: list[tuple[Tensor, Tensor]], recipe: te.recipe.Recipe) -> float:
    """Mean loss over all batches and data parallel ranks."""
    total = torch.zeros((), device=model.mesh.device)
    for tokens, targets in batches:
        with precision(recipe, model.mesh):
            total += model(tokens, targets).mean()
    return float(mean_over_replicas(total / len(batches), model.mesh))


def refuse_bad_loss(losses: list[float], first_step: int) -> None:
    for offset, loss in enumerate(losses):
        if not loss < float("inf"):
            raise RefusedError(
                f"loss {loss} at step {first_step + offset}: it must be finite. Nothing after it was saved. "
                "Lower --lr or raise --warmup; --resume continues from the last checkpoint."
            )


def restore(
    args: argparse.Namespace, model: GPT, optimizer: MasterAdamW, identity: checkpoint.Identity
) -> tuple[int, History]:
    """(steps done, their history) of the checkpoint to resume, or (0, empty) for a new run."""
    directory, mesh = args.checkpoint_dir, model.mesh
    if args.resume:
        return checkpoint.load(directory, model, optimizer, identity, mesh)
    found = checkpoint.latest_step(directory) if directory is not None else None
    problem = None
    if found is not None:
        problem = (
            f"--checkpoint-dir {directory} already holds a run, saved at step {found}, which a new run would "
            "overwrite. Add --resume to continue it, or choose another directory."
        )
    mesh.agree(problem)
    return 0, History()


class Trainer:
    """A run from `restore` to --steps or --stop-at."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: GPTConfig,
        corpus: Corpus,
        mesh: Mesh,
        identity: checkpoint.Identity,
    ) -> None:
        self.args, self.corpus, self.mesh, self.identity = args, corpus, mesh, identity
        self.recipe = te.recipe.from_name(args.recipe)
        self.model = build_model(config, args.seed, mesh)
        self.optimizer = MasterAdamW(self.model, mesh)
        self.done, self.history = restore(args, self.model, self.optimizer, identity)
        self.last = args.stop_at or args.steps
        self.pending: list[Tensor] = []
        self.held_out = held_out_batches(corpus, args.eval_tokens, args.batch_size, args.seq_length, mesh)

    def flush(self) -> None:
        """Moves the losses that are still on the device into the history; one wait for all of them."""
        if self.pending:
            losses = mean_over_replicas(torch.stack(self.pending), self.mesh).tolist()
            refuse_bad_loss(losses, len(self.history.losses) + 1)
            self.history.losses += losses
            self.pending = []

    def step(self) -> None:
        args = self.args
        tokens, targets = train_batch(self.corpus, self.done, args.seed, args.batch_size, args.seq_length, self.mesh)
        lr = learning_rate(self.done, peak=args.lr, warmup=args.warmup, steps=args.steps)
        self.pending.append(train_step(self.model, self.optimizer, tokens, targets, lr, self.recipe))
        self.done += 1

    def due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def evaluate(self) -> None:
        self.history.held_out[self.done] = held_out_loss(self.model, self.held_out, self.recipe)

    def save(self) -> None:
        directory = self.args.checkpoint_dir
        checkpoint.save(directory, self.done, self.model, self.optimizer, self.history, self.identity, self.mesh)

    def run(self, on_step: Callable[[int, float, float], None]) -> History:
        """Trains; on_step(steps done, loss, tokens per second) reports.

        The rate leaves out evaluations, saves and the first step, which compiles kernels and fills caches.
        """
        args, history = self.args, self.history
        log_every = LOG_EVERY_CUDA if self.mesh.device.type == "cuda" else 1
        counted, first = 0, self.done + 1
        started, since = time.perf_counter(), self.done
        while self.done < self.last:
            self.step()
            evaluates, ends = self.due(args.eval_every), self.done == self.last
            saves = args.checkpoint_dir is not None and (ends or self.due(args.save_every))
            if not (self.due(log_every) or evaluates or saves or ends or self.done == first):
                continue
            self.flush()
            if self.done > first:
                history.seconds += time.perf_counter() - started
                counted += self.done - since
                history.tokens_per_second = counted * args.batch_size * args.seq_length / history.seconds
            on_step(self.done, history.losses[-1], history.tokens_per_second)
            # evaluation before the save, in every run alike: it may leave traces in the recipe's state
            if evaluates:
                self.evaluate()
            if saves:
                self.save()
            started, since = time.perf_counter(), self.done
        if self.done not in history.held_out:
            self.evaluate()
        return history
