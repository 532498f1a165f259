"""The public verbs on 2 and 4 ranks against plain torch, te.Linear and their own promises; many cases a launch."""

from pathlib import Path

import pytest

from te_lite.testing.distributed import launch, rank_device_params
from tests.distributed.verbs_checks import CHECKS
from tests.distributed.verbs_hostile import HOSTILE

SCRIPT = Path(__file__).with_name("run_verbs.py")


def check(ranks, device):
    lines = launch(SCRIPT, "--device", device, ranks=ranks, timeout=120).splitlines()
    names = ["exact", *["recipes"] * (device == "cpu"), "symmetric", *(check.__name__ for check in (*CHECKS, *HOSTILE))]
    assert [line.split(":")[0] for line in lines] == names


@pytest.mark.parametrize("device", rank_device_params(2))
def test_two_ranks(device):
    check(2, device)


@pytest.mark.parametrize("device", rank_device_params(4))
def test_four_ranks(device):
    check(4, device)


def test_a_sum_that_is_rounded_once_too_often_is_found(tmp_path):
    """The gradient of several weights, added up in bf16."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys, torch\n"
        "from te_lite.functional import verbs\n"
        "from tests.distributed import run_verbs\n"
        "def product(self, a, *rest):\n"
        "    return sum(gemm.product(q) for gemm, q in self.terms)\n"
        "verbs.Sum.product = product\n"
        "sys.exit(run_verbs.main())\n"
    )
    with pytest.raises(AssertionError, match=r"repeat it: --only exact --seed \d+ --iterations 1"):
        launch(script, "--only", "exact", ranks=2, timeout=60)


def test_userbuffers_of_another_world_are_refused():
    launch(Path(__file__).with_name("run_new_world.py"), ranks=2, timeout=60)
