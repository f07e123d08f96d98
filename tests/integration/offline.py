"""The real scheduler core and a real executor in one process and thread, no gRPC: whole generations, step by step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import SystemClock
from common.messages import Hello, Sampling, Welcome, u32
from executor_svc.step_executor import PendingStep, StepExecutor
from scheduler_svc.choice_seed import choice_seed
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Child, FinishReason, Submit

MAX_STEPS = 20_000

# Prompt token ids and how to continue them.
Request = tuple[Sequence[int], Sampling]


@dataclass(frozen=True)
class Generation:
    """What came out of one `generate`: tokens per request, and how it went."""

    tokens: tuple[tuple[int, ...], ...]
    steps: int
    preemptions: int
    cached_tokens: int
    most_sequences: int


def generate(
    executor: StepExecutor,
    requests: Sequence[Request],
    *,
    depth: int = 2,
    at_once: int = 16,
    prefill_chunk: int = 0,
    prefix_cache: bool = True,
    lose_executor_after: int = 0,
    num_choices: int = 1,
) -> Generation:
    """Runs every request, at most `at_once` live ones at a time, in order. `num_choices`: of each request; the tokens
    of all choices of the first come first.

    `lose_executor_after` n: after n steps the stream breaks with steps in flight, and the executor comes back with an
    empty cache. `executor` must be drained; it is left drained.
    """
    clock = SystemClock()
    core = Scheduler(
        CoreConfig(
            pipeline_depth=depth,
            max_prefill_chunk=prefill_chunk,
            enable_prefix_cache=prefix_cache,
        )
    )
    executor_id = core.add_executor("here")

    def connect() -> None:
        start = core.begin_epoch(executor_id)
        hello = Hello(
            scheduler_id=bytes(16),
            epoch=start.epoch,
            pipeline_depth=depth,
            monotonic_ns=clock.monotonic_ns(),
            wall_ns=clock.wall_ns(),
            known_incarnation=start.known_incarnation,
        )
        kept = executor.begin_epoch(hello)
        welcome = Welcome(executor.incarnation, executor.info, depth, kept, clock.monotonic_ns(), clock.wall_ns())
        assert not core.executor_up(executor_id, start.epoch, welcome, clock.monotonic_ns())

    connect()
    out: list[list[int]] = [[] for _ in range(len(requests) * num_choices)]
    done = 0
    queued = deque(range(len(requests)))
    in_flight: deque[PendingStep] = deque()
    steps = most = live = 0
    while done < len(out):
        while queued and live < at_once:
            i = queued.popleft()
            core.submit(
                Submit(
                    key=i * num_choices,
                    request_id=f"r{i}",
                    prompt=u32(requests[i][0]),
                    sampling=requests[i][1],
                    arrival_ns=clock.monotonic_ns(),
                    children=tuple(
                        Child(i * num_choices + k, choice_seed(requests[i][1].seed, k)) for k in range(1, num_choices)
                    ),
                ),
                clock.monotonic_ns(),
            )
            live += num_choices
        while len(in_flight) < depth and core.can_schedule(executor_id):
            record = core.schedule(executor_id, clock.monotonic_ns())
            if record is None:
                break
            most = max(most, len(record.decode_keys) + len(record.prefill_keys))
            in_flight.append(executor.execute(record.plan, clock.monotonic_ns()))
            steps += 1
        assert in_flight, "nothing runs and nothing can be planned"
        assert steps < MAX_STEPS
        if steps == lose_executor_after:
            while in_flight:  # the device finishes, but nobody hears of it
                in_flight.popleft().wait()
            core.executor_down(executor_id, clock.monotonic_ns())
            connect()
            continue
        outcome = core.update(executor_id, in_flight.popleft().wait(), clock.monotonic_ns())
        for batch in outcome.batches.values():
            at = 0
            for key, count, reason in zip(
                batch.keys.tolist(), batch.counts.tolist(), batch.reasons.tolist(), strict=True
            ):
                out[key] += batch.tokens[at : at + count].tolist()
                at += count
                if reason:
                    assert reason in set(FinishReason)
                    done += 1
                    live -= 1
    while in_flight:
        core.update(executor_id, in_flight.popleft().wait(), clock.monotonic_ns())
    stats = core.stats()
    assert stats.executors[0].free_rows == executor.info.num_rows
    assert stats.executors[0].free_blocks == executor.info.num_blocks
    return Generation(tuple(map(tuple, out)), steps, stats.preemptions, stats.cached_tokens, most)
