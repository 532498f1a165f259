"""Megatron-core's GPT, its files unmodified, over te_lite under Transformer Engine's name, on CPU ranks."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from te_lite.testing.distributed import launch

SCRIPT = Path(__file__).parent / "ranks_megatron.py"
RANKS = {"one": 1, "tp": 2, "pp": 2, "dp": 2}


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install -e .[test])")
@pytest.mark.parametrize("world", RANKS)
def test_gpt(world: str) -> None:
    """The cases of ranks_megatron.py: recipes, recomputation, overlap, fp8 parameters, optimizers."""
    out = launch(SCRIPT, world, ranks=RANKS[world], timeout=300)
    assert out.count("ok Case(") >= 5, out
