"""The maximum over ranks: one rank with the others' words in ordinary memory, and several ranks on one GPU."""

import pytest
import torch

from te_lite.ops import group_max as M
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import Late
from tests.ops.interpreted import only_interpreted, run_interpreted
from tests.ops.paths import PATHS, device_of

INF = float("inf")
EPOCHS = [*fused.EPOCHS, 0]


class Rank:
    """What one rank of a group has: its slots, and where its words lie with the others."""

    def __init__(self, rank: int, ranks: int, epoch: int, device: str) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        before = fused.as_int32(epoch - 1)
        self.words = torch.full((M.SLOTS, ranks, 2), before, dtype=torch.int32, device=device)  # value, epoch
        self.done, self.abort, self.zero = (fused.words(n, device=device) for n in (2, 1, 1))
        self.done[:1] = before

    def call(self, everyone: "list[Rank]", partials: torch.Tensor, epoch: int, word: torch.Tensor | None = None):
        """word: a graph's, in which the epoch before this one is counted."""
        targets = torch.tensor([r.words.data_ptr() + 8 * self.rank for r in everyone], device=self.device)
        slots, delta = self.words.view(-1).view(torch.int64), fused.as_int32(epoch)
        word, delta = (self.zero, delta) if word is None else (word, 1)
        return lambda: M.group_max(partials, slots, targets, self.done, word, delta, self.abort)

    @staticmethod
    def bits(value: float, epoch: int) -> torch.Tensor:
        """The word that says so."""
        as_bits = torch.tensor([value]).view(torch.int32).item()
        return torch.tensor([as_bits, fused.as_int32(epoch)], dtype=torch.int32)

    def slot(self, source: int, epoch: int) -> torch.Tensor:
        return self.words[epoch % M.SLOTS, source]


def make(ranks: int, epoch: int, device: str) -> list[Rank]:
    return [Rank(rank, ranks, epoch, device) for rank in range(ranks)]


VALUES = [(3.0, 0.5, 0.25, 0.0), (1e-42, 0.0, 2.0**-149, 1e-45), (1.0, INF, 3e38, 0.0), (0.0, 0.0, 0.0, 0.0)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("ranks, count", [(2, 1), (4, 132), (3, 1025)])
def test_interpreted_and_not_it_is_the_largest_of_all(ranks, count, values, epoch, path, monkeypatch):
    if path == "interpreted":
        monkeypatch.setattr(M, "group_max_ref", interpreted)
    device = device_of(path)
    everyone = make(ranks, epoch, device)
    for me in everyone:
        partials = torch.full((count,), values[me.rank], device=device) * torch.linspace(0, 1, count, device=device)
        partials = torch.nan_to_num(partials, nan=0.0, posinf=INF)
        partials[-1] = values[me.rank]
        for other in everyone:
            me.slot(other.rank, epoch).copy_(me.bits(values[other.rank], epoch))
            me.slot(other.rank, epoch + 1).copy_(me.bits(7e37, epoch - 1))  # of the epoch before
        got = me.call(everyone, partials, epoch)()
        if device == "cuda":
            fused.finish(me.abort)
        assert_bitwise_equal("maximum", got.cpu(), torch.tensor([max(values[:ranks])]))
        assert me.done.tolist() == [fused.as_int32(epoch), 0]
        if path != "cpu":
            for other in everyone:
                want = me.bits(values[me.rank], epoch)
                assert_bitwise_equal("sent", other.slot(me.rank, epoch).cpu(), want)


def interpreted(partials, slots, targets, done, word, delta, abort):
    out = torch.full((1,), float("nan"))
    arguments = (partials, slots, targets, done, word, abort, out, delta, partials.numel(), targets.numel(), 1)
    M.group_max_kernel[(1,)](*arguments)
    return out


def test_in_the_interpreter():
    run_interpreted(__file__)


@only_interpreted
def test_interpreted_graphs_count_epochs_on_the_device(monkeypatch):
    me, other = everyone = make(2, 2**31, "cpu")
    monkeypatch.setattr(M, "group_max_ref", interpreted)
    for epoch in range(2**31, 2**31 + 4):
        me.slot(1, epoch).copy_(me.bits(5.0, epoch))
        assert me.call(everyone, torch.ones(3), epoch, word=me.done)().item() == 5.0
        assert me.done.tolist() == [fused.as_int32(epoch), 0]
        assert_bitwise_equal("sent", other.slot(0, epoch), me.bits(1.0, epoch))


class Many(Rank):
    """As a Rank, of values one by one."""

    def __init__(self, rank: int, ranks: int, epoch: int, device: str) -> None:
        super().__init__(rank, ranks, epoch, device)
        before = fused.as_int32(epoch - 1)
        self.words = torch.full((M.SLOTS, ranks, M.MOST_VALUES, 2), before, dtype=torch.int32, device=device)

    def run(self, everyone: "list[Many]", values: torch.Tensor, epoch: int) -> torch.Tensor:
        at = [r.words.data_ptr() + 8 * M.MOST_VALUES * self.rank for r in everyone]
        targets, slots = torch.tensor(at, device=self.device), self.words.view(-1).view(torch.int64)
        M.group_maxima(values, slots, targets, self.done, self.zero, fused.as_int32(epoch), self.abort)
        return values


def interpreted_many(values, slots, targets, done, word, delta, abort):
    sizes = (values.numel(), targets.numel(), M.MOST_VALUES)
    grid = (-(-values.numel() // M.A_PROGRAM),)
    M.group_max_kernel[grid](values, slots, targets, done, word, abort, values, delta, *sizes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("count", [1, 12, 1000, 1024, M.MOST_VALUES])
def test_values_one_by_one(count, epoch, path, monkeypatch):
    if path == "interpreted":
        monkeypatch.setattr(M, "group_maxima_ref", interpreted_many)
    device = device_of(path)
    everyone = [Many(rank, 3, epoch, device) for rank in range(3)]
    values = torch.rand(3, count) * torch.tensor([[1.0], [2.0], [0.5]])
    values[1, 0] = INF
    for me in everyone:
        for other in everyone:
            sent = torch.stack((values[other.rank].view(torch.int32), torch.full((count,), fused.as_int32(epoch))), 1)
            me.words[epoch % M.SLOTS, other.rank, :count] = sent.int().to(device)
        got = me.run(everyone, values[me.rank].to(device), epoch)
        if device == "cuda":
            fused.finish(me.abort)
        assert_bitwise_equal("maxima", got.cpu(), values.amax(0))
        assert me.done.tolist() == [fused.as_int32(epoch), 0]


# A GPU


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_values_of_ranks_on_streams_of_one_gpu(ranks):
    """Hundreds of uses through two slots, past 2^31, of ever other numbers of values."""
    first, uses = 2**31 - 100, 300
    everyone = [Many(rank, ranks, first, "cuda") for rank in range(ranks)]
    values = torch.rand(uses, ranks, 4096, generator=torch.Generator().manual_seed(0)).cuda()
    own, counts = [torch.cuda.Stream() for _ in everyone], [1 + 1367 * i % 4096 for i in range(uses)]
    M.compiled_group_max(everyone[0].words.device, ranks, M.MOST_VALUES)
    want, got = values.amax(1), values.clone()
    torch.cuda.synchronize()
    for i in range(uses):
        for me in everyone:
            with torch.cuda.stream(own[me.rank]):
                torch.cuda._sleep(3000 * (me.rank * i % 5))
                me.run(everyone, got[i, me.rank, : counts[i]], first + i)
    for me in everyone:
        with torch.cuda.stream(own[me.rank]):
            fused.finish(me.abort)
    for i in range(uses):
        for rank in range(ranks):
            assert_bitwise_equal(f"use {i} of rank {rank}", got[i, rank, : counts[i]], want[i, : counts[i]])


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", EPOCHS)
def test_it_waits_for_every_rank(epoch):
    """Epochs come late, by a copy engine, to values that are there."""
    me, *others = everyone = make(4, epoch, "cuda")
    call = me.call(everyone, torch.tensor([1.0, 2.0], device="cuda"), epoch)
    M.compiled_group_max(me.words.device, 4, 1)
    late = Late()
    for other in others:
        me.slot(other.rank, epoch).copy_(me.bits(2.0 + other.rank, epoch - 1))
        late.copy(me.slot(other.rank, epoch)[1:], fused.as_int32(epoch))
    late.start()
    got = call()
    early = torch.cuda.Event()
    early.record()
    assert not early.query(), "it ended before the last word"
    fused.finish(me.abort)
    assert got.item() == 5.0


@pytest.mark.gpu
def test_abort_ends_the_wait():
    me, *_ = everyone = make(2, 1, "cuda")
    call = me.call(everyone, torch.ones(1, device="cuda"), 1)
    M.compiled_group_max(me.words.device, 2, 1)
    torch.cuda.synchronize()
    stop = Late().copy(me.abort, 1)
    call()
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    stop.start(0.0)
    assert fused.finished_within(fused.PATIENCE_S, ended)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 2], ids=["a stream a rank", "two streams a rank"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_on_streams_of_one_gpu(ranks, streams):
    """Hundreds of uses through two slots, past 2^31; on two streams in turn a rank's kernels follow each other too."""
    first, uses = 2**31 - 100, 300
    everyone = make(ranks, first, "cuda")
    values = torch.rand(uses, ranks, 132, generator=torch.Generator().manual_seed(0)).cuda()
    own = [[torch.cuda.Stream() for _ in range(streams)] for _ in everyone]
    M.compiled_group_max(everyone[0].words.device, ranks, 1)
    calls = [[me.call(everyone, values[i, me.rank], first + i) for me in everyone] for i in range(uses)]
    torch.cuda.synchronize()
    got = [[] for _ in everyone]
    for i in range(uses):
        for me, call in zip(everyone, calls[i], strict=True):
            with torch.cuda.stream(own[me.rank][i % streams]):
                torch.cuda._sleep(3000 * (me.rank * i % 5))
                got[me.rank].append(call())
    for me, mine in zip(everyone, own, strict=True):
        for stream in mine:
            with torch.cuda.stream(stream):
                fused.finish(me.abort)
    for me in everyone:
        assert_bitwise_equal(f"rank {me.rank}", torch.cat(got[me.rank]), values.amax((1, 2)))
