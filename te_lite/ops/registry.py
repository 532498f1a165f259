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
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

NAMESPACE = "te_lite"

# FRAGMENT, not DEF: a quantizer that lives in another package may add ops to the same namespace.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


_modes = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled


def unwatched() -> bool:
    """True in plain eager execution: no compiler, dispatch mode or profiler looks at the ops that run."""
    return not (torch.compiler.is_compiling() or _modes() or _profiling())


def capturing() -> bool:
    """Whether what the current stream is given now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()


def makes_data(device: torch.device) -> bool:
    """Whether a tensor made now on `device` has data: it is not meta, and no FakeTensorMode is open."""
    return device.type != "meta" and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


_OPS: dict[torch._ops.OpOverload, Op] = {}
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # others may have no data: fake, functional


class Op:
    """A registered op. Calling it goes straight to the implementation when nobody is watching.

    Anything that watches or rewrites ops (torch.compile, fake tensors, dispatch modes such as selective
    checkpointing, the profiler) sees `overload`, through torch's dispatcher; that costs 20 to 35 us of host time with
    the many arguments of a fused kernel, which plain eager execution need not pay.
    """

    __slots__ = ("cpu", "cuda", "index", "overload")

    def __init__(self, overload: torch._ops.OpOverload, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
        self.overload, self.cpu, self.cuda = overload, cpu, cuda
        names = [argument.type for argument in overload._schema.arguments]
        self.index = next(i for i, kind in enumerate(names) if isinstance(kind, torch.TensorType))

    def __call__(self, *args: Any) -> Any:
        tensor = args[self.index]
        if type(tensor) in PLAIN and not (torch.compiler.is_compiling() or _modes() or _profiling()):
            if tensor.is_cuda:
                return self.cuda(*args)
            if tensor.is_cpu and not torch.is_grad_enabled():  # an oracle is torch ops, which autograd would record
                return self.cpu(*args)
        return self.overload(*args)


def returns_nothing(*args: Any) -> None:
    """The fake of an op that only writes to its arguments."""


def register(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any] = returns_nothing
) -> Op:
    """Define `te_lite::<schema>` and return what to call; the overload is `torch.ops.te_lite.<name>.default`.

    schema: "name(Tensor x, Tensor(a!)? out, ...) -> ...", without the namespace.
    cpu, cuda: implementations for tensors of that device; same positional arguments as the schema.
    fake: the same for tensors without data (torch.compile, FakeTensor, meta); left out where nothing is returned.
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
    op = Op(getattr(getattr(torch.ops, NAMESPACE), name).default, cpu, cuda)
    _OPS[op.overload] = op
    return op


def implementation(overload: torch._ops.OpOverload) -> Op | None:
    """The op of te_lite that a dispatch mode sees as `overload`."""
    return _OPS.get(overload)
