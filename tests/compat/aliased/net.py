"""A small model as users write it and as te_lite has it, and the loop that a framework's losses are compared with."""

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal

VOCABULARY, HIDDEN, FFN = 256, 64, 128


class Net(nn.Module):
    """tokens int64 [B, S] -> logits [B, S, VOCABULARY]."""

    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, HIDDEN), norm(HIDDEN)
        self.mlp = nn.Sequential(linear(HIDDEN, FFN), nn.GELU(), linear(FFN, HIDDEN))
        self.head = linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.head(h + self.mlp(self.norm(h)))


def twin(net: nn.Module, dtype: torch.dtype, device: torch.device | str = "cpu") -> Net:
    """te_lite's modules with the parameters of a Net of torch's."""
    made = Net(te.Linear, te.LayerNorm)
    missing = made.load_state_dict(net.state_dict(), strict=False).missing_keys
    assert all(key.endswith("_extra_state") for key in missing)
    return made.to(device, dtype)


def token_batches(count: int, sequence: int = 33) -> list[Tensor]:
    """Fresh tokens, the same two batches over and over: a loss that must fall."""
    both = torch.randint(VOCABULARY, (2, 8, sequence))
    return [both[step % 2] for step in range(count)]


def loss_of(net: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)  # fp16 holds no squares of small gradients


def train(
    net: nn.Module, batches: Iterable[Tensor], context: Callable[[], AbstractContextManager[object]],
    *, accumulate: int = 1, clip: float | None = None,
) -> list[float]:  # fmt: skip
    """The losses of a plain loop: forward inside `context`, a step of AdamW every `accumulate` batches."""
    optimizer, losses = optimizer_of(net), []
    for number, tokens in enumerate(batches, 1):
        with context():
            loss = loss_of(net, tokens)
        (loss / accumulate).backward()
        if number % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, parameter in ours.named_parameters():
        assert_bitwise_equal(name, parameter, expected[name])


def recipes_run() -> set[tuple[str, str]]:
    """(recipe, operands) of the last call of each te_lite module that is alive."""
    gc.collect()
    return {(row["recipe"], row["operands"]) for row in te.overlap_report()}
