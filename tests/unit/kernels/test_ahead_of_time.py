"""Every kernel compiles for sm_90 in the shapes that are served, within what a multiprocessor has, spilling no tile."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executor_svc.kernels.skinny import CANDIDATES, VECTOR_CANDIDATES, SkinnyConfig

pytestmark = pytest.mark.timeout(300)  # all compiling counts as the first test's

SHARES = 2  # processes that compile at once, each its share of the cases
# Of compute capability 9.0: shared memory of one program, registers of all its threads.
MAX_SHARED = 227 * 1024
MAX_REGISTERS = 65536
# Bytes of a thread's stack: a few for what the compiler keeps there of its own; tiles that spill take hundreds.
MAX_STACK = 32


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "protos")])

    def compile_share(share: int) -> dict[str, list[dict[str, Any]]]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tests.unit.kernels.ahead", str(share), str(SHARES)],
            env=environment, cwd=root, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        told: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
        return told

    with ThreadPoolExecutor(SHARES) as pool:
        return {name: kernels for told in pool.map(compile_share, range(SHARES)) for name, kernels in told.items()}


def test_every_case_compiles_within_a_multiprocessor(compiled: dict[str, list[dict[str, Any]]]) -> None:
    for name, kernels in compiled.items():
        assert kernels, name
        for kernel in kernels:
            told = f"{name}: {kernel}"
            assert kernel["target"].startswith(".target sm_90"), told
            assert kernel["shared"] <= MAX_SHARED, told
            assert kernel["registers"] * kernel["warps"] * 32 <= MAX_REGISTERS, told
            assert kernel["stack"] <= MAX_STACK and kernel["local"] == 0, told


def test_every_kernel_compiles_with_each_of_its_flags_on_and_off(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """So that no way to launch is left out. Sampling is greedy or has all that a row may have: nothing in between."""
    seen: dict[str, dict[str, set[bool]]] = {}
    for kernels in compiled.values():
        for kernel in kernels:
            for flag, value in kernel["flags"].items():
                seen.setdefault(kernel["kernel"], {}).setdefault(flag, set()).add(value)
    missing = {
        (kernel, flag, value)
        for kernel, flags in seen.items()
        for flag, values in flags.items()
        for value in {True, False} - values
    }
    assert missing == {("draw_kernel", "HAS_PENALTIES", False)}
    ways = {
        (kernel["flags"]["IS_RANDOM"], kernel["flags"]["HAS_PENALTIES"], kernel["flags"]["HAS_OUT"])
        for kernels in compiled.values()
        for kernel in kernels
        if kernel["kernel"] == "commit_kernel"
    }
    assert ways == {(full, full, has_out) for full in (True, False) for has_out in (True, False)}


def test_what_is_written_in_place_no_other_thread_reads(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """Nothing orders the threads of a program there."""
    kernels = [k for told in compiled.values() for k in told if k["kernel"] == "norm_kernel"]
    for kernel in kernels:
        assert kernel["in place"] == ("itself" if kernel["flags"]["HAS_RESIDUAL"] else ""), kernel
    assert len(compiled["norms in place"]) == 4


@pytest.mark.parametrize("kind", ["exact", "exact, window"])
def test_a_row_is_summed_alike_decoding_and_in_a_chunk(compiled: dict[str, list[dict[str, Any]]], kind: str) -> None:
    """In exact numerics its bits are the same: the compiler must have laid both kernels' tiles out the same way."""
    decode, prefill = (compiled[f"{kernel}, {kind}"][0] for kernel in ("decode", "prefill"))
    assert decode["warps"] == prefill["warps"]
    assert len(decode["sums"]) == 4 and decode["sums"] == prefill["sums"], (decode["sums"], prefill["sums"])


# Few rows leave the wide unit of a warp group mostly idle: a row that decodes takes a warp's.
@pytest.mark.parametrize(
    ("name", "units"),
    [
        *((f"decode, {model}{mixed}", {"wgmma", "mma.sync"}) for model in ("l1b", "l8b") for mixed in ("", ", mixed")),
        *((f"prefill, {kind}", {"wgmma"}) for kind in ("l1b", "l8b", "window")),
    ],
)
def test_attention_of_half_precision_uses_the_matrix_units(
    compiled: dict[str, list[dict[str, Any]]], name: str, units: set[str]
) -> None:
    kernel = compiled[name][0]
    assert units & set(kernel["instructions"]), kernel
    assert "cp.async of 16" in kernel["instructions"], kernel


# What a multiprocessor must have under way for 4.8 TB/s: 132 of them, 0.8 µs from request to data.
BYTES_IN_FLIGHT = 4.8e12 * 0.8e-6 / 132
# Of a multiprocessor: shared memory (1 KiB more for each program), registers, threads.
SHARED, REGISTERS, THREADS = 228 * 1024, 65536, 2048


@pytest.mark.parametrize("config", [*CANDIDATES, *VECTOR_CANDIDATES], ids=str)
def test_products_of_few_rows_have_enough_bytes_under_way(
    compiled: dict[str, list[dict[str, Any]]], config: SkinnyConfig
) -> None:
    """Weights come 16 bytes a thread at once, past the registers where the matrix units multiply; what is asked for
    and not yet there, of all programs that fit a multiprocessor, covers the way to memory."""
    kernel = compiled[f"skinny, {config}"][0]
    assert ("load of 16" if config.is_vector else "cp.async of 16") in kernel["instructions"], kernel
    threads = 32 * kernel["warps"]
    fit = min(SHARED // (kernel["shared"] + 1024), REGISTERS // (kernel["registers"] * threads), THREADS // threads)
    tile = 2 * config.outs * config.inner
    assert fit * tile * max(1, config.stages - 2) >= BYTES_IN_FLIGHT, (fit, kernel)


@pytest.mark.parametrize("name", ["attention", "between products", "sampling", "products"])
def test_kernels_launched_early_wait_before_they_touch_memory(
    compiled: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """All but the hint that weights, which no kernel writes, will be read."""
    for kernel in compiled[f"early, {name}"]:
        reads_weights = kernel["kernel"] in ("skinny_kernel", "vector_kernel")
        assert kernel["early"] == ("prefetches" if reads_weights else "yes"), kernel
    for plain, kernels in compiled.items():
        if not plain.startswith("early"):
            assert {kernel["early"] for kernel in kernels} == {"no"}, plain
