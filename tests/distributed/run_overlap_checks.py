"""Ranks of the overlap checks, started by torchrun: prints a line for each check; exit status 1 if one fails."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TE_LITE_AUTO"] = "rule"  # what is fastest would differ from run to run

import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.distributed.overlap_auto import AUTO  # noqa: E402
from tests.distributed.overlap_gradients import GRADIENTS  # noqa: E402
from tests.distributed.overlap_groups import EIGHT, GROUPS  # noqa: E402
from tests.distributed.overlap_narrow import NARROW  # noqa: E402
from tests.distributed.overlap_own import OWN  # noqa: E402
from tests.distributed.overlap_sizes import SIZES  # noqa: E402

SUITES = {"sizes": SIZES, "gradients": GRADIENTS, "groups": GROUPS, "eight": EIGHT, "narrow": NARROW}
SUITES["auto"] = AUTO + OWN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="one check's name")
    args = parser.parse_args()
    rank, _, device = init_ranks(args.device)
    for check in SUITES[args.suite]:
        if args.only not in (None, check.__name__):
            continue
        started = time.monotonic()
        try:
            check(device)
        except BaseException:
            print(f"{check.__name__}: FAIL", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # at once, so that no rank waits for this one
        te.destroy_ub()
        dist.barrier()
        if rank == 0:
            print(f"{check.__name__}: ok, {time.monotonic() - started:.1f} s", flush=True)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
