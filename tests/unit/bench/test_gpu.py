"""What bench.gpu makes of what it measured, and what it says where nothing can be measured."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bench.gpu
from bench.gpu_load import Load, Outcome, summarise
from bench.gpu_record import record, shown
from bench.gpu_serve import EDGES, gaps, held_against
from bench.gpu_services import phases
from bench.gpu_shapes import GOALS, SHAPES, WORKLOADS
from executor_svc.models.config import parse_config

LOAD = Load(requests=2, at_once=2, prompt=4, output=3)


def arrivals(*rows: tuple[int, int]) -> Any:
    return np.array([(stream, at, 7) for stream, at in rows], np.int64)


def test_a_load_runs_from_the_first_request_to_the_last_token() -> None:
    ms = 1_000_000
    first = (np.array([(1, 10 * ms)]), arrivals((1, 12 * ms), (1, 13 * ms), (1, 15 * ms)))
    second = (np.array([(1, 11 * ms)]), arrivals((1, 12 * ms), (1, 13 * ms), (1, 30 * ms)))
    outcome = summarise([first, second], LOAD, 0.5)
    assert outcome.wall_s == 0.02 and outcome.output_tokens_per_s == 300.0
    assert outcome.ttft_ms["p50"] == 1.5 and outcome.gap_ms["p50"] == 1.5


def test_a_stream_that_lacks_tokens_is_an_error() -> None:
    whole = (np.array([(1, 0)]), arrivals((1, 1), (1, 2), (1, 3)))
    with pytest.raises(RuntimeError, match="3 tokens came where 6"):
        summarise([whole], LOAD, 0.0)
    with pytest.raises(RuntimeError, match=r"got \[2\]"):
        summarise([(whole[0], arrivals((1, 1), (1, 2)))], LOAD, 0.0)


def outcome(tokens_per_s: float, ms: float) -> Outcome:
    return Outcome(tokens_per_s, ms, 1.0, {}, {}, 0.1)


def test_ratios_above_one_are_ahead_whichever_way_the_unit_runs() -> None:
    slower = held_against("l1b", "G1", outcome(500.0, 2.0), None)
    assert slower["of_vllm"] == 1.22 and slower["of_floor"] == 0.29 and not slower["reached"]
    faster = held_against("l8b", "G2", outcome(7300.0, 1.0), {"output_tokens_per_s": 7500.0})
    assert faster["of_vllm"] == 1.086 and faster["reached"]
    assert faster["split_cost_percent"] == 2.67 and not faster["split_reached"]
    assert held_against("l8b", "G2", outcome(7400.0, 1.0), {"output_tokens_per_s": 7500.0})["split_reached"]
    assert held_against("tiny", "G1", outcome(1.0, 1.0), None) == {}


def step(step_id: int, idle_us: float, *, decode: int = 4, prefill: int = 0, skipped: int = 0) -> Any:
    return SimpleNamespace(
        step_id=step_id, epoch=1, skipped=skipped, decode_tokens=decode, prefill_tokens=prefill, bucket=4,
        device_idle_ns=int(idle_us * 1e3), device_ns=100_000,
    )  # fmt: skip


def test_gaps_are_those_between_steps_that_only_decode() -> None:
    seen = [
        step(1, 900, prefill=8), step(2, 800), step(3, 5), step(4, 7), step(6, 700, skipped=1),
        step(7, 9), step(8, 0, decode=0),
    ]  # fmt: skip
    found = gaps(seen)
    assert found["steady_steps"] == 3 and found["idle_us"]["p50"] == 7.0
    assert found["histogram_us"]["<=5"] == 1 and found["histogram_us"]["<=10"] == 2
    assert len(found["histogram_us"]) == len(EDGES) + 1 and found["lost"] == 1
    assert gaps([])["idle_us"] == {} and gaps([])["reached"] is None


def test_idle_gaps_are_held_against_their_goal() -> None:
    assert gaps([step(i, 9) for i in range(5)])["reached"]
    assert gaps([step(i, 11) for i in range(5)])["reached"] is False
    assert gaps([step(i, 60 if i == 3 else 5) for i in range(5)])["reached"] is False


def test_phases_of_a_log() -> None:
    log = """2026-01-02 03:04:05,000 executor INFO loading l1b: 0 %
2026-01-02 03:04:05,500 executor INFO warming up: 0 %
2026-01-02 03:04:06,000 executor INFO capturing graphs: 10 %
2026-01-02 03:04:07,250 executor INFO capturing graphs: 100 %
2026-01-02 03:04:07,500 executor INFO warming up: 100 %
2026-01-02 03:04:08,000 executor INFO ready: l1b on cpu"""
    assert phases(log) == {"loading l1b": 0.0, "warming up": 2.0, "capturing graphs": 1.25}


def test_shapes_are_models_that_are_served() -> None:
    configs = {name: parse_config(values, name) for name, values in SHAPES.items()}
    assert 1.2e9 < configs["l1b"].num_parameters < 1.3e9
    assert 7.9e9 < configs["l8b"].num_parameters < 8.1e9
    assert {workload for _, workload in GOALS} == set(WORKLOADS)


def test_a_record_names_what_is_wrong_and_what_was_cut_off() -> None:
    results: dict[str, list[dict[str, Any]]] = {
        "model": [{"what": "check", "name": "tokens", "right": False, "different": 3}],
        "endings": [{"part": "model", "ended": "cut off after 60 s", "wall_s": 60.0}],
    }
    text = record({"device": "a | b"}, results)
    assert "| model | cut off after 60 s | 60 |" in text
    assert "## Wrong" in text and "| tokens | **no** | 3 |" in text
    assert len(bench.gpu.failures(results)) == 2
    assert shown({"a": 1234.5, "b": None}) == "a 1,234, b "


def test_limits_are_checked() -> None:
    assert bench.gpu.limits(bench.gpu.parse(["--limit", "model=5"]))["model"] == 5.0
    with pytest.raises(SystemExit, match="PART=SECONDS"):
        bench.gpu.limits(bench.gpu.parse(["--limit", "models=5"]))
    around = bench.gpu.START_S + len(bench.gpu.LIMITS) * 2 * bench.gpu.STOP_S
    assert sum(bench.gpu.LIMITS.values()) + around <= 360, "six minutes in all, starting and stopping with it"
    assert bench.gpu.limits(bench.gpu.parse(["--rehearse"])) == dict.fromkeys(bench.gpu.LIMITS, bench.gpu.REHEARSE_S)
