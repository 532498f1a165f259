"""The demo's parts that need no ranks: options, data, weights, optimizer, checkpoint rules, rank discovery."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from examples.gpt import checkpoint, data, loop, mesh, model, optimizer, options

ALONE = mesh.Mesh("python", 0, 1, 0, 1, 0, 1, None, None, torch.device("cpu"))


def parse(*argv: str, world_size: int = 1):
    args = options.build_parser().parse_args(list(argv))
    options.check(args, world_size)
    return args


# (options, ranks, what the message must contain)
BAD_OPTIONS = [
    ("--layers 0", 1, ("--layers 0", "at least 1")),
    ("--save-every -1", 1, ("--save-every -1", "at least 0")),
    ("--lr 0", 1, ("--lr 0.0", "positive")),
    ("--lr nan", 1, ("--lr nan", "positive")),
    ("--seed -5", 1, ("--seed -5", "another seed")),
    ("--steps 10 --stop-at 11", 1, ("--stop-at 11", "--steps 10")),
    ("--hidden 100 --heads 8", 1, ("--hidden 100", "--heads 8", "multiple of 16")),
    ("--tp 4 --heads 6", 4, ("--heads 6", "--tp 4")),
    ("--tp 2 --ffn 129", 2, ("--ffn 129", "--tp 2", "multiple of 2")),
    ("--tp 2 --hidden 48 --heads 2 --recipe delayed", 2, ("--hidden 48", "of 32", "--recipe bf16")),
    ("--vocab 100", 1, ("--vocab 100", "256")),
    ("--tp 2 --vocab 257", 2, ("--vocab 257", "258")),
    ("--batch-size 3", 2, ("--batch-size 3", "2 data parallel")),
    ("--sequence-parallel", 1, ("--sequence-parallel", "--tp 1")),
    ("--tp 2 --sequence-parallel --seq-length 33", 2, ("--seq-length 33", "multiple of 2")),
    ("--overlap", 1, ("--overlap", "--sequence-parallel")),
    ("--fp8-buf", 1, ("--fp8-buf", "--overlap")),
    ("--resume", 1, ("--resume", "--checkpoint-dir")),
    ("--save-every 5", 1, ("--save-every 5", "--checkpoint-dir")),
]


@pytest.mark.parametrize(("argv", "ranks", "expected"), BAD_OPTIONS, ids=[case[0] for case in BAD_OPTIONS])
def test_bad_options_are_refused_with_value_rule_and_remedy(argv, ranks, expected) -> None:
    with pytest.raises(mesh.RefusedError) as error:
        parse(*argv.split(), world_size=ranks)
    for text in expected:
        assert text in str(error.value)


def test_default_options_hold() -> None:
    args = parse()
    assert args.ffn % 128 == 0 and args.ffn >= 8 * args.hidden / 3
    for recipe in ("bf16", "delayed", "current"):
        parse("--tp", "2", "--sequence-parallel", "--recipe", recipe, world_size=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(bad: float) -> None:
    loop.refuse_bad_loss([2.5, 3.0], 7)
    with pytest.raises(mesh.RefusedError, match=f"loss {bad} at step 8.*finite.*--lr"):
        loop.refuse_bad_loss([2.5, bad], 7)


def test_tp_must_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "place", lambda: ("torchrun", 0, 3, 0))
    with pytest.raises(mesh.RefusedError, match=r"--tp 2 does not divide the 3 rank\(s\) started by torchrun"):
        mesh.connect(2, "cpu")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "python"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"PMI_SIZE": "2"}, "mpirun"),
        ({"RANK": "0", "WORLD_SIZE": "2", "PMI_SIZE": "1"}, "torchrun"),
    ],
    ids=str,
)
def test_launcher_is_detected(variables, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", *mesh.MPI_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert mesh.detect_launcher() == expected


def text_corpus(length: int = 40_000, seq_length: int = 16) -> data.Corpus:
    return data.split_text(bytes(i * i % 251 for i in range(length)), "a test", seq_length)


def test_split_keeps_every_byte_once() -> None:
    text = bytes(i * i % 251 for i in range(40_000))
    corpus = data.split_text(text, "a test", 16)
    assert len(corpus.train) + len(corpus.held_out) == len(text)
    block = len(text) // 16
    assert bytes(corpus.held_out.tolist()) == text[15 * block : 16 * block]
    assert bytes(corpus.train.tolist()) == text[: 15 * block] + text[16 * block :]


def test_short_or_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mesh.RefusedError, match=r"has 100 bytes: too few for --seq-length 16.*544"):
        data.split_text(bytes(100), "a test", 16)
    with pytest.raises(mesh.RefusedError, match=r"--data .*nowhere: not a file"):
        data.load_corpus(str(tmp_path / "nowhere"), 16, ALONE)


def test_a_given_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 40)
    corpus = data.load_corpus(str(file), 16, ALONE)
    assert len(corpus.train) + len(corpus.held_out) == 256 * 40 and corpus.source == str(file)


def test_batches_depend_on_step_and_seed_only() -> None:
    corpus = text_corpus()
    first = data.train_batch(corpus, 7, 1, 4, 16, ALONE)
    again = data.train_batch(corpus, 7, 1, 4, 16, ALONE)
    assert torch.equal(first[0], again[0])
    for step, seed in ((8, 1), (7, 2), (7, 1 + 2**30)):
        assert not torch.equal(first[0], data.train_batch(corpus, step, seed, 4, 16, ALONE)[0])
    tokens, targets = first
    assert tokens.shape == targets.shape == (4, 16) and torch.equal(tokens[:, 1:], targets[:, :-1])
    # two replicas together see the batch of one
    replicas = [dataclasses.replace(ALONE, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    halves = [data.train_batch(corpus, 7, 1, 4, 16, replica)[0] for replica in replicas]
    assert torch.equal(torch.cat(halves), tokens)


def test_held_out_windows_do_not_overlap() -> None:
    corpus = text_corpus()
    batches = data.held_out_batches(corpus, 1600, 4, 16, ALONE)
    tokens = torch.cat([tokens for tokens, _ in batches])
    assert tokens.shape == (100, 16)
    starts = torch.linspace(0, len(corpus.held_out) - 17, 100).long()
    assert int(starts.diff().min()) >= 16
    assert torch.equal(tokens[3], corpus.held_out[starts[3] : starts[3] + 16].long())


def test_unigram_entropy() -> None:
    """Train counts 3 of byte 0 and 1 of byte 1, and one more of each of 256; held out is one of each."""
    corpus = data.Corpus(torch.tensor([0, 0, 0, 1], dtype=torch.uint8), torch.tensor([0, 1], dtype=torch.uint8), "", "")
    expected = -(math.log(4 / 260) + math.log(2 / 260)) / 2
    assert data.unigram_entropy(corpus) == pytest.approx(expected, rel=1e-12)


def test_weights_depend_on_seed_and_name() -> None:
    shape = dict(layers=1, hidden=32, heads=2, ffn=32, vocab=256, seq_length=8, params_dtype=torch.float32)
    one, same, other = (loop.build_model(model.GPTConfig(**shape), seed, ALONE) for seed in (1, 1, 2))
    differing = 0
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        differing += a.numel() and not torch.equal(a, c)
    assert differing == 5, "embedding, qkv, proj, fc1 and fc2 are drawn; norms are ones"


def test_shards_put_together_are_the_full_weight() -> None:
    full = torch.randn(12, 6)
    ranks = [dataclasses.replace(ALONE, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert torch.equal(torch.cat([model.take_shard(full, rank, 0, 1) for rank in ranks]), full)
    assert torch.equal(torch.cat([model.take_shard(full, rank, 1, 1) for rank in ranks], 1), full)
    gate, up = full.chunk(2)
    shards = [model.take_shard(full, rank, 0, 2) for rank in ranks]
    assert torch.equal(torch.cat([shard[:3] for shard in shards]), gate)
    assert torch.equal(torch.cat([shard[3:] for shard in shards]), up)


def test_rotation_depends_on_the_distance_only() -> None:
    rotary = model.rotary_table(8, 4)
    q, k = torch.randn(2, 4, dtype=torch.float64)
    q, k = (model.rotate(x.expand(8, 4), rotary) for x in (q, k))
    scores = q @ k.t()
    for distance in range(8):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))
    torch.testing.assert_close(q.norm(dim=-1), q[0].norm().expand(8))


def test_masters_keep_updates_smaller_than_a_bf16_step() -> None:
    """bf16 has no number between 1 and 1 + 2^-7, so steps of 1e-3 would be lost without the fp32 master."""
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    adamw = optimizer.MasterAdamW(layer, ALONE, weight_decay=0.0)
    for _ in range(10):
        layer.weight.grad = torch.full_like(layer.weight, -1.0)
        adamw.step(1e-3)
    assert adamw.masters[0].item() == pytest.approx(1.01, abs=1e-5)
    assert layer.weight.item() == torch.tensor(1.01).bfloat16().item() != 1.0


def test_clipping_scales_all_gradients_by_their_common_norm() -> None:
    layer = torch.nn.Linear(3, 1)
    adamw = optimizer.MasterAdamW(layer, ALONE, clip=1.0)
    coefficient = adamw.clip_coefficient([torch.full((1, 3), 2.0), torch.full((1,), 2.0)])
    assert coefficient.item() == pytest.approx(1 / 4, rel=1e-5)
    assert adamw.clip_coefficient([torch.full((1, 3), 0.1), torch.zeros(1)]).item() == 1.0


def test_learning_rate_warms_up_and_ends_at_a_tenth() -> None:
    rates = [optimizer.learning_rate(step, peak=1.0, warmup=10, steps=100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(0.1)


IDENTITY = {"recipe": "delayed", "data": "abc", "tp": 2, "hidden": 64}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint directory with both ranks' files of step 3, as far as the rules read them."""
    for tp_rank in (0, 1):
        state = {"version": checkpoint.VERSION, "identity": IDENTITY}
        file = checkpoint.rank_file(tmp_path, 3, tp_rank, 2)
        checkpoint.write_atomically(file, lambda stream, state=state: torch.save(state, stream))
    (tmp_path / "latest.json").write_text(json.dumps({"step": 3}))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "tp_size", "expected"),
    [
        ({}, 2, None),
        ({"recipe": "current"}, 2, ("--recipe", "delayed", "current")),
        ({"hidden": 128}, 2, ("--hidden", "64", "128")),
        ({"data": "xyz"}, 2, ("--data", "abc", "xyz")),
        ({"tp": 1}, 1, ("--tp", "has 2", "asks for 1")),
        ({"tp": 4}, 4, ("--tp", "has 2", "asks for 4")),
    ],
    ids=str,
)
def test_resume_rules(change, tp_size, expected, saved: Path) -> None:
    here = dataclasses.replace(ALONE, tp_size=tp_size)
    problem = checkpoint.resume_problem(saved, 3, {**IDENTITY, **change}, here)
    if expected is None:
        assert problem is None
    else:
        for text in (*expected, "Resume with the checkpoint's values", "untouched"):
            assert text in problem


def test_incomplete_or_missing_checkpoints_are_named(saved: Path, tmp_path: Path) -> None:
    here = dataclasses.replace(ALONE, tp_rank=1, tp_size=2)
    checkpoint.rank_file(saved, 3, 1, 2).unlink()
    assert "tp_1_of_2.pt is missing" in checkpoint.resume_problem(saved, 3, IDENTITY, here)
    assert "no checkpoint" in checkpoint.resume_problem(tmp_path / "empty", None, IDENTITY, here)
    assert checkpoint.latest_step(tmp_path / "empty") is None and checkpoint.latest_step(saved) == 3


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    checkpoint.write_atomically(file, lambda stream: stream.write(b"old"))

    def fail(stream) -> None:
        stream.write(b"ne")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        checkpoint.write_atomically(file, fail)
    assert file.read_bytes() == b"old"
