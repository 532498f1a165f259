"""Run under torchrun: trains tiny models in fp32 on all ranks as one tensor parallel group; prints JSON losses.

"right" is the training as it is. "unreduced" leaves out the reduction of the sequence-parallel norm gradients: the
bug that the comparison must be able to see.
"""

import json
import sys

import te_lite as te
from examples.gpt import data, loop, mesh, options


def losses(argv: list[str], here: mesh.Mesh, corpus: data.Corpus) -> list[float]:
    args = options.build_parser().parse_args(argv)
    options.check(args, here.world_size)
    identity = options.identity(args, corpus.digest)
    trainer = loop.Trainer(args, options.model_config(args), corpus, here, identity)
    return trainer.run(lambda *_: None).losses


def main() -> None:
    argv = sys.argv[1:]
    tp = int(argv[argv.index("--tp") + 1])
    here = mesh.connect(tp, "cpu")
    corpus = data.load_corpus(None, options.build_parser().parse_args(argv).seq_length, here)
    result = {"right": losses(argv, here, corpus)}
    te.reduce_sequence_parallel_grads = lambda *_: 0
    result["unreduced"] = losses(argv, here, corpus)
    if here.is_main:
        print(json.dumps(result))
    mesh.disconnect()


if __name__ == "__main__":
    main()
