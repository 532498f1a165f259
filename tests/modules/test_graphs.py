"""Delayed scaling in CUDA graphs: replays take the steps that eager calls take. On the CPU tests/cpu_graph.py plays."""

import copy

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.cpu_graph import CpuGraph
from tests.harness import build
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

RECIPE = te.recipe.DelayedScaling(amax_history_len=3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
M, K = 48, 64


def model(kinds, device):
    return torch.nn.Sequential(*(build(Spec(kind), K, K, 96, device=device) for kind in kinds))


class Step:
    """Forward and backward of a model on tensors that stay where they are."""

    def __init__(self, model, device, recipe=RECIPE):
        self.model, self.recipe = model, recipe
        self.x = torch.empty(M, K, dtype=torch.bfloat16, device=device, requires_grad=True)
        self.dy = torch.empty(M, K, dtype=torch.bfloat16, device=device)
        self.results = []

    def load(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for t in (self.x, self.dy):
                t.copy_(torch.randn(M, K, generator=generator) * 2.0 ** (seed % 7))

    def __call__(self):
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        with te.autocast(recipe=self.recipe):
            y = self.model(self.x)
        y.backward(self.dy)
        self.results = [y.detach(), self.x.grad, *(p.grad for p in self.model.parameters())]

    def eager(self, seed):
        self.load(seed)
        self()
        return [t.clone() for t in (*self.results, *states(self.model))]

    def replay(self, graph, results, seed):
        self.load(seed)
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        return [t.clone() for t in (*results, *states(self.model))]


def states(model):
    return [module.get_extra_state() for module in model]


class CudaGraph(torch.cuda.CUDAGraph):
    def capture(self):
        return torch.cuda.graph(self)


def new_graph(device):
    return CudaGraph() if device == "cuda" else CpuGraph()


def capture(step):
    """The graph of a step, and where its results are."""
    graph = new_graph(step.x.device.type)
    with graph.capture():
        step()
    return graph, step.results


def agree(label, got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(f"{label}: {i}", a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [(LINEAR,), (LN_LINEAR,), (LN_MLP,), (LN_LINEAR, LN_MLP, LINEAR)])
def test_replays_are_eager_steps(kinds, device):
    step = Step(model(kinds, device), device)
    for seed in range(2):
        step.eager(seed)
    graph, results = capture(step)
    twin, before = Step(copy.deepcopy(step.model), device), states(step.model)
    for seed in range(2, 12):
        agree(f"replay {seed}", step.replay(graph, results, seed), twin.eager(seed))
        if seed % 4 == 0:
            agree(f"eager {seed}", step.eager(seed + 20), twin.eager(seed + 20))
    with torch.no_grad():
        for mine, others in zip(step.model.parameters(), twin.model.parameters(), strict=True):
            mine.mul_(3)
            others.mul_(3)
    agree("other weights", step.replay(graph, results, 30), twin.eager(30))
    assert not any(torch.equal(a, b) for a, b in zip(before, states(step.model), strict=True)), "no scale has moved"


@pytest.mark.parametrize("device", DEVICES)
def test_two_graphs_of_one_model(device):
    """Replayed in turns, with an evaluation in a third."""
    steps = [Step(model((LN_MLP,), device), device)]
    steps.append(Step(steps[0].model, device))
    for seed in range(2):
        steps[0].eager(seed)
    captured = [(step, *capture(step)) for step in steps]
    asked, evaluation = torch.zeros_like(steps[0].x).detach(), new_graph(device)
    with evaluation.capture(), torch.no_grad(), te.autocast(recipe=RECIPE):
        answer = steps[0].model(asked)
    twin = Step(copy.deepcopy(steps[0].model), device)
    for seed in range(2, 10):
        step, graph, results = captured[seed % 2]
        agree(f"replay {seed}", step.replay(graph, results, seed), twin.eager(seed))
        asked.copy_(step.x.detach())
        evaluation.replay()
        with torch.no_grad(), te.autocast(recipe=RECIPE):
            assert_bitwise_equal("evaluation", answer, twin.model(asked))


@pytest.mark.gpu
def test_forward_and_backward_in_graphs_of_their_own():
    """As torch.cuda.make_graphed_callables captures a module that opens the autocast itself."""

    class Inside(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            with te.autocast(recipe=RECIPE):
                return self.model(x)

    plain = model((LN_MLP, LINEAR), "cuda")
    step = Step(plain, "cuda")
    step.eager(0)
    graphed = torch.cuda.make_graphed_callables(Inside(plain), (step.x.detach().clone().requires_grad_(),))
    twin = Step(copy.deepcopy(plain), "cuda")
    for seed in range(1, 8):
        step.load(seed)
        step.x.grad = None
        plain.zero_grad(set_to_none=True)
        y = graphed(step.x)
        y.backward(step.dy)
        got = [y.detach(), step.x.grad, *(p.grad for p in plain.parameters()), *states(plain)]
        agree(f"step {seed}", got, twin.eager(seed))


@pytest.mark.parametrize("device", DEVICES)
def test_recomputation_in_a_graph(device):
    inner = model((LN_MLP,), device)

    class Recomputed(torch.nn.Module):
        def forward(self, x):
            return te.checkpoint(inner, x, use_reentrant=False)

    step = Step(inner, device)
    twin = Step(copy.deepcopy(inner), device)
    step.model = Recomputed()
    step.model.inner = inner
    for one in (step, twin):  # once by itself: it compiles what no capture may
        one.load(0)
        one()
    graph, results = capture(step)
    for seed in range(1, 5):
        step.load(seed)
        graph.replay()
        agree(f"replay {seed}", [*results, *states(inner)], twin.eager(seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [(LN_MLP,), (LN_LINEAR, LINEAR)])
def test_eager_steps_of_what_a_graph_uses(kinds, device):
    """Scales are written in place, what was taken of them is not: a second forward before the first one's backward."""
    step = Step(model(kinds, device), device)
    step.eager(0)
    capture(step)
    twin = Step(copy.deepcopy(step.model), device)
    where = step.model[0]._scales._live["forward"].scale.data_ptr()
    for seed in range(2, 8):
        both = []
        for one in (step, twin):
            first, second = Step(one.model, device), Step(one.model, device)
            first.load(seed)
            with te.autocast(recipe=RECIPE):
                y = first.model(first.x)
            later = second.eager(seed + 10)
            first.model.zero_grad(set_to_none=True)
            y.backward(first.dy)
            both.append([*later, y.detach(), first.x.grad, *(p.grad for p in one.model.parameters())])
        agree(f"step {seed}", *both)
    assert step.model[0]._scales._live["forward"].scale.data_ptr() == where


def evaluate(step, seed):
    step.load(seed)
    with torch.no_grad(), te.autocast(recipe=step.recipe):
        return step.model(step.x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [RECIPE, te.recipe.DelayedScaling(amax_history_len=5)])
def test_other_models_are_left_alone(recipe, device):
    """Of which one was evaluated before the capture, so that it waits for a step, and one is made later."""
    step, evaluated = Step(model((LINEAR,), device), device), Step(model((LN_MLP,), device), device, recipe)
    step.eager(0)
    of_evaluated = Step(copy.deepcopy(evaluated.model), device, recipe)
    evaluate(evaluated, 1)
    live = step.model[0]._scales._live
    graph, results = capture(step)
    where = {direction: (state.scale.data_ptr(), state.history.data_ptr()) for direction, state in live.items()}
    assert all(state.isfinite().all() for state in states(evaluated.model))
    evaluate(of_evaluated, 1)
    later = Step(model((LN_LINEAR,), device), device)
    twins = [Step(copy.deepcopy(step.model), device), of_evaluated, Step(copy.deepcopy(later.model), device)]
    for seed in range(2, 6):
        agree(f"captured {seed}", step.replay(graph, results, seed), twins[0].eager(seed))
        agree(f"evaluated {seed}", evaluated.eager(seed), twins[1].eager(seed))
        agree(f"later {seed}", later.eager(seed), twins[2].eager(seed))
    assert where == {name: (state.scale.data_ptr(), state.history.data_ptr()) for name, state in live.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_an_evaluation_alone(device):
    """With a checkpoint's scales, of which no step may be taken."""
    trained = Step(model((LN_MLP,), device), device)
    for seed in range(3):
        trained.eager(seed)
    step = Step(model((LN_MLP,), device), device)
    step.model.load_state_dict(trained.model.state_dict())
    for one in (step, trained):
        evaluate(one, 0)
    graph = new_graph(device)
    with graph.capture(), torch.no_grad(), te.autocast(recipe=RECIPE):
        answer = step.model(step.x)
    for seed in range(4, 7):
        want = evaluate(trained, seed)
        step.load(seed)
        graph.replay()
        assert_bitwise_equal("evaluation", answer, want)
    agree("amaxes", states(step.model), states(trained.model))
    for seed in range(7, 9):
        step.eager(seed)
        want = evaluate(step, 10)
        graph.replay()
        assert_bitwise_equal("evaluation after a step", answer, want)


@pytest.mark.parametrize("device", DEVICES)
def test_loading_and_moving(device):
    """Replays go on with what was loaded, of whichever recipe; a move to where the module is moves nothing."""
    step = Step(model((LN_LINEAR, LINEAR), device), device)
    step.eager(0)
    saved = {name: value.clone() for name, value in step.model.state_dict().items()}
    graph, results = capture(step)
    other = model((LN_LINEAR, LINEAR), device)  # of which delayed scaling knows nothing
    for state in (saved, other.state_dict()):
        for seed in range(1, 3):
            step.replay(graph, results, seed)
        step.model.load_state_dict(state)
        step.model.to(device).bfloat16()
        twin = Step(model((LN_LINEAR, LINEAR), device), device)
        twin.model.load_state_dict(state)
        for seed in range(3, 6):
            agree(f"replay {seed}", step.replay(graph, results, seed), twin.eager(seed))
        agree("eager", step.eager(7), twin.eager(7))


@pytest.mark.parametrize("device", DEVICES)
def test_refusals(device):
    step = Step(model((LINEAR,), device), device)
    twin = Step(copy.deepcopy(step.model), device)
    step.load(0)
    with pytest.raises(RuntimeError, match="no scales yet .* run the module once before the capture"):
        with new_graph(device).capture():
            step()
    for seed in range(3):  # nothing was spoiled
        agree(f"step {seed}", step.eager(seed), twin.eager(seed))
    with te.autocast(recipe=RECIPE), pytest.raises(RuntimeError, match="its autocast began before the capture"):
        with new_graph(device).capture():
            step.model(step.x)
    agree("afterwards", step.eager(4), twin.eager(4))
    graph, results = capture(step)
    other = te.recipe.DelayedScaling(amax_history_len=5)
    with pytest.raises(
        RuntimeError, match=r"another recipe, group or device cannot replace them; call copy.deepcopy\(module"
    ):
        Step(step.model, device, other).eager(0)
    Step(copy.deepcopy(step.model), device, other).eager(0)
    agree("replay", step.replay(graph, results, 5), twin.eager(5))
