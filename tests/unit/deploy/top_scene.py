"""Steps and statistics made up for tests of `stepwire top`."""

from dataclasses import replace

from stepwire_client import ExecutorStats, Stats, Step

STEP = Step(
    executor="e:1", epoch=1, step_id=1, decode_tokens=4, prefill_tokens=0, num_sequences=4, waiting=0, free_blocks=75,
    bucket=4, planned_ns=0, result_ns=12_000_000, device_ns=10_000_000, device_idle_ns=0, skipped=0, running=4,
    num_blocks=100, preemptions=0, admitted_tokens=0, cached_tokens=0, generated_tokens=4,
)  # fmt: skip
EXECUTOR = ExecutorStats(
    address="e:1", connected=True, epoch=1, incarnation=1, num_blocks=100, free_blocks=100, limbo_blocks=0,
    cached_blocks=0, num_rows=16, free_rows=16, in_flight_steps=0, steps=0, epochs_ended=0, rtt_ns=0,
    clock_offset_ns=0,
)  # fmt: skip


def step(step_id: int = 1, **changes: object) -> Step:
    return replace(STEP, step_id=step_id, **changes)  # type: ignore[arg-type]


def stats(*executors: ExecutorStats, **changes: object) -> Stats:
    fields = dict.fromkeys(Stats.__slots__, 0) | {"executors": executors or (EXECUTOR,)}
    return Stats(**(fields | changes))  # type: ignore[arg-type]
