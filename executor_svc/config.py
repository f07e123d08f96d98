"""The executor's configuration; see common/config.py for where values come from. Loads no torch."""

from typing import ClassVar, Literal

from pydantic import Field

from common.config import Listen, ServiceConfig, Size


class ExecutorConfig(ServiceConfig):
    """Frozen; made by `load_config(ExecutorConfig, argv)`."""

    service: ClassVar[str] = "executor"

    listen: Listen = Field(
        default="127.0.0.1:50052", description="where the scheduler connects: host:port or unix:path"
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N; auto: a GPU if any"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="auto: float32 in exact mode, bfloat16 on a CPU that multiplies it, else the model's own",
    )
    weight_dtype: Literal["auto", "dense", "int8", "int4"] = Field(
        default="auto",
        description="CPU kernels only; auto: GGUF blocks as they are or in 8 bits, else dense; dense: in dtype",
    )
    numerics: Literal["exact", "fast"] = Field(
        default="fast", description="exact: tokens do not depend on batch, chunks, cache or restarts"
    )
    block_size: int = Field(default=16, ge=1, le=256, description="tokens in one KV block")
    num_blocks: int = Field(
        default=0, ge=0, description="KV blocks; 0: measured, or from kv_cache_memory; on a GPU, leave room for graphs"
    )
    kv_cache_memory: Size = Field(default=0, ge=0, description="memory for KV blocks (2GiB); 0: measured")
    max_num_seqs: int = Field(default=64, ge=1, description="sequences in one step, at most")
    max_tokens_per_step: int = Field(
        default=0, ge=0, description="tokens in one step, at most; 0: 512 on a CPU, 2048 on a GPU"
    )
    max_context: int = Field(default=0, ge=0, description="prompt and completion together, tokens; 0: the model's own")
    attention_backend: str = Field(
        default="auto", description="auto, torch, triton, varlen or exact; auto: what suits numerics and device"
    )
    early_launch: bool = Field(
        default=False,
        description="on a GPU of capability 9.0 or newer: kernels start before the one ahead ends; measure first",
    )
    threads: int = Field(
        default=0, ge=0, description="compute threads on the CPU; 0: what host, cgroup and affinity give"
    )
    progress: Literal["auto", "log", "json"] = Field(
        default="auto",
        description="how the start is told; auto: a bar on a terminal, else lines of the log; json: lines for a parent",
    )
    lease_s: float = Field(
        default=5.0, gt=0, description="seconds without a ping after which a scheduler loses its lease"
    )
    drain_s: float = Field(default=10.0, ge=0, description="seconds steps in flight get to finish when stopping")
