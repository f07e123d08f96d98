"""What the engine loop tells whoever watches steps and requests (tracing, metrics, WatchSteps).

Calls come from the loop thread, right after the event, and must be cheap: no I/O, no waiting.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from common.frozen import step_message
from common.messages import StepPlan, StepResult
from scheduler_svc.messages import FinishReason, Submit

if TYPE_CHECKING:
    from scheduler_svc.core.outcome import StepOutcome


@step_message
class StepRecord:
    """The core's own record of a planned step: how results are attributed, and what the step was made of.

    decode_keys, prefill_keys: uint64, request keys in the order of plan.decode_rows and plan.prefill_rows. Counts are
    as of planning time.
    """

    executor_id: int
    plan: StepPlan
    planned_ns: int
    decode_keys: NDArray[np.uint64]
    prefill_keys: NDArray[np.uint64]
    decode_tokens: int
    prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int


class StepObserver(Protocol):
    """All times are scheduler monotonic ns."""

    def on_submit(self, request: Submit, now_ns: int) -> None: ...

    def trace_context(self, executor_id: int, now_ns: int) -> bytes:
        """Asked before each plan: the trace context to put into it; empty: this step is not traced live."""
        ...

    def on_plan(self, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None: ...

    def on_result(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        """`clock_offset_ns`: executor monotonic minus scheduler monotonic, best estimate so far."""
        ...

    def on_delivered(self, outcome: "StepOutcome", now_ns: int) -> None:
        """A step's tokens went to their workers; its endings are told after this."""
        ...

    def on_tokens(self, key: int, count: int, now_ns: int) -> None:
        """Only called for requests whose Submit carries a trace context."""
        ...

    def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        """The request left the core. `reason` None: it ended with an error of class `error`."""
        ...

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        """ "connected", "lost", "epoch_ended", "draining"."""
        ...


class NoObserver:
    """Watches nothing."""

    def on_submit(self, request: Submit, now_ns: int) -> None:
        pass

    def trace_context(self, executor_id: int, now_ns: int) -> bytes:
        return b""

    def on_plan(self, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None:
        pass

    def on_result(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        pass

    def on_delivered(self, outcome: "StepOutcome", now_ns: int) -> None:
        pass

    def on_tokens(self, key: int, count: int, now_ns: int) -> None:
        pass

    def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        pass

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        pass
