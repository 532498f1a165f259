"""Compiled delayed scaling where threads change, or where eager calls of the same module take turns with it."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import te_lite as te
from te_lite.modules.scale_state import ScaleStates
from te_lite.quantize import graph_scales
from tests.harness import under
from tests.modules.test_compile import BF16, WIDTH, assert_same, fresh_dynamo, linear, state_of, step, twins

__all__ = ["fresh_dynamo"]
SHORT, LONGER = (te.recipe.DelayedScaling(amax_history_len=length) for length in (4, 8))


def counting(function):
    """(compiled, a list that grows by one with each graph)."""
    graphs: list = []
    return torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True), graphs


def in_a_thread(function, *args):
    """Its result, in a thread that ends then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.parametrize("other", ["recipe", "thread"])
def test_eager_calls_see_states_that_compiled_code_has_replaced(other):
    """And the other way round. The scales that a call uses are those that a checkpoint then holds."""
    eager, net = twins(linear("cpu"))
    call, _ = counting(lambda module, x: module(x))
    found = []
    for module, second in ((eager, eager), (net, functools.partial(call, net))):
        results: dict = {}
        seen = 0
        for i in range(9):
            alone = i in (3, 4, 7)
            recipe = LONGER if alone and other == "recipe" else SHORT
            run = functools.partial(step, module, second if alone else module, i, recipe, "cpu")
            results |= (in_a_thread(run) if alone and other == "thread" else run()) | {f"{i}": state_of(module)}
            held = module._scales._live["forward"]
            if not alone and module._planned[1]:  # not where this call has replaced them
                assert module._planned[1][0].operands.fprop.a.state is held
                seen += 1
        assert seen >= 2
        found.append({name: value for name, value in results.items() if isinstance(value, torch.Tensor)})
    assert_same(found[1], found[0])


def test_a_new_thread_for_each_forward():
    """The module goes from each to the next, with the step of its backward scales, and nothing is compiled again. In
    between nobody reads the state and no eager call runs: both would take that step."""
    eager, net = twins(linear("cpu"))
    call, graphs = counting(lambda module, x: module(x))
    want: dict = {}
    got: dict = {}
    for results, module, run in ((got, net, functools.partial(call, net)), (want, eager, eager)):
        for i in range(12):
            results |= in_a_thread(step, module, run, i, SHORT, "cpu")
        results |= step(module, run, 12, SHORT, "cpu") | state_of(module)  # this thread, too
    assert_same(got, want)
    assert len(graphs) == 1


def test_threads_whose_autocasts_overlap():
    """Each trains a module of its own; the other's autocast begins between an autocast and the call in it."""
    pairs = [twins(linear("cpu")) for _ in range(2)]
    call, graphs = counting(lambda module, x: module(x))
    xs, dys = (torch.randn(6, 48, width, dtype=BF16) for width in (WIDTH, 48))
    both = threading.Barrier(2, timeout=20)

    def train(index):
        eager, net = pairs[index]
        for x, dy in zip(xs, dys, strict=True):
            results = []
            for module in (eager, net):
                module.zero_grad()
                with under(SHORT):
                    both.wait()  # both autocasts are open
                    y = module(x) if module is eager else call(module, x)
                y.backward(dy)
                grads = {name: param.grad for name, param in module.named_parameters()}
                results.append(grads | {"y": y.detach(), "state": module.get_extra_state()})
            assert_same(results[1], results[0])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, index) for index in range(2)]:
            done.result()
    assert len(graphs) <= 2  # each thread may have to compile once


def test_which_states_are_live_is_found_and_changed_in_one_go(monkeypatch):
    """An autocast of another thread looks at every module of the process, and may make states for a new one."""
    first, other, fits = linear("cpu"), linear("cpu"), ScaleStates.fits
    call, _ = counting(lambda module, x: module(x))
    step(first, functools.partial(call, first), 0, SHORT, "cpu")
    held = []
    monkeypatch.setattr(
        ScaleStates, "fits", lambda self, *asked: held.append(graph_scales.LIVE._is_owned()) or fits(self, *asked)
    )
    with torch.no_grad(), under(LONGER):
        pass
    assert held and all(held) and other._scales._live
