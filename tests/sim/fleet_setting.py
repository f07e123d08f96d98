"""What a history of the fleet is played in. Small numbers everywhere, so that every limit is met."""

import random
from dataclasses import dataclass, replace

from common.messages import ExecutorInfo
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor_state import context_limit
from tests.fakes.toy_executor import toy_info

VOCAB = 200


@dataclass(frozen=True)
class Setting:
    """What a history is played in."""

    config: CoreConfig
    infos: tuple[ExecutorInfo, ...]
    eos_chance: float


def draw_setting(rng: random.Random) -> Setting:
    pick = rng.choice
    long = pick((0, 0, 9))
    config = CoreConfig(
        pipeline_depth=pick((1, 2, 2, 3, 4)),
        adapt_pipeline_depth=pick((True, False)),
        max_prefill_chunk=pick((0, 0, 1, 7)),
        max_num_batched_tokens=pick((0, 0, 5, 17)),
        max_num_seqs=pick((0, 0, 2, 5)),
        enable_prefix_cache=pick((True, True, False)),
        policy=pick(("fcfs", "priority", "fair", "deadline")),
        max_preemptions=pick((0, 1, 2, 4)),
        long_prefill_token_threshold=long,
        max_partial_prefills=pick((0, 0, 1, 2)),
        max_long_partial_prefills=pick((0, 1)) if long else 0,
        priority_aging_ms=pick((0, 50)),
        tenant_weights={"b": 3.0},
        isolate_tenants=pick((True, False)),
        max_queued_requests=pick((6, 30, 1024)),
        max_queued_tokens=pick((0, 0, 150)),
        max_queue_time_ms=pick((0, 0, 40)),
        target_itl_ms=pick((0.0, 0.0, 3.0)),
        prefill_share=pick((1.0, 0.67, 0.1)),
    )
    infos = sorted((draw_info(rng) for _ in range(pick((1, 1, 2, 3)))), key=context_limit)
    outputs = sorted(info.max_output_bytes for info in infos)  # none holds less than those before it
    infos = [replace(info, max_output_bytes=output) for info, output in zip(infos, outputs, strict=True)]
    return Setting(config, tuple(infos), pick((0.0, 0.02, 0.1)))


def draw_info(rng: random.Random) -> ExecutorInfo:
    size = rng.choice((1, 2, 4, 8))
    return toy_info(
        vocab_size=VOCAB,
        block_size=size,
        num_blocks=rng.choice((48, 80, 160, 800)) // size,
        max_blocks_per_row=rng.choice((128, 256)) // size,
        num_rows=rng.choice((12, 24)),
        max_num_seqs=8,
        max_output_bytes=rng.choice((4 * VOCAB - 1, 4 * VOCAB, 2000, 1 << 20)),
        decode_step_ns=6_000_000,
        decode_row_ns=600_000,
        prefill_token_ns=rng.choice((0, 200_000, 4_000_000)),
    )
