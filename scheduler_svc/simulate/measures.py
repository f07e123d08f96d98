"""What a simulation measures, in columns: no Python object per token. Owner: the simulation."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.messages import TokenBatch
from scheduler_svc.observer import StepRecord
from scheduler_svc.simulate.modelled_executor import ModelledStep
from scheduler_svc.simulate.trace import I64, Trace

U64 = NDArray[np.uint64]
_NEVER: Final = -1
_FIRST_SAMPLE_NS: Final = 10_000_000
_MAX_SAMPLES: Final = 4096

STEP_COLUMNS: Final = np.dtype(
    [
        ("executor", np.int32),
        ("step_id", np.int64),
        ("planned_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("decode_tokens", np.int32),
        ("prefill_tokens", np.int32),
        ("num_sequences", np.int32),
        ("running", np.int32),
        ("waiting", np.int64),
        ("free_blocks", np.int64),
        ("context_tokens", np.int64),
        ("preemptions", np.int64),  # of this executor, so far
        ("admitted_tokens", np.int64),
        ("cached_tokens", np.int64),
    ]
)


class StepList:
    """Every step in the order of planning; STEP_COLUMNS says of what each consists."""

    def __init__(self) -> None:
        self._rows = np.zeros(1024, dtype=STEP_COLUMNS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, record: StepRecord, step: ModelledStep, preemptions: int) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(self._count, dtype=STEP_COLUMNS)])
        self._rows[self._count] = (
            record.executor_id,
            record.plan.step_id,
            record.planned_ns,
            step.start_ns,
            step.end_ns,
            record.decode_tokens,
            record.prefill_tokens,
            record.decode_tokens + len(record.prefill_keys),
            record.running,
            record.waiting,
            record.free_blocks,
            step.context_tokens,
            preemptions,
            step.admitted_tokens,
            step.cached_tokens,
        )
        self._count += 1

    def rows(self) -> NDArray[np.void]:
        """A structured array [steps]; valid until the next `add`."""
        return self._rows[: self._count]


class Histogram:
    """Of lengths in ns, in bins of 0.5 %: percentiles of any number of values in constant memory."""

    _PER_LOG: Final = 200.0  # bins per factor e

    def __init__(self) -> None:
        self._bins: I64 = np.zeros(int(np.log(1e15) * self._PER_LOG) + 2, dtype=np.int64)
        self._sum = 0

    def __len__(self) -> int:
        return int(self._bins.sum())

    def add(self, values_ns: I64) -> None:
        if len(values_ns):
            bins = (np.log(np.maximum(values_ns, 1)) * self._PER_LOG).astype(np.int64)
            low = int(bins.min())
            counts = np.bincount(bins - low)
            self._bins[low : low + len(counts)] += counts
            self._sum += int(values_ns.sum())

    def percentile_ns(self, percent: float) -> float:
        """The middle of the bin it falls into; nan without values."""
        total = np.cumsum(self._bins)
        if not total[-1]:
            return float("nan")
        at = int(np.searchsorted(total, max(1, np.ceil(total[-1] * percent / 100))))
        return float(np.exp((at + 0.5) / self._PER_LOG))

    def mean_ns(self) -> float:
        count = len(self)
        return self._sum / count if count else float("nan")


class Measures:
    """Columns are [requests], times in ns, -1: has not happened."""

    def __init__(self, trace: Trace, config: CoreConfig) -> None:
        n = len(trace)

        def never() -> I64:
            return np.full(n, _NEVER, dtype=np.int64)

        self.trace = trace
        self.arrival, self.first, self.last, self.end = never(), never(), never(), never()
        self.tokens: NDArray[np.int32] = np.zeros(n, dtype=np.int32)
        self.gaps = Histogram()
        self.steps = StepList()
        self.ended_by: dict[str, int] = {}  # requests without a finish reason, by what ended them
        self.tenants = TenantService(trace, config) if len(trace.tenants) > 1 else None

    def on_submit(self, index: int, arrival_ns: int) -> None:
        self.arrival[index] = arrival_ns
        if self.tenants is not None:
            self.tenants.on_submit(index)

    def on_end(self, index: int, why: str) -> None:
        """Refused, or ended without a finish reason."""
        self.ended_by[why] = self.ended_by.get(why, 0) + 1
        if self.tenants is not None:
            self.tenants.on_admission(np.array([index]))

    def on_plan(self, record: StepRecord, step: ModelledStep, preemptions: int) -> None:
        self.steps.add(record, step, preemptions)
        if self.tenants is not None and len(record.prefill_keys):
            self.tenants.on_admission(record.prefill_keys.astype(np.int64))

    def on_result(self, batch: TokenBatch | None, record: StepRecord, now_ns: int) -> None:
        if batch is not None:
            keys = batch.keys.astype(np.int64)
            if len(batch.tokens) < len(keys):
                keys = keys[batch.counts > 0]
            if self.tenants is not None:
                self.tenants.on_tokens(keys)
            last = self.last[keys]
            new = last == _NEVER
            if new.any():
                self.first[keys[new]] = now_ns
                last = last[~new]
            self.gaps.add(now_ns - last)
            self.last[keys] = now_ns
            self.tokens[keys] += 1
            if batch.reasons.any():
                self.end[batch.keys[batch.reasons > 0].astype(np.int64)] = now_ns
        if self.tenants is not None:
            self.tenants.on_step(record, now_ns)


class TenantService:
    """What each tenant was served, sampled over time, and how many of its requests wait for their first admission.

    served: prompt tokens computed times input_token_weight and generated tokens times output_token_weight, as the
    policy `fair` weighs them; not divided by the tenants' own weights, which are `weights`.
    """

    def __init__(self, trace: Trace, config: CoreConfig) -> None:
        self._tenant = trace.tenant
        self._input_weight, self._output_weight = config.input_token_weight, config.output_token_weight
        self.weights = np.array([config.tenant_weights.get(name, 1.0) for name in trace.tenants])
        self._count = len(trace.tenants)
        self.waiting: I64 = np.zeros(self._count, dtype=np.int64)
        self._waits: NDArray[np.bool_] = np.zeros(len(trace), dtype=np.bool_)
        self._served: NDArray[np.float64] = np.zeros(self._count)
        self._interval_ns = _FIRST_SAMPLE_NS
        self._samples: list[tuple[int, NDArray[np.float64], I64]] = [(0, self._served.copy(), self.waiting.copy())]

    def on_submit(self, index: int) -> None:
        self._waits[index] = True
        self.waiting[self._tenant[index]] += 1

    def on_admission(self, indices: I64) -> None:
        """Or the end of a request. Who waits no longer is passed over."""
        new = indices[self._waits[indices]]
        if len(new):
            self._waits[new] = False
            self.waiting -= np.bincount(self._tenant[new], minlength=self._count)

    def on_tokens(self, indices: I64) -> None:
        self._served += self._output_weight * np.bincount(self._tenant[indices], minlength=self._count)

    def on_step(self, record: StepRecord, now_ns: int) -> None:
        if len(record.prefill_keys):
            owner = self._tenant[record.prefill_keys.astype(np.int64)]
            computed = np.bincount(owner, weights=record.plan.prefill_counts, minlength=self._count)
            self._served += self._input_weight * computed
        if now_ns - self._samples[-1][0] >= self._interval_ns:
            self._samples.append((now_ns, self._served.copy(), self.waiting.copy()))
            if len(self._samples) > _MAX_SAMPLES:
                self._interval_ns *= 2
                self._samples = self._samples[::2]

    def samples(self) -> tuple[I64, NDArray[np.float64], I64]:
        """Times [samples], served so far and requests waiting then [samples, tenants]."""
        times, served, waiting = zip(*self._samples, strict=True)
        return np.array(times, dtype=np.int64), np.stack(served), np.stack(waiting)

    def contended(self) -> tuple[float, NDArray[np.float64]]:
        """Seconds in which requests of every tenant waited, and what each was served in that time."""
        times, served, waiting = self.samples()
        all_wait: NDArray[np.bool_] = np.all(waiting > 0, axis=1)
        both = all_wait[:-1] & all_wait[1:]
        return float(np.diff(times)[both].sum()) / 1e9, np.diff(served, axis=0)[both].sum(axis=0)
