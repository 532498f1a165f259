"""The protocol of userbuffers on ranks that are threads: what arrives, in which order it is added, what is awaited."""

import ctypes
import time

import pytest
import torch

from te_lite.functional.saved import flatten, unflatten
from te_lite.ops.reduce import reduce_slots
from te_lite.ops.transpose import transpose
from te_lite.overlap.arena import ALIGNMENT, Arena, aligned
from te_lite.overlap.buffers import SLOTS, Gather, Scatter
from te_lite.overlap.programs import following, gathered_bytes, part_offsets
from te_lite.quantize.identity import HIGH_PRECISION
from te_lite.quantize.mxfp8 import MXFormat
from te_lite.quantize.per_tensor import FORMATS, PerShardFormat
from te_lite.quantize.qtensor import QTensor
from te_lite.testing.numerics import assert_bitwise_equal
from tests.overlap.threads import LIMIT_S, in_group, on_threads, plain, poison


def shard(rank: int, use: int, m: int = 5, k: int = 32) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1000 * use + rank)
    return torch.randn(m, k, generator=gen).bfloat16()


def gathered(size: int, use: int, **sizes: int) -> torch.Tensor:
    return torch.cat([shard(rank, use, **sizes) for rank in range(size)])


def summed(size: int, rank: int, use: int) -> torch.Tensor:
    """Rank's rows of the sum over all: rank + 1, rank + 2, ..., its own last and unrounded, in fp32, rounded once."""
    total = torch.zeros(6, 32)
    for peer in following(rank, size):
        total += partial(peer, rank, use).bfloat16().float()
    return (total + partial(rank, rank, use)).bfloat16()


def partial(source: int, destination: int, use: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(10000 * use + 100 * source + destination)
    return torch.randn(6, 32, generator=gen) * 2.0 ** (4 * source)  # another order would round elsewhere


def scatter(group, use: int) -> torch.Tensor:
    """Each partial whole, or in one or two pieces, or all at once."""
    cuts = (2, 1, 2)[: group.size - 1] if use % 2 else ()
    exchange = Scatter(group, (6, 32), torch.bfloat16, cuts)
    exchange.expect()  # which does nothing on CPU ranks
    if use % 3 == 0:
        exchange.push_all(torch.cat([partial(group.rank, peer, use).bfloat16() for peer in range(group.size)]))
        own = partial(group.rank, group.rank, use)
        return exchange.reduce(own, take=lambda slots, own, rank: reduce_slots(slots, own, None, rank, slots.dtype))
    for peer, cut in zip(following(group.rank, group.size), exchange.cuts, strict=True):
        for i, piece in enumerate(partial(group.rank, peer, use).bfloat16().chunk(cut)):
            exchange.push(piece.contiguous(), peer, i)
    return exchange.reduce(partial(group.rank, group.rank, use))


def test_addresses():
    assert [aligned(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
    assert following(2, 4) == [3, 0, 1]
    assert part_offsets([100, 3, 0, 8], 4) == [0, 512, 768, 768]
    assert gathered_bytes([100, 3, 0, 8], 4) == 1024


@pytest.mark.parametrize("first_epoch", [1, 2**31 - 2, 2**32 - 3, 2**32 - 1])
@pytest.mark.parametrize("size", [2, 4])
def test_many_uses_of_few_slots_whatever_the_epoch(size, first_epoch):
    """Gathers and scatters in turn, delays of their own on each rank, epochs that pass 2^31 and wrap around."""

    def run(group):
        group.executor.set_delays(group.rank + 1, 2000)
        for use in range(12):
            m = (5, 1, 16)[use % 3]
            gather = Gather(group, plain(shard(group.rank, use, m=m)), "row", own=True)
            if use % 2:
                for source in following(group.rank, size):
                    assert_bitwise_equal(f"use {use}", gather.shard(source).row, shard(source, use, m=m))
            assert_bitwise_equal(f"use {use}", gather.whole().row, gathered(size, use, m=m))
            gather.close()
            assert_bitwise_equal(f"sum {use}", scatter(group, use), summed(size, group.rank, use))

    in_group(size, run, first_epoch=first_epoch)


def stored(group, use: int, blocks: int) -> torch.Tensor:
    """As a kernel of the caller's does it: partials and flags, block by block, written where `targets` says."""
    exchange = Scatter(group, (6, 32), torch.bfloat16, blocks=blocks)
    to, arrived = exchange.targets
    _, room = exchange.buffer.flags(exchange.slot)
    for peer in following(group.rank, group.size):
        end = time.monotonic() + LIMIT_S
        while (exchange.epoch - 1 - int(room[peer])) & 0xFFFFFFFF not in (
            0,
            0xFFFFFFFF,
        ):  # cyclically, at most one ahead
            assert time.monotonic() < end
            time.sleep(0.001)
    for block in range(blocks):
        for peer in following(group.rank, group.size):
            rows = partial(group.rank, peer, use).bfloat16().chunk(blocks)[block].contiguous()
            ctypes.memmove(to[peer] + block * rows.nbytes, rows.data_ptr(), rows.nbytes)
            ctypes.c_uint32.from_address(arrived[peer] + 4 * block).value = exchange.epoch
    return exchange.reduce(partial(group.rank, group.rank, use))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_partials_that_a_kernel_stores(blocks):
    def run(group):
        for use in range(2 * SLOTS + 1):
            assert_bitwise_equal(f"sum {use}", stored(group, use, blocks), summed(group.size, group.rank, use))

    in_group(4, run, first_epoch=2**32 - 2)


def test_the_order_of_the_sum_shows():
    """The expected sums would differ in another order, so that their equality says something."""
    want = summed(4, 0, 0)
    other = sum(partial(peer, 0, 0).bfloat16().float() for peer in (3, 2, 1)).add(partial(0, 0, 0)).bfloat16()
    early = sum(partial(peer, 0, 0).bfloat16() for peer in (1, 2, 3)).add(partial(0, 0, 0).bfloat16())
    assert not torch.equal(want, early)
    assert torch.allclose(want.float(), other.float(), rtol=0.01, atol=0.5)


def test_two_gathers_at_once_and_poison_between_uses():
    """As many uses are in flight as there are slots; what lay in a slot before is never seen."""

    def run(group):
        for use in range(0, 6, SLOTS):
            poison(group)
            group.exchange.all(None)
            gathers = [Gather(group, plain(shard(group.rank, use + i)), "row", own=True) for i in range(SLOTS)]
            for i, gather in enumerate(gathers):
                assert_bitwise_equal(f"use {use + i}", gather.whole().row, gathered(group.size, use + i))
            for gather in gathers:
                gather.close()
            group.exchange.all(None)  # nothing is under way when the next poison comes

    in_group(4, run)


def test_scales_travel_with_odd_sizes():
    """Parts of several types, vectors that end anywhere: every part arrives where its reader looks for it."""
    m, k = 3, 96  # 9 bytes of scales a rank

    def tensors(rank):
        gen = torch.Generator().manual_seed(rank)
        return (torch.randint(0, 255, shape, generator=gen, dtype=torch.uint8) for shape in ((m, k), (m, k // 32)))

    def operand(rank):
        data, scale = tensors(rank)
        return QTensor(MXFormat(), (m, k), torch.bfloat16, data.view(torch.float8_e4m3fn), scale)

    def run(group):
        q = operand(group.rank)
        gather = Gather(group, q, "row", own=True)
        whole = [part.clone() for part in gather.whole().wire("row")]
        parts = [torch.cat(rank_parts) for rank_parts in zip(*(operand(r).wire("row") for r in range(3)), strict=True)]
        for got, want in zip(whole, parts, strict=True):
            assert_bitwise_equal("whole", got, want)
        for peer in following(group.rank, 3):
            for got, want in zip(gather.shard(peer).wire("row"), operand(peer).wire("row"), strict=True):
                assert_bitwise_equal(f"shard {peer}", got, want)
        gather.close()

    in_group(3, run)


@pytest.mark.parametrize("size, m, k", [(2, 16, 32), (3, 32, 5), (4, 16, 33)])
def test_columns_are_put_side_by_side(size, m, k, monkeypatch):
    """The gathered col layout is the transposed one of the gathered rows, without rows to transpose."""
    monkeypatch.setattr("te_lite.quantize.per_tensor.LEAST_COLUMNS", 16)

    def bytes_of(rank, use):
        gen = torch.Generator().manual_seed(10 * use + rank)
        return torch.randint(0, 120, (m, k), generator=gen, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def run(group):
        group.executor.set_delays(group.rank + 1, 500)
        scale = torch.tensor([0.5])
        for use in range(2 * SLOTS + 1):
            q = QTensor(FORMATS[torch.float8_e4m3fn], (m, k), torch.bfloat16, bytes_of(group.rank, use), scale)
            gather = Gather(group, q, q.wgrad_layout, own=True)
            whole = gather.whole()
            want = transpose(torch.cat([bytes_of(rank, use) for rank in range(size)]))
            assert whole.row is None and whole.borrowed and whole.shape == (size * m, k)
            assert_bitwise_equal(f"use {use}", whole.col, want)
            assert_bitwise_equal("scale", whole.col_scale, scale)
            for source in range(size):
                (part,) = gather.parts(source)
                assert_bitwise_equal(f"from {source}", part, want.chunk(size, 1)[source])
            gather.close()

    in_group(size, run, tokens=size * m)


def test_which_layout_is_gathered_for_wgrad():
    """Columns lie side by side only where one scale serves all ranks, shards need no padding and are not small."""
    e5m2, per_shard = FORMATS[torch.float8_e5m2], PerShardFormat(shard_multiple=16)
    cases = [
        (e5m2, 256, "col"),
        (e5m2, 264, "row"),
        (e5m2, 240, "row"),
        (per_shard, 256, "row"),
        (MXFormat(), 32, "col"),
    ]
    for format, m, layout in [*cases, (HIGH_PRECISION, 32, "row")]:
        assert QTensor(format, (m, 32), torch.bfloat16).wgrad_layout == layout
        assert format.gathers_columns(m) == (format is e5m2 and m == 256)


def test_what_is_kept_for_backward_may_not_lie_in_the_arena():
    """A borrowed tensor is refused, one made from it too; keep() gives a copy that outlives the slot."""

    def run(group):
        gather = Gather(group, plain(shard(group.rank, 0)), "row", own=True)
        borrowed = gather.whole()
        peer = gather.shard(1 - group.rank)
        for q in (borrowed, peer, borrowed.only("row"), borrowed.rows(0, 2)):
            assert q.borrowed
            with pytest.raises(RuntimeError, match="borrowed tensor .* userbuffer"):
                flatten([q])
            with pytest.raises(RuntimeError, match="borrowed"):
                flatten([plain(shard(0, 0)), None, q])
        numbers = borrowed.dequantize()
        copy = borrowed.keep()
        kept, specs = flatten([copy])
        gather.close()
        group.exchange.all(None)
        poison(group)
        assert bool(borrowed.row.isnan().all())  # it was a view of the arena
        assert_bitwise_equal("dequantized", numbers, gathered(2, 0))
        (loaded,), _ = unflatten(specs, kept)
        assert_bitwise_equal("kept", loaded.row, gathered(2, 0))
        group.exchange.all(None)

    in_group(2, run)


def test_capacity_decides_and_says_what_to_do():
    def run(group):
        fits, too_much = plain(shard(0, 0, m=32)), plain(shard(0, 0, m=320))
        assert group.gather_refusal(fits, "row") == group.scatter_refusal(32, 32, torch.bfloat16) == ""
        for refusal in (group.gather_refusal(too_much, "row"), group.scatter_refusal(320, 32, torch.bfloat16)):
            assert "initialize_ub was given the shape [64, 32]" in refusal and "bytes are more than" in refusal

    in_group(2, run)


def test_the_shape_that_was_asked_for_fits():
    """[tokens, hidden] in the widest type, gathered with scales of its own or scattered."""
    for tokens, hidden, size in ((64, 32, 2), (2, 32, 2), (4096, 96, 4), (1000, 64, 2)):
        m = tokens // size

        def run(group, m=m, hidden=hidden):
            assert not group.gather_refusal(plain(torch.zeros(m, hidden, dtype=torch.bfloat16)), "row")
            q = QTensor(
                MXFormat(),
                (m, hidden),
                torch.bfloat16,
                torch.zeros(m, hidden, dtype=torch.float8_e4m3fn),
                torch.zeros(m, hidden // 32, dtype=torch.uint8),
            )
            assert not group.gather_refusal(q, "row")
            assert not group.scatter_refusal(m, hidden, torch.bfloat16)

        in_group(size, run, tokens=tokens, hidden=hidden)


PLACES = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]


def test_arena_slots_do_not_overlap():
    def run(rank, exchange):
        memory = Arena(rank, exchange.size, torch.device("cpu"))
        memory.reserve("a", 100, 2)
        memory.reserve("b", ALIGNMENT, 3)
        memory.commit(exchange)
        for value, (name, slot) in enumerate(PLACES):
            view = memory.view(name, slot)
            assert view.dtype == torch.uint8 and view.shape == (ALIGNMENT,)
            assert view.fill_(16 * rank + value).data_ptr() == memory.address(name, slot, rank)
        exchange.all(None)
        for peer in range(exchange.size):
            for value, (name, slot) in enumerate(PLACES):
                found = ctypes.string_at(memory.address(name, slot, peer), ALIGNMENT)
                assert found == bytes([16 * peer + value]) * ALIGNMENT
        exchange.all(None)

    on_threads(3, run)
