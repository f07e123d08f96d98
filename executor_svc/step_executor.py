"""What runs step plans: the seam between the gRPC servicer and the device.

`Runner` is the real one; tests/fakes/toy_executor.py is a deterministic stand-in. One contract suite
(tests/contract) runs against every implementation. Nothing here knows gRPC.
"""

from dataclasses import replace
from typing import Protocol

from common.messages import ExecutorInfo, Hello, PlanError, PlanErrorCode, StepPlan, StepResult


class PlanRefused(Exception):
    """A plan was not run. The executor's state is as before the plan; the epoch is over."""

    def __init__(self, error: PlanError) -> None:
        super().__init__(f"{error.code.name} {error.field}: {error.text}")
        self.error = error


class PendingStep(Protocol):
    """A step that was launched and whose result is not there yet."""

    def wait(self) -> StepResult:
        """Blocks, outside the GIL, until the step's outputs are on the host. Called once, by the waiter thread.

        The result has its `outputs` and every timing but `sent_ns`. Raises PlanRefused (DEVICE_FAILED, OUT_OF_MEMORY)
        when the device gave up; the epoch is then over.
        """
        ...


class StepExecutor(Protocol):
    """Owner of all device state. Every method but `info` is called by the runner thread alone."""

    @property
    def info(self) -> ExecutorInfo:
        """Constant for the life of the executor. Any thread."""
        ...

    @property
    def incarnation(self) -> int:
        """Random, drawn at construction, never 0. Any thread."""
        ...

    def begin_epoch(self, hello: Hello) -> bool:
        """Waits for device work in flight, releases every row and starts `hello.epoch`; step ids start from 1 again.

        Returns whether the blocks' contents were kept: `hello.keep_kv`, `hello.known_incarnation` is ours, and the
        epoch before was the same scheduler's.
        """
        ...

    def execute(self, plan: StepPlan, received_ns: int) -> PendingStep:
        """Applies `plan` and launches its device work without waiting for it.

        Validates the whole plan before changing anything. Raises PlanRefused; after that every plan of the same epoch
        is refused with EPOCH_ENDED. At most `pipeline_depth` steps may be pending.
        """
        ...

    def close(self) -> None:
        """Waits for device work and frees everything. Idempotent."""
        ...


def refused(plan: StepPlan, code: PlanErrorCode, text: str, **details: object) -> PlanRefused:
    """A PlanRefused for `plan`; `details` are further fields of PlanError."""
    return PlanRefused(replace(PlanError(plan.epoch, plan.step_id, code, text), **details))  # type: ignore[arg-type]
