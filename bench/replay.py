"""Runs plans made beforehand on an executor in this process: no wire, no scheduler."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from common.messages import Hello, StepPlan, StepResult
from executor_svc.step_executor import PendingStep, StepExecutor

_Item = TypeVar("_Item")


@dataclass
class Replayed:
    """`ends_ns`: when each result was there, from the first launch on."""

    results: list[StepResult] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """From the first launch to the last result."""
        return self.ends_ns[-1] / 1e9 if self.ends_ns else 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)


class Replayer:
    """Runs plans on an executor, epoch after epoch. The executor must be drained and is left so."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._epoch = 0

    def replay(self, plans: Sequence[StepPlan], *, depth: int) -> Replayed:
        """Up to `depth` steps are launched before the oldest is waited for."""
        executor = self._executor
        self._epoch += 1
        executor.begin_epoch(Hello(b"replay".ljust(16), self._epoch, depth, 0, 0))
        own = deque(replace(plan, epoch=self._epoch) for plan in plans)
        in_flight: deque[PendingStep] = deque()
        found = Replayed()
        start = time.perf_counter_ns()
        while own or in_flight:
            while own and len(in_flight) < depth:
                in_flight.append(executor.execute(own.popleft(), time.monotonic_ns()))
            found.results.append(in_flight.popleft().wait())
            found.ends_ns.append(time.perf_counter_ns() - start)
        return found


def tokens_of(plans: Sequence[StepPlan], results: Sequence[StepResult]) -> list[list[int]]:
    """Of each request, in the order of their admission."""
    return _by_request(plans, results, lambda result: result.tokens.tolist())


@dataclass(frozen=True)
class Seen:
    """What was told of one token: its own logprob, and the most likely ids with theirs."""

    token: int
    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def seen_of(plans: Sequence[StepPlan], results: Sequence[StepResult]) -> list[list[Seen]]:
    """As `tokens_of`, of requests that all asked for logprobs."""
    return _by_request(plans, results, _seen)


def _seen(result: StepResult) -> list[Seen]:
    """Of each token, in the result's order."""
    told, at = result.logprobs, 0
    found = []
    for i, token in enumerate(result.tokens.tolist()):
        end = at + int(told.top_counts[i])
        tops = tuple(told.top_ids[at:end].tolist()), tuple(told.top_logprobs[at:end].tolist())
        found.append(Seen(token, float(told.chosen[i]), *tops))
        at = end
    return found


def _by_request(
    plans: Sequence[StepPlan], results: Sequence[StepResult], read: Callable[[StepResult], list[_Item]]
) -> list[list[_Item]]:
    """`read`: something for each token of a result. Sorted to the requests, in the order of their admission."""
    owner: dict[int, int] = {}
    found: list[list[_Item]] = []
    for plan, result in zip(plans, results, strict=True):
        for admit in plan.admit:
            owner[admit.row] = len(found)
            found.append([])
        for row, item in zip(result.emitted_rows.tolist(), read(result), strict=True):
            found[owner[row]].append(item)
    return found
