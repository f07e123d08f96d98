"""The script for the device, rehearsed on the CPU in the smallest sizes: every part runs, what it tells is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import run_part
from tests.unit.kernels.test_bench_gpu import EVERY_KERNEL

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
def test_a_rehearsal_from_the_first_line_to_the_record(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--rehearse", "--json", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "gpu.json").read_text())
    assert told["conditions"]["options"]["rehearse"]
    results = told["results"]
    assert [ending["ended"] for ending in results["endings"]] == ["well"] * 3
    assert {row["kernel"] for row in results["kernels"]} == EVERY_KERNEL
    assert [row for row in results["kernels"] if row.get("right") is False] == []
    assert [row["right"] for row in results["model"]] == [True] * 10
    rows = results["l1b"]
    assert {row["workload"] for row in rows if row["what"] == "table"} == {"G1", "G2", "G3", "G4"}
    (start,) = [row for row in rows if row["what"] == "start-up"]
    assert {"loading tiny", "warming up", "ready"} <= start["seconds"].keys()
    for told in ("KV blocks", "memory, GB: KV cache"):
        assert any(told in line for line in start["log"]), told
    (steps,) = [row for row in rows if row["what"] == "steps"]
    assert sum(steps["histogram_us"].values()) == steps["steady_steps"] > 0
    assert steps["cached_tokens"] == 0, "every prompt is fresh"
    assert {row["pipeline_depth"] for row in rows if row["what"] == "depth"} == {1}
    assert {row["workload"] for row in rows if row["what"] == "alone"} == {"G1", "G2"}
    (row,) = [row for row in rows if row["what"] == "table" and row["workload"] == "G2"]
    assert {"split_cost_percent", "split_reached"} <= row.keys()
    assert isinstance(steps["reached"], bool)
    assert any("reached" in row for row in results["kernels"])
    record = (tmp_path / "gpu.md").read_text()
    assert record.startswith("# bench.gpu\n")
    assert all(f"\n## {title}" in record for title in ("Through the public API", "Checks", "Kernels", "Start-up"))


def test_a_part_that_is_cut_off_or_fails_costs_nobody_anything() -> None:
    rows, ending = run_part("model", json.dumps({"rehearse": True}), 0.05)
    assert rows == [] and ending["ended"] == "cut off after 0 s"
    rows, ending = run_part("model", json.dumps({"nonsense": True}), 60.0)
    assert rows == [] and ending["ended"] == "1"
