"""What the core can be told. Frozen; complete at construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from common.errors import ConfigError

MAX_AGING_MS = 1 << 22  # more would not fit into a rank


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """0 means "no limit of ours" wherever a limit can be left to the executor.

    pipeline_depth: plans in flight at most; adapt_pipeline_depth: no more of them than `PipelineDepth` finds needed.
    max_queued_requests and max_queued_tokens (prompt tokens; 0: no limit) bound the waiting queue; max_queue_time_ms
    bounds the time a request waits for its first admission.
    max_num_batched_tokens, max_num_seqs and max_output_bytes (bulk output of one step) lower the executor's own limits.
    max_preemptions: after so many a sequence comes back only with every block it can ever need, and is never preempted
    again. max_plan_bytes: what the tokens, tables and sampling parameters of one plan may take on the wire.

    Prefill: max_prefill_chunk: tokens of one prompt in one step. A prompt over long_prefill_token_threshold is long and
    takes at most so many in one step. max_partial_prefills: sequences at once whose prompts are computed in part;
    max_long_partial_prefills: those of them that are long. target_itl_ms: the time between two tokens of a sequence
    that 99 % of the steps with prefill keep: see `itl_controller`. prefill_share: of a step's time that prompts may
    take beside decodes (see `prefill_share`; 1: no limit), unless max_num_batched_tokens or target_itl_ms is given.

    Policy: priority_aging_ms: waiting worth one level of priority. tenant_weights: shares, 1 for tenants not named;
    input_token_weight and output_token_weight: what a token counts (see `policies.fair`). isolate_tenants: no tenant
    finds another's prompts in the prefix cache.
    """

    pipeline_depth: int = 2
    adapt_pipeline_depth: bool = False
    max_queued_requests: int = 1024
    max_queued_tokens: int = 0
    max_prefill_chunk: int = 0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    max_output_bytes: int = 0
    enable_prefix_cache: bool = True
    policy: str = "fcfs"
    max_preemptions: int = 4
    max_plan_bytes: int = 960 * 1024
    max_queue_time_ms: int = 0
    long_prefill_token_threshold: int = 0
    max_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    target_itl_ms: float = 0.0
    prefill_share: float = 1.0
    priority_aging_ms: int = 0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    input_token_weight: float = 1.0
    output_token_weight: float = 2.0
    isolate_tenants: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field that is out of range."""
        for name, least in (
            ("pipeline_depth", 1),
            ("max_queued_requests", 1),
            ("max_queued_tokens", 0),
            ("max_prefill_chunk", 0),
            ("max_num_batched_tokens", 0),
            ("max_num_seqs", 0),
            ("max_output_bytes", 0),
            ("max_preemptions", 0),
            ("max_plan_bytes", 128 * 1024),
            ("max_queue_time_ms", 0),
            ("long_prefill_token_threshold", 0),
            ("max_partial_prefills", 0),
            ("max_long_partial_prefills", 0),
            ("target_itl_ms", 0),
            ("prefill_share", 0),
            ("priority_aging_ms", 0),
            ("input_token_weight", 0),
            ("output_token_weight", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}", field=name, limit=str(least))
        if self.prefill_share > 1:
            raise ConfigError(f"prefill_share: {self.prefill_share} is above 1", field="prefill_share", limit="1")
        if self.priority_aging_ms > MAX_AGING_MS:
            raise ConfigError(
                f"priority_aging_ms: {self.priority_aging_ms} is above {MAX_AGING_MS}",
                field="priority_aging_ms",
                limit=str(MAX_AGING_MS),
            )
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ConfigError(
                "max_long_partial_prefills: without long_prefill_token_threshold no prompt is long",
                field="max_long_partial_prefills",
            )
        for tenant, weight in self.tenant_weights.items():
            if not (isfinite(weight) and weight > 0):
                raise ConfigError(f"tenant_weights: {tenant}={weight} is not above 0", field="tenant_weights")
