"""For the examples with other trainers: a small Llama of transformers over bytes, and windows of real text."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from .data import BYTES, read_text, seeded_generator


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a text at random places, the same in every run: {"input_ids", "labels"}, bytes as int64 [S]."""

    def __init__(self, count: int, seq_length: int = 64, path: str | None = None) -> None:
        self.text = torch.frombuffer(bytearray(read_text(path)[0]), dtype=torch.uint8)
        self.seq_length = seq_length
        self.starts = torch.randint(len(self.text) - seq_length, (count,), generator=seeded_generator(0, "windows"))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[self.starts[index] :][: self.seq_length].long()
        return {"input_ids": window, "labels": window}


def small_llama(hidden: int = 64, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """All features are multiples of 16, as fp8 wants them."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 16, "num_key_value_heads": hidden // 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, **sizes, **heads, tie_word_embeddings=False))


def show(losses: Iterable[float]) -> None:
    """A line a step, as examples/megatron_gpt.py prints it."""
    for step, loss in enumerate(losses, 1):
        print(f"step {step:4} loss {loss:.4f}")
