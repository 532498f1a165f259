"""How many bytes a forward pass keeps for its backward pass.

Counted is every storage that a node of the autograd graph holds: saved tensors and, for nodes written in
Python, whatever their attributes reach. Each storage counts once and in full (a view of an arena keeps the
arena). A parameter counts where a node saved it as data; that its gradient will be accumulated does not
count, because the parameter lives anyway; so do delayed scaling's pools.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_lite.quantize.delayed import Pools

_DEPTH = 8  # attributes of attributes: plan -> kept -> QTensor -> data is 4


def graph_nodes(*outputs: Tensor) -> Iterator[Any]:
    """Every node of the autograd graph below `outputs`, each once."""
    todo: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[int] = set()
    alive = []  # ids are compared: keep what they belong to
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        alive.append(node)
        yield node
        todo.extend(parent for parent, _ in node.next_functions)


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if depth == 0 or id(value) in seen:
        return
    if isinstance(value, torch.nn.Parameter):
        return  # a reference for the gradient's sink
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (str, bytes, int, float, type(None), type, torch.nn.Module, torch.dtype, Pools)):
        return
    seen.add(id(value))
    children: Any = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        names = list(getattr(value, "__dict__", ()))
        for cls in type(value).__mro__:
            slots = getattr(cls, "__slots__", ())
            names.extend([slots] if isinstance(slots, str) else slots)
        children = [getattr(value, n, None) for n in names]
    for child in children:
        yield from _tensors_in(child, depth - 1, seen)


def _saved_by(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if name.startswith("_saved_"):
            saved = getattr(node, name)
            yield from (t for t in (saved if isinstance(saved, (tuple, list)) else [saved]) if isinstance(t, Tensor))
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        yield from (t for t in node.saved_tensors if t is not None)
        yield from _tensors_in(dict(node.__dict__), _DEPTH, set())


def kept_tensors(*outputs: Tensor) -> list[Tensor]:
    """The tensors kept for the backward of `outputs`, one for each distinct storage."""
    by_storage: dict[int, Tensor] = {}
    for node in graph_nodes(*outputs):
        for tensor in _saved_by(node):
            if tensor.numel():
                by_storage.setdefault(tensor.untyped_storage()._cdata, tensor)
    return list(by_storage.values())


def bytes_kept(*outputs: Tensor) -> int:
    """Bytes of the storages kept for the backward of `outputs`."""
    return sum(t.untyped_storage().nbytes() for t in kept_tensors(*outputs))
