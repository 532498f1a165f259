"""Lists in pages are those of the code."""

import ast
import re

from te_lite.ops.activation import Activation
from tests.docs.tutorials import ROOT
from tests.reference import ALL_ACTIVATIONS


def test_gated_activations_of_a_sharded_checkpoint() -> None:
    """A name that is missing there would mix the rows of gate and up in a checkpoint."""
    page = (ROOT / "docs" / "how-to" / "shard-with-fsdp.md").read_text()
    found = re.search(r"^GATED = (\(.*\))$", page, re.MULTILINE)
    assert found is not None
    gated = [name for name in ALL_ACTIVATIONS if Activation.of(name).glu]
    assert sorted(ast.literal_eval(found[1])) == sorted(gated)
