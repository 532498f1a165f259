"""In how many pieces a reduce-scatter's partials travel; what rings do with them is for tests/distributed."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from te_lite.ops.gemm_fused import ROWS
from te_lite.ops.gemm_scatter import blocks
from te_lite.overlap import ring
from te_lite.overlap.fused import Fused
from te_lite.overlap.group import Group
from te_lite.overlap.ring import Ring


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_pieces_of_partials(size):
    """Of whole tiles, for each other rank, the last in as many as any; whole where half would not fill a GPU."""
    for m, n, row_bytes in itertools.product((512, 2000, 2048, 4096), (4096, 8192), (2048, 4096, 14336)):
        cuts = ring.cuts(size, m, n, row_bytes)
        assert len(cuts) == size - 1 and max(cuts) == cuts[-1]
        assert all(cut == 1 or (m % (128 * cut) == 0 and m * n // cut >= ring.PIECE_ELEMENTS) for cut in cuts)


def operands(m: int, n: int, k: int, ranks: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """What cuts_of and counts look at of a GEMM [ranks * m, k] x [n, k]."""
    a = SimpleNamespace(shape=(ranks * m, k), row=torch.empty(ranks * m, k, device="meta"))
    return SimpleNamespace(columns=n), a


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("m", [128, 256, 384, 512, 520, 1024, 2048, 3072, 3584])
def test_numbers_of_pieces_that_auto_tries(m, ranks):
    """Those that divide the rows into whole tiles, and not what the rule takes anyway."""
    exchange = SimpleNamespace(tp=SimpleNamespace(size=ranks))
    for n in (64, 8192):
        gemm, a = operands(m, n, 8192, ranks)
        rings, fused = Ring.counts(exchange, gemm, a), Fused.counts(exchange, gemm, a)
        assert all(m % (128 * count) == 0 and (count,) * (ranks - 1) != ring.cuts_of(gemm, a, ranks) for count in rings)
        assert all(-(-m // ROWS) % count == 0 and count != blocks(m) for count in fused)
        assert m != 2048 or (rings and fused)


def test_gemms_take_turns_on_two_streams(monkeypatch):
    """What the second stream begins comes after what was issued before; what comes after waits for both streams."""
    log, current = [], ["main"]

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class stream:  # which may be entered any number of times, as torch's may
        def __init__(self, which):
            self.which = which

        def __enter__(self):
            self.before, current[0] = current[0], self.which.name

        def __exit__(self, *_):
            current[0] = self.before

    main, beside = Stream("main"), Stream("beside")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    group = Group.__new__(Group)
    group.side_stream, group.device, group.rank, group.size, group.others = beside, None, 1, 4, (2, 3, 0)
    format = SimpleNamespace(wire=lambda *_: (), from_wire=lambda *_: "own")
    shard = SimpleNamespace(shape=(2, 16), row=torch.zeros(2, 16), format=format)
    b = SimpleNamespace(operand=lambda layout: log.append(f"operand on {current[0]}"))
    gathering = SimpleNamespace(q=shard, shard=lambda source: f"shard {source}")

    class Gemm:
        columns, dtype, layout, bias = 3, torch.float32, "col", None

        def product(self, a, bias, dtype, out):
            log.append(f"{a} on {current[0]}")
            out.fill_(float(a.split()[-1]) if " " in a else 1.0)

        def finish(self, product):
            log.append("finished")
            return product

    gemm = Gemm()
    gemm.b = b
    out = Ring.all_gather_gemm(SimpleNamespace(group=group), gemm, gathering)
    assert out.view(4, -1)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    gemms = ["own on main", "shard 2 on beside", "shard 3 on main", "shard 0 on beside"]
    assert log == ["operand on main", "beside waits for main", *gemms, "main waits for beside", "finished"]
