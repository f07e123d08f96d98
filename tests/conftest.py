"""Before any test module is imported: what exact numerics need must stand in the environment before torch is loaded,
and whether Triton interprets its kernels is decided when triton is. It does where there is no GPU to run them on.

One thread per operation: tests share the machine with the services they start, and threads that wait for each other on
busy cores are slower than one.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

from executor_svc.environment import cgroup_cpus, prepare_environment

prepare_environment("exact")

HAS_GPU = Path("/dev/nvidiactl").exists()
MAX_PROCESSES = 4  # each loads torch, and starts services beside it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `pytest -n auto`: one for each processor there is time for, and one for a GPU, whose memory the
    tests take as if it were theirs."""
    return 1 if HAS_GPU else min(len(os.sched_getaffinity(0)), cgroup_cpus() or MAX_PROCESSES, MAX_PROCESSES)
