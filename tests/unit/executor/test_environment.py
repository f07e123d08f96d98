"""What the machine has: processors by its control group, and what Triton needs before a GPU's first step."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from executor_svc import assemble, environment
from executor_svc.assemble import compute_threads
from executor_svc.build import make_ops
from executor_svc.config import ExecutorConfig
from executor_svc.cpu_device import CpuDevice
from executor_svc.environment import cgroup_cpus, own_cpus, why_no_triton
from executor_svc.numerics import FastOps
from executor_svc.streams import Stream


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Has the package, a compiler and Python's headers."""
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(environment, "find_spec", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_path", lambda *which: str(tmp_path))
    return tmp_path


def test_the_working_directory_may_be_gone(tmp_path: Path) -> None:
    """MKL, which torch loads, ends a process whose directory was deleted."""
    code = (
        "import pathlib, sys; pathlib.Path.cwd().rmdir(); "
        "from executor_svc.environment import prepare_environment; prepare_environment('fast'); "
        "import torch; a = torch.ones(64, 64); print((a @ a).sum().item())"
    )
    (tmp_path / "gone").mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "gone", env=environ, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "262144.0\n"), done.stderr


def test_what_triton_needs_is_there(able: Path) -> None:
    assert why_no_triton() == ""


@pytest.mark.parametrize(("missing", "reason"), [("gcc", "no C compiler"), ("Python.h", "Python's C headers")])
def test_a_gpu_is_served_by_torch_without(able: Path, missing: str, reason: str) -> None:
    (able / missing).unlink()
    assert reason in why_no_triton()
    assert type(make_ops("fast", torch.device("cuda"))) is FastOps


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_threads_are_bounded_by_the_control_group(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_cpus(tmp_path) == expected


@pytest.mark.parametrize(("asked", "bound", "expected"), [(0, 2, 2), (0, 4, 0), (0, 9, 0), (0, None, 0), (3, 2, 3)])
def test_threads_are_the_least_that_host_and_control_group_give(
    monkeypatch: pytest.MonkeyPatch, asked: int, bound: int | None, expected: int
) -> None:
    """Of four that torch counted, which knows host and affinity. 0: those stay."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(assemble, "cgroup_cpus", lambda: bound)
    assert compute_threads(ExecutorConfig(threads=asked)) == expected


def test_as_many_threads_as_processors_keep_to_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 2, 5})
    assert own_cpus(3) == (2, 5, 7)
    assert own_cpus(2) == own_cpus(4) == ()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2})
    assert own_cpus(1) == ()


def test_a_device_thread_keeps_to_its_processor_alone() -> None:
    before = os.sched_getaffinity(0)
    device = CpuDevice(threads=1, cpu=max(before))
    seen: list[set[int]] = []
    device.enqueue(Stream.COMPUTE, lambda: seen.append(os.sched_getaffinity(0)))
    device.close()
    assert seen == [{max(before)}]
    assert os.sched_getaffinity(0) == before
