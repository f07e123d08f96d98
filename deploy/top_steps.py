"""Steps as they come, added up over a sliding window. Pure: time comes in as a value, in seconds of any clock."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from stepwire_client import ExecutorStats, Stats, Step

NUM_SLOWEST: Final = 5
# Of one executor; the window is that much shorter where steps are quicker.
MAX_STEPS: Final = 50_000
# A step's own counts are those of when it was planned: older ones give way to what the server says now.
FRESH_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the values in the window, by nearest rank."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        ranked = sorted(values)
        if not ranked:
            return None
        p50, p95, p99 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.95, 0.99))
        return cls(p50, p95, p99, ranked[-1])


@dataclass(frozen=True, slots=True)
class SlowStep:
    epoch: int
    step_id: int
    device_ms: float
    decode_tokens: int
    prefill_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True)
class ExecutorSummary:
    """One executor's window. Rates are per second and count lost steps as if they were like the others.

    hit_rate: of the tokens of sequences that got their row, the share the prefix cache held; None: none got one.
    turn_ms: from plan to result, which includes waiting behind the step before. device_idle: share of the window in
    which no step ran. decode_line, prefill_line: mean tokens of a step in each slice of the window, oldest first; None:
    no step ended in it.
    """

    executor: str
    connected: bool
    epoch: int
    last_step: int
    steps: int
    lost_steps: int
    steps_per_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    generated_tokens_per_s: float
    decode_tokens: Spread | None
    prefill_tokens: Spread | None
    running: int
    preempted: int
    preemptions: int
    num_blocks: int
    free_blocks: int
    kv_used: float
    hit_rate: float | None
    device_ms: Spread | None
    turn_ms: Spread | None
    device_idle: float
    slowest: tuple[SlowStep, ...]
    decode_line: tuple[float | None, ...] = ()
    prefill_line: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """All executors together. `seconds`: what the window really covers. `problem`: why nothing comes; empty: it does.
    `preempted` and `hit_rate`: in the window. `waiting`: as of the newest step or statistics."""

    seconds: float
    problem: str
    running: int
    waiting: int
    preempted: int
    hit_rate: float | None
    steps_per_s: float
    generated_tokens_per_s: float
    prefill_tokens_per_s: float
    lost_steps: int
    stats: Stats | None
    executors: tuple[ExecutorSummary, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    step: Step
    preempted: int


class _Window:
    """One executor's steps of the last `window_s` seconds."""

    def __init__(self, executor: str, window_s: float) -> None:
        self.executor = executor
        self._window_s = window_s
        self.steps: deque[_Seen] = deque(maxlen=MAX_STEPS)
        self.last: _Seen | None = None

    def add(self, step: Step, now_s: float) -> None:
        before = self.last.step.preemptions if self.last is not None else step.preemptions
        # The count begins anew with the scheduler.
        preempted = step.preemptions - before if step.preemptions >= before else step.preemptions
        self.last = _Seen(now_s, step, preempted)
        self.steps.append(self.last)

    def forget(self, now_s: float) -> None:
        while self.steps and self.steps[0].at_s <= now_s - self._window_s:
            self.steps.popleft()

    def hits(self) -> tuple[int, int]:
        """(tokens the cache held, tokens of the sequences admitted)."""
        return sum(s.step.cached_tokens for s in self.steps), sum(s.step.admitted_tokens for s in self.steps)

    def line(self, tokens: Sequence[int], now_s: float, columns: int) -> tuple[float | None, ...]:
        """Slices lie at fixed times, so that a value once shown moves left but does not change."""
        if not columns:
            return ()
        slice_s = self._window_s / columns
        first = math.floor(now_s / slice_s) - columns + 1
        sums, counts = [0.0] * columns, [0] * columns
        for seen, count in zip(self.steps, tokens, strict=True):
            at = math.floor(seen.at_s / slice_s) - first
            if 0 <= at < columns:
                sums[at] += count
                counts[at] += 1
        return tuple(total / count if count else None for total, count in zip(sums, counts, strict=True))

    def summary(
        self, stats: ExecutorStats | None, stats_s: float, now_s: float, seconds: float, columns: int
    ) -> ExecutorSummary:
        steps = [seen.step for seen in self.steps]
        lost = sum(step.skipped for step in steps)
        if len(steps) == MAX_STEPS:
            seconds = max(1e-3, min(seconds, now_s - self.steps[0].at_s))
        per_s = (len(steps) + lost) / len(steps) / seconds if steps else 0.0
        decode, prefill = [s.decode_tokens for s in steps], [s.prefill_tokens for s in steps]
        held, admitted = self.hits()
        slowest = sorted(self.steps, key=lambda seen: seen.step.device_ns, reverse=True)[:NUM_SLOWEST]
        last = self.last.step if self.last is not None else None
        running, num_blocks, free_blocks = (
            (last.running, last.num_blocks, last.free_blocks) if last is not None else (0, 0, 0)
        )
        if stats is not None and (self.last is None or self.last.at_s < min(stats_s, now_s - FRESH_S)):
            running = stats.num_rows - stats.free_rows
            num_blocks, free_blocks = stats.num_blocks, stats.free_blocks
        return ExecutorSummary(
            executor=self.executor,
            connected=stats.connected if stats is not None else last is not None,
            epoch=stats.epoch if stats is not None else last.epoch if last is not None else 0,
            last_step=last.step_id if last is not None else 0,
            steps=len(steps),
            lost_steps=lost,
            steps_per_s=len(steps) * per_s,
            decode_tokens_per_s=sum(decode) * per_s,
            prefill_tokens_per_s=sum(prefill) * per_s,
            generated_tokens_per_s=sum(step.generated_tokens for step in steps) * per_s,
            decode_tokens=Spread.of(decode),
            prefill_tokens=Spread.of(prefill),
            running=running,
            preempted=sum(seen.preempted for seen in self.steps),
            preemptions=last.preemptions if last is not None else 0,
            num_blocks=num_blocks,
            free_blocks=free_blocks,
            kv_used=1 - free_blocks / num_blocks if num_blocks else 0.0,
            hit_rate=held / admitted if admitted else None,
            device_ms=Spread.of(step.device_ns / 1e6 for step in steps),
            turn_ms=Spread.of((step.result_ns - step.planned_ns) / 1e6 for step in steps),
            device_idle=max(0.0, 1 - sum(step.device_ns for step in steps) / 1e9 * per_s),
            slowest=tuple(
                SlowStep(
                    epoch=seen.step.epoch,
                    step_id=seen.step.step_id,
                    device_ms=seen.step.device_ns / 1e6,
                    decode_tokens=seen.step.decode_tokens,
                    prefill_tokens=seen.step.prefill_tokens,
                    age_s=now_s - seen.at_s,
                )
                for seen in slowest
            ),
            decode_line=self.line(decode, now_s, columns),
            prefill_line=self.line(prefill, now_s, columns),
        )


class Board:
    """What was seen of one scheduler since `started_s`. Executors stay on it in the order they were first seen."""

    def __init__(self, window_s: float, started_s: float) -> None:
        self._window_s = window_s
        self._started_s = started_s
        self._windows: dict[str, _Window] = {}
        self._stats: Stats | None = None
        self._stats_s = started_s
        self._newest: _Seen | None = None
        self.problem = ""
        self.num_steps = 0  # since the start

    def add(self, step: Step, now_s: float) -> None:
        window = self._window(step.executor)
        window.add(step, now_s)
        window.forget(now_s)
        self._newest = window.last
        self.num_steps += 1
        self.problem = ""

    def take_stats(self, stats: Stats, now_s: float) -> None:
        self._stats, self._stats_s = stats, now_s
        for executor in stats.executors:
            self._window(executor.address)
        self.problem = ""

    def _window(self, executor: str) -> _Window:
        return self._windows.setdefault(executor, _Window(executor, self._window_s))

    def summary(self, now_s: float, columns: int = 0) -> Summary:
        """`columns`: slices of the window in each executor's lines."""
        seconds = max(1e-3, min(self._window_s, now_s - self._started_s))
        stats, newest = self._stats, self._newest
        of_executor = {executor.address: executor for executor in stats.executors} if stats is not None else {}
        for window in self._windows.values():
            window.forget(now_s)
        hits = [window.hits() for window in self._windows.values()]
        held, admitted = sum(hit for hit, _ in hits), sum(total for _, total in hits)
        executors = tuple(
            window.summary(of_executor.get(address), self._stats_s, now_s, seconds, columns)
            for address, window in self._windows.items()
        )
        waiting = newest.step.waiting if newest is not None else 0
        if stats is not None and (newest is None or newest.at_s < min(self._stats_s, now_s - FRESH_S)):
            waiting = stats.waiting
        return Summary(
            seconds=seconds,
            problem=self.problem,
            running=sum(executor.running for executor in executors),
            waiting=waiting,
            preempted=sum(executor.preempted for executor in executors),
            hit_rate=held / admitted if admitted else None,
            steps_per_s=sum(executor.steps_per_s for executor in executors),
            generated_tokens_per_s=sum(executor.generated_tokens_per_s for executor in executors),
            prefill_tokens_per_s=sum(executor.prefill_tokens_per_s for executor in executors),
            lost_steps=sum(executor.lost_steps for executor in executors),
            stats=stats,
            executors=executors,
        )
