"""FP8GlobalStateManager: what frameworks ask about the open autocast, and how they open, keep and restore one."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.autocast import OPEN, Context, Open, current, model_init
from te_lite.compat import contexts
from te_lite.compat.alias import graph, recipes, support
from te_lite.compat.alias.contexts import autocast
from te_lite.compat.alias.names import NotThere
from te_lite.ops.registry import capturing
from te_lite.recipe import Recipe

_BUFFERS = "te_lite's scales lie in pools, not in buffers with keys; module.fp8_meta['scaling_fwd'] has a module's"
_RECOMPUTE = "te.checkpoint gives a recomputed call the scales of its first run by itself"
# Methods of Transformer Engine's that have no meaning in te_lite -> what to do instead.
_INSTEAD = {
    **dict.fromkeys(("get_buffer_info", "get_key_in_buffer", "split_key_in_buffer"), _BUFFERS),
    "copy_forward_fp8_meta_tensors_for_recompute": _RECOMPUTE,
    "get_old_fp8_meta_tensors_for_recompute": _RECOMPUTE,
    "restore_fp8_meta_tensors": _RECOMPUTE,
    "fp8_autocast_enter": "use autocast_enter",
    "fp8_autocast_exit": "use autocast_exit",
    "quantization_state": "ask is_fp8_enabled, get_fp8_recipe and their like",
}


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        raise NotThere(f"{cls.__name__}.{name}: te_lite does not have it; {_INSTEAD.get(name, 'leave it out')}")


class _Entered(threading.local):
    """What autocast_enter opened in this thread: the autocast, and what it put on the stack."""

    def __init__(self) -> None:
        self.stack: list[tuple[autocast, Context]] = []


_ENTERED = _Entered()


class FP8GlobalStateManager(contexts.FP8GlobalStateManager, metaclass=_Named):
    """What frameworks ask about the open autocast, and what this machine supports. All state is of this thread."""

    is_fp8_available = staticmethod(support.check_fp8_support)
    is_mxfp8_available = staticmethod(support.check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(support.check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(support.check_nvfp4_support)
    add_fp8_tensors_to_global_buffer = staticmethod(graph.add_fp8_tensors_to_global_buffer)
    reduce_and_update_fp8_tensors = staticmethod(graph.reduce_and_update_fp8_tensors)
    set_skip_fp8_weight_update_tensor = staticmethod(graph.set_skip_fp8_weight_update_tensor)

    # questions

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of the open autocast; outside of any the default."""
        state = current()
        return recipes.DelayedScaling() if state is None else state.recipe

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Inside quantized_model_init."""
        return model_init() is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Inside quantized_model_init(preserve_high_precision_init_val=True)."""
        return (init := model_init()) is not None and init.preserve

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """No module of this pass has run yet that will take the backward scales' step."""
        return (state := current()) is not None and not state.one_pass.claimed

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Between set_capture_start and set_capture_end, or while the current stream is captured."""
        return Open.graphs or capturing()

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Tensor | None:
        """None: no graph of te_lite's reads such a tensor. See set_skip_fp8_weight_update_tensor."""
        return None

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Under which module.fp8_meta has the scales of a direction."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """The direction's name."""
        return "forward" if forward else "backward"

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: dist.ProcessGroup | None = None) -> str:
        """The same for equal recipes with the same group. Others have other ones, but for CustomRecipes, which do not
        print their factory."""
        return f"{recipe} among {'no group' if group is None else id(group)}"

    # what is open

    @classmethod
    def get_autocast_state(cls) -> tuple[Context, ...]:
        """The open autocasts, outermost first, for set_autocast_state."""
        return tuple(OPEN.stack)

    @classmethod
    def set_autocast_state(cls, fp8_state: tuple[Context, ...]) -> None:
        """Modules follow from now on what was open when get_autocast_state gave `fp8_state`. No scale takes a step.

        Inside of a `with autocast(...)`, set the state that it made again before it ends, which raises otherwise.
        TypeError for anything else.
        """
        if not isinstance(fp8_state, tuple) or not all(isinstance(one, Context) for one in fp8_state):
            raise TypeError(
                f"set_autocast_state got {type(fp8_state).__name__}: must be what get_autocast_state() gave; pass that"
            )
        OPEN.stack = list(fp8_state)

    @classmethod
    def autocast_enter(
        cls, enabled: bool = False, calibrating: bool = False, fp8_recipe: Recipe | str | None = None,
        fp8_group: dist.ProcessGroup | None = None, _graph: bool = False,
    ) -> None:  # fmt: skip
        """Opens autocast(enabled, calibrating, fp8_recipe, fp8_group) until autocast_exit, and raises what it does.

        _graph: accepted; autocast_exit(_graph=True) and set_capture_start() say that a graph is captured.
        """
        opened = autocast(enabled, calibrating, fp8_recipe, fp8_group)
        opened.__enter__()
        _ENTERED.stack.append((opened, OPEN.stack[-1]))

    @classmethod
    def autocast_exit(cls, enabled: bool = True, _graph: bool = False) -> None:
        """Closes what the last autocast_enter opened. Forward scales take a step where it is the outermost.

        set_autocast_state may have restored what was open before. enabled: accepted; what was entered says it. _graph:
        no scale takes a step. RuntimeError where nothing was entered, or another autocast is open inside.
        """
        if not _ENTERED.stack:
            raise RuntimeError("autocast_exit() without autocast_enter(): nothing is open; call that first")
        opened, context = _ENTERED.stack[-1]
        if any([one is context for one in OPEN.stack[:-1]]):
            raise RuntimeError(
                "autocast_exit(): another autocast was opened after that of autocast_enter() and is open yet; close "
                "that first"
            )
        _ENTERED.stack.pop()
        if not (OPEN.stack and OPEN.stack[-1] is context):
            OPEN.stack.append(context)
        if _graph:
            OPEN.stack.pop()
        else:
            opened.__exit__(None)

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """`tensor` becomes its elementwise maximum over the group's ranks (None: all). Alone without torch.distributed.

        All ranks of the group must call it.
        """
        if dist.is_initialized():
            with torch.no_grad():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    @classmethod
    def reset(cls) -> None:
        """Forgets open autocasts, the delayed-scaling pools, and graphs that were replayed; for tests and notebooks."""
        super().reset()
        _ENTERED.stack.clear()
        graph.forget_graphs()
