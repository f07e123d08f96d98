"""What every simulated step is checked for is looked at: each rule, broken by hand, is named."""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

SHARED = range(20, 44)


def _scene() -> Sim:
    """Two that decode and share five blocks, one in the middle of its prompt, one that waits; two steps in flight."""
    sim = Sim(CoreConfig(max_prefill_chunk=8, max_num_seqs=3), toy_info(num_blocks=64))
    for number in (50, 51):
        sim.submit([*SHARED, number], 30, ignore_eos=True)
        for _ in range(5):
            sim.fill()
            sim.deliver()
    sim.submit(range(100, 140), 30, ignore_eos=True)
    sim.fill()
    sim.deliver()
    sim.submit([5, 6, 7], 30)
    sim.fill()
    assert sim.executor.num_running == 3 and len(sim.executor.prefilling) == 1 and len(sim.pending) == 2
    assert sim.executor.pool.shared_blocks() and sim.scheduler.num_waiting == 1
    return sim


def _running(sim: Sim) -> list[int]:
    return np.flatnonzero(sim.executor.rows.running).tolist()


def _waiting(scheduler: Scheduler) -> Sequence:
    return next(sequence for sequence in scheduler.live_sequences() if sequence.row < 0)


def _block_lost(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    pool.num_free -= 1


def _block_free_and_used(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    pool._free[-1] = executor.rows.table[_running(sim)[0], 0]


def _block_of_two_rows(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    one, *_, other = _running(sim)
    executor.rows.table[other, 0] = executor.rows.table[one, executor.rows.table_len[one] - 1]


def _block_twice_in_a_table(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    row = _running(sim)[0]
    executor.rows.table[row, 1] = executor.rows.table[row, 0]


def _too_few_users(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    del pool._users[pool.shared_blocks()[0]]


def _too_many_users(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    pool._users[pool.shared_blocks()[0]] += 1


def _cached_and_written(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    assert pool.cache is not None
    pool.cache.register([b"x"], executor.rows.blocks(_running(sim)[0])[-1:].tolist())


def _row_free_twice(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.free_rows.append(executor.free_rows[0])


def _row_free_and_taken(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.free_rows.append(_running(sim)[0])


def _admission_id_twice(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    one, other, *_ = _running(sim)
    executor.rows.admission[one] = executor.rows.admission[other]


def _token_lost(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.rows.low[_running(sim)[0]] -= 1


def _computed_less(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.rows.prefilled[executor.prefilling[0]] -= 4


def _over_the_budget(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.max_tokens = 2


def _over_the_sequence_limit(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.max_num_seqs = 2


def _step_forgotten(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.flights.popleft()


def _rests_for_ever(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    row = _running(sim)[0]
    executor.vacate(row, keep=False)
    executor.rows.last_step[row] = 0


def _leaves_early(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.vacate(_running(sim)[0], keep=False)
    executor.leaving.append(executor.limbo.pop())


def _leaves_and_goes_on(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.vacate(_running(sim)[0], keep=True)
    executor.leaving.append(executor.limbo.pop())
    executor.rows.last_step[executor.leaving] = 0


def _leaves_for_ever(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    executor.vacate(_running(sim)[0], keep=False)
    executor.leaving.append(executor.limbo.pop())
    executor.rows.last_step[executor.leaving] = 0
    executor.flights.clear()
    executor.next_step = executor.last_result + 1


def _request_lost(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    del sim.scheduler._live[_waiting(sim.scheduler).key]


def _request_ended_twice(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    sim.scheduler._counters.finished += 1


def _nowhere(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    _waiting(sim.scheduler).ticket = 0


def _negative_counter(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    sim.scheduler._counters.preemptions = -1


def _tenant_miscounted(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    sim.scheduler._tenants.live[0] += 1


def _stale_set(sim: Sim, executor: ExecutorState, pool: BlockPool) -> None:
    rows = executor.rows
    executor._decoding = type(executor.no_rows).of(rows, executor.decoding().index[:1])


CASES: list[tuple[Callable[[Sim, ExecutorState, BlockPool], None], str]] = [
    (_block_lost, "blocks are lost"),
    (_block_free_and_used, "lost or counted twice"),
    (_block_of_two_rows, "a block's users are miscounted"),
    (_block_twice_in_a_table, "has a block twice"),
    (_too_few_users, "miscounted"),
    (_too_many_users, "miscounted"),
    (_cached_and_written, "a block that the cache offers"),
    (_row_free_twice, "a row is free twice"),
    (_row_free_and_taken, "both free and taken"),
    (_admission_id_twice, "an admission id is used twice"),
    (_token_lost, "became fewer"),
    (_computed_less, "became fewer"),
    (_over_the_budget, "the token budget was passed"),
    (_over_the_sequence_limit, "the limit on sequences was passed"),
    (_step_forgotten, "steps in flight have a gap"),
    (_rests_for_ever, "stays in limbo"),
    (_leaves_early, "leaves before its last result"),
    (_leaves_and_goes_on, "leaves and its sequence goes on"),
    (_leaves_for_ever, "no result will free them"),
    (_request_lost, "who waits is miscounted"),
    (_request_ended_twice, "did not end exactly once"),
    (_nowhere, "who waits is not in the queue"),
    (_negative_counter, "preemptions is -1"),
    (_tenant_miscounted, "a tenant's live requests are miscounted"),
    (_stale_set, "the kept set is not who decodes"),
]


@pytest.mark.parametrize(("breaks", "named"), CASES, ids=lambda value: getattr(value, "__name__", "").strip("_"))
def test_a_broken_rule_is_found(breaks: Callable[[Sim, ExecutorState, BlockPool], None], named: str) -> None:
    sim = _scene()
    breaks(sim, sim.executor, sim.executor.pool)
    with pytest.raises(AssertionError, match=named):
        sim.check()
