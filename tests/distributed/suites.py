"""How ranks run one check after the other."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping

import torch.distributed as dist

import te_lite as te
from te_lite.overlap import userbuffers
from tests.distributed.overlapping import settle


def run_checks(checks: Mapping[str, Callable[[], object]]) -> None:
    """Each in turn, with a line from rank 0; no userbuffers are left to the next. A failure ends the process at once,
    so that no rank waits for this one."""
    for name, check in checks.items():
        started = time.monotonic()
        try:
            check()
        except BaseException:
            print(f"{name}: FAIL", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        te.destroy_ub()
        assert not userbuffers.groups()
        settle()
        if dist.get_rank() == 0:
            print(f"{name}: ok, {time.monotonic() - started:.1f} s", flush=True)
