"""`python -m te_lite.compat script.py ...`: runs a script with te_lite under Transformer Engine's name.

    python -m te_lite.compat train.py --lr 1e-3
    python -m te_lite.compat -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py ...

The Python processes that the script starts have the alias too: they inherit PYTHONPATH, on which a folder with a
sitecustomize.py comes first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from te_lite.compat.alias.finder import refuse_real

SITE = Path(__file__).parent / "alias" / "site"


def main(argv: list[str]) -> None:
    """Becomes `python *argv` with the alias in place; does not return."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    try:
        refuse_real()
    except ImportError as error:
        sys.exit(f"te_lite.compat: {error}")
    paths = [str(SITE), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    os.execve(sys.executable, [sys.executable, *argv], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
