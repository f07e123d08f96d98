"""What the core process and the api workers say to each other.

A worker (servicers, tokenising, detokenising, stop strings) and the core (scheduler, engine loop, executor client)
share no object: with `--api-workers 0` these messages pass inside one process, with N over local sockets. All are
frozen.

A request's `key` is chosen by its worker, `worker_id << 48 | counter`, and never reused. Its public `request_id` lives
in the core, which alone knows duplicates, limits and health.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import StepwireError
from common.frozen import step_message
from common.messages import U32, ExecutorInfo, Output, Sampling

WORKER_SHIFT = 48


class FinishReason(IntEnum):
    """Values are those of the public proto enum. 0 in a column means: not finished."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT = 5


# --------------------------------------------------------------------------------------------------- worker to core


@dataclass(frozen=True, slots=True)
class Child:
    """A further completion of its Submit's prompt: a request like that one but for these two."""

    key: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A validated request. Answered by Accepted or Refused, for its own key alone: all of it or nothing is taken.

    `sampling.max_tokens` 0: as far as the context allows. `arrival_ns` and `deadline_ns` (0: none) are monotonic.
    `tenant`: on whose account; empty: the default tenant's. `trace_context`: empty, or 16 bytes trace id, 8 bytes id of
    the Generate span, 1 byte flags. `children`: choices 1, 2, … of a request for several (choice 0 is the Submit
    itself); each has a key of its own under the one request_id, and from there on ends, is cancelled and gets its
    tokens as any request. Prompt logprobs come with choice 0 only.
    """

    key: int
    request_id: str
    prompt: U32
    sampling: Sampling
    arrival_ns: int
    raw_logits: bool = False
    priority: int = 0
    cache_salt: bytes = b""
    tenant: str = ""
    deadline_ns: int = 0
    trace_context: bytes = b""
    children: tuple[Child, ...] = ()

    @property
    def keys(self) -> tuple[int, ...]:
        """Of all choices, in their order."""
        return (self.key, *(child.key for child in self.children))


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller is gone or gave up. Idempotent; not answered: nothing more comes for this key."""

    key: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The worker found a stop string in the first `token_count` generated tokens. Not answered, as Cancel."""

    key: int
    token_count: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Abort:
    """The Abort call: ends every choice of the request with exactly this id. Answered by AbortAnswer."""

    call: int
    worker_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class GetStats:
    """Answered by StatsAnswer."""

    call: int
    worker_id: int


@dataclass(frozen=True, slots=True)
class WatchSteps:
    """From now on (or no longer) the worker wants a StepSeen for each step."""

    worker_id: int
    on: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """No more admission. After `deadline_ms` what still runs ends with UNAVAILABLE. Answered by DrainAnswer."""

    call: int
    worker_id: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Nothing computed before is found in the prefix cache from now on. Answered by ResetAnswer."""

    call: int
    worker_id: int


ToCore = Submit | Cancel | Finish | Abort | GetStats | WatchSteps | Drain | ResetPrefixCache


def makes_room(message: ToCore) -> bool:
    """It only ever ends work, so it is taken however far behind the core is."""
    return isinstance(message, Cancel | Finish) or (isinstance(message, WatchSteps) and not message.on)


# --------------------------------------------------------------------------------------------------- core to worker


@dataclass(frozen=True, slots=True)
class Accepted:
    key: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request never ran."""

    key: int
    error: StepwireError


@dataclass(frozen=True, slots=True)
class Ended:
    """An accepted request ended without a finish reason: aborted, failed, drained."""

    key: int
    error: StepwireError


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Logprobs of one generated token: the chosen one's and those of the most likely, best first."""

    chosen: float
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Extras:
    """What few requests want: `logprobs` has one entry per token of the batch; `outputs` are whole."""

    logprobs: tuple[TopTokens, ...] = ()
    outputs: tuple[Output, ...] = ()


@step_message
class TokenBatch:
    """What one step brought to the requests of one worker; all columns of entries have one length.

    keys: uint64. counts: tokens of each entry (0 is possible: prompt logprobs before the first token, or a finish
    alone). tokens: flattened. reasons: uint8, FinishReason or 0; a non-zero entry is the last of its key. cached:
    prompt tokens found in the prefix cache at first admission. extras: by index of the entry.
    """

    keys: NDArray[np.uint64]
    counts: U32
    tokens: U32
    reasons: NDArray[np.uint8]
    cached: U32
    extras: Mapping[int, Extras] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    call: int
    found: bool


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    call: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class ResetAnswer:
    """Blocks the prefix cache held: `dropped` were idle and are free now, `forgotten` are in use and stay so."""

    call: int
    dropped: int
    forgotten: int


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """Fields as in stepwire.v1.ExecutorStats."""

    address: str
    connected: bool
    epoch: int = 0
    incarnation: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    limbo_blocks: int = 0
    cached_blocks: int = 0
    num_rows: int = 0
    free_rows: int = 0
    in_flight_steps: int = 0
    steps: int = 0
    epochs_ended: int = 0
    rtt_ns: int = 0
    clock_offset_ns: int = 0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Fields as in stepwire.v1.TenantStats."""

    tenant: str
    requests: int
    waiting: int
    running: int
    prompt_tokens: int
    generated_tokens: int
    served: float
    weight: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Fields as in stepwire.v1.GetStatsResponse."""

    requests_accepted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    requests_refused: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    waiting: int = 0
    running: int = 0
    spans_dropped: int = 0
    cache_queried_tokens: int = 0
    cache_hit_tokens: int = 0
    readmitted_tokens: int = 0
    readmitted_hit_tokens: int = 0
    forked_tokens: int = 0
    requests_expired: int = 0
    queued_tokens: int = 0
    drain_rate: float = 0.0
    tenants: tuple[TenantStats, ...] = ()
    executors: tuple[ExecutorStats, ...] = ()


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    call: int
    stats: Stats


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One finished step, for WatchSteps; fields as in stepwire.v1.WatchStepsResponse."""

    executor: str
    epoch: int
    step_id: int
    decode_tokens: int
    prefill_tokens: int
    num_sequences: int
    waiting: int
    free_blocks: int
    bucket: int
    planned_ns: int
    result_ns: int
    device_ns: int
    device_idle_ns: int
    running: int = 0
    num_blocks: int = 0
    preemptions: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CoreState:
    """Sent when it changes, and once to a new worker. `info` None: no executor was ever connected.

    `ready`: an executor is connected and the core does not drain. `max_context` and `max_prompt_tokens` already take
    the KV cache's size into account.
    """

    ready: bool
    draining: bool
    info: ExecutorInfo | None
    max_context: int = 0
    max_prompt_tokens: int = 0


FromCore = (
    Accepted
    | Refused
    | Ended
    | TokenBatch
    | AbortAnswer
    | DrainAnswer
    | ResetAnswer
    | StatsAnswer
    | StepSeen
    | CoreState
)


class CorePort(Protocol):
    """A worker's way to the core."""

    def send(self, message: ToCore) -> None:
        """Never blocks. Raises Overloaded when the core is `max_port_messages` behind, except of what `makes_room`."""
        ...


class WorkerPort(Protocol):
    """The core's way to a worker."""

    @property
    def worker_id(self) -> int: ...

    def deliver(self, message: FromCore) -> None:
        """Never blocks and never raises: a worker that falls behind ends its slow streams itself."""
        ...
