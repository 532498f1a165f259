"""Arguments that callers get wrong in the same way everywhere: names, True or False, devices."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch

# "what name" in lower case -> what to write instead, for names that resemble none of ours; compat/names.py fills it.
INSTEAD: dict[str, str] = {}


def remedy(what: str, name: object, known: Iterable[str], otherwise: str = "choose one") -> str:
    """What to write instead of `name`, which is none of `known`. otherwise: where nothing is near."""
    lower = {one.lower(): one for one in known}
    near = ", ".join(lower[one] for one in get_close_matches(str(name).lower(), lower, n=2))
    return INSTEAD.get(f"{what} {name}".lower()) or (f"nearest: {near}" if near else otherwise)


def flag(owner: str, name: str, value: object) -> bool:
    """`value`, which must be True, False (also numpy's) or None, which is False. TypeError for all else: 1, "no" ..."""
    if not (value is True or value is False or value is None or type(value).__name__ in ("bool", "bool_")):
        raise TypeError(f"{owner}({name}={reprlib.repr(value)}): must be True or False; pass other arguments by name")
    return bool(value)


def checked_device(device: Any) -> torch.device:
    """The device of that name, None: the GPU, or the CPU where there is none. ValueError for one that is not there."""
    there = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    try:
        made = torch.device(("cuda" if there else "cpu") if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: is no device; pass 'cpu', 'meta', 'cuda' or 'cuda:0'") from error
    if made.type == "cuda" and (made.index or 0) >= there:
        raise ValueError(f"device={str(device)!r}: torch counts {there} CUDA devices; pass 'cpu', or one that is there")
    return made
