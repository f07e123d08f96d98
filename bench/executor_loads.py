"""Loads of bench.executor: the plans that the real scheduler makes for W1 to W4, replayed on executors in this process.

A plan is submitted while the one before it runs, as in a service. What a service has beside that is left out: the wire,
callers that take time to ask again, a second process on the same cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from bench.load import INTRUDER_OUTPUT, SETTLED, Workload
from bench.plans import Calls, greedy, plans_of, random_requests
from bench.replay import Replayer, tokens_of
from bench.step_batch import Lengths
from bench.step_work import StepSize, Work, rates
from common.messages import ExecutorInfo, StepPlan
from executor_svc.runner import Runner
from scheduler_svc.app import core_config
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.pipeline_depth import MAX_ADAPTED, PipelineDepth

# What a service begins with and, on a CPU, stays with: steps take longer than the way to the executor and back.
SERVICE_DEPTH: Final = PipelineDepth(MAX_ADAPTED, adapts=True).now
WARM_STEPS: Final = 16


def service_config(depth: int) -> CoreConfig:
    """The core's of a service with its defaults, but for the pipeline's depth, which does not adapt."""
    return replace(core_config(SchedulerConfig()), pipeline_depth=depth, adapt_pipeline_depth=False)


def calls_of(load: Workload, vocab: int) -> Calls:
    requests = random_requests(load.requests, load.prompt, greedy(load.output), vocab)
    late = random_requests(1, load.intruder, greedy(INTRUDER_OUTPUT), vocab, 0) if load.intruder else []
    return Calls(requests, load.concurrency, late, SETTLED)


@dataclass(frozen=True)
class Planned:
    """outputs: tokens that each request gets, in the order of their admission."""

    plans: Sequence[StepPlan]
    outputs: Sequence[int]

    @classmethod
    def of(cls, info: ExecutorInfo, load: Workload, depth: int) -> "Planned":
        """Raises RuntimeError where plans would hang on tokens: a sequence was preempted, or found in the cache."""
        calls = calls_of(load, info.vocab_size)
        plans = plans_of(info, service_config(depth), calls)
        for admit in (admit for plan in plans for admit in plan.admit):
            if admit.computed_len or admit.length != admit.prompt_len:
                raise RuntimeError(f"a sequence was admitted twice, or in part: are {info.num_blocks} blocks too few?")
        return cls(plans, [sampling.max_tokens for _, sampling in calls.all])


@dataclass
class Taken:
    """Of one executor and load: nanoseconds of each step that computes something, and whether it computes prompts."""

    step_ns: list[int] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    with_prompts: list[bool] = field(default_factory=list)

    def summarise(self) -> dict[str, Any]:
        """All steps, and each kind by itself."""
        kinds = np.array(self.with_prompts)
        found = {}
        for name, of_kind in (("all", kinds | True), ("decode", ~kinds), ("prompts", kinds)):
            at = np.flatnonzero(of_kind).tolist()
            if at:
                found[name] = rates([self.step_ns[i] for i in at], [self.works[i] for i in at])
        return found


class LoadReplayer:
    """Replays loads on one executor, which is drained between two of them."""

    def __init__(self, runner: Runner, depth: int) -> None:
        self._runner = runner
        self._depth = depth
        self._replayer = Replayer(runner)
        self._size = StepSize.of(runner.model, runner.cache.shape)

    def warm_up(self, planned: Planned) -> None:
        self._replayer.replay(planned.plans[:WARM_STEPS], depth=self._depth)

    def replay(self, planned: Planned, taken: Taken) -> None:
        """Raises RuntimeError when a request got another number of tokens than was planned."""
        run = self._replayer.replay(planned.plans, depth=self._depth)
        came = [len(tokens) for tokens in tokens_of(planned.plans, run.results)]
        if came != list(planned.outputs):
            raise RuntimeError(f"requests got {came} tokens, not {list(planned.outputs)}")
        lengths, before = Lengths(self._runner.info.num_rows), 0
        for plan, end in zip(planned.plans, run.ends_ns, strict=True):
            batch = lengths.batch(plan)
            if not batch.num_tokens:
                continue  # what it took belongs to the next
            taken.step_ns.append(end - before)
            taken.works.append(self._size.work(batch))
            taken.with_prompts.append(len(batch.counts) > 0)
            before = end
