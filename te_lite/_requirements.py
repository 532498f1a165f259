"""What te_lite needs at run time, checked once at import. Each check raises one ImportError that says what
was found, what is needed and what to do.
"""

import importlib
import importlib.util
import re

MINIMUM_TORCH = (2, 11)


def check() -> None:
    """Raise ImportError unless torch, triton and te_lite's own extension can be used. Initialises no GPU."""
    needed = ".".join(map(str, MINIMUM_TORCH))
    rule = f"te_lite needs torch >= {needed}: pip install 'torch>={needed}'"
    if not _findable("torch"):
        raise ImportError(f"torch was not found; {rule}")
    found = importlib.import_module("torch").__version__
    version = re.match(r"(\d+)\.(\d+)", found)
    if version is None or tuple(map(int, version.groups())) < MINIMUM_TORCH:
        raise ImportError(f"torch is {found}; {rule}")
    # Found but not imported: this check costs nothing, whoever comes to import triton and when.
    if not _findable("triton"):
        raise ImportError(
            "triton was not found; te_lite needs triton >= 3.6, also on machines without a GPU: "
            "pip install 'triton>=3.6'"
        )
    try:
        importlib.import_module("te_lite._C")
    except ImportError as error:
        raise ImportError(
            f"te_lite._C cannot be loaded ({error}); te_lite needs its C++ extension built for this Python: "
            "run `pip install -e .` (or `make setup`) in the source folder"
        ) from None


def _findable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        # An import hook refuses it, or something without a spec stands in its place.
        return False
