"""Every kernel compiles for sm_90 in the shapes that are served, within what a multiprocessor has, spilling no tile."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # all compiling counts as the first test's

# Of compute capability 9.0: shared memory of one program, registers of all its threads.
MAX_SHARED = 227 * 1024
MAX_REGISTERS = 65536
# Bytes of a thread's stack: a few for what the compiler keeps there of its own; tiles that spill take hundreds.
MAX_STACK = 16


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "protos")])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.unit.kernels.ahead"],
        env=environment, cwd=root, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return told


def test_every_case_compiles_within_a_multiprocessor(compiled: dict[str, list[dict[str, Any]]]) -> None:
    for name, kernels in compiled.items():
        assert kernels, name
        for kernel in kernels:
            told = f"{name}: {kernel}"
            assert kernel["target"].startswith(".target sm_90"), told
            assert kernel["shared"] <= MAX_SHARED, told
            assert kernel["registers"] * kernel["warps"] * 32 <= MAX_REGISTERS, told
            assert kernel["stack"] <= MAX_STACK and kernel["local"] == 0, told


@pytest.mark.parametrize("name", ["decode, l1b", "decode, l8b"])
def test_attention_of_half_precision_uses_the_matrix_units(
    compiled: dict[str, list[dict[str, Any]]], name: str
) -> None:
    kernel = compiled[name][0]
    assert {"wgmma", "mma.sync"} & set(kernel["instructions"]), kernel
    assert "cp.async" in kernel["instructions"], kernel
