"""Ranks of the overlap checks, started by torchrun: prints a line for each check; exit status 1 if one fails."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TE_LITE_AUTO"] = "rule"  # what is fastest would differ from run to run

from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.distributed.overlap_auto import AUTO  # noqa: E402
from tests.distributed.overlap_gradients import GRADIENTS  # noqa: E402
from tests.distributed.overlap_groups import EIGHT, GROUPS  # noqa: E402
from tests.distributed.overlap_narrow import NARROW  # noqa: E402
from tests.distributed.overlap_own import OWN  # noqa: E402
from tests.distributed.overlap_sizes import SIZES  # noqa: E402
from tests.distributed.suites import run_checks  # noqa: E402

SUITES = {"sizes": SIZES, "gradients": GRADIENTS, "groups": GROUPS, "eight": EIGHT, "narrow": NARROW}
SUITES["auto"] = AUTO + OWN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="one check's name")
    args = parser.parse_args()
    _, _, device = init_ranks(args.device)
    suite = {check.__name__: partial(check, device) for check in SUITES[args.suite]}
    run_checks({name: check for name, check in suite.items() if args.only in (None, name)})
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
