"""Text as bytes: where it comes from, its split, deterministic batches and its unigram entropy."""

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Mesh, RefusedError

BYTES = 256
MAX_TEXT_BYTES = 8 * 2**20
BLOCK_BYTES = 64 * 2**10
HELD_OUT_EVERY = 16


@dataclass(frozen=True)
class Corpus:
    """train and held_out are uint8 [n]; digest is the whole text's sha256; source says where it came from."""

    train: Tensor
    held_out: Tensor
    digest: str
    source: str


def read_text(path: str | None) -> tuple[bytes, str]:
    """At most MAX_TEXT_BYTES to train on and where they came from: the file at path, or without one the top-level
    modules of this Python's standard library in sorted order."""
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise RefusedError(
                f"--data {path}: not a file. Pass a readable text file, or drop --data to train on the "
                "sources of Python's standard library."
            )
        with file.open("rb") as stream:
            return stream.read(MAX_TEXT_BYTES), str(path)
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(root.glob("*.py"), key=lambda file: file.name)
    text = b"".join(file.read_bytes() for file in sources)[:MAX_TEXT_BYTES]
    return text, f"{len(sources)} modules of Python {sysconfig.get_python_version()}'s standard library"


def split_text(text: bytes, source: str, seq_length: int) -> Corpus:
    """Every 16th block of 64 KiB (less for a short text) is held out; the rest is trained on."""
    block = min(BLOCK_BYTES, len(text) // HELD_OUT_EVERY)
    if block < 2 * (seq_length + 1):
        raise RefusedError(
            f"{source} has {len(text)} bytes: too few for --seq-length {seq_length}, which needs at least "
            f"{2 * (seq_length + 1) * HELD_OUT_EVERY} for a held-out split. "
            "Pass a longer file or a shorter length."
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = (torch.arange(len(text)) // block) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(data[~held_out], data[held_out], hashlib.sha256(text).hexdigest(), source)


def load_corpus(path: str | None, seq_length: int, mesh: Mesh) -> Corpus:
    """Rank 0 reads, all ranks train on its bytes: hosts with different files cannot drift apart."""
    answer: list[tuple[bytes, str] | str | None] = [None]
    if mesh.is_main:
        try:
            answer[0] = read_text(path)
        except (RefusedError, OSError) as error:
            answer[0] = str(error)
    if mesh.world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise RefusedError(answer[0])
    text, source = answer[0]
    return split_text(text, source, seq_length)


def seeded_generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator of its own for each (seed, purpose). They are hashed, because torch's CPU generator keeps only
    the low 32 bits of a seed."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {purpose}".encode()))


def windows(text: Tensor, starts: Tensor, seq_length: int) -> tuple[Tensor, Tensor]:
    """starts int64 [B] -> tokens, targets int64 [B, S]; the target of a byte is the byte after it."""
    window = text[starts.unsqueeze(1) + torch.arange(seq_length + 1)].long()
    return window[:, :-1], window[:, 1:]


def train_batch(corpus: Corpus, step: int, seed: int, batch: int, seq_length: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Batch number `step`, a pure function of the arguments: a resumed run sees what an uninterrupted one would.

    batch counts the sequences of all data parallel ranks; each takes its consecutive share.
    """
    generator = seeded_generator(seed, f"batch {step}")
    starts = torch.randint(len(corpus.train) - seq_length, (batch,), generator=generator)
    tokens, targets = windows(corpus.train, starts.chunk(mesh.dp_size)[mesh.dp_rank], seq_length)
    return tokens.to(mesh.device), targets.to(mesh.device)


def held_out_batches(
    corpus: Corpus, tokens: int, batch: int, seq_length: int, mesh: Mesh
) -> list[tuple[Tensor, Tensor]]:
    """About `tokens` held-out tokens in evenly spaced windows that do not overlap, in whole batches."""
    available = (len(corpus.held_out) - 1) // seq_length
    count = max(1, min(tokens // seq_length, available) // batch) * batch
    starts = torch.linspace(0, len(corpus.held_out) - seq_length - 1, count).long()
    batches = []
    for some in starts.split(batch):
        inputs, targets = windows(corpus.held_out, some.chunk(mesh.dp_size)[mesh.dp_rank], seq_length)
        batches.append((inputs.to(mesh.device), targets.to(mesh.device)))
    return batches


def unigram_entropy(corpus: Corpus) -> float:
    """Nats a byte that a model without context pays on the held-out text: the cross-entropy of its bytes under
    the training split's byte frequencies (one more of each, so that an unseen byte costs no infinity)."""
    counts = torch.bincount(corpus.train.long(), minlength=BYTES).double() + 1
    cost = -(counts / counts.sum()).log()
    held_out = torch.bincount(corpus.held_out.long(), minlength=BYTES).double()
    return float((held_out * cost).sum() / held_out.sum())
