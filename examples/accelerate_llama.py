"""Trains a small Llama in fp8 with accelerate (docs/how-to/accelerate.md).

python examples/accelerate_llama.py --steps 20
accelerate launch --num_processes 2 examples/accelerate_llama.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from gpt.llama import Windows, show, small_llama

import te_lite.compat.transformer_engine  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()

    fp8 = TERecipeKwargs(amax_history_len=16, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[fp8])
    model = small_llama(args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = torch.utils.data.DataLoader(Windows(args.steps * args.batch_size), batch_size=args.batch_size)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    losses = []
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        show(losses)


if __name__ == "__main__":
    main()
