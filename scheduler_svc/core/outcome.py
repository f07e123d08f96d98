"""What the core answers its owner with."""

from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import StepwireError
from common.frozen import step_message
from scheduler_svc.messages import FinishReason, TokenBatch
from scheduler_svc.observer import StepRecord


@dataclass(frozen=True, slots=True)
class EpochStart:
    """What the next Hello to this executor says."""

    epoch: int
    keep_kv: bool
    known_incarnation: int


@step_message
class Ending:
    """A request left the core: with a reason (its last TokenBatch entry carries it too) or with an error."""

    key: int
    request_id: str
    reason: FinishReason | None
    error: StepwireError | None


@step_message
class StepOutcome:
    """batches: by worker id. endings: of this step, with reason or error."""

    batches: Mapping[int, TokenBatch]
    endings: tuple[Ending, ...]
    record: StepRecord


@dataclass(slots=True)
class Counters:
    """Since start. Owner: the scheduler."""

    accepted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queried_tokens: int = 0
    cache_hit_tokens: int = 0
    readmitted_tokens: int = 0
    readmitted_hit_tokens: int = 0
    forked_tokens: int = 0
    expired: int = 0
