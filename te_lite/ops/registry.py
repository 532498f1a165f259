"""Registration of operators under `te_lite::`.

An op is declared by its schema and three implementations of the same positional signature: the oracle
(CPU tensors), the launcher of the Triton kernel (CUDA tensors) and the fake (shapes and dtypes only).
`Library.define` and `impl` are used instead of `torch.library.custom_op`: a dispatch costs 1.9 us against
6.6 to 11.8 us, and arguments that are views of one another are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "te_lite"

# FRAGMENT, not DEF: a quantizer that lives in another package may add ops to the same namespace.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Define `te_lite::<schema>` and return the overload to call, `torch.ops.te_lite.<name>.default`.

    schema: "name(Tensor x, Tensor(a!)? out, ...) -> ...", without the namespace.
    cpu, cuda: implementations for tensors of that device; same positional arguments as the schema.
    fake: the same for tensors without data (torch.compile, FakeTensor, meta).
    """
    name, paren, _ = schema.partition("(")
    if not paren or not name.isidentifier():
        raise ValueError(
            f"schema {schema!r}: an op is declared as 'name(arguments) -> returns' with an identifier as "
            f"its name and no namespace; write for example 'amax(Tensor x) -> Tensor'"
        )
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
