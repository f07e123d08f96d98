"""The scheduler's configuration; see common/config.py for where values come from."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from common.config import Listen, ServiceConfig, Size, check_listen, check_target, split_list
from common.grpc_options import PUBLIC_MAX_MESSAGE_BYTES
from scheduler_svc.core.config import MAX_AGING_MS


def weights_of(pairs: Iterable[str]) -> dict[str, float]:
    """{tenant: weight} of "tenant=weight". Raises ValueError naming the pair that is none."""
    weights: dict[str, float] = {}
    for pair in pairs:
        tenant, equals, text = pair.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not equals or not (0 < weight < float("inf")):
            raise ValueError(f"{pair!r}: write tenant=weight, the weight above 0")
        if tenant in weights:
            raise ValueError(f"the tenant {tenant!r} is named twice")
        weights[tenant] = weight
    return weights


def check_worker_listen(value: str) -> str:
    """host:port or nothing."""
    if value.startswith("unix:"):
        raise ValueError("not host:port; with a unix: address in listen each API process gets one by itself")
    return check_listen(value) if value else value


class SchedulerConfig(ServiceConfig):
    """Frozen; made by `load_config(SchedulerConfig, argv)`. Names equal those of the core's configuration."""

    service: ClassVar[str] = "scheduler"

    listen: Listen = Field(
        default="127.0.0.1:50051", description="where the public API listens: host:port or unix:path"
    )
    served_model_name: str = Field(
        default="", description="the name clients call the model; empty: taken from the model"
    )
    executors: Annotated[tuple[str, ...], BeforeValidator(split_list)] = Field(
        default=("127.0.0.1:50052",), min_length=1, description="addresses of executors, separated by commas"
    )
    pipeline_depth: int = Field(
        default=0,
        ge=0,
        le=4,
        description="step plans in flight to one executor; 0: 2, or 3 while it would wait for them",
    )
    max_num_seqs: int = Field(default=0, ge=0, description="sequences in one step, at most; 0: what the executor can")
    max_num_batched_tokens: int = Field(
        default=0, ge=0, description="tokens in one step, at most; 0: what the executor can, less by prefill_share"
    )
    max_prefill_chunk: int = Field(
        default=512, ge=0, description="prompt tokens of one sequence in one step; 0: no limit"
    )
    enable_prefix_cache: bool = Field(default=True, description="reuse the KV blocks of equal prefixes")
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        description="prompts over this are long and take at most so many tokens a step; 0: none is long",
    )
    max_partial_prefills: int = Field(
        default=0, ge=0, description="sequences at once whose prompts are computed in part; 0: no limit"
    )
    max_long_partial_prefills: int = Field(
        default=0, ge=0, description="long ones of them; shorter prompts pass those that wait for it; 0: no limit"
    )
    prefill_share: float = Field(
        default=0.67,
        ge=0,
        le=1,
        description="of a step's time that prompts may take beside decodes, on a CPU; 1: all; off with the next or "
        "max_num_batched_tokens",
    )
    target_itl_ms: float = Field(
        default=0.0, ge=0, description="p99 time between tokens that prefill may not push steps over; 0: off"
    )
    policy: Literal["fcfs", "priority", "fair", "deadline"] = Field(
        default="fcfs", description="which waiting request goes first: fcfs, priority, fair (over tenants), deadline"
    )
    priority_aging_ms: int = Field(
        default=0, ge=0, le=MAX_AGING_MS, description="waiting worth one level of priority; 0: priorities never age"
    )
    tenant_weights: Annotated[tuple[str, ...], BeforeValidator(split_list)] = Field(
        default=(), description="shares under the policy fair: a=2,b=1; a tenant not named has 1"
    )
    input_token_weight: float = Field(default=1.0, ge=0, description="what a prompt token counts under the policy fair")
    output_token_weight: float = Field(
        default=2.0, ge=0, description="what a generated token counts under the policy fair"
    )
    isolate_tenants: bool = Field(default=False, description="no tenant finds another's prompts in the prefix cache")
    max_preemptions: int = Field(
        default=4, ge=0, description="a sequence preempted so often returns with all blocks it can need, for good"
    )
    max_queued_requests: int = Field(default=1024, ge=1, description="waiting requests; more are refused")
    max_queued_tokens: int = Field(
        default=0, ge=0, description="prompt tokens of all waiting requests; more are refused; 0: no limit"
    )
    max_queue_time_ms: int = Field(
        default=0, ge=0, description="a request that waited so long for its first step is refused; 0: no limit"
    )
    stream_interval_ms: float = Field(
        default=20.0,
        ge=0,
        description="longest wait of a token for the next ones while an API process is behind; 0: none",
    )
    slow_reader_s: float = Field(default=30.0, gt=0, description="seconds a client may leave its stream unread")
    max_unread_bytes: Size = Field(
        default=256 * 1024 * 1024,
        ge=1024 * 1024,
        description="bytes of results that all clients together leave unread; over it the slowest readers end",
    )
    drain_s: float = Field(default=30.0, ge=0, description="seconds running requests get to finish when stopping")
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain of the public API")
    tls_key: Path | None = Field(default=None, description="PEM key of that certificate")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM authorities whose client certificates are required"
    )
    auth_tokens_file: Path | None = Field(default=None, description="accepted bearer tokens, one per line")
    max_message_bytes: Size = Field(
        default=PUBLIC_MAX_MESSAGE_BYTES, ge=65536, description="largest public message, bytes"
    )
    allow_request_templates: bool = Field(
        default=False, description="take chat templates from callers: programs that may eat time and memory here"
    )
    api_workers: int = Field(
        default=0, ge=0, le=64, description="processes that serve the API; 0: the core's own process does"
    )
    worker_listen: Annotated[str, BeforeValidator(check_worker_listen)] = Field(
        default="",
        description="the first API process's own address, host:port; the next have the next ports; empty: free ports",
    )
    trace_window_interval_s: float = Field(default=5.0, gt=0, description="seconds between two traced windows of steps")
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of requests traced that carry no decision"
    )
    slow_step_ms: float = Field(
        default=0.0, ge=0, description="steps longer than this get a trace; 0: those five times as long as usual"
    )

    @field_validator("executors")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("an executor is named twice")
        return tuple(check_target(address) for address in value)

    @field_validator("tenant_weights")
    @classmethod
    def _weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        weights_of(value)
        return value

    @model_validator(mode="after")
    def _long(self) -> Self:
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ValueError("max_long_partial_prefills needs long_prefill_token_threshold")
        return self

    @model_validator(mode="after")
    def _tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self
