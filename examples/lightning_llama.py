"""Trains a small Llama in fp8 with Lightning (docs/how-to/lightning.md).

python examples/lightning_llama.py --steps 20
"""

import argparse

import lightning.pytorch as pl
import torch
from gpt.llama import Windows, show, small_llama
from lightning.pytorch.plugins import TransformerEnginePrecision
from torch import Tensor

import te_lite.compat.transformer_engine  # noqa: F401


class Llama(pl.LightningModule):
    def __init__(self, hidden: int, lr: float) -> None:
        super().__init__()
        self.model, self.lr = small_llama(hidden), lr
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.trainer.precision_plugin.convert_module(self)  # before a checkpoint is loaded

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()

    fp8 = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}
    precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=fp8)
    trainer = pl.Trainer(
        plugins=[precision], max_epochs=1, devices=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Llama(args.hidden, args.lr)
    trainer.fit(module, torch.utils.data.DataLoader(Windows(args.steps * args.batch_size), batch_size=args.batch_size))
    show(module.losses)


if __name__ == "__main__":
    main()
