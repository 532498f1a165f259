"""te_lite doctor: each finding can be good and bad, the trial is real, and the exit status says which."""

import importlib
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from te_lite import _C, doctor
from te_lite.doctor import BROKEN, NOTE, OK, Finding

ROOT = Path(__file__).parents[2]
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 << 30, multi_processor_count=132)
WITH_GPU = {"available": True, "reason": "", "driver_version": 13000, "devices": 1}
WITHOUT = {"available": False, "reason": "libcuda.so.1 cannot be opened", "driver_version": 0, "devices": 0}

# (driver_info, torch's CUDA, devices that torch sees, states, part of the text)
DRIVERS = [
    (WITHOUT, None, [], [NOTE], "libcuda.so.1 cannot be opened"),
    (WITH_GPU, "13.0", [H200], [OK, OK], "NVIDIA H200, compute capability 9.0, 150 GiB, 132 SMs"),
    (WITH_GPU, None, [], [OK, BROKEN], "built without CUDA"),
    (WITH_GPU, "13.1", [], [OK, BROKEN], "built for CUDA 13.1, the driver serves 13.0"),
]


@pytest.mark.parametrize(("info", "torch_cuda", "seen", "states", "says"), DRIVERS)
def test_driver(info, torch_cuda, seen, states, says) -> None:
    found = doctor.driver(info, torch_cuda, seen)
    assert [finding.state for finding in found] == states
    assert says in doctor.format_findings(found)


def test_devices_that_torch_cannot_use_are_a_finding(monkeypatch) -> None:
    def fail(ordinal: int) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    _, broken = doctor.driver(WITH_GPU, "13.1", *doctor.seen_devices(1))
    assert broken.state == BROKEN and broken.text == "the driver is too old" and "update the driver" in broken.remedy
    assert doctor.seen_devices(0) == ([], "")


def test_recipes_that_a_device_lacks_are_named_with_the_reason() -> None:
    def support(name: str, device: str) -> tuple[bool, str]:
        return (name != "mxfp8" or device == "cpu", "needs more")

    found = doctor.recipes(["cpu", "cuda:0"], support)
    assert [(f.what, f.state) for f in found] == [
        ("recipes on cpu", OK),
        ("recipes on cuda:0", OK),
        ("recipe mxfp8 on cuda:0", NOTE),
    ]
    assert "mxfp8" in found[0].text and "mxfp8" not in found[1].text and found[2].text == "needs more"


def test_fused() -> None:
    assert [f.state for f in doctor.fused(2, lambda device: "")] == [OK]
    (found,) = doctor.fused(2, lambda device: "pip install it" if device.index else "")
    assert found.state == NOTE and found.text == "cuda:1: pip install it"


def test_peers() -> None:
    assert doctor.peers(1, lambda a, b: False) == []
    assert [f.state for f in doctor.peers(2, lambda a, b: True)] == [OK]
    (found,) = doctor.peers(3, lambda a, b: (a, b) != (0, 2))
    assert found.state == NOTE and "not from 0 to 2" in found.text and found.remedy


def test_ranks_share_memory() -> None:
    said = doctor.trial("cpu", 2)
    assert said == [""] * 2
    assert doctor.userbuffers("cpu", said) == Finding(
        "userbuffers on cpu", OK, "2 ranks gathered through shared memory"
    )


def test_a_rank_that_fails_is_named() -> None:
    said = doctor.trial("abacus", 2)
    found = doctor.userbuffers("abacus", said)
    assert found.state == BROKEN and found.text.startswith("rank 0: ") and "rank 1: " in found.text and found.remedy


def test_ranks_that_do_not_answer_are_ended() -> None:
    said = doctor.trial("cpu", 2, seconds=0.0)
    assert said == ["no answer in time"] * 2


@pytest.mark.parametrize(("state", "status", "last"), [(NOTE, 0, "this machine can run"), (BROKEN, 1, "broken: it")])
def test_exit_status(state: str, status: int, last: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("it", state, "is so", "do this")])
    assert doctor.main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(state) and lines[1].strip() == "-> do this" and lines[2].startswith(last)


@pytest.mark.skipif(_C.driver_info()["available"], reason="this machine has a GPU")
def test_a_machine_without_gpu_is_examined(monkeypatch) -> None:
    tried = []

    def trial(kind: str, ranks: int) -> list[str]:
        tried.append((kind, ranks))
        return [""] * ranks

    monkeypatch.setattr(doctor, "trial", trial)
    found = {finding.what: finding for finding in doctor.examine()}
    assert tried == [("cpu", 2)]
    assert found["driver"].state == NOTE and found["userbuffers on cpu"].state == OK
    assert doctor.verdict(found.values()) == ("this machine can run te_lite", True)


@pytest.mark.multigpu
def test_gpus_are_examined() -> None:
    found = {finding.what: finding for finding in doctor.examine()}
    assert found["userbuffers on cuda"].state == OK and "GB/s" in found["peer copies"].text


def test_console_script() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["te_lite"].partition(":")
    assert getattr(importlib.import_module(module), function) is doctor.main
