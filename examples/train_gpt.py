"""Trains a byte-level GPT with te_lite on real text, on CPU ranks or on GPUs.

    torchrun --nproc-per-node 2 examples/train_gpt.py --tp 2 --sequence-parallel --recipe delayed
    mpirun -n 2 python examples/train_gpt.py --tp 2 --sequence-parallel --recipe current
    python examples/train_gpt.py --recipe bf16 --steps 50

docs/how-to/run-the-demo.md explains the options and what the summary says.
"""

import faulthandler
import sys
import traceback
from argparse import ArgumentParser, Namespace

from gpt import loop, mesh, options, report
from gpt.data import load_corpus

import te_lite as te


def initialize_overlap(args: Namespace, here: mesh.Mesh) -> None:
    """Reserves the library's communication buffers for this model's largest activation, [S * B, H]."""
    try:
        te.initialize_ub(
            [args.seq_length * args.batch_size // here.dp_size, args.hidden],
            args.tp,
            use_fp8=te.recipe.from_name(args.recipe).is_fp8,
            dtype=options.PARAMS_DTYPES[args.params_dtype],
            ub_cfgs={f"{layer}_fprop": {"fp8_buf": args.fp8_buf} for layer in ("proj", "fc2")},
            tp_group=here.tp_group,
            device=here.device,
        )
    except (ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        raise mesh.RefusedError(f"--overlap: {error}") from error


def train(args: Namespace, here: mesh.Mesh) -> None:
    corpus = load_corpus(args.data, args.seq_length, here)
    if args.overlap:
        initialize_overlap(args, here)
    trainer = loop.Trainer(args, options.model_config(args), corpus, here, options.identity(args, corpus.digest))
    if trainer.done >= trainer.last:
        raise mesh.RefusedError(
            f"--resume: the checkpoint is at step {trainer.done} and this run ends at step "
            f"{trainer.last}, so nothing is left to train. Raise --steps (or --stop-at)."
        )
    progress = report.Progress(args, trainer.done, here)
    try:
        history = trainer.run(progress)
    finally:
        progress.close()
    # every rank asks, since a report may compare the ranks
    rows = te.overlap_report()
    if not here.is_main:
        return
    summary = report.summarise(args, history, corpus, here, trainer.model)
    report.plot_curve(args.plot, history, summary)
    if args.log_json is not None:
        report.write_log(args.log_json, args, history, summary, rows)
    print(report.format_summary(summary, report.written(args, history), rows), flush=True)


def main(argv: list[str] | None = None, parser: ArgumentParser | None = None) -> int:
    """0, or 2 with one message for values that cannot work."""
    faulthandler.enable()  # a crash below Python still says where it was
    parser = parser or options.build_parser()
    args = parser.parse_args(argv)
    rank = 0
    try:
        _, rank, world_size, _ = mesh.place()
        options.check(args, world_size)
        here = mesh.connect(args.tp, args.device, args.ep)
        options.check_device(args, here)
        train(args, here)
    except mesh.RefusedError as error:
        # all ranks refuse alike, so one of them says it
        if rank == 0:
            print(f"{parser.prog}: error: {error}", file=sys.stderr, flush=True)
        mesh.disconnect()
        return 2
    except Exception:
        traceback.print_exc()
        mesh.abort_all_ranks()
        return 1  # without mesh.disconnect(), which would wait for ranks that wait for this one
    # the ranks leave together: rank 0 still writes files when the others are done
    here.barrier()
    te.destroy_ub()
    mesh.disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
