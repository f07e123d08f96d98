"""The core's part of the statistics; round-trip times, clock offsets and dropped spans are others' to fill in."""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.outcome import Counters
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.messages import ExecutorStats, Stats


def core_stats(
    c: Counters,
    executors: Sequence[ExecutorState],
    tenants: Tenants,
    waiting: int,
    running: int,
    queued_tokens: int,
    drain_rate: float,
) -> Stats:
    slots = [e.rows.tenant[e.rows.running] for e in executors]
    return Stats(
        requests_accepted=c.accepted,
        requests_finished=c.finished,
        requests_aborted=c.aborted,
        requests_failed=c.failed,
        requests_refused=c.refused,
        preemptions=c.preemptions,
        prompt_tokens=c.prompt_tokens,
        cached_tokens=c.cache_hit_tokens + c.forked_tokens,
        generated_tokens=c.generated_tokens,
        waiting=waiting,
        running=running,
        cache_queried_tokens=c.cache_queried_tokens,
        cache_hit_tokens=c.cache_hit_tokens,
        readmitted_tokens=c.readmitted_tokens,
        readmitted_hit_tokens=c.readmitted_hit_tokens,
        forked_tokens=c.forked_tokens,
        requests_expired=c.expired,
        queued_tokens=queued_tokens,
        drain_rate=drain_rate,
        tenants=tenants.stats(np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64)),
        executors=tuple(executor_stats(e) for e in executors),
    )


def executor_stats(e: ExecutorState) -> ExecutorStats:
    return ExecutorStats(
        address=e.address,
        connected=e.up,
        epoch=e.epoch,
        incarnation=e.incarnation,
        num_blocks=e.pool.num_blocks,
        free_blocks=e.pool.available,
        limbo_blocks=e.num_limbo_blocks,
        cached_blocks=len(e.pool.cache) if e.pool.cache is not None else 0,
        num_rows=len(e.rows),
        free_rows=len(e.free_rows),
        in_flight_steps=len(e.flights),
        steps=e.steps,
        epochs_ended=e.epochs_ended,
    )
