"""The command lines of train_gpt.py and train_moe.py, and the rules their values obey."""

import argparse
from pathlib import Path

import torch

import te_lite as te

from .data import BYTES
from .mesh import Mesh, RefusedError
from .model import GPTConfig
from .moe import MoEConfig

PARAMS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # fp16 would need loss scaling
FP8_MULTIPLE = 16
FFN_MULTIPLE = 128


DENSE = "Trains a byte-level GPT with te_lite: tensor and sequence parallel, in bf16 or fp8."


def build_parser(prog: str = "train_gpt.py", description: str = DENSE) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(experts=0, ep=1)
    parallel = parser.add_argument_group("parallelism and precision")
    parallel.add_argument(
        "--tp", type=int, default=1, help="tensor parallel size; the rest of the ranks is data parallel"
    )
    parallel.add_argument("--sequence-parallel", action="store_true", help="cut activations along the sequence, too")
    parallel.add_argument("--recipe", default="bf16", choices=sorted(te.recipe.available()), help="bf16 means no fp8")
    parallel.add_argument("--params-dtype", default="bf16", choices=sorted(PARAMS_DTYPES))
    parallel.add_argument("--overlap", action="store_true", help="hide communication behind GEMMs (userbuffers)")
    parallel.add_argument("--fp8-buf", action="store_true", help="with --overlap: partial sums of proj and fc2 in fp8")
    parallel.add_argument("--fuse-wgrad", action="store_true", help="accumulate weight gradients into fp32 main_grad")
    parallel.add_argument("--recompute", default="none", choices=("none", "full"), help="activation checkpointing")
    parallel.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=3)
    model.add_argument("--hidden", type=int, default=192)
    model.add_argument("--heads", type=int, default=6)
    model.add_argument("--ffn", type=int, help=f"default: 8/3 hidden, rounded up to a multiple of {FFN_MULTIPLE}")
    model.add_argument("--seq-length", type=int, default=128)
    model.add_argument("--vocab", type=int, default=BYTES, help="256 bytes, or more rows of padding")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=150)
    training.add_argument(
        "--stop-at", type=int, help="end after this step as if interrupted; --steps keeps its schedule"
    )
    training.add_argument("--batch-size", type=int, default=16, help="sequences a step over all data parallel ranks")
    training.add_argument("--lr", type=float, default=1.5e-3)
    training.add_argument("--warmup", type=int, default=50)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--data", help="a text file; default: the sources of Python's standard library")
    training.add_argument(
        "--eval-every", type=int, default=50, help="steps between held-out losses; 0: at the end only"
    )
    training.add_argument("--eval-tokens", type=int, default=32768)
    output = parser.add_argument_group("output")
    output.add_argument("--checkpoint-dir", type=Path)
    output.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    output.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, bit for bit")
    output.add_argument("--plot", type=Path, default=Path("out/loss.png"), help="the loss curve, a PNG")
    output.add_argument("--log-json", type=Path, help="write configuration, losses and summary to this JSON file")
    return parser


def build_moe_parser() -> argparse.ArgumentParser:
    """train_gpt.py's options, with experts in the place of the MLPs."""
    parser = build_parser("train_moe.py", "Trains a byte-level mixture-of-experts GPT with te_lite: expert parallel.")
    moe = parser.add_argument_group("mixture of experts")
    moe.add_argument("--experts", type=int, default=8, help="in each layer")
    moe.add_argument("--top-k", type=int, default=2, help="experts of a token; --ffn is one expert's, by default 1/k")
    moe.add_argument("--ep", type=int, default=1, help="data parallel neighbours that share the experts")
    moe.add_argument("--balance", type=float, default=0.01, help="factor of the load-balancing loss")
    return parser


def default_ffn(hidden: int, parts: int = 1) -> int:
    return -(-8 * hidden // (3 * parts * FFN_MULTIPLE)) * FFN_MULTIPLE


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RefusedError(message)


def check_numbers(args: argparse.Namespace) -> None:
    at_least_one = "tp ep layers hidden heads seq_length steps batch_size eval_tokens"
    at_least_zero = "warmup save_every eval_every"
    for names, least in ((at_least_one, 1), (at_least_zero, 0)):
        for name in names.split():
            value = getattr(args, name)
            require(value >= least, f"--{name.replace('_', '-')} {value}: must be at least {least}. Raise it.")
    require(0 < args.lr < float("inf"), f"--lr {args.lr}: must be positive. 1.5e-3 suits the default model.")
    require(0 <= args.seed < 2**31, f"--seed {args.seed}: must be within [0, 2^31). Pass another seed.")
    require(
        args.stop_at is None or 1 <= args.stop_at <= args.steps,
        f"--stop-at {args.stop_at}: must lie within --steps {args.steps}. Drop it to train to the end.",
    )


def check_shapes(args: argparse.Namespace, dp: int) -> None:
    tp, hidden, heads, ffn = args.tp, args.hidden, args.heads, args.ffn
    require(ffn >= 1, f"--ffn {ffn}: must be at least 1. Raise it.")
    require(
        hidden % (2 * heads) == 0,
        f"--hidden {hidden} is not divisible by twice --heads {heads}: a head takes hidden/heads features and rotary "
        f"positions turn them in pairs. Pass a multiple of {2 * heads}.",
    )
    require(heads % tp == 0, f"--heads {heads} is not divisible by --tp {tp}: ranks hold whole heads. Change one.")
    require(ffn % tp == 0, f"--ffn {ffn} is not divisible by --tp {tp}. Pass a multiple of {tp}.")
    if te.recipe.from_name(args.recipe).is_fp8:
        multiple = FP8_MULTIPLE * tp
        require(
            hidden % multiple == 0 and ffn % multiple == 0,
            f"--hidden {hidden} and --ffn {ffn} at --tp {tp}: fp8 GEMMs need multiples of {FP8_MULTIPLE} on each "
            f"rank, so of {multiple} here. Change them, or pass --recipe bf16.",
        )
    require(
        args.vocab >= BYTES and args.vocab % tp == 0,
        f"--vocab {args.vocab}: must be at least {BYTES} (one row a byte) and divisible by --tp {tp}. "
        f"Pass {-(-max(args.vocab, BYTES) // tp) * tp}.",
    )
    require(
        args.batch_size % dp == 0,
        f"--batch-size {args.batch_size} is not divisible by the {dp} data parallel ranks. Pass a multiple of {dp}.",
    )
    if args.sequence_parallel:
        require(tp > 1, "--sequence-parallel at --tp 1: no group to cut the sequence over. Drop it or raise --tp.")
        require(
            args.seq_length % tp == 0,
            f"--seq-length {args.seq_length} is not divisible by --tp {tp}, which --sequence-parallel needs. "
            f"Pass a multiple of {tp}.",
        )
    require(
        args.sequence_parallel or not args.overlap,
        "--overlap hides the collectives of sequence parallelism. Add --sequence-parallel with --tp 2 or more.",
    )
    require(
        args.overlap or not args.fp8_buf,
        "--fp8-buf is about what userbuffers send. Add --overlap.",
    )


def check_experts(args: argparse.Namespace, dp: int) -> None:
    experts, ep = args.experts, args.ep
    require(args.tp == 1, f"--tp {args.tp}: tensor parallelism does not cut experts. Pass --ep {args.tp} instead.")
    require(experts >= 1, f"--experts {experts}: must be at least 1. Raise it.")
    require(1 <= args.top_k <= experts, f"--top-k {args.top_k}: must lie within 1 and --experts {experts}. Change one.")
    require(
        experts % ep == 0, f"--experts {experts} is not divisible by --ep {ep}: ranks hold equal numbers. Change one."
    )
    require(dp % ep == 0, f"--ep {ep} does not divide the {dp} rank(s). Start a multiple of {ep}, or change --ep.")
    require(args.balance >= 0, f"--balance {args.balance}: must be at least 0. 0.01 is usual.")


def check_directories(args: argparse.Namespace) -> None:
    if args.checkpoint_dir is None:
        need = "--checkpoint-dir is not given. Pass --checkpoint-dir DIR."
        require(not args.resume, f"--resume: nothing says where to resume from: {need}")
        require(not args.save_every, f"--save-every {args.save_every}: nothing says where to save: {need}")


def check(args: argparse.Namespace, world_size: int) -> None:
    """Fills the derived defaults in; RefusedError for the first rule that is broken."""
    check_numbers(args)
    dp = max(1, world_size // args.tp)
    if args.experts:
        check_experts(args, dp)
    if args.ffn is None:
        args.ffn = default_ffn(args.hidden, args.top_k if args.experts else 1)
    check_shapes(args, dp)
    check_directories(args)


def check_device(args: argparse.Namespace, mesh: Mesh) -> None:
    """RefusedError where the recipe does not run on this device."""
    supported, reason = te.check_recipe_support(te.recipe.from_name(args.recipe), mesh.device)
    if not supported:
        raise RefusedError(f"--recipe {args.recipe} on {mesh.device}: {reason}. Pass --recipe bf16 or another device.")


def model_config(args: argparse.Namespace) -> GPTConfig:
    recipe = te.recipe.from_name(args.recipe)
    moe = MoEConfig(args.experts, args.top_k, args.balance, recipe) if args.experts else None
    return GPTConfig(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        ffn=args.ffn,
        vocab=args.vocab,
        seq_length=args.seq_length,
        params_dtype=PARAMS_DTYPES[args.params_dtype],
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute == "full",
        overlap=args.overlap,
        fuse_wgrad=args.fuse_wgrad,
        moe=moe,
    )


def identity(args: argparse.Namespace, digest: str) -> dict[str, object]:
    """What a run must share with a checkpoint to continue it; --steps, --save-every and so on may change."""
    keys = "tp layers hidden heads ffn vocab seq_length params_dtype batch_size seed".split()
    keys += ["experts", "top_k", "ep", "balance"] if args.experts else []
    recipe = te.recipe.from_name(args.recipe).name
    return {"recipe": recipe, "data": digest, **{key: getattr(args, key) for key in keys}}
