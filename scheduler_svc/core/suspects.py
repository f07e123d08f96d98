"""Which sequences a failed plan or a dead executor speaks against.

A request can kill the executor each time it is computed, and the failure names nobody. Taking all of the batch back
each time would kill executors for ever; ending all of it would punish the innocent. So: whoever was being computed in
two failures without getting a token further is a suspect. Suspects wait in front of the queue and are admitted one at a
time, when everyone beside them has delivered a token since its admission; until the one on trial delivers, nobody else
is admitted. A token clears it; who fails on trial as well is guilty after MAX_DEATHS failures. Effort: two failures for
a batch, two for each guilty request, one short trial for each innocent.

A failing device is no sequence's fault: as long as no token at all came from an executor since its first failure, a
sequence gets MAX_LONE_DEATHS.
"""

import numpy as np

from common.messages import PlanError, PlanErrorCode
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.sequence import Sequence, SequenceState

MAX_PLAN_ERRORS = 2
SUSPECT_DEATHS = 2
MAX_DEATHS = 4
MAX_LONE_DEATHS = 12


def named(executor: ExecutorState, error: PlanError) -> Sequence | None:
    """The sequence a PlanError names; ask before the epoch is closed."""
    found = np.flatnonzero(executor.rows.admission == error.admission_id).tolist()
    return executor.rows.seqs[found[0]] if error.admission_id and found else None


def present(executor: ExecutorState, step_id: int = 0) -> list[Sequence]:
    """Those whose tokens the unanswered steps (or the one step) compute; ask before the epoch is closed."""
    plans = [flight.record.plan for flight in executor.flights if step_id in (0, flight.step_id)]
    rows = {row for plan in plans for row in (*plan.decode_rows.tolist(), *plan.prefill_rows.tolist())}
    found = [executor.rows.seqs[row] for row in sorted(rows)]
    return [sequence for sequence in found if sequence is not None and sequence.state != SequenceState.ENDED]


def book_death(sequence: Sequence, tokens_seen: int, is_device_fault: bool) -> bool:
    """One more failure with `sequence` present; True: it is guilty. Call it when the sequence's tokens are all known
    and it is in no queue. `tokens_seen`: of all sequences, so far."""
    if not sequence.deaths or sequence.length > sequence.death_length:
        sequence.deaths, sequence.death_length, sequence.death_mark = 0, sequence.length, tokens_seen
    sequence.deaths += 1
    sequence.is_suspect = sequence.deaths >= SUSPECT_DEATHS
    alone = is_device_fault and tokens_seen == sequence.death_mark
    return sequence.deaths >= (MAX_LONE_DEATHS if alone else MAX_DEATHS)


def may_be_tried(executor: ExecutorState) -> bool:
    """Everyone on the executor has delivered since its admission."""
    rows = executor.rows
    for row in np.flatnonzero(rows.running).tolist():
        sequence = rows.seqs[row]
        assert sequence is not None
        if rows.low[row] <= sequence.admitted_len:
            return False
    return True


def on_trial(executor: ExecutorState) -> bool:
    """A suspect runs and has not delivered yet."""
    sequence = executor.trial
    if sequence is None:
        return False
    is_here = sequence.row >= 0 and sequence.executor_id == executor.id
    if not is_here or executor.rows.low[sequence.row] > sequence.death_length:
        executor.trial = None
    return executor.trial is not None


def is_device_fault(error: PlanError) -> bool:
    return error.code == PlanErrorCode.DEVICE_FAILED
