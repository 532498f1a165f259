"""torch.distributed's collectives under the eyes of userbuffers: what is told, when, and whose error is raised."""

import pytest
import torch

from te_lite import watch


class Broken(RuntimeError):
    """What a watch raises once a rank has failed."""


class Recorder:
    """Notes what it is told; breaks after `checks` questions."""

    def __init__(self, seen: list, checks: int = 10**9) -> None:
        self.seen, self.left, self.has_maximum = seen, checks, True

    def meet(self, text: str) -> None:
        self.seen.append(text)

    def maximum(self, what: str, values: torch.Tensor, elementwise: bool) -> torch.Tensor | None:
        self.seen.append(f"{'maxima' if elementwise else 'maximum'} of {what}")
        if not self.has_maximum:
            return None
        return values.mul_(2) if elementwise else values.amax().view(1) * 2

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Broken("rank 1 has stopped")


@pytest.fixture
def seen(monkeypatch) -> list:
    monkeypatch.setattr(watch, "watches", {})
    monkeypatch.setattr(watch, "NAMING_S", 0.2)
    monkeypatch.setattr(watch, "CHECK_RANKS", "0")  # groups are tuples here
    monkeypatch.setattr(watch.dist, "get_process_group_ranks", lambda group: group)
    return []


def run(seen: list, group=(0, 1, 2, 3), shape=(8, 2)) -> None:
    watch.collective("amax", torch.zeros(shape, dtype=torch.bfloat16), group, lambda: seen.append("run"))


def fail() -> None:
    raise RuntimeError("Connection closed by peer")


def test_without_userbuffers_it_only_runs(seen) -> None:
    run(seen, group=None)
    assert seen == ["run"]


def test_userbuffers_all_of_whose_ranks_take_part_are_told_first(seen) -> None:
    watch.watches[2, 3] = Recorder(seen)
    watch.watches[4, 5] = Recorder(seen)  # not of this group
    run(seen)
    run(seen, group=(1, 2))
    assert seen == ["amax, bfloat16 [8, 2]", "run", "run"]


def test_gradients_of_a_step_are_told_too(seen, monkeypatch) -> None:
    watch.watches[0, 1] = Recorder(seen)
    monkeypatch.setattr(watch.dist, "all_reduce", lambda flat, group: flat.mul_(2))
    norm = torch.nn.LayerNorm(4, bias=False)
    norm.weight.sequence_parallel, norm.weight.grad = True, torch.ones(4)
    assert watch.reduce_sequence_parallel_grads(norm, group=(0, 1)) == 1
    assert seen == ["sequence-parallel gradients, float32 [4]"] and norm.weight.grad.tolist() == [2.0] * 4


def test_an_empty_one_is_told_and_not_run(seen) -> None:
    watch.watches[0, 1] = Recorder(seen)
    run(seen, shape=(0, 2))
    assert seen == ["amax, bfloat16 [0, 2]"]


@pytest.mark.parametrize("variable, device, compares", [
    ("cpu", "cpu", True), ("cpu", "cuda", False), ("1", "cpu", True), ("1", "cuda", True), ("0", "cpu", False),
    ("0", "cuda", False),
])  # fmt: skip
def test_where_ranks_are_compared(monkeypatch, variable, device, compares) -> None:
    monkeypatch.setattr(watch, "CHECK_RANKS", variable)
    assert watch.compares(torch.device(device)) is compares


def test_ranks_are_compared_once_before_it_begins(seen, monkeypatch) -> None:
    """By userbuffers where these have exactly the group's ranks."""
    monkeypatch.setattr(watch, "CHECK_RANKS", "cpu")
    monkeypatch.setattr(watch.dist, "all_reduce", lambda extremes, op, group: seen.append("compared"))
    watch.watches[1, 2] = Recorder(seen)
    run(seen)
    run(seen, group=(1, 2))
    run(seen, shape=(0, 2))
    told = "amax, bfloat16 [8, 2]"
    assert seen == [told, "compared", "run", told, "run", "amax, bfloat16 [0, 2]", "compared"]


def test_a_rank_that_failed_is_named_in_place_of_the_broken_connection(seen) -> None:
    watch.watches[0, 1] = Recorder(seen, checks=3)  # it takes a while until its silence is noticed
    with pytest.raises(Broken, match="rank 1 has stopped"):
        watch.collective("amax", torch.zeros(1), (0, 1), fail)


@pytest.mark.parametrize("group, has_maximum, by", [
    ((0, 1), True, ["maximum of amax"]),
    ((0, 1), False, ["maximum of amax", "maxima of amax", "amax, float32 [1]", "all-reduce"]),
    ((0, 1, 2), True, ["amax, float32 [1]", "all-reduce"]),  # userbuffers of fewer ranks
    ((2, 3), True, ["all-reduce"]),
])  # fmt: skip
def test_a_maximum_goes_through_userbuffers_of_exactly_its_ranks(seen, monkeypatch, group, has_maximum, by) -> None:
    monkeypatch.setattr(watch.dist, "all_reduce", lambda values, **_: (seen.append("all-reduce"), values.mul_(2)))
    watch.watches[0, 1] = recorder = Recorder(seen)
    recorder.has_maximum = has_maximum
    assert watch.group_max("amax", torch.tensor([1.0, 3.0, 2.0]), group).tolist() == [6.0]
    assert seen == by
    seen.clear()
    watch.all_reduce_max("amax", values := torch.tensor([1.0, 3.0]), group)
    assert values.tolist() == [2.0, 6.0]
    assert seen == list(dict.fromkeys(line.replace("maximum", "maxima").replace("[1]", "[2]") for line in by))


@pytest.mark.parametrize("watched", [True, False])
def test_any_other_error_stays_what_it_is(seen, watched) -> None:
    if watched:
        watch.watches[0, 1] = Recorder(seen)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        watch.collective("amax", torch.zeros(1), (0, 1), fail)
