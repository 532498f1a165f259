"""Scales of a GroupedLinear under delayed scaling: in files and copies, in calls computed again, in calibration."""

import copy
import pickle
from functools import partial

import torch

import te_lite as te
from tests.modules.test_grouped_linear import DELAYED, GROUPS, SIZES, data, equal, grads_of, made, step, weights_of
from tests.ops.grouped import offs_of


def test_state_goes_through_files_copies_and_pickles():
    x, dy = data()
    module = made()
    for seed in range(2):
        step(module, *data(seed), recipe=DELAYED)
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), made()]
    others[-1].load_state_dict(module.state_dict())
    want = step(module, x, dy, recipe=DELAYED)
    for other in others:
        equal(step(other, x, dy, recipe=DELAYED), want)
    assert torch.equal(others[0].get_extra_state(), module.get_extra_state())


def test_checkpointed_and_calibrated():
    x, dy = data()
    modules = [made(), made(), made()]
    for seed in range(3):
        x, dy = data(seed)
        want = step(modules[0], x, dy, recipe=DELAYED)
        leaf = x.clone().requires_grad_()
        modules[1].zero_grad()
        with te.autocast(recipe=DELAYED):
            y = te.checkpoint(partial(modules[1], m_splits=SIZES), leaf)
        y.backward(dy)
        equal([y.detach(), leaf.grad, *grads_of(modules[1])], want)
    assert torch.equal(modules[0].get_extra_state(), modules[1].get_extra_state())
    with te.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        y = modules[2](x, SIZES)
    equal([y], [made()(x, SIZES)])
    now = modules[2].get_extra_state()[6 : 6 + 9 * GROUPS].view(3, GROUPS, 3)
    first = [0, *offs_of(SIZES).tolist()]
    for g, weight in enumerate(weights_of(modules[2])):
        part = x[first[g] : first[g + 1]]
        assert now[:, g, 0].max() == (part.abs().max() if len(part) else 0) and now[:, g, 1].max() == weight.abs().max()
