"""Training steps of a Llama-shaped stack by te_lite and its peers, taking turns: tokens a second and peak memory.

    python benchmarks/llama.py
    python benchmarks/llama.py --libraries torch te_lite --recipes bf16 current --no-compile
    python benchmarks/llama.py --device cpu        # smoke test of a tiny stack; its numbers mean nothing

transformers' LlamaForCausalLM with Llama 3 8B's layers, four of them, random weights, bf16; a step is forward,
backward and AdamW. All but the head is converted:

    torch, bf16             as it is, and under torch.compile
    te_lite, RECIPE         te_lite.convert_to_float8_training, and te_lite.fuse; some under torch.compile
    te, RECIPE              Transformer Engine's Linear in the place of nn.Linear, and its LayerNormLinear and
                            LayerNormMLP put into each layer by hand, where it is installed
    torchao, RECIPE         torchao's conversion under torch.compile, where it is installed

All ways share one set of weights and one optimizer, so that they fit on a GPU together (but for fc1 of Transformer
Engine's LayerNormMLP, which is one parameter where Llama has two). Its learning rate is 0: the
work is the same, the weights stay, and so every loss must be that of bf16 within MAX_LOSS_OFF. A sample is the wall
time of one step that begins and ends with an idle GPU.

Once anything is compiled under delayed scaling, each autocast of it sees to all te_lite modules of the process, here
those of ten models, while the GPU is idle. So eager delayed scaling takes some milliseconds longer than in a process
with one model that compiles nothing. --no-compile measures it without them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
from torch import Tensor, nn

from benchmarks import bench, result_files
from benchmarks.llama_te import fuse_by_te, swap_in_te, to_convert
from benchmarks.modules import BF16, RESULTS
from benchmarks.peer_steps import RECIPES as TE_RECIPES
from benchmarks.peer_steps import installed, library

MAX_LOSS_OFF = 0.02  # relative
FUSED = ("bf16", "delayed", "current", "blockwise")


@dataclass(frozen=True)
class Stack:
    """What a model has of Llama's sizes. The vocabulary is not Llama 3's 128,256: the layers are to decide."""

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    sequences: int = 2
    length: int = 4096

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


SMOKE = Stack(2, 64, 96, 4, 2, 128, 2, 32)


@dataclass(frozen=True)
class Way:
    """fused: norms and linears are one module, else each linear is one."""

    library: str
    recipe: str
    compiled: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        return f"{self.library} {self.recipe}{' fused' * self.fused}{' compiled' * self.compiled}"


WAYS = (
    Way("torch", "bf16"),
    Way("torch", "bf16", True),
    *(Way("te_lite", recipe) for recipe in ("delayed", "current", "rowwise", "blockwise", "mxfp8")),
    *(Way("te_lite", recipe, fused=True) for recipe in FUSED),
    Way("te_lite", "current", True),
    *(Way("te_lite", recipe, True, True) for recipe in FUSED),
    *(Way("te", recipe) for recipe in TE_RECIPES),
    *(Way("te", recipe, fused=True) for recipe in TE_RECIPES),
    *(Way("torchao", recipe, True) for recipe in ("tensorwise", "rowwise")),
)


def build_model(stack: Stack, device: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=stack.hidden, intermediate_size=stack.ffn, num_hidden_layers=stack.layers,
        num_attention_heads=stack.heads, num_key_value_heads=stack.kv_heads, vocab_size=stack.vocabulary,
        max_position_embeddings=stack.length, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(BF16).train()


def sharing(model: nn.Module) -> nn.Module:
    """A copy of the modules that has the same parameters and buffers."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)


def converted(way: Way, base: nn.Module, smoke: bool) -> tuple[nn.Module, Callable, list[nn.Parameter]]:
    """(the model of a way, what opens the context of its forward, parameters that base has not). smoke: no layer is too
    small."""
    model, context, new = sharing(base), contextlib.nullcontext, []
    if way.library == "te_lite":
        import te_lite as te

        # Delayed scaling's steps are taken by an autocast, which comes before the recipe of the conversion.
        recipe = {"delayed": "bf16" if way.fused else "current"}.get(way.recipe, way.recipe)
        if way.fused:
            if te.fuse(model, recipe).left:
                raise RuntimeError("layers are not fused")
        else:
            tokens = {"tokens": None} if smoke else {}
            te.convert_to_float8_training(model, recipe, to_convert, **tokens)
        if way.recipe == "delayed":
            context = functools.partial(te.autocast, recipe="delayed")
    elif way.library == "te":
        te, recipes = library("te")
        if way.fused:
            new = fuse_by_te(model)
        swap_in_te(model)
        if way.recipe != "bf16":
            recipe = getattr(recipes, TE_RECIPES[way.recipe])()
            context = functools.partial(te.autocast, enabled=True, recipe=recipe)
    elif way.library == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(way.recipe)
        model = convert_to_float8_training(model, config=config, module_filter_fn=to_convert)
    return (torch.compile(model, fullgraph=way.library == "te_lite") if way.compiled else model), context, new


@dataclass
class Training:
    """step() of one way; losses and peaks have a number for each."""

    model: nn.Module
    context: Callable
    optimizer: torch.optim.Optimizer
    ids: Tensor
    new: list[nn.Parameter]
    losses: list[Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def reset(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def step(self) -> None:
        with self.context():
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.peaks.append(torch.cuda.max_memory_allocated() if self.ids.is_cuda else 0)


def own_bytes(step: Training) -> int:
    """Of parameters that this way alone has, with what the optimizer keeps of them: other ways' peaks hold them too."""
    states = [t for p in step.new for t in step.optimizer.state[p].values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in (*step.new, *states))


class StepClock(bench.HostClock):
    """Wall time of one step, with the device idle before and after."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sample(self, step: Callable[[], object], hold_us: float) -> bench.Sample:
        def whole() -> None:
            step()
            self.synchronize()

        self.synchronize()
        return super().sample(whole, hold_us)


def chosen(args: argparse.Namespace, peers: dict[str, str]) -> Iterator[Way]:
    """The ways to take. On a CPU torch.compile is left out: it would take most of the time."""
    needs = {"te": "transformer_engine", "torchao": "torchao"}
    for way in WAYS:
        there = needs.get(way.library) is None or needs[way.library] in peers
        wanted = way.library in args.libraries and (not args.recipes or way.recipe in args.recipes)
        if there and wanted and not (way.compiled and args.no_compile):
            yield way


def measure(args: argparse.Namespace, peers: dict[str, str], stack: Stack) -> list[dict]:
    """A row a way. The first way, torch in bf16, is what the others are compared with."""
    torch._dynamo.config.recompile_limit = 64  # several ways compile the same code
    base = build_model(stack, args.device)
    cuda = torch.device(args.device).type == "cuda"
    optimizer = torch.optim.AdamW(base.parameters(), lr=0.0, fused=cuda)
    ids = torch.randint(stack.vocabulary, (stack.sequences, stack.length), device=args.device)
    rows: dict[str, dict] = {}
    steps: dict[str, Training] = {}
    for way in chosen(args, peers):
        rows[way.name] = {**asdict(way), "error": None}
        try:
            model, context, new = converted(way, base, not cuda)
            if new:
                optimizer.add_param_group({"params": new})
            steps[way.name] = Training(model, context, optimizer, ids, new)
        except Exception as error:  # a row with its error, and the others run
            rows[way.name]["error"] = f"{type(error).__name__}: {error}"
    candidates = [bench.Candidate(name, one.step, one.reset) for name, one in steps.items()]
    timings = bench.time_interleaved(
        candidates, StepClock(args.device), rounds=args.rounds, warmup=args.warmup, wall_rounds=0
    )
    for name, timing in timings.items():
        found = {"step_us": timing.gpu_us, "spread": timing.spread, "samples": timing.samples, "error": timing.error}
        if timing.error is None:
            found["tokens_s"] = stack.tokens / timing.gpu_us * 1e6
            others = sum(own_bytes(one) for other, one in steps.items() if other != name)
            found["peak_gib"] = (max(steps[name].peaks[-args.rounds :]) - others) / 2**30 if cuda else None
            found["loss"] = steps[name].losses[-1].item()
        rows[name] |= found
    compare_with_bf16(list(rows.values()))
    return list(rows.values())


def compare_with_bf16(rows: list[dict]) -> None:
    """Adds of_bf16, tokens a second over those of plain torch, and an error to a row with another loss."""
    plain = next((row for row in rows if (row["library"], row["compiled"]) == ("torch", False)), {})
    for row in rows:
        if row["error"] is not None or plain.get("loss") is None:
            continue
        row["of_bf16"] = row["tokens_s"] / plain["tokens_s"]
        off = abs(row["loss"] / plain["loss"] - 1)
        if not off <= MAX_LOSS_OFF:  # NaN too
            row["error"] = f"loss {row['loss']:.4g}, torch's in bf16 {plain['loss']:.4g}: at most {MAX_LOSS_OFF} apart"


def summary(rows: list[dict]) -> str:
    columns = {"step_us": 0, "tokens_s": 0, "of_bf16": 3, "peak_gib": 2, "loss": 4}
    lines = []
    for row in rows:
        cells = ["-" if row.get(name) is None else f"{row[name]:.{digits}f}" for name, digits in columns.items()]
        marks = ["yes" if row[mark] else "" for mark in ("fused", "compiled")]
        lines.append([row["library"], row["recipe"], *marks, *cells, row["error"] or ""])
    return result_files.text_table(("library", "recipe", "fused", "compiled", *columns, "error"), lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    libraries = list(dict.fromkeys(way.library for way in WAYS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--libraries", nargs="+", default=libraries, choices=libraries)
    parser.add_argument("--recipes", nargs="+", choices=sorted({way.recipe for way in WAYS}), help="all by default")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out what needs torch.compile: llama_eager.json"
    )
    parser.add_argument("--layers", type=int, default=Stack.layers)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3, help="steps of each way before the first round")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for llama.json or llama_eager.json")
    args = parser.parse_args(argv)
    args.no_compile |= torch.device(args.device).type == "cpu"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    peers, left_out = installed()
    if args.no_compile:
        left_out.append("torch.compile is left out.")
    stack = SMOKE if torch.device(args.device).type == "cpu" else Stack(args.layers)
    rows = measure(args, peers, stack)
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    path = args.out / ("llama_eager.json" if args.no_compile else "llama.json")
    result_files.write_results(
        path, "llama", rows, tree=tree, device=args.device, peers=peers, left_out=left_out,
        tokens=stack.tokens, **asdict(stack),
    )  # fmt: skip
    print(summary(rows), *left_out, sep="\n")
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
