"""Plans of the real scheduler, made beforehand: what a service would have sent.

Greedy or seeded, full length, prompts that share nothing: then plans do not depend on the tokens, which stay on the
device, and a modelled executor can stand in for the one that will run them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.executor_steps import shape_of
from common.messages import ExecutorInfo, Sampling, StepPlan, StepResult, Welcome, u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Submit
from scheduler_svc.simulate.modelled_executor import ModelledExecutor
from scheduler_svc.simulate.step_model import Cost, StepModel

# Prompt and how to go on from it.
Request = tuple[Sequence[int], Sampling]


@dataclass(frozen=True)
class Calls:
    """Who asks when: `at_once` callers, each for the next of `requests` once its last one has ended. `late` ones are
    asked for when every one of `requests` was, and has `settled` tokens or more."""

    requests: Sequence[Request]
    at_once: int
    late: Sequence[Request] = ()
    settled: int = 0

    @property
    def all(self) -> tuple[Request, ...]:
        """In the order they are asked for."""
        return (*self.requests, *self.late)


def greedy(output: int, num_logprobs: int = 0) -> Sampling:
    return Sampling(seed=1, max_tokens=output, temperature=0.0, ignore_eos=True, num_logprobs=num_logprobs)


def random_requests(count: int, prompt: int, sampling: Sampling, vocab: int, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(1, vocab, prompt).tolist(), replace(sampling, seed=seed + i)) for i in range(count)]


def make_plans(
    info: ExecutorInfo, requests: Sequence[Request], *, depth: int, at_once: int, prefill_chunk: int
) -> list[StepPlan]:
    """All steps of `requests`, which wait from the beginning on and run `at_once`, without a prefix cache."""
    config = CoreConfig(
        pipeline_depth=depth, max_prefill_chunk=prefill_chunk, max_num_seqs=at_once, enable_prefix_cache=False,
        max_queued_requests=len(requests),
    )  # fmt: skip
    return plans_of(info, config, Calls(requests, len(requests)))


def plans_of(
    info: ExecutorInfo,
    config: CoreConfig,
    calls: Calls,
    execute: Callable[[StepPlan], StepResult] | None = None,
) -> list[StepPlan]:
    """All steps of `calls`, config.pipeline_depth of them in flight when each was made. Their epoch is for who runs
    them to say. `execute`: gives the result of each plan, at once; None: a modelled executor, whose tokens are 0.

    Raises RuntimeError when the scheduler stands still.
    """
    core = Scheduler(config)
    executor_id = core.add_executor("here")
    welcome = Welcome(1, info, config.pipeline_depth, False, 0, 0)
    core.executor_up(executor_id, core.begin_epoch(executor_id).epoch, welcome, 0)
    answer = execute or _modelled(info)
    callers = _Callers(core, calls)
    plans: list[StepPlan] = []
    results: deque[StepResult] = deque()

    def send() -> None:
        while len(results) < config.pipeline_depth and core.can_schedule(executor_id):
            record = core.schedule(executor_id, 0)
            if record is None:
                break
            plans.append(record.plan)
            results.append(answer(record.plan))

    callers.ask()
    send()
    while results:
        outcome = core.update(executor_id, results.popleft(), 0)
        send()  # before a caller can have seen what the result brought
        callers.see(outcome)
        callers.ask()
        send()
    if core.num_live or not callers.are_done:
        raise RuntimeError(f"after {len(plans)} steps nothing moves and {core.num_live} requests have not ended")
    return plans


class _Callers:
    """What the callers know: tokens that came, by request, in the order of `calls.all`."""

    def __init__(self, core: Scheduler, calls: Calls) -> None:
        self._core = core
        self._calls = calls
        self._waiting = deque(enumerate(calls.requests))
        self._late = deque(enumerate(calls.late, len(calls.requests)))
        self._tokens = np.zeros(len(calls.all), dtype=np.int64)

    @property
    def are_done(self) -> bool:
        return not self._waiting and not self._late

    def see(self, outcome: StepOutcome) -> None:
        for batch in outcome.batches.values():
            self._tokens[batch.keys.astype(np.int64)] += batch.counts

    def ask(self) -> None:
        while self._waiting and self._core.num_live < self._calls.at_once:
            self._submit(*self._waiting.popleft())
        if not self._waiting and (self._tokens[: len(self._calls.requests)] >= self._calls.settled).all():
            while self._late:
                self._submit(*self._late.popleft())

    def _submit(self, key: int, request: Request) -> None:
        prompt, sampling = request
        self._core.submit(Submit(key=key, request_id=str(key), prompt=u32(prompt), sampling=sampling, arrival_ns=0), 0)


def _modelled(info: ExecutorInfo) -> Callable[[StepPlan], StepResult]:
    lengths = ModelledExecutor(
        StepModel(name="none", origin="derived", costs=(Cost(base_us=1.0),), executor=shape_of(info), conditions={})
    )
    return lambda plan: lengths.execute(plan, 0).result
