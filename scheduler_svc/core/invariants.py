"""What must hold between any two calls of the core. For simulation and tests: it walks over everything."""

from collections import Counter

import numpy as np

from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.recent_tokens import SAFE_AGE
from scheduler_svc.core.row_set import RowSet
from scheduler_svc.core.rows import NEVER, Rows
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.suspects import SUSPECT_DEATHS
from scheduler_svc.core.tenants import MAX_TOLD
from scheduler_svc.messages import Stats


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the first rule that is broken."""
    for executor in scheduler.executors:
        if executor.up:
            assert executor.rows.final.max(initial=0) <= scheduler.limits()[0], "a row may outgrow another executor"
            _check_rows(executor)
            _check_writes(executor)
            _check_copies(executor)
            _check_kept(executor)
        _check_blocks(executor)
    stats = scheduler.stats()
    _check_requests(scheduler, stats)
    _check_tenants(scheduler, stats)
    for name in stats.__dataclass_fields__:
        value = getattr(stats, name)
        assert not isinstance(value, int) or value >= 0, f"{name} is {value}"


def _check_rows(executor: ExecutorState) -> None:
    rows = executor.rows
    occupied = [row for row, sequence in enumerate(rows.seqs) if sequence is not None]
    assert len(set(executor.free_rows)) == len(executor.free_rows), "a row is free twice"
    assert sorted([*occupied, *executor.free_rows]) == list(range(len(rows))), "rows are lost or both free and taken"
    running = np.flatnonzero(rows.running).tolist()
    assert len(running) == executor.num_running, "running rows are miscounted"
    assert len(running) <= executor.max_num_seqs, "the limit on sequences was passed"
    given_up = [*executor.limbo, *executor.leaving]
    assert sorted([*running, *given_up]) == occupied, "a row is neither running nor in limbo nor leaving, or several"
    admissions = rows.admission[occupied].tolist()
    assert len(set(admissions)) == len(admissions) and 0 not in admissions, "an admission id is used twice"
    due = rows.slack.min(initial=NEVER)  # above half of NEVER: never, for one row as for the other
    assert rows.least_slack <= due or due > NEVER // 2, "a block may be due unseen"
    for row in given_up:
        assert not rows.left[row], f"row {row} in limbo has tokens left to plan"
    for row in executor.limbo:
        assert rows.last_step[row] > executor.last_result, f"row {row} stays in limbo after its last result"
    for row in executor.leaving:
        assert rows.last_step[row] <= executor.last_result, f"row {row} leaves before its last result"
        assert not rows.accept[row], f"row {row} leaves and its sequence goes on"
    assert executor.flights or not executor.leaving, "rows leave and no result will free them"
    for row in running:
        sequence = rows.seqs[row]
        assert sequence is not None and sequence.row == row, f"row {row} is not that of its sequence"
        assert sequence.state == SequenceState.RUNNING, f"row {row} runs, its sequence does not"
        num_recent = rows.low.item(row) - sequence.length
        recent = rows.recent.of([row])[0] if num_recent else ()
        assert len(recent) == num_recent, "recent tokens are lost, or others' are among them"
        assert rows.low[row] <= rows.high(row) <= rows.final[row], f"row {row} has more tokens than planned or allowed"
        assert 0 <= rows.computed(row) <= sequence.planned or rows.decoding[row], f"row {row} computed the unplanned"
        assert rows.computed(row) < rows.low[row], f"row {row} computed its newest token"
        assert rows.capacity[row] == rows.table_len[row] * executor.block_size, f"row {row}'s blocks are miscounted"
        assert rows.high(row) - 1 <= rows.capacity[row], f"row {row} writes past its blocks"
        assert rows.decoding[row] or not rows.left[row], f"row {row} decodes before its prompt is planned"
        has_all = not rows.decoding[row] or rows.capacity[row] >= rows.final[row] - 1
        slack = NEVER // 2 if has_all else rows.capacity[row] - (executor.depth - 2) - rows.high(row)
        assert rows.slack[row] > slack if has_all else rows.slack[row] == slack, "a block is due at another time"
        assert (row in executor.prefilling) != bool(rows.decoding[row]), "a row is in both phases, or in none"
    assert sum(_is_tried(executor, row) for row in running) <= 1, "more than one suspect is on trial"
    flights = [flight.step_id for flight in executor.flights]
    assert flights == list(range(executor.last_result + 1, executor.next_step)), "steps in flight have a gap"
    assert len(flights) <= executor.depth, "more steps are in flight than may be"
    for flight in executor.flights:
        plan = flight.record.plan
        assert plan.num_tokens <= executor.max_tokens, "the token budget was passed"
        sequences = len(plan.decode_rows) + len(plan.prefill_rows)
        assert sequences <= executor.max_num_seqs, "a step has more sequences than may be"


def _check_kept(executor: ExecutorState) -> None:
    """What is kept from step to step is what would be found by looking again."""
    rows, kept = executor.rows, executor.kept_decoding
    if kept is not None:
        _check_row_set(rows, kept)
        assert kept.index.tolist() == np.flatnonzero(rows.left > 0).tolist(), "the kept set is not who decodes"
        if executor.quiet_steps:
            assert executor.quiet_steps <= rows.slack.min(), "a block is due earlier"
            assert executor.quiet_steps < rows.left[kept.index].min(), "a row ends earlier"
    assert rows.recent.room > 0 and rows.recent.oldest_age + rows.recent.room <= SAFE_AGE, "recent tokens may run over"
    assert rows.recent.has_all, "recent tokens, or promised ones, are overwritten"
    length = rows.low.copy()
    for flight in executor.flights:
        _check_row_set(rows, flight.sampled)
        length += flight.sampled.advance
        ends = (length >= rows.final) & rows.accept & (flight.sampled.advance > 0)
        assert flight.has_last_token or not ends.any(), "a last token is in flight and the step does not know"


def _check_row_set(rows: Rows, kept: RowSet) -> None:
    again = RowSet.of(rows, kept.index.copy())
    for name in ("column", "advance", "keys"):
        assert np.array_equal(getattr(kept, name), getattr(again, name)), f"{name} of a row set is stale"
    batch, fresh = kept.batch(), again.batch()
    assert batch.worker == fresh.worker and np.array_equal(batch.cached, fresh.cached), "a batch's columns are stale"


def _check_fork(sequence: Sequence) -> None:
    for follower in sequence.followers:
        assert follower.state == SequenceState.HELD and follower.leader is sequence, "a choice waits for another"
        assert not follower.followers, "a choice that waits leads others"
    if sequence.followers:
        assert not sequence.prefilled_step or sequence.row < 0, "choices wait for a prompt that is planned"
    if sequence.state == SequenceState.HELD:
        leader = sequence.leader
        assert leader is not None and sequence in leader.followers, "a choice waits and nobody leads it"
        assert leader.state not in (SequenceState.ENDED, SequenceState.HELD), "a choice waits for nobody"
    if sequence.leader is not None:
        assert sequence.cached < 0, "only a first admission forks"
        assert sequence.leader.request.request_id == sequence.request.request_id, "a choice forks from a stranger"


def _check_writes(executor: ExecutorState) -> None:
    """What a row will write belongs to it alone: nobody shares it, and the prefix cache does not offer it."""
    pool, rows, size = executor.pool, executor.rows, executor.block_size
    for row in np.flatnonzero(rows.running).tolist():
        sequence = rows.seqs[row]
        assert sequence is not None
        start = rows.high(row) - 1 if rows.decoding[row] else sequence.planned
        own = rows.blocks(row)[start // size :].tolist()
        assert all(pool.num_users(block) == 1 for block in own), f"row {row} will write a block that others read"
        offered = pool.cache is not None and any(pool.cache.holds(block) for block in own)
        assert not offered, f"row {row} will write a block that the cache offers"


def _is_tried(executor: ExecutorState, row: int) -> bool:
    sequence = executor.rows.seqs[row]
    assert sequence is not None
    return sequence.deaths >= SUSPECT_DEATHS and int(executor.rows.low[row]) <= sequence.death_length


def _check_copies(executor: ExecutorState) -> None:
    """What a step in flight copies from and to has users, if only rows in limbo."""
    rows = executor.rows
    used: set[int] = set()
    for row in np.flatnonzero(rows.table_len).tolist():
        used.update(rows.blocks(row).tolist())
    for flight in executor.flights:
        plan = flight.record.plan
        assert used.issuperset(plan.copy_sources.tolist()), "a block is free that a step in flight copies from"
        assert used.issuperset(plan.copy_targets.tolist()), "a block is free that a step in flight copies to"


def _check_blocks(executor: ExecutorState) -> None:
    pool, rows = executor.pool, executor.rows
    users: Counter[int] = Counter()
    running: Counter[int] = Counter()
    for row in np.flatnonzero(rows.table_len).tolist():
        sequence, table = rows.seqs[row], rows.blocks(row).tolist()
        assert sequence is not None, f"row {row} is free and has blocks"
        assert len(set(table)) == len(table), f"row {row} has a block twice"
        users.update(table)
        running.update(table if rows.running[row] else ())
        for block in table[sequence.num_known :]:
            assert pool.num_users(block) == 1, f"row {row} shares a block it takes for its own"
            assert pool.cache is None or not pool.cache.holds(block), f"row {row} offers a block it takes for its own"
    assert all(pool.num_users(block) == count for block, count in users.items()), "a block's users are miscounted"
    assert users.keys() >= set(pool.shared_blocks()), "a block without users is counted as shared"
    assert sum(block not in running for block in users) == executor.num_limbo_blocks, "blocks in limbo are miscounted"
    free = pool.free_blocks()
    idle = pool.cache.idle_blocks() if pool.cache is not None else ()
    assert sorted([*free, *idle, *users]) == list(range(pool.num_blocks)), "blocks are lost or counted twice"
    assert pool.available == len(free) + len(idle), "available blocks are miscounted"
    if pool.cache is not None:
        tails = pool.cache.tail_blocks()
        assert all(pool.cache.holds(block) != (block in tails) for block in idle), "an idle block holds nothing"
        assert set(tails) <= set(idle) and len(set(tails)) == len(tails) <= len(pool.cache), (
            "a tail's block is not idle"
        )
        assert not any(pool.cache.holds(block) for block in free), "a free block is still registered"


def _check_tenants(scheduler: Scheduler, stats: Stats) -> None:
    live: dict[str, int] = {}
    for sequence in scheduler.live_sequences():
        live[sequence.request.tenant] = live.get(sequence.request.tenant, 0) + 1
    if len(live) <= MAX_TOLD and len(stats.tenants) < MAX_TOLD:
        told = {tenant.tenant: tenant.waiting + tenant.running for tenant in stats.tenants}
        assert {name: count for name, count in told.items() if count} == live, "a tenant's live requests are miscounted"
        assert sum(tenant.waiting for tenant in stats.tenants) == stats.waiting, "tenants' waiting are miscounted"
        assert sum(tenant.running for tenant in stats.tenants) == stats.running, "tenants' running are miscounted"


def _check_requests(scheduler: Scheduler, stats: Stats) -> None:
    waiting = parked = running = held = 0
    for sequence in scheduler.live_sequences():
        no_further = sequence.deaths >= SUSPECT_DEATHS and sequence.length <= sequence.death_length
        assert sequence.is_suspect == no_further, "a suspect that got further, or one that is not known as such"
        waiting += sequence.state == SequenceState.WAITING
        parked += sequence.state == SequenceState.PARKED
        running += sequence.state == SequenceState.RUNNING
        held += sequence.state == SequenceState.HELD
        has_row = sequence.state in (SequenceState.PARKED, SequenceState.RUNNING)
        assert (sequence.row >= 0) == has_row, "a sequence has a row and should not, or has none"
        assert (sequence.ticket > 0) == (sequence.state == SequenceState.WAITING), "who waits is not in the queue"
        assert sequence.key in scheduler.keys_of(sequence.request.request_id), "a live request is not known by its id"
        _check_fork(sequence)
    assert waiting + parked + running + held == scheduler.num_live, "a live request is nowhere"
    assert waiting + parked + held == scheduler.num_waiting, "who waits is miscounted"
    assert running == scheduler.num_running, "who runs is miscounted"
    ended = stats.requests_finished + stats.requests_aborted + stats.requests_failed
    assert stats.requests_accepted == ended + scheduler.num_live, "an accepted request did not end exactly once"
