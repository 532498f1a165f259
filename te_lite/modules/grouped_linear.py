"""te.GroupedLinear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, zip_longest
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite import epoch
from te_lite.arguments import flag
from te_lite.autocast import OPEN, Pass, State, model_init
from te_lite.functional.grouped import GroupedCall, GroupedFunction, GroupedWgrad
from te_lite.functional.layer import as_output
from te_lite.functional.plan import expect_new_sum
from te_lite.modules import checks
from te_lite.modules.backward_thread import backward_on_calling_thread
from te_lite.modules.base import TeLiteModule
from te_lite.modules.grouped_mm import check_offs, fitting
from te_lite.modules.grouped_params import all_quantized, join_quantized, read_as_they_are
from te_lite.modules.grouped_params import operands as quantized_operands
from te_lite.modules.weights import Init, ParamSpec, check_param, default_init, join
from te_lite.ops.grouped_cast import group_amax
from te_lite.ops.grouped_layout import MOST_GROUPS, group_layout
from te_lite.ops.registry import capturing, makes_data
from te_lite.overlap.userbuffers import UB_FLAGS
from te_lite.parallel import shard
from te_lite.quantize import replay
from te_lite.quantize.grouped import Given, Rule, rule_of, weights_for_both
from te_lite.quantize.per_tensor import GRADS_PER_GEMM, INPUTS_PER_GEMM
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import DelayedScaling, HighPrecision

# Of a gemm's tensors under delayed scaling: the direction and the slot.
_SLOTS = {"x": ("forward", 0), "w": ("forward", 1), "dy": ("backward", 0)}
_PER_GEMM = {"forward": INPUTS_PER_GEMM, "backward": GRADS_PER_GEMM}


class GroupedLinear(TeLiteModule):
    """y[m] = x[m] @ weight_g[N, K]^T + bias_g[N] for the tokens m of group g: the experts of a mixture in one call; a
    drop-in for Transformer Engine's GroupedLinear.

    num_gemms: groups, each with a weight and a bias of its own: weight0, bias0, weight1, ...; with
    single_grouped_weight and single_grouped_bias one `weight` [G, N, K], one `bias` [G, N]. parallel_mode "column"
    splits N, "row" splits K over tp_size ranks; as in Transformer Engine nothing is gathered, scattered or reduced: the
    caller's token dispatcher does that. The other arguments are te.Linear's.

    Raises NotImplementedError for ub_overlap_ag, ub_overlap_rs and a single weight under quantized_model_init,
    ValueError for sizes that tp_size does not divide and more than 1,023 groups.
    """

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: dist.ProcessGroup | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, rng_tracker_name: str | None = None,
        init_method: Init | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: torch.device | str | None = "cuda", ub_overlap_rs: bool = False, ub_overlap_ag: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, save_original_input: bool = False,
        single_grouped_weight: bool = False, single_grouped_bias: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        given = locals()
        for option in ("ub_overlap_rs", "ub_overlap_ag"):
            if flag("GroupedLinear", option, given[option]):
                raise NotImplementedError(f"GroupedLinear({option}=True): it has nothing to overlap; leave it out")
        if type(num_gemms) is not int or not 0 < num_gemms <= MOST_GROUPS:
            raise ValueError(f"GroupedLinear(num_gemms={num_gemms!r}): must be an integer from 1 to {MOST_GROUPS}")
        self.gemm_names = tuple(map(str, range(num_gemms)))
        given = dict.fromkeys(UB_FLAGS, False) | {"symmetric_ar_type": None, "sequence_dim": 0} | given
        modes = (parallel_mode,) * num_gemms
        super().__init__(given, modes, (None,) * num_gemms, ("in_features", "out_features"))
        self._modes = (None,) * num_gemms  # no rank talks to another
        self.num_gemms, self.parallel_mode, self.save_original_input = num_gemms, parallel_mode, save_original_input
        if parallel_mode == "column":
            out_features = shard(out_features, self.tp_size, "out_features")
        elif parallel_mode == "row":
            in_features = shard(in_features, self.tp_size, "in_features")
        self.in_features, self.out_features = in_features, out_features
        if single_grouped_weight and model_init() is not None:
            raise NotImplementedError(
                "GroupedLinear(single_grouped_weight=True) under quantized_model_init: experts have scales of their "
                "own; leave it out, so that each has a weight of its own"
            )
        self._add_weights(init_method or default_init, single_grouped_weight, single_grouped_bias)

    def _add_weights(self, init: Init, one_weight: bool, one_bias: bool) -> None:
        n, k, count, late = self.out_features, self.in_features, self.num_gemms, self.delay_wgrad_compute
        split = {"column": 0, "row": 1}.get(self.parallel_mode or "")
        self.weight_names = ["weight"] if one_weight else [f"weight{i}" for i in range(count)]
        self.bias_names = ["bias"] if one_bias else [f"bias{i}" for i in range(count)]
        shape, lead = ((count, n, k), 1) if one_weight else ((n, k), 0)
        fill = partial(_each, init) if one_weight else init
        spec = ParamSpec(shape, fill, None if split is None else split + lead, True, late_grad=late)
        making = model_init()
        if making is not None and not (n % making.multiple or k % making.multiple):
            spec = replace(spec, quantizer=making.quantizer, preserve=making.preserve)
        self._add_params(dict.fromkeys(self.weight_names, spec), True)
        partial_grad = True if self.parallel_mode == "row" and self.sequence_parallel else None
        split = int(one_bias) if self.parallel_mode == "column" else None
        bias = ParamSpec((count, n) if one_bias else (n,), nn.init.zeros_, split, sequence_parallel=partial_grad)
        self._add_biases(dict.fromkeys(self.bias_names, bias), self.use_bias)
        # weight0, bias0, weight1, ...: optimizers number their states by it, so it is Transformer Engine's order.
        for name in filter(self._parameters.__contains__, chain(*zip_longest(self.weight_names, self.bias_names))):
            self._parameters[name] = self._parameters.pop(name)

    def _callers(self, index: int) -> tuple[bool, bool]:
        return True, True

    def _put_wgrad(self, weights: tuple[Tensor, ...], wgrad: GroupedWgrad) -> Tensor | None:
        """What autograd gets for the joined weights [G, N, K]; the first sink has the gradients of all."""
        sink = self._sinks[0]
        dw = sink(wgrad, *weights)
        dw = sink.answer(dw, *weights) if sink.answers else dw
        return None if dw is None else dw.view(self.num_gemms, self.out_features, self.in_features)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        """x [..., in_features], its tokens sorted by group -> y [..., out_features]; with return_bias (y, the biases).

        m_splits: tokens of each group. A list, a tuple or a tensor on the CPU adds up to all tokens (else ValueError);
        a tensor on the input's GPU is never read by the host, and tokens beyond its sum belong to no group: y is zero
        there. is_first_microbatch: as of te.Linear.
        """
        if torch.compiler.is_dynamo_compiling():
            from te_lite.ops.untraced import untraced

            why = "te.GroupedLinear runs in Python; te.scaled_grouped_mm is compiled"
            return untraced(why, GroupedLinear.forward, self, inp, m_splits, is_first_microbatch)
        state = OPEN.stack[-1].state if OPEN.stack else self._default
        recomputes = replay.may_repeat()
        if recomputes:
            state = checks.followed((id(self), "state"), type(self).__name__, self._outstanding, state)
        weights = tuple([getattr(self, name) for name in self.weight_names])
        grad, device = torch.is_grad_enabled(), inp.device if isinstance(inp, Tensor) else None
        rule, dtype, own_bytes = self._decide(inp, weights, state)
        if grad and (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            checks.check_wgrad_targets(self, weights)
        if grad and device.type == "cuda" and torch._C._is_multithreading_enabled():
            backward_on_calling_thread()
        x = inp.reshape(-1, self.in_features).to(dtype).contiguous()
        offs, sizes = self._ends(m_splits, x)
        w, bias, cached = *self._joined(weights, rule, dtype, own_bytes), None
        first = None if OPEN.graphs else is_first_microbatch
        if first is not None:
            first = flag("GroupedLinear", "is_first_microbatch", first)
        if first and self.fuse_wgrad_accumulation:
            expect_new_sum(weights, grad)
        if all_quantized(weights):
            first = None  # they are kept
            cached = quantized_operands(weights, rule, grad and x.requires_grad) if own_bytes else None
        given = after = None
        if state and state.delayed:
            given, after = self._delayed(state, recomputes, x, weights, w, offs)
        if first is not None and rule.kind != "none":
            cached = replay.recall((id(self), "weights"), partial(self._cached, first, weights, w, rule, given))
        elif self._caching:
            self.clear_caches()
        self._caching = first is not None
        sink = partial(self._put_wgrad, weights) if self.fuse_wgrad_accumulation or self.delay_wgrad_compute else None
        note = self._outstanding.note(state, grad)
        original = self.save_original_input and not rule.delayed
        tracked = grad and not any([weight.is_inference() for weight in weights])  # or they have no version
        fresh = partial(_check_versions, weights, tuple([weight._version for weight in weights])) if tracked else None
        call = GroupedCall(rule, grad, cached, given, sink, after, note, original, fresh, sizes)
        y = as_output(GroupedFunction.apply(call, x, w, bias, offs), inp.shape)
        if not self.return_bias:
            return y
        biases = [getattr(self, name) for name in self.bias_names]
        return y, biases if torch.is_grad_enabled() else [bias.detach() for bias in biases]  # as _outputs() does

    def _decide(self, inp: Any, weights: tuple[Tensor, ...], state: State | None) -> tuple[Rule, torch.dtype, bool]:
        """The rule, the dtype of activations, and whether the GEMMs read the bytes that the weights hold; what they
        depend on is checked when it changes."""
        if not isinstance(inp, Tensor):
            checks.refuse_type(self, inp)
        amp = checks.amp_dtype(inp)
        key = (
            None if state is None else state.key, inp.dtype, inp.device, inp.shape[-1:], inp.dim() > 1, amp,
            weights[0].dtype, weights[0].device, epoch.number,
            tuple([weight.q.format if isinstance(weight, QuantizedTensor) else None for weight in weights]),
            tuple([weight.requires_grad for weight in weights]),
        )  # fmt: skip
        known: Any = self._planned  # one value, which another thread may replace; last what is decided here
        if known[0] != key:
            checks.check_input(self, inp, weights[0])
            recipe = HighPrecision() if state is None or not state.enabled else state.recipe
            checks.check_recipe(recipe, inp.device, self.save_original_input)
            if len({weight.requires_grad for weight in weights}) > 1:
                raise NotImplementedError(
                    "GroupedLinear with some of its weights frozen: one GEMM computes all their gradients; freeze all "
                    "or none, or drop the gradients of some"
                )
            for name, spec in self._specs.items():
                check_param("GroupedLinear", spec, name, getattr(self, name), weights[0].device, len(spec.shape) > 1)
            who = f"GroupedLinear(name={self.name!r})"
            rule = fitting(who, rule_of(recipe), recipe, self.out_features, self.in_features)
            own_bytes = read_as_they_are(self, weights, rule, recipe)
            Pass.any_module = True
            self._outstanding.start(state)
            self.clear_caches()
            known = key if makes_data(inp.device) else None, (), (rule, own_bytes)
            self._planned = known
        rule, own_bytes = known[2]
        return rule, amp or inp.dtype, own_bytes

    def _ends(self, m_splits: Any, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """(the groups' ends on x's device, their sizes where the host knows them)."""
        count, tokens = self.num_gemms, x.shape[0]
        if isinstance(m_splits, Tensor) and m_splits.device.type != "cpu":
            if m_splits.shape != (count,) or m_splits.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"GroupedLinear got m_splits {m_splits.dtype} {list(m_splits.shape)}: must be int32 or int64 "
                    f"[{count}], the tokens of each group"
                )
            ends = torch.cumsum(m_splits, 0, dtype=torch.int32)
            check_offs("GroupedLinear", ends, x.device)
            return ends, None
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        whole = all(isinstance(size, Integral) and type(size) is not bool and int(size) >= 0 for size in splits)
        splits = [int(size) for size in splits] if whole else splits
        if len(splits) != count or not whole or sum(splits) != tokens:
            raise ValueError(
                f"GroupedLinear got m_splits {splits} for {tokens} tokens: must be the tokens of each of {count} "
                "groups, integers that add up to all tokens; of a padded input pass a tensor on its GPU"
            )
        if capturing():
            raise RuntimeError(
                "GroupedLinear got m_splits as a list in the capture of a CUDA graph, which would be replayed for "
                "ever: pass a CUDA tensor, which replays read again"
            )
        pin = x.is_cuda and makes_data(x.device)
        ends = torch.tensor(list(accumulate(splits)), dtype=torch.int32, pin_memory=pin)
        return ends.to(x.device, non_blocking=True), splits  # the host does not wait for the copy

    def _joined(
        self, weights: tuple[Tensor, ...], rule: Rule, dtype: torch.dtype, own_bytes: bool
    ) -> tuple[Tensor, Tensor | None]:
        """All weights [G, N, K], without a copy where they lie together, and biases [G, N]."""
        if all_quantized(weights):
            w = join_quantized(weights, not own_bytes)
        else:
            w = weights[0] if weights[0].dim() == 3 else join(weights)
        bias, w = None, w.view(self.num_gemms, self.out_features, self.in_features)
        if self.use_bias and not self.return_bias:
            biases = tuple([getattr(self, name) for name in self.bias_names])
            bias = biases[0] if biases[0].dim() == 2 else join(biases).view(self.num_gemms, self.out_features)
        return (w.to(dtype) if rule.inner_first and not own_bytes else w), bias

    def _cached(
        self, first: bool, weights: tuple[Tensor, ...], w: Tensor, rule: Rule, given: Callable[[str], Given] | None
    ) -> Any:
        def make() -> Any:
            with torch.no_grad():
                return weights_for_both(rule, w, None if given is None else given("w"))

        return self._caches[0].reuse(first, weights, (rule, w.dtype), make)

    def _delayed(
        self, state: State, recomputes: bool, x: Tensor, weights: tuple[Tensor, ...], w: Tensor, offs: Tensor
    ) -> tuple[Any, Any]:
        """(scales and where amaxes go, what follows backward) under delayed scaling."""
        recipe: Any = state.recipe
        assert isinstance(recipe, DelayedScaling)
        group, pools = self.tp_group if state.group is None else state.group, state.one_pass.pools
        assert pools is not None
        if capturing():
            checks.check_capture(self, state)
            self._scales.fix()
        states = {way: self._scales.state(recipe, group, x.device, pools, way) for way in _PER_GEMM}

        def given(name: str) -> Given:
            way, slot = _SLOTS[name]
            scales, step = states[way], _PER_GEMM[way]

            def make() -> Tensor:
                return scales.scale[slot::step].clone()

            scale = replay.recall((id(self), "scale", name), make) if way == "forward" else make()
            recorded = scales.amax_at(slot)  # None where a checkpoint computes the call again
            return Given(scale, None if recorded is None else scales.history[0, slot::step])

        if not state.enabled:  # calibrating
            layout = group_layout(offs, x.shape[0])
            for name, amax in (("x", group_amax(x.detach(), layout)), ("w", group_amax(w.detach(), None))):
                into = given(name).amax
                if into is not None:
                    torch.maximum(into, amax, out=into)
            return None, None
        return given, partial(pools.close, self._claims_first(state.one_pass, recomputes, x, weights))

    def extra_repr(self) -> str:
        sizes = f"gemms={self.num_gemms}, in={self.in_features}, out={self.out_features}"
        return f"{sizes}, mode={self.parallel_mode}, tp_size={self.tp_size}"


def _each(init: Init, weight: Tensor) -> None:
    for part in weight:
        init(part)


def _check_versions(weights: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Autograd cannot see it: joined weights have a version of their own."""
    if tuple([weight._version for weight in weights]) != versions:
        raise RuntimeError(
            "a weight of GroupedLinear was written to between forward and backward, which still needed it; run "
            "backward before the optimizer's step"
        )
