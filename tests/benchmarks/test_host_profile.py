"""benchmarks/host_profile.py: its shares against measured times, and what modules.py and overlap.py print of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from te_lite.testing.distributed import launch

ROOT = Path(__file__).resolve().parents[2]

# A step of Python and of a long call into C, after another such call that does not belong to it.
SAMPLED = """
import json, time
from benchmarks.host_profile import Sampler

took = dict.fromkeys(("first", "second", "third", "long"), 0.0)

def spin(name):
    begin = time.perf_counter()
    while time.perf_counter() - begin < 2e-4:
        pass
    took[name] += time.perf_counter() - begin

def step():
    spin("first")
    spin("second")
    spin("third")
    begin = time.perf_counter()
    sum(range(40_000))  # some periods, in which Python handles no signal
    took["long"] += time.perf_counter() - begin

sampler = Sampler()
sampler.run(step, lambda: sum(range(100_000)), 800)
begin = step.__code__.co_firstlineno
found = {line - begin: periods for (code, line), periods in sampler.all.items() if code is step.__code__}
print(json.dumps([list(took.values()), [found.get(i, 0) for i in (1, 2, 3, 5)]]))
"""


def test_host_profile_shares():
    """What a line took is what samples say: also of a call that holds signals up, and wherever in a step it stands."""
    said = subprocess.run([sys.executable, "-c", SAMPLED], check=True, capture_output=True, text=True, cwd=ROOT)
    took, found = (torch.tensor(values) for values in json.loads(said.stdout))
    assert not said.stderr
    # The spins alone are 800 * 0.6 ms, over 2,000 periods. A sample may count for several: a bound of seven times the
    # deviation sqrt(p (1 - p) / n), which is 0.011 at most.
    torch.testing.assert_close(found / found.sum(), took / took.sum(), atol=0.08, rtol=0)


def test_host_profile_of_a_module():
    options = ("--device", "cpu", "--profile", "60", "--modules", "Linear", "--recipes", "current")
    text = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "modules.py", *options], check=True, capture_output=True, text=True
    ).stdout
    whole, forward = map(
        int, re.search(r"Linear current: host (\d+) us a step, (\d+) of it the forward", text).groups()
    )
    assert 0 < forward < whole
    lines = text.rpartition("by the line and what it calls")[2]
    for name in ("linear_forward", "quantize_grad"):  # of forward, of backward
        found = [float(us) for us in re.findall(rf"([\d.]+)  functional/linear.py:\d+ {name}\n", lines)]
        assert found and 0 < max(found) < whole


def test_host_profile_of_ranks(tmp_path):
    """Of the overlapped module and of the other, and nothing is timed or written."""
    out = tmp_path / "none"
    options = ("--device", "cpu", "--profile", "300", "--methods", "ring", "--recipes", "bf16", "--out", str(out))
    said = launch(ROOT / "benchmarks" / "overlap.py", *options, ranks=2, timeout=120)
    _, ring, collective = said.split("=== smoke bf16, ")
    assert ring.startswith("ring: host") and "overlap/ring.py" in ring
    assert collective.startswith("Collective: host") and "overlap/collective.py" in collective
    assert "overlap/ring.py" not in collective
    assert not out.exists()
