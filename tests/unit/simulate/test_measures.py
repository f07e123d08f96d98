"""Numbers against plain Python."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from scheduler_svc.simulate.measures import Histogram
from scheduler_svc.simulate.plots import plots_of
from scheduler_svc.simulate.report import MEANINGS, meaning, shown, write_report
from scheduler_svc.simulate.results import jain, write_steps
from tests.unit.simulate.scenes import MODEL, drawn, simulated


def test_percentiles_of_the_histogram_are_within_half_a_percent() -> None:
    values = np.random.default_rng(1).lognormal(16, 2, size=50_000).astype(np.int64)
    histogram = Histogram()
    for part in np.array_split(values, 500):
        histogram.add(part)
    assert len(histogram) == 50_000
    for percent in (1, 50, 95, 99, 100):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert histogram.percentile_ns(percent) == pytest.approx(exact, rel=0.006)
    assert histogram.mean_ns() == pytest.approx(values.mean())
    assert math.isnan(Histogram().percentile_ns(50)) and math.isnan(Histogram().mean_ns())


def test_results_agree_with_what_was_measured() -> None:
    trace = drawn(tenants=(("a", 1.0), ("b", 1.0)))
    simulation, results = simulated(trace)
    m, numbers = simulation.measures, results.numbers
    ttft = (m.first - m.arrival) / 1e6
    assert numbers["p99_ttft_ms"] == pytest.approx(np.percentile(ttft, 99))
    assert numbers["output_tokens"] == trace.output_tokens.sum() == simulation.stats.generated_tokens
    assert len(m.gaps) == trace.output_tokens.sum() - len(trace)
    own = {name: row["p50_ttft_ms"] for name, row in results.tenants.items()}
    assert own["a"] == pytest.approx(np.percentile(ttft[trace.tenant == 0], 50))
    assert sum(row["output_tokens"] for row in results.tenants.values()) == numbers["output_tokens"]
    assert m.tenants is not None
    _, served, waiting = m.tenants.samples()
    assert (np.diff(served, axis=0) >= 0).all() and (waiting >= 0).all()
    assert (m.tenants.waiting == 0).all()


def test_fairness_under_contention() -> None:
    """Twice the requests, twice the tokens, as long as nobody is favoured."""
    _, results = simulated(drawn(requests=400, rate=5000.0, tenants=(("a", 2.0), ("b", 1.0))))
    assert results.numbers["contended_s"] > 0
    assert results.tenants["a"]["contended_share"] == pytest.approx(2 / 3, abs=0.1)
    assert results.numbers["fairness"] == pytest.approx(jain(np.array([2.0, 1.0])), abs=0.06)
    assert jain(np.array([1.0, 1.0])) == 1.0 and jain(np.array([1.0, 0.0])) == 0.5


def test_steps_are_written_as_json_lines_and_csv(tmp_path: Path) -> None:
    simulation, _ = simulated(drawn(requests=5))
    steps = simulation.measures.steps.rows()
    write_steps(steps, tmp_path / "s.jsonl")
    write_steps(steps, tmp_path / "s.csv")
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    with (tmp_path / "s.csv").open(newline="") as text:
        table = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(text)]
    assert lines == table and len(lines) == len(steps)
    assert {"decode_tokens", "prefill_tokens", "num_sequences", "free_blocks"} <= set(lines[0])
    with pytest.raises(ConfigError, match=r"jsonl or a \.csv"):
        write_steps(steps, tmp_path / "s.txt")


def test_a_report_is_the_same_each_time_and_has_every_plot(tmp_path: Path) -> None:
    trace = drawn(tenants=(("a", 1.0), ("b", 1.0)))
    for name in ("one", "two"):
        simulation, results = simulated(trace)
        plots = plots_of(simulation.measures, MODEL.executor.num_blocks)
        write_report(tmp_path / name, "stepwire simulate", results, plots)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert {
        "ttft.svg",
        "itl.svg",
        "throughput.svg",
        "queue.svg",
        "kv.svg",
        "cache.svg",
        "preemptions.svg",
        "tenants.svg",
    } < set(files)
    report = files["report.md"].decode()
    assert all(f"]({name})" in report for name in plots)
    assert all(meaning(name) in report for name in results.numbers)
    assert json.loads(files["report.json"])["results"]["finished"] == len(trace)
    assert all(files[name].startswith(b"<svg") for name in plots)


def test_every_number_has_a_meaning() -> None:
    _, results = simulated(drawn(tenants=(("a", 1.0), ("b", 1.0))))
    assert set(results.numbers) | set(results.tenants["a"]) <= set(MEANINGS)


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "–"), (math.inf, "∞"), (0.0, "0"), (1234567.0, "1,234,567"), (12345.6, "12,346"), (3.14159, "3.142")],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert shown(value) == text
