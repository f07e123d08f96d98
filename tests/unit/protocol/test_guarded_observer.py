"""A watcher that raises is dropped; the engine goes on."""

import logging

import pytest

from common.messages import Sampling, StepPlan, StepResult, u32
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.guarded_observer import GuardedObserver
from scheduler_svc.messages import FinishReason, Submit
from scheduler_svc.observer import NoObserver, StepRecord

SUBMIT = Submit(key=1, request_id="r", prompt=u32([1]), sampling=Sampling(seed=1, max_tokens=1), arrival_ns=0)


def record() -> StepRecord:
    keys = u32().astype("uint64")
    return StepRecord(0, StepPlan(1, 1, 0, 0), 0, keys, keys, 0, 0, 0, 0, 0)


class Broken(NoObserver):
    """Raises in one method, counts calls of another."""

    def __init__(self, broken: str) -> None:
        self.calls = 0
        self._broken = broken

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "_broken"):
            return object.__getattribute__(self, "_break")
        return object.__getattribute__(self, name)

    def _break(self, *args: object) -> None:
        raise RuntimeError("broken watcher")

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    "broken",
    ["on_submit", "trace_context", "on_plan", "on_result", "on_delivered", "on_tokens", "on_end", "on_executor"],
)
def test_a_broken_watcher_is_dropped_and_told_of_once(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = Broken(broken)
    guarded = GuardedObserver(inner)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            guarded.on_submit(SUBMIT, 1)
            assert guarded.trace_context(0, 1) == b""
            guarded.on_plan(record(), 1, 2)
            guarded.on_result(record(), StepResult(1, 1), 1, 2, 0)
            guarded.on_delivered(StepOutcome({}, (), record()), 1)
            guarded.on_tokens(1, 1, 1)
            guarded.on_end(1, FinishReason.EOS, "", 1)
            guarded.on_executor(0, "lost", "", 1)
    assert len(caplog.records) == 1
    assert inner.calls == 0
