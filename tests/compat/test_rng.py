"""CudaRNGStatesTracker: named states that do not disturb each other."""

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw():
    return torch.rand(8, device=DEVICE)


def default_state():
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


@pytest.fixture
def tracker():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    tracker.add("other", 2)
    return tracker


def test_fork_goes_on_where_it_stopped(tracker):
    torch.manual_seed(1)
    want = torch.cat([draw(), draw()])
    torch.manual_seed(77)
    with tracker.fork():
        first = draw()
    with tracker.fork("other"):
        draw()
    with tracker.fork("model-parallel-rng"):
        second = draw()
    assert_bitwise_equal("draws", torch.cat([first, second]), want)


def test_outside_is_not_disturbed(tracker):
    before = default_state()
    with tracker.fork():
        draw()
    assert_bitwise_equal("state", default_state(), before)
    te.CudaRNGStatesTracker().add("x", 5)
    assert_bitwise_equal("state after add", default_state(), before)


def test_nested_forks(tracker):
    with tracker.fork():
        inner_before = draw()
        with tracker.fork("other"):
            other = draw()
        inner_after = draw()
    torch.manual_seed(1)
    assert_bitwise_equal("outer", torch.cat([inner_before, inner_after]), torch.cat([draw(), draw()]))
    torch.manual_seed(2)
    assert_bitwise_equal("inner", other, draw())


def test_an_error_inside_keeps_both_states(tracker):
    before = default_state()
    with pytest.raises(KeyError), tracker.fork():
        first = draw()
        raise KeyError
    assert_bitwise_equal("default", default_state(), before)
    with tracker.fork():
        assert not torch.equal(draw(), first)


def test_states_round_trip(tracker):
    saved = tracker.get_states()
    with tracker.fork():
        first = draw()
    tracker.set_states(saved)
    with tracker.fork():
        assert_bitwise_equal("again", draw(), first)
    assert set(saved) == {"model-parallel-rng", "other"}
    assert all(isinstance(state, torch.Tensor) for state in saved.values())


def test_get_states_is_a_copy(tracker):
    tracker.get_states().clear()
    assert set(tracker.get_states()) == {"model-parallel-rng", "other"}


def test_states_are_copies_both_ways(tracker):
    """What a caller writes into a state, taken or given, changes no draw."""
    given = tracker.get_states()
    with tracker.fork():
        want = draw()
    tracker.set_states(given)
    for states in (given, tracker.get_states()):
        for state in states.values():
            state.zero_()
    with tracker.fork():
        assert_bitwise_equal("draws", draw(), want)


@pytest.mark.parametrize("states", [None, [1], "x", torch.zeros(4), {"a": None}, {"a": [1]}, {"a": torch.zeros(4)}])
def test_states_that_are_none(states, tracker):
    before = tracker.get_states()
    with pytest.raises(TypeError, match="get_states"):
        tracker.set_states(states)
    assert all(torch.equal(state, before[name]) for name, state in tracker.get_states().items())


def test_refusals(tracker):
    with pytest.raises(ValueError, match="other"):
        tracker.add("other", 3)
    with pytest.raises(ValueError, match="seed 2"):
        tracker.add("third", 2)
    with pytest.raises(ValueError, match="nope"), tracker.fork("nope"):
        pass


def test_reset_forgets_names_and_seeds(tracker):
    tracker.reset()
    assert not tracker.get_states()
    tracker.add("other", 2)


def test_states_have_transformer_engines_names(tracker):
    """Megatron-FSDP looks there for the state that it forks."""
    assert tracker.states_.keys() == tracker.get_states().keys()
    tracker.reset()
    assert tracker.states_ == {} and tracker.seeds_ == set()


def test_set_states_replaces_seeds_too(tracker):
    """States restored from a checkpoint into a new tracker fork as before."""
    with tracker.fork():
        draw()
    saved = tracker.get_states()
    with tracker.fork():
        want = draw()
    fresh = te.CudaRNGStatesTracker()
    fresh.set_states(saved)
    with fresh.fork():
        assert_bitwise_equal("restored", draw(), want)
