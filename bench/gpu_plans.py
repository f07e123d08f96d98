"""Plans of the real scheduler, made beforehand and replayed on an executor in this process: no wire, no scheduler.

Greedy or seeded, full length: then plans do not depend on the tokens, which stay on the device.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.executor_steps import shape_of
from common.messages import ExecutorInfo, Hello, Sampling, StepPlan, StepResult, Welcome, u32
from executor_svc.step_executor import PendingStep, StepExecutor
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Submit
from scheduler_svc.simulate.modelled_executor import ModelledExecutor
from scheduler_svc.simulate.step_model import Cost, StepModel

# Prompt and how to go on from it.
Request = tuple[Sequence[int], Sampling]


def greedy(output: int, num_logprobs: int = 0) -> Sampling:
    return Sampling(seed=1, max_tokens=output, temperature=0.0, ignore_eos=True, num_logprobs=num_logprobs)


def random_requests(count: int, prompt: int, sampling: Sampling, vocab: int, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(1, vocab, prompt).tolist(), replace(sampling, seed=seed + i)) for i in range(count)]


def make_plans(
    info: ExecutorInfo, requests: Sequence[Request], *, depth: int, at_once: int, prefill_chunk: int
) -> list[StepPlan]:
    """All steps of `requests`, `depth` of them in flight when each was made, without a prefix cache. Their epoch is for
    `replay` to say."""
    core = Scheduler(
        CoreConfig(
            pipeline_depth=depth, max_prefill_chunk=prefill_chunk, max_num_seqs=at_once, enable_prefix_cache=False,
            max_queued_requests=len(requests),
        )
    )  # fmt: skip
    executor_id = core.add_executor("here")
    core.executor_up(executor_id, core.begin_epoch(executor_id).epoch, Welcome(1, info, depth, False, 0, 0), 0)
    lengths = ModelledExecutor(
        StepModel(name="none", origin="derived", costs=(Cost(base_us=1.0),), executor=shape_of(info), conditions={})
    )
    for key, (prompt, sampling) in enumerate(requests):
        core.submit(Submit(key=key, request_id=str(key), prompt=u32(prompt), sampling=sampling, arrival_ns=0), 0)
    plans: list[StepPlan] = []
    results: deque[StepResult] = deque()
    while core.num_live or results:
        while len(results) < depth and core.can_schedule(executor_id):
            record = core.schedule(executor_id, 0)
            if record is None:
                break
            plans.append(record.plan)
            results.append(lengths.execute(record.plan, 0).result)
        core.update(executor_id, results.popleft(), 0)
    return plans


@dataclass
class Replayed:
    """`wall_s`: from the first launch to the last result."""

    wall_s: float
    results: list[StepResult] = field(default_factory=list)

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
        found = Replayed(0.0)
        start = time.perf_counter()
        while own or in_flight:
            while own and len(in_flight) < depth:
                in_flight.append(executor.execute(own.popleft(), time.monotonic_ns()))
            found.results.append(in_flight.popleft().wait())
        found.wall_s = time.perf_counter() - start
        return found


def tokens_of(plans: Sequence[StepPlan], results: Sequence[StepResult]) -> list[list[int]]:
    """Of each request, in the order of their admission."""
    owner: dict[int, int] = {}
    found: list[list[int]] = []
    for plan, result in zip(plans, results, strict=True):
        for admit in plan.admit:
            owner[admit.row] = len(found)
            found.append([])
        for row, token in zip(result.emitted_rows.tolist(), result.tokens.tolist(), strict=True):
            found[owner[row]].append(token)
    return found


@dataclass(frozen=True)
class Seen:
    """What was told of one token: its own logprob, and the most likely ids with theirs."""

    token: int
    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def seen_of(plans: Sequence[StepPlan], results: Sequence[StepResult]) -> list[list[Seen]]:
    """As `tokens_of`, of requests that all asked for logprobs."""
    owner: dict[int, int] = {}
    found: list[list[Seen]] = []
    for plan, result in zip(plans, results, strict=True):
        for admit in plan.admit:
            owner[admit.row] = len(found)
            found.append([])
        told, at = result.logprobs, 0
        for i, (row, token) in enumerate(zip(result.emitted_rows.tolist(), result.tokens.tolist(), strict=True)):
            end = at + int(told.top_counts[i])
            tops = tuple(told.top_ids[at:end].tolist()), tuple(told.top_logprobs[at:end].tolist())
            found[owner[row]].append(Seen(token, float(told.chosen[i]), *tops))
            at = end
    return found
