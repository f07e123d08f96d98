"""The script for the device runs: without one it says so; its kernels' part on one, without a clock."""

from collections.abc import Callable, Sequence

import pytest
import torch

import bench.gpu
import bench.gpu_attention
import bench.gpu_kernels
import bench.gpu_layers
import bench.gpu_step
from bench.gpu_report import Row
from bench.gpu_timing import Bounds
from tests.interpreter import DEVICE

EVERY_KERNEL = {
    "bounds", "decode attention", "decode attention, exact", "prefill attention", "norm and residual", "gate",
    "rotation and write", "step inputs", "cache write", "sampling", "skinny product", "layers, launched early",
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.gpu.main(["--part", "kernels"]) == 0
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the whole rehearsal does the same in the interpreter")
def test_each_kernel_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(calls: Sequence[Callable[[], object]], *, least_calls: int = 0) -> float:
        calls[0]()
        return 1.0

    for module in (bench.gpu_kernels, bench.gpu_attention, bench.gpu_layers, bench.gpu_step):
        monkeypatch.setattr(module, "time_us", run_once)
    monkeypatch.setattr(bench.gpu_kernels, "measure_bounds", lambda device: Bounds(1e12, 1e15))
    emitted: list[Row] = []
    rows = bench.gpu_kernels.run(DEVICE, bench.gpu_kernels.REHEARSED, emitted.append)
    assert {row["kernel"] for row in rows} == EVERY_KERNEL
    assert [row for row in rows if row.get("right") is False] == []
    assert emitted == rows
