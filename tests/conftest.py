"""Markers, seeds and scheduling that hold for every test."""

import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here and in the ranks that tests start: two cores are shared by several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if os.environ.get("TE_LITE_SPREAD") and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    # Each worker on a GPU of its own choice (benchmarks/gpu_check.py, for tests of one GPU).
    gpus = os.environ["TE_LITE_SPREAD"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

SEED = 1234
MANY_CORES = 32  # every suite of ranks has at most 8 processes

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run; the deadline would measure the neighbours on a shared machine.
    settings.register_profile("te_lite", derandomize=True, deadline=None, max_examples=50)
    settings.load_profile("te_lite")


OUTCOMES = os.environ.pop("TE_LITE_OUTCOMES", None)  # a file (benchmarks/gpu_check.py); not of runs that tests start


class Outcomes:
    """Each test that has passed or failed is written to `file` as it ends. One that passed before is not run again."""

    def __init__(self, file: str) -> None:
        lines = Path(file).read_text().splitlines()[1:]
        last = {name: word for word, _, name in (line.partition(" ") for line in lines)}
        self.file, self.known = file, [name for name, word in last.items() if word == "passed"]
        self.called: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.called.discard(report.nodeid)
            self.write("failed", report.nodeid)
        elif report.passed and report.when == "call":
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self.called:
            self.write("passed", report.nodeid)

    def write(self, word: str, name: str) -> None:
        with open(self.file, "a") as log:
            log.write(f"{word} {name}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["known"] = self.known  # also of a process that takes the place of one that died


def pytest_configure(config: pytest.Config) -> None:
    if OUTCOMES:
        config.pluginmanager.register(Outcomes(OUTCOMES), "outcomes")


@pytest.hookimpl(trylast=True)  # after -m has left out what it leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    outcomes = config.pluginmanager.get_plugin("outcomes")
    if known := set(outcomes.known if outcomes else getattr(config, "workerinput", {}).get("known", ())):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needs = {"gpu": 1, "multigpu": 2}
    for item in items:
        for marker, needed in needs.items():
            if item.get_closest_marker(marker) and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {gpus}"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Under -n, one worker runs all of tests/distributed, one after the other, so that ranks never run beside
    other ranks, unless there are cores for both; every other test goes to whichever worker is free. (--dist loadgroup
    would say the same, but xdist 3.8 renames tests in a way that pytest 9.2 no longer sees.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            alone = nodeid.startswith("tests/distributed/") and (os.cpu_count() or 1) < MANY_CORES
            return "distributed" if alone else nodeid

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test begins as in a process that has compiled nothing under delayed scaling: then autocasts do more."""
    yield
    if (scales := sys.modules.get("te_lite.quantize.graph_scales")) is not None:
        scales.active = False  # type: ignore[attr-defined]


@pytest.fixture
def no_other_scales() -> None:
    """Modules of earlier tests may live on: their scales step too, and move others when they go."""
    from te_lite import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if (te := sys.modules.get("te_lite")) is not None:
        te.destroy_ub()
    dist.destroy_process_group()
