"""In how many pieces a reduce-scatter's partials travel; what rings do with them is for tests/distributed."""

import pytest

from te_lite.overlap import ring


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
