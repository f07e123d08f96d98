"""Which sequences a refused plan speaks against."""

import numpy as np

from common.messages import PlanError, PlanErrorCode
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.sequence import Sequence

MAX_PLAN_ERRORS = 2
MAX_FRUITLESS_EPOCHS = 3


def blamed(executor: ExecutorState, error: PlanError) -> list[Sequence]:
    """The sequence the error names; ask before the epoch is closed.

    When plans are refused over and over for no named reason, and no epoch gets further than the one before, everything
    the refused plan computes: else it would be sent for ever. A failing device alone is no sequence's fault.
    """
    rows = executor.rows
    if error.code == PlanErrorCode.EPOCH_ENDED:
        return []
    if error.admission_id:
        chosen = np.flatnonzero(rows.admission == error.admission_id).tolist()
    elif error.code == PlanErrorCode.DEVICE_FAILED:
        return []
    else:
        executor.fruitless_epochs += 1
        executor.failed_step = error.step_id
        if executor.fruitless_epochs <= MAX_FRUITLESS_EPOCHS:
            return []
        plans = [flight.record.plan for flight in executor.flights if flight.step_id == error.step_id]
        chosen = [int(row) for plan in plans for row in (*plan.decode_rows, *plan.prefill_rows)]
    return [sequence for row in chosen if (sequence := rows.seqs[row]) is not None]
