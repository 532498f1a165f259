"""What the pages say of names that the alias lacks is what happens."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_lite as te
from te_lite.compat.alias import finder, grouped, manager, tensors
from te_lite.compat.alias.names import MODULES
from te_lite.modules.base import TeLiteModule
from tests.docs.tutorials import ROOT

PAGE = (ROOT / "docs" / "reference" / "not-there.md").read_text()
ROWS = [tuple(map(str.strip, line.strip("|").split(" | "))) for line in PAGE.splitlines() if line.startswith("| ")]


def grouped_quantizers() -> Any:
    module = grouped.GroupedLinear(2, 32, 48, params_dtype=torch.bfloat16, device="cpu")
    with te.autocast(recipe="current"):
        module(torch.randn(32, 32, dtype=torch.bfloat16), [16, 16])
    return module.quantizers


def cast_master() -> Any:
    weight = te.MXFP8Quantizer(torch.float8_e4m3fn)(torch.randn(32, 32))
    return tensors.cast_master_weights_to_fp8([weight], [torch.randn(1024)], [0], None)  # type: ignore[arg-type]


def derived() -> Any:
    return type("Own", (TeLiteModule,), {})()  # TransformerEngineBaseModule


# Words of a row's first column -> what raises, and is named in its second.
RAISES: dict[tuple[str, ...], tuple[type[Exception], Callable[[], Any]]] = {
    ("FP8GlobalStateManager", "quantization_state"): (
        NotImplementedError,
        lambda: manager.FP8GlobalStateManager.quantization_state,
    ),
    ("FP8GlobalStateManager", "fp8_autocast_enter"): (
        NotImplementedError,
        lambda: manager.FP8GlobalStateManager.fp8_autocast_enter,
    ),
    ("quantizers", "GroupedLinear"): (NotImplementedError, grouped_quantizers),
    ("cast_master_weights_to_fp8", "that and", "MXFP8"): (NotImplementedError, cast_master),
    ("TransformerEngineBaseModule",): (NotImplementedError, derived),
}


def row(*words: str) -> tuple[str, ...]:
    found = [one for one in ROWS if all(word in one[0] for word in words)]
    assert len(found) == 1, f"{words}: {len(found)} rows of docs/reference/not-there.md"
    return found[0]


@pytest.mark.parametrize("words", RAISES, ids=" ".join)
def test_rows_name_what_is_raised(words: tuple[str, ...]) -> None:
    error, call = RAISES[words]
    assert error.__name__ in row(*words)[1]
    with pytest.raises(error):
        call()


def test_modules_and_names_have_rows_of_their_own() -> None:
    """A module that is not there is not found; the name of anything else raises NotImplementedError."""
    modules, names = row("modules of `transformer_engine`"), row("names of `transformer_engine`")
    quoted = [name for name in re.findall(r"`([\w.]+)`", modules[0]) if name != "transformer_engine"]
    assert quoted and not any(name in MODULES for name in quoted) and modules[1] == "ModuleNotFoundError"
    assert all(finder.AliasFinder().find_spec(name) is None for name in quoted)
    assert "NotImplementedError" in names[1] and "cpu_offload" not in names[0]


def test_parts_of_blocks() -> None:
    """Rows that begin inside of a block of 128x128 are plain, and named; those of other formats stay quantized."""
    assert "rows of 128x128 blocks that begin inside of one" in row("writing to a part")[0]
    square = te.Float8BlockQuantizer(torch.float8_e4m3fn)(torch.randn(256, 128))
    tall = te.Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1)(torch.randn(256, 128))
    assert type(square[64:192]) is torch.Tensor
    assert all(isinstance(part, te.QuantizedTensor) for part in (square[128:], tall[64:192]))
