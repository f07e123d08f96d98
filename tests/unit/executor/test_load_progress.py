"""What the start took is told part by part, in the log and as a metric."""

import logging

import pytest

from common.clock import ManualClock
from executor_svc.load_progress import OTHER, LogProgress
from executor_svc.metrics import CountingSink


def started(clock: ManualClock) -> LogProgress:
    progress = LogProgress(clock=clock)

    def at(seconds: float, activity: str, done: int, total: int) -> None:
        clock.advance_ns(int(seconds * 1e9))
        progress(activity, done, total)

    at(1.0, "loading some/model", 0, 100)
    at(2.0, "loading some/model", 50, 100)
    at(2.0, "loading some/model", 100, 100)
    at(0.5, "warming up", 0, 1)
    at(0.25, "capturing graphs", 0, 2)
    at(3.0, "capturing graphs", 2, 2)
    at(0.0, "warming up", 1, 1)
    clock.advance_ns(250_000_000)
    progress.finish()
    return progress


def test_time_counts_for_what_was_named_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seconds = started(ManualClock()).seconds
    assert seconds == {OTHER: 1.75, "loading": 4.0, "warming up": 0.25, "capturing graphs": 3.0}
    last = caplog.records[-1].getMessage()
    assert last.startswith("started in 9.00 s: ") and "capturing graphs 3.00 s" in last


def test_the_start_is_a_metric_of_its_own() -> None:
    counts = CountingSink(None, started(ManualClock()).seconds)
    start = next(family for family in counts.families() if family.name == "stepwire_start_seconds")
    assert {sample.labels["part"]: sample.value for sample in start.samples}["loading"] == 4.0
    assert not counts.steps
