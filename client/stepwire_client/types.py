"""What calls return: frozen dataclasses, free of protobuf.

Token ids, texts and counts mean what protos/stepwire/v1/inference.proto says of the fields of the same names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypedDict

from stepwire_client._gen.stepwire.v1 import admin_pb2, inference_pb2


class FinishReason(StrEnum):
    """Why a generation ended. UNKNOWN: a newer server's reason that this client has no name for."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    UNKNOWN = "unknown"


class Health(StrEnum):
    """Answers of grpc.health.v1."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's natural log probability and those of the most likely, best first."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RawLogits:
    """`data`: float32 little-endian [vocab_size]; `numpy.frombuffer(data, "<f4")` reads it."""

    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: the request was accepted. One for each choice; with choice `index`'s seed, n = 1 gives it."""

    request_id: str
    prompt_tokens: int
    seed: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last event. `text` is whole characters; the texts of all deltas joined are the answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    raw_logits: tuple[RawLogits, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of its choice."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    stop_string: str | None = None
    index: int = 0


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; `index`: which of the request's choices."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    stop_token_id: int | None = None
    stop_string: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    raw_logits: tuple[RawLogits, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """The model's own defaults; None: the model names none and the server's documented default holds."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    model_hash: str
    vocab_size: int
    max_context: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_tokenizer: bool
    has_chat_template: bool
    default_sampling: Sampling
    features: tuple[str, ...]
    server_version: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids and the vocabulary's own spelling of each."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat as the model sees it."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """Fields as in stepwire.v1.ExecutorStats."""

    address: str
    connected: bool
    epoch: int
    incarnation: int
    num_blocks: int
    free_blocks: int
    limbo_blocks: int
    cached_blocks: int
    num_rows: int
    free_rows: int
    in_flight_steps: int
    steps: int
    epochs_ended: int
    rtt_ns: int
    clock_offset_ns: int


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

    requests_accepted: int
    requests_finished: int
    requests_aborted: int
    requests_failed: int
    requests_refused: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    waiting: int
    running: int
    spans_dropped: int
    requests_expired: int
    queued_tokens: int
    drain_rate: float
    cache_queried_tokens: int
    cache_hit_tokens: int
    readmitted_tokens: int
    readmitted_hit_tokens: int
    forked_tokens: int
    tenants: tuple[TenantStats, ...]
    executors: tuple[ExecutorStats, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step; fields as in stepwire.v1.WatchStepsResponse."""

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
    skipped: int
    running: int
    num_blocks: int
    preemptions: int
    admitted_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What the prefix cache held: `dropped_blocks` were idle and are free now, `forgotten_blocks` are in use."""

    dropped_blocks: int
    forgotten_blocks: int


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every generating call. What is not given takes the model's default, else the server's."""

    n: int
    model: str
    request_id: str
    priority: int
    cache_salt: str
    tenant: str
    template: str
    add_generation_prompt: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    stop_strings: Sequence[str]
    ignore_eos: bool
    logprobs: int
    raw_logits: bool
    prompt_logprobs: int
    detokenize: bool


def _logprobs(messages: Sequence[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(m.token_id, m.logprob, tuple(TopLogprob(t.token_id, t.logprob) for t in m.top)) for m in messages
    )


_REASONS = {
    inference_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    inference_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    inference_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    inference_pb2.FINISH_REASON_MAX_TOKENS: FinishReason.MAX_TOKENS,
    inference_pb2.FINISH_REASON_CONTEXT: FinishReason.CONTEXT,
}


def decode_started(message: inference_pb2.Started, index: int) -> Started:
    return Started(message.request_id, message.prompt_tokens, message.seed, index)


def decode_delta(message: inference_pb2.Delta, index: int) -> Delta:
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        raw_logits=tuple(RawLogits(r.position, r.data) for r in message.raw_logits),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        index=index,
    )


def decode_finished(message: inference_pb2.Finished, index: int) -> Finished:
    usage = message.usage
    return Finished(
        reason=_REASONS.get(message.reason, FinishReason.UNKNOWN),
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        index=index,
    )


def decode_model_info(message: inference_pb2.GetModelInfoResponse) -> ModelInfo:
    defaults: Any = message.default_sampling
    return ModelInfo(
        model=message.model,
        model_hash=message.model_hash,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        max_prompt_tokens=message.max_prompt_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        default_sampling=Sampling(
            **{f.name: getattr(defaults, f.name) for f in fields(Sampling) if defaults.HasField(f.name)}
        ),
        features=tuple(message.features),
        server_version=message.server_version,
    )


def _same_names(kind: type[Any], message: Any) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(kind)}


def decode_stats(message: admin_pb2.GetStatsResponse) -> Stats:
    executors = tuple(ExecutorStats(**_same_names(ExecutorStats, e)) for e in message.executors)
    tenants = tuple(TenantStats(**_same_names(TenantStats, t)) for t in message.tenants)
    return Stats(**_same_names(Stats, message) | {"executors": executors, "tenants": tenants})


def decode_steps(message: admin_pb2.WatchStepsResponse) -> list[Step]:
    return [Step(**_same_names(Step, step)) for step in (*message.earlier, message)]
