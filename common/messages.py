"""The messages of the step protocol as both services hold them.

All are frozen (those of every step for mypy alone: see `step_message`) and complete at construction; once handed over
nobody changes them. Columns are read-only uint32 (or float32) numpy arrays; columns that belong together have one
length. `common.wire` turns them into protobuf and back.
The meaning of every field, its unit and its zero stand in protos/stepwire/executor/v1/executor.proto; here only what
differs in form.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from common.frozen import step_message

PROTOCOL_VERSION = 1
MAX_EXTEND_TOKENS = 16384
MAX_OUTPUT_CHUNK_BYTES = 256 * 1024

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


def u32(values: Iterable[int] | NDArray[np.integer] = ()) -> U32:
    """A read-only uint32 column. An array that is one already is taken as it is, so hand it over, don't keep it."""
    column = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.uint32)
    column.setflags(write=False)
    return column


def f32(values: Iterable[float] | NDArray[np.floating] = ()) -> F32:
    """A read-only float32 column; see `u32`."""
    column = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)
    column.flags.writeable = False
    return column


EMPTY_U32 = u32()
EMPTY_F32 = f32()


def _no_u32() -> U32:
    return EMPTY_U32


def _no_f32() -> F32:
    return EMPTY_F32


class PlanErrorCode(IntEnum):
    """Values are those of the proto enum."""

    STALE_EPOCH = 1
    STEP_GAP = 2
    EPOCH_ENDED = 3
    MALFORMED = 4
    UNKNOWN_ROW = 5
    ROW_BUSY = 6
    BLOCK_RANGE = 7
    BUDGET = 8
    OUT_OF_MEMORY = 9
    DEVICE_FAILED = 10
    UNSUPPORTED = 11


class RowErrorCode(IntEnum):
    NOT_FINITE = 1


class StepMode(IntEnum):
    NONE = 1
    EAGER = 2
    GRAPH = 3
    SPLIT = 4


class OutputKind(IntEnum):
    RAW_LOGITS = 1
    PROMPT_LOGPROBS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    scheduler_id: bytes
    epoch: int
    pipeline_depth: int
    monotonic_ns: int
    wall_ns: int
    expected_model_hash: str = ""
    keep_kv: bool = False
    known_incarnation: int = 0
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor is and can hold."""

    model_id: str
    model_hash: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    num_rows: int
    max_num_seqs: int
    max_blocks_per_row: int
    block_size: int
    num_blocks: int
    max_tokens_per_step: int
    max_context: int
    max_draft_tokens: int = 0
    buckets: tuple[int, ...] = ()
    numerics: str = "fast"
    kv_dtype: str = "float32"
    world_size: int = 1
    features: tuple[str, ...] = ()
    max_message_bytes: int = 4 * 1024 * 1024
    max_output_bytes: int = 8 * 1024 * 1024
    device: str = "cpu"
    dtype: str = "float32"
    decode_step_ns: int = 0
    decode_row_ns: int = 0
    prefill_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    incarnation: int
    info: ExecutorInfo
    pipeline_depth: int
    kv_kept: bool
    monotonic_ns: int
    wall_ns: int
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Ping:
    id: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Pong:
    id: int
    ping_sent_ns: int
    received_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Draining:
    reason: str
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Everything the executor needs to choose tokens of one sequence."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    prompt_logprobs_from: int = 0
    grammar_kind: str = ""
    grammar: str = ""
    adapter_id: int = 0


@step_message
class Admit:
    row: int
    admission_id: int
    tokens: U32
    length: int
    prompt_len: int
    computed_len: int
    blocks: U32
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Fork:
    source_row: int
    row: int
    admission_id: int
    length: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Extend:
    row: int
    offset: int
    tokens: U32


@step_message
class StepPlan:
    """One step. `decode_rows` is ascending (a bitmap on the wire); `prefill_rows` is ascending."""

    epoch: int
    step_id: int
    sent_ns: int
    num_tokens: int
    trace_context: bytes = b""
    release: U32 = dataclasses.field(default_factory=_no_u32)
    admit: tuple[Admit, ...] = ()
    fork: tuple[Fork, ...] = ()
    extend: tuple[Extend, ...] = ()
    grant_rows: U32 = dataclasses.field(default_factory=_no_u32)
    grant_indices: U32 = dataclasses.field(default_factory=_no_u32)
    grant_blocks: U32 = dataclasses.field(default_factory=_no_u32)
    copy_sources: U32 = dataclasses.field(default_factory=_no_u32)
    copy_targets: U32 = dataclasses.field(default_factory=_no_u32)
    set_token_rows: U32 = dataclasses.field(default_factory=_no_u32)
    set_token_tokens: U32 = dataclasses.field(default_factory=_no_u32)
    prefill_rows: U32 = dataclasses.field(default_factory=_no_u32)
    prefill_starts: U32 = dataclasses.field(default_factory=_no_u32)
    prefill_counts: U32 = dataclasses.field(default_factory=_no_u32)
    decode_rows: U32 = dataclasses.field(default_factory=_no_u32)
    draft_rows: U32 = dataclasses.field(default_factory=_no_u32)
    draft_counts: U32 = dataclasses.field(default_factory=_no_u32)
    raw_logits_rows: U32 = dataclasses.field(default_factory=_no_u32)
    raw_logits_positions: U32 = dataclasses.field(default_factory=_no_u32)


@step_message
class Logprobs:
    """Entry i belongs to the i-th emitted token of the rows that asked. Flattened tops: see `top_counts`."""

    rows: U32 = dataclasses.field(default_factory=_no_u32)
    chosen: F32 = dataclasses.field(default_factory=_no_f32)
    top_counts: U32 = dataclasses.field(default_factory=_no_u32)
    top_ids: U32 = dataclasses.field(default_factory=_no_u32)
    top_logprobs: F32 = dataclasses.field(default_factory=_no_f32)


NO_LOGPROBS = Logprobs()


@dataclass(frozen=True, slots=True)
class RowError:
    row: int
    admission_id: int
    code: RowErrorCode
    text: str


@step_message
class Timings:
    """Executor monotonic ns; 0: the step has no such part. `device_idle_ns` is a length."""

    received_ns: int = 0
    prepare_start_ns: int = 0
    prepare_end_ns: int = 0
    copy_in_start_ns: int = 0
    copy_in_end_ns: int = 0
    launched_ns: int = 0
    device_start_ns: int = 0
    device_end_ns: int = 0
    copy_out_end_ns: int = 0
    sent_ns: int = 0
    device_idle_ns: int = 0


NO_TIMINGS = Timings()


@dataclass(frozen=True, slots=True)
class Output:
    """One bulk result, whole. `data` as in OutputChunk."""

    step_id: int
    kind: OutputKind
    row: int
    admission_id: int
    position: int
    count: int
    data: bytes


@step_message
class StepResult:
    """What one step produced. `emitted_rows` is ascending (a bitmap on the wire).

    `counts` empty: one token per emitting row. `outputs` travel on their own RPC and are joined again by the receiver
    before anybody sees the result.
    """

    epoch: int
    step_id: int
    emitted_rows: U32 = dataclasses.field(default_factory=_no_u32)
    tokens: U32 = dataclasses.field(default_factory=_no_u32)
    counts: U32 = dataclasses.field(default_factory=_no_u32)
    accepted: U32 = dataclasses.field(default_factory=_no_u32)
    logprobs: Logprobs = NO_LOGPROBS
    row_errors: tuple[RowError, ...] = ()
    timings: Timings = NO_TIMINGS
    mode: StepMode = StepMode.NONE
    bucket: int = 0
    output_bytes: int = 0
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanError:
    epoch: int
    step_id: int
    code: PlanErrorCode
    text: str
    field: str = ""
    row: int | None = None
    admission_id: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of an Output; see the proto."""

    epoch: int
    step_id: int
    kind: OutputKind
    row: int
    admission_id: int
    position: int
    count: int
    offset: int
    total_bytes: int
    data: bytes


ToExecutor = Hello | StepPlan | Ping
FromExecutor = Welcome | StepResult | PlanError | Pong | Draining
