"""Trains a small Llama in fp8 with transformers' Trainer (docs/how-to/trainer.md).

python examples/trainer_llama.py --steps 20 --out out/trainer
python examples/trainer_llama.py --steps 40 --out out/trainer --resume
"""

import argparse

import torch
from gpt.llama import Windows, show, small_llama
from transformers import Trainer, TrainingArguments

import te_lite as te


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--out", default="out/trainer", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out")
    args = parser.parse_args()

    model = small_llama(args.hidden)
    print(te.convert_to_float8_training(model, "current", minimum_size=0))  # these layers are small
    training = TrainingArguments(
        args.out, max_steps=args.steps, per_device_train_batch_size=args.batch_size, learning_rate=args.lr, bf16=True,
        gradient_checkpointing=True, save_steps=10, logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, training, train_dataset=Windows(64 * args.batch_size))
    trainer.train(resume_from_checkpoint=args.resume or None)
    show(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


if __name__ == "__main__":
    main()
