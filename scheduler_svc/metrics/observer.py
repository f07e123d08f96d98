"""Counts what steps and requests do. A StepObserver; loop thread.

Costs a few microseconds a step whatever its size, and some tens more where requests come or go.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.messages import StepResult
from common.metrics.histogram import Histogram
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.messages import FinishReason, Submit, TokenBatch
from scheduler_svc.observer import NoObserver, StepRecord

U64 = NDArray[np.uint64]
_NO_KEYS: U64 = np.empty(0, dtype=np.uint64)


@dataclass(slots=True)
class ExecutorCounts:
    """Of one executor since start. device: the device's work; turn: plan to result."""

    device: Histogram = field(default_factory=Histogram)
    turn: Histogram = field(default_factory=Histogram)
    decode_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class _Cohort:
    """The requests that got a token in an executor's last step, and when that was."""

    keys: U64 = field(default_factory=lambda: _NO_KEYS)
    at_ns: int = 0


class MetricsObserver(NoObserver):
    """Times of tokens are those of the result that brought them to the core: what clients see comes on top.

    Most steps bring tokens to the same requests as the one before: one interval then counts for all of them.
    """

    def __init__(self) -> None:
        self.executors: dict[int, ExecutorCounts] = {}
        self.first_token = Histogram()
        self.between_tokens = Histogram()
        self.duration = Histogram()
        self.finished: Counter[str] = Counter()  # by reason
        self.failed: Counter[str] = Counter()  # by class of error
        self._arrival_ns: dict[int, int] = {}  # live requests
        self._last_ns: dict[int, int] = {}  # live requests that had a token, but none in their executor's last step
        self._cohorts: dict[int, _Cohort] = {}  # by executor

    def on_submit(self, request: Submit, now_ns: int) -> None:
        self._arrival_ns.update(dict.fromkeys(request.keys, request.arrival_ns))

    def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        if reason is not None:
            self.finished[reason.name.lower()] += 1
        else:
            self.failed[error] += 1
        arrival_ns = self._arrival_ns.pop(key, None)
        self._last_ns.pop(key, None)
        if arrival_ns is not None and reason is not None:
            self.duration.add((now_ns - arrival_ns) / 1e9)

    def on_result(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        counts = self.executors.get(record.executor_id)
        if counts is None:
            counts = self.executors[record.executor_id] = ExecutorCounts()
        counts.device.add((result.timings.device_end_ns - result.timings.device_start_ns) / 1e9)
        counts.turn.add((received_ns - record.planned_ns) / 1e9)
        counts.decode_tokens += record.decode_tokens
        counts.prefill_tokens += record.prefill_tokens

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        """Its requests go on elsewhere, or there again after a pause."""
        if event in ("lost", "epoch_ended") and (cohort := self._cohorts.get(executor_id)) is not None:
            self._move(cohort, _NO_KEYS, now_ns)

    def on_delivered(self, outcome: StepOutcome, now_ns: int) -> None:
        executor_id = outcome.record.executor_id
        cohort = self._cohorts.get(executor_id)
        if cohort is None:
            cohort = self._cohorts[executor_id] = _Cohort()
        parts = [_keys_with_tokens(batch) for batch in outcome.batches.values()]
        if parts:
            self._take(cohort, parts[0] if len(parts) == 1 else np.concatenate(parts), now_ns)

    def _take(self, cohort: _Cohort, keys: U64, now_ns: int) -> None:
        if len(keys) == len(cohort.keys) and np.array_equal(keys, cohort.keys):
            if len(keys):
                self.between_tokens.add((now_ns - cohort.at_ns) / 1e9, len(keys))
                cohort.at_ns = now_ns
            return
        before = np.isin(keys, cohort.keys)
        if same := int(before.sum()):
            self.between_tokens.add((now_ns - cohort.at_ns) / 1e9, same)
        for key in keys[~before].tolist():
            last_ns = self._last_ns.pop(key, None)
            if last_ns is not None:
                self.between_tokens.add((now_ns - last_ns) / 1e9)
            elif key in self._arrival_ns:
                self.first_token.add((now_ns - self._arrival_ns[key]) / 1e9)
        self._move(cohort, keys, now_ns)

    def _move(self, cohort: _Cohort, keys: U64, now_ns: int) -> None:
        for key in cohort.keys[~np.isin(cohort.keys, keys)].tolist():
            if key in self._arrival_ns:  # else it has ended
                self._last_ns[key] = cohort.at_ns
        cohort.keys, cohort.at_ns = keys, now_ns


def _keys_with_tokens(batch: TokenBatch) -> U64:
    return batch.keys if batch.counts.all() else batch.keys[batch.counts > 0]
