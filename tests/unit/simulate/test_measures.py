"""Numbers against plain Python."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.simulate.lengths import Lengths
from scheduler_svc.simulate.measures import Histogram
from scheduler_svc.simulate.plots import plots_of
from scheduler_svc.simulate.report import MEANINGS, meaning, shown, write_report
from scheduler_svc.simulate.results import jain, write_steps
from scheduler_svc.simulate.simulation import Setup
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


def test_the_table_is_what_plain_python_counts() -> None:
    """Of two executors with too few blocks and a short queue: some are preempted, some refused."""
    model = MODEL.model_copy(update={"executor": MODEL.executor.model_copy(update={"num_blocks": 40})})
    lengths = {"prompt": Lengths("uniform", 1, 100), "output": Lengths("uniform", 1, 200)}
    trace = drawn(requests=120, rate=400.0, tenants=(("a", 1.0), ("b", 1.0)), **lengths)
    config = CoreConfig(max_queued_requests=8)
    simulation, results = simulated(trace, config, Setup(num_executors=2), model)
    m, n = simulation.measures, results.numbers
    steps = [dict(zip(m.steps.rows().dtype.names or (), row, strict=True)) for row in m.steps.rows().tolist()]
    done = [i for i in range(len(trace)) if m.end[i] >= 0]
    seconds = (max(m.last.tolist()) - min(at for at in m.arrival.tolist() if at >= 0)) / 1e9
    took_ms = [(step["end_ns"] - step["start_ns"]) / 1e6 for step in steps]
    assert 0 < n["refused_overloaded"] == len(trace) - len(done) and n["preemptions"] > 0
    assert {step["executor"] for step in steps} == {0, 1}
    wanted = {
        "finished": len(done),
        "duration_s": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": sum(int(trace.output_tokens[i]) for i in done) / seconds,
        "prefill_tokens": sum(step["prefill_tokens"] for step in steps),
        "p99_latency_ms": np.percentile([(m.end[i] - m.arrival[i]) / 1e6 for i in done], 99),
        "steps": len(steps),
        "p95_step_ms": np.percentile(took_ms, 95),
        "mean_sequences": sum(step["num_sequences"] for step in steps) / len(steps),
        "most_waiting": max(step["waiting"] for step in steps),
        "least_free_blocks": min(step["free_blocks"] for step in steps),
        "device_busy_share": sum(took_ms) / 1000 / 2 / seconds,
        "preemptions": sum(max(s["preemptions"] for s in steps if s["executor"] == e) for e in (0, 1)),
    }
    assert {name: n[name] for name in wanted} == pytest.approx(wanted)
    assert n["prefill_tokens"] > sum(int(trace.prompt_tokens[i]) for i in done), "what was computed again counts"
    assert n["device_busy_share"] < 1 and n["p95_step_ms"] < n["p99_latency_ms"]
    assert m.tenants is not None and (m.tenants.waiting == 0).all()


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
