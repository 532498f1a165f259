"""Compiled delayed scaling among other modules of the process: the bits of eager mode, and little work in Python."""

import collections
import concurrent.futures
import copy
import functools
import gc
import sys
import weakref

import pytest
import torch

import te_lite as te
from te_lite.quantize import graph_scales
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import delayed_state, under
from tests.modules.test_compile import (
    BF16,
    MODULES,
    WIDTH,
    assert_same,
    compiled,
    fresh_dynamo,
    linear,
    make,
    no_recompilation,
    state_of,
    step,
    train,
    twins,
)  # fmt: skip

__all__ = ["fresh_dynamo"]
SHORT = te.recipe.DelayedScaling(amax_history_len=4)


def call_of(module, x):
    return module(x)


def steps_alike(call, pairs, i, recipe=SHORT):
    """Step i of each pair (eager, compiled), and that both are the same. The compiled ones go first: a step of eager
    mode may put right what they lack."""
    got = [step(net, functools.partial(call, net), i, recipe, "cpu") | state_of(net) for _, net in pairs]
    for (eager, _), one in zip(pairs, got, strict=True):
        assert_same(one, step(eager, eager, i, recipe, "cpu") | state_of(eager))


@pytest.mark.parametrize("kind", MODULES)
def test_ten_steps_among_idle_modules(kind):
    """The idle ones lie beside the used one in its pools, and their own scales stay what they were. Each of them starts
    as a new module when it runs at last, with code that was compiled for another."""
    eager, net = twins(make(kind, "cpu"))
    want = train(eager, eager, SHORT, "cpu")
    idle = [make(other, "cpu") for _ in range(8) for other in MODULES]
    call = compiled(call_of)
    assert_same(train(net, functools.partial(call, net), SHORT, "cpu"), want)
    for one in idle:
        state = delayed_state(one)
        assert state["history_fwd"].eq(0).all() and state["history_bwd"].eq(0).all()
        assert state["scale_fwd"].eq(1).all() and state["scale_bwd"].eq(1).all()
    with no_recompilation:
        late = idle[list(MODULES).index(kind)]
        pairs = [(eager, net), (copy.deepcopy(late), late)]
        for i in range(3):
            steps_alike(call, pairs, i)


def test_modules_that_come_and_go_between_steps():
    """Made, deleted, loaded, copied, moved to other memory; alike, so that they share what is compiled."""
    pairs = [twins(linear("cpu")) for _ in range(3)]
    idle = [linear("cpu") for _ in range(4)]
    call = compiled(call_of)
    steps_alike(call, pairs, 0)
    with no_recompilation:
        for i in range(1, 8):
            if i == 2:
                pairs.insert(1, twins(linear("cpu")))
                idle.insert(0, linear("cpu"))
            if i == 3:
                del pairs[0], idle[1:3]
            if i == 4:
                pairs.append(copy.deepcopy(pairs[1]))
            if i == 5:
                states = [part.state_dict() for part in pairs[0]]
                for part, state in zip(pairs[1], states, strict=True):
                    part.load_state_dict(state)
            if i == 6:  # as fp8_meta does, in place
                for part in pairs[0]:
                    live = part._scales._live["forward"]
                    live.load(live.history * 3, live.scale * 2, live.key.fp8_max)
            steps_alike(call, pairs, i)


def test_states_that_leave_a_pool_that_a_cuda_graph_has_fixed():
    first, call = twins(linear("cpu")), compiled(call_of)
    for i in range(3):
        steps_alike(call, [first], i)
    late = twins(linear("cpu"))
    for _ in range(3):  # gives the late ones forward states, which no update has put beside the others
        with torch.no_grad(), under(SHORT):
            pass
    for module in first:
        module._scales.fix()
    for i in range(3):
        steps_alike(call, [late, first], i)
    forward = late[1]._scales._live["forward"]
    assert not forward.pool.fixed and forward.scale.ne(1).any()


def test_states_that_an_update_moves_while_an_autocast_begins(monkeypatch):
    """Backward may run on another thread. Here it steps in after what is kept was found to fit."""
    (net, _idle), call, fits = twins(linear("cpu")), compiled(call_of), graph_scales.Followed.fits

    def move_then(followed, user):
        fitted = fits(followed, user)
        first, *states = state.pool.members
        states.append(first)
        state.pool.hold(states, torch.cat([s.history for s in states], 1), torch.cat([s.scale for s in states]))
        return fitted

    for i in range(3):
        step(net, functools.partial(call, net), i, SHORT, "cpu")
    state = net._scales._live["forward"]
    before = state.place
    monkeypatch.setattr(graph_scales.Followed, "fits", move_then)
    with torch.no_grad(), under(SHORT):
        pass
    assert state.place != before and state.scale.ne(1).any()
    assert_bitwise_equal("scales", net._graph_scales.forward_scales, state.scale)


def test_maxima_that_a_graph_holds_are_taken_once():
    """Where a backward runs again (retain_graph=True) its graph holds them from step to step."""
    call, net = compiled(call_of), linear("cpu")
    step(net, functools.partial(call, net), 0, SHORT, "cpu")
    scales, held = net._graph_scales, net._graph_scales.backward_amaxes
    graph = torch.ones(held.shape, requires_grad=True) * held
    for value in (5, 3):
        held.data.fill_(value)
        assert delayed_state(net)["history_bwd"][-1].eq(value).all()
        assert held.eq(0).all() and scales.backward_amaxes is not held and scales.backward_amaxes.eq(0).all()
    assert delayed_state(net)["history_bwd"][-2:, 0].tolist() == [5, 3]
    graph.sum().backward()


def test_what_is_kept_keeps_no_module_alive():
    call, nets = compiled(call_of), [linear("cpu") for _ in range(3)]
    x = torch.randn(48, WIDTH, dtype=BF16)
    for _ in range(3):
        for net in nets[:2]:
            with under(SHORT):
                y = call(net, x)
            y.sum().backward()
    gone = [weakref.ref(part) for net in nets[1:] for part in (net._graph_scales, *net._scales._live.values())]
    assert len(gone) == 6
    del net, nets[1:]
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 6


def test_two_threads_take_turns():
    """Each has its own pools. A module is ready for the thread that it ran in, while that has an autocast open."""
    call, here, there = compiled(call_of), twins(linear("cpu")), twins(linear("cpu"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for i in range(6):
            steps_alike(call, [here], i)
            pool.submit(steps_alike, call, [there], i).result()
            with under(SHORT):
                assert i == 0 or (here[1]._graph_scales.here.ready and not there[1]._graph_scales.here.ready)
    owners = [pair[1]._scales._live["forward"].key.owner for pair in (here, there)]
    assert owners[0] is not owners[1]


def test_recipes_that_change_between_steps():
    other = te.recipe.DelayedScaling(amax_history_len=6, margin=1, amax_compute_algo="most_recent")
    recipes = [SHORT, SHORT, other, other, other, SHORT, other, SHORT, SHORT, other]
    eager, net = twins(linear("cpu"))
    want: dict = {}
    for i, recipe in enumerate(recipes):
        want |= step(eager, eager, i, recipe, "cpu") | {f"{i} state": eager.get_extra_state().clone()}
    call, got = compiled(net), {}
    for i, recipe in enumerate(recipes):
        got |= step(net, call, i, recipe, "cpu") | {f"{i} state": net.get_extra_state().clone()}
    assert_same(got, want)


def calls_of_a_step(call, net, x):
    """How many functions, of Python and of C, Python calls in one step."""
    counts: collections.Counter = collections.Counter()
    sys.setprofile(lambda frame, event, arg: counts.update((event,)))
    try:
        with under(SHORT):
            y = call(net, x)
        y.sum().backward()
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def test_an_idle_module_costs_a_few_calls_a_step():
    """Others of the process, perhaps hundreds, must not slow a step down: a call takes about 0.1 us, while working out
    anew what to follow took 28 calls and 20 us a module. 3 look whether a graph holds maxima for a later backward."""
    call, net, x = compiled(call_of), linear("cpu"), torch.randn(48, WIDTH, dtype=BF16)
    idle, counted = [], []
    for n in (10, 60):
        idle += [linear("cpu") for _ in range(n - len(idle))]
        counted.append([calls_of_a_step(call, net, x) for _ in range(6)][-1])
    assert counted[1] - counted[0] <= 4 * 50, counted


def test_scales_stay_in_their_memory_but_where_a_graph_holds_them():
    eager, net = twins(linear("cpu"))
    call, held = compiled(call_of), net._graph_scales
    steps_alike(call, [(eager, net)], 0)
    steps_alike(call, [(eager, net)], 1)
    before = held.forward_scales, held.backward_scales
    steps_alike(call, [(eager, net)], 2)
    assert held.forward_scales is before[0] and held.backward_scales is before[1]
    x, found = torch.randn(48, WIDTH, dtype=BF16), []
    with under(SHORT):
        first = call(net, x)
    kept = [t.clone() for t in before]
    with under(SHORT):
        second = call(net, x * 2.0**10)
    assert held.forward_scales is not before[0] and held.backward_scales is not before[1]
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    for y in (first, second):
        net.zero_grad()
        y.sum().backward()
        found.append(net.weight.grad.clone())
    with under(SHORT):
        first = eager(x)
    with under(SHORT):
        second = eager(x * 2.0**10)
    for y, grad in zip((first, second), found, strict=True):
        eager.zero_grad()
        y.sum().backward()
        assert_bitwise_equal("dw", grad, eager.weight.grad)
    view, value = held.forward_scales.detach(), held.forward_scales.clone()  # as a graph may hold one
    for factor in (2.0**12, 1.0):
        with under(SHORT):
            call(net, x * factor)
    assert torch.equal(view, value) and not torch.equal(held.forward_scales, value)
