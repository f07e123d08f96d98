"""What the core can be told. Frozen; complete at construction."""

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """0 means "no limit of ours" wherever a limit can be left to the executor.

    pipeline_depth: plans in flight at most. max_queued_requests and max_queued_tokens (prompt tokens; 0: no limit)
    bound the waiting queue. max_prefill_chunk: tokens of one prompt in one step. max_num_batched_tokens, max_num_seqs
    and max_output_bytes (bulk output of one step) lower the executor's own limits. max_preemptions: after so many a
    sequence comes back only with every block it can ever need, and is never preempted again. max_plan_bytes: what the
    tokens, tables and sampling parameters of one plan may take on the wire.
    """

    pipeline_depth: int = 2
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
    retry_after_ms: int = 1000

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
            ("retry_after_ms", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}", field=name, limit=str(least))
