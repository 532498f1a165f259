"""In how many pieces a reduce-scatter's partials travel; what rings do with them is for tests/distributed."""

from types import SimpleNamespace

import pytest
import torch

from te_lite.overlap import ring
from te_lite.overlap.fused import Fused
from te_lite.overlap.group import Group
from te_lite.overlap.ring import Ring


@pytest.mark.parametrize(
    ("size", "m", "n", "row_bytes", "wanted"),
    [
        (4, 2048, 8192, 4096, (2, 2, 2)),  # proj 70b in bf16: copies and GEMMs take about as long
        (4, 2048, 8192, 2048, (2, 1, 2)),  # in fp8: copies take longer
        (4, 2048, 8192, 14336, (1, 1, 2)),  # fc2 70b: GEMMs do
        (4, 512, 4096, 7168, (1, 1, 1)),  # half a partial would not fill a GPU
        (4, 2000, 8192, 4096, (1, 1, 1)),  # halves that are no whole tiles
        (2, 4096, 8192, 14336, (2,)),
        (3, 4096, 8192, 14336, (1, 2)),
        (8, 1024, 8192, 2048, (2, 1, 1, 1, 1, 1, 2)),
    ],
)
def test_pieces_of_partials(size, m, n, row_bytes, wanted):
    assert ring.cuts(size, m, n, row_bytes) == wanted


def operands(m: int, n: int, k: int, ranks: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """What cuts_of and counts look at of a GEMM [ranks * m, k] x [n, k]."""
    a = SimpleNamespace(shape=(ranks * m, k), row=torch.empty(ranks * m, k, device="meta"))
    return SimpleNamespace(columns=n), a


@pytest.mark.parametrize(
    ("m", "n", "ranks", "rings", "blocks"),
    [
        (128, 64, 2, (), ()),
        (256, 64, 2, (2,), ()),
        (384, 64, 4, (), ()),
        (512, 64, 2, (2, 4), ()),
        (520, 64, 2, (), ()),
        (1024, 64, 4, (2, 4), (2,)),
        (2048, 64, 4, (2, 4), (4, 2)),
        (2048, 8192, 2, (1, 4), (4, 2)),  # by rule in two
        (2048, 8192, 4, (1, 2, 4), (4, 2)),  # by rule in one or two
        (3072, 64, 2, (2, 4), (4, 2)),
        (3584, 64, 2, (2, 4), (2,)),
    ],
)
def test_numbers_of_pieces_that_auto_tries(m, n, ranks, rings, blocks):
    """Those that divide the rows, and not what the rule takes anyway."""
    gemm, a = operands(m, n, 8192, ranks)
    exchange = SimpleNamespace(tp=SimpleNamespace(size=ranks))
    assert Ring.counts(exchange, gemm, a) == rings and Fused.counts(exchange, gemm, a) == blocks
    assert all((count,) * (ranks - 1) != ring.cuts_of(gemm, a, ranks) for count in rings)


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
    group.beside, group.device, group.rank, group.size, group.others = beside, None, 1, 4, (2, 3, 0)
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
