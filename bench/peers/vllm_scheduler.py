"""What a step costs vLLM's schedulers, in the cases of bench.scheduler. A script for a Python that has vLLM 0.32:

    ENV/bin/python -I bench/peers/vllm_scheduler.py --rows 256     last line is one object: conditions, results

Measured: schedule() and update_from_output() of its Scheduler and its AsyncScheduler, called in the order in which its
EngineCore calls them. No model, no executor, no wire. What is made up outside the measured time: sampled tokens, and
requests, which vLLM makes in another thread. Configured as a server of a Llama is by default: prefix cache, statistics,
the bookkeeping of its second model runner (where Triton is, so on GPUs). Each scheduler has a process of its own, with
vLLM's treatment of the collector: the heap frozen once, before the first request; Python's thresholds.

With --in-turns it writes "ready" and reads how many steps to run next, until that is 0. A turn's first
ones, on top of these, are not counted: another process has had the caches.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns
from typing import IO, Any

import numpy as np
import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

EOS, TOKENS = (128_009, 128_001, 128_008), (1000, 128_000)
AHEAD = {"Scheduler": False, "AsyncScheduler": True}  # whether it plans a step before it knows the last one's result
TURN = 10
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}


@dataclass(frozen=True)
class Load:
    """`output`: tokens of each request without churn; with churn they are spread around `mean_output`. `uncounted`:
    first steps of each turn."""

    rows: int
    prompt: int
    mean_output: int
    output: int
    block_size: int
    seed: int
    uncounted: int
    churn: bool = False
    queued: int = 0


def built(load: Load, ahead: bool, model: str) -> tuple[Any, Any]:
    """The scheduler, as EngineCore builds it, and what hashes a request's blocks."""
    longest = 2 * load.mean_output if load.churn else load.output
    context = (-(-(load.prompt + longest) // load.block_size) + 2) * load.block_size
    num_blocks = (load.rows + 64) * context // load.block_size
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=context, dtype="bfloat16"),
        cache_config=CacheConfig(block_size=load.block_size),
        scheduler_config=SchedulerConfig(
            max_model_len=context,
            is_encoder_decoder=False,
            max_num_seqs=load.rows,
            max_num_batched_tokens=2 * load.rows * load.prompt,  # all are admitted in one step
        ),
    )
    config.scheduler_config.async_scheduling = ahead  # on CPUs it was set to false just now
    config.cache_config.num_gpu_blocks = num_blocks
    assert config.cache_config.enable_prefix_caching and config.max_concurrent_batches == (2 if ahead else 1)
    spec = FullAttentionSpec(block_size=load.block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=load.block_size,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = True  # which configuration refuses where Triton is not, as on CPUs
    hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hashed)
    return scheduler, get_request_block_hasher(load.block_size, hashed)


class Case:
    """One scheduler, kept full, warm after construction."""

    def __init__(self, load: Load, name: str, model: str, warm_up: int) -> None:
        self._load, self._random = load, random.Random(load.seed)
        self._tokens = [self._random.randint(*TOKENS) for _ in range(1 << 16)]
        self._scheduler, self._hasher = built(load, AHEAD[name], model)
        assert type(self._scheduler).__name__ == name
        freeze_gc_heap()
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._submitted = self.ended = self._steps = self._ended_last = 0
        self.samples: list[tuple[int, int]] = []
        for _ in range(load.rows + load.queued):
            self._submit()
        if AHEAD[name]:
            self._send(self._scheduler.schedule())
        self.run(warm_up)
        self.samples, self.ended = [], 0

    def _submit(self) -> None:
        """Of the first ones, with churn, most are part done: else they would end together too."""
        load = self._load
        self._submitted += 1
        output = load.output
        if load.churn:
            shortest = 1 if self._submitted <= load.rows else load.mean_output // 2
            output = self._random.randint(shortest, 2 * load.mean_output - shortest)
        sampling = SamplingParams(max_tokens=output, seed=self._submitted)
        sampling.update_from_generation_config({"eos_token_id": list(EOS)}, EOS[0])
        prompt = [self._random.randint(*TOKENS) for _ in range(load.prompt)]
        name = f"request-{self._submitted}"
        self._scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def _send(self, plan: Any) -> None:
        names = list(plan.num_scheduled_tokens)
        first = self._steps * 37 % (len(self._tokens) - len(names))
        tokens = [[token] for token in self._tokens[first : first + len(names)]]
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        self._in_flight.append((plan, result))

    def _step(self) -> None:
        """Measured: a plan made, a result taken. Then, unmeasured, who left is replaced."""
        start = perf_counter_ns()
        plan = self._scheduler.schedule()
        scheduled = perf_counter_ns()
        self._send(plan)
        before, result = self._in_flight.popleft()
        began = perf_counter_ns()
        outputs = self._scheduler.update_from_output(before, result)
        updated = perf_counter_ns()
        self.samples.append((scheduled - start, updated - began))
        self._steps += 1
        rows = outputs[0].outputs
        ended = sum(row.finish_reason is not None for row in rows)
        # Planned ahead, who ended in the step before was in this one too; his token is dropped.
        emitted = self._load.rows - (self._ended_last if self._in_flight else 0)
        assert len(rows) == emitted and all(len(row.new_token_ids) == 1 for row in rows)
        for _ in range(ended):
            self._submit()
        self.ended += ended
        self._ended_last = ended
        waiting = self._scheduler.get_request_counts()[1]
        assert len(self._scheduler.running) == self._load.rows - ended and waiting == self._load.queued + ended

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def settle(self) -> None:
        counted, self.samples = self.samples, []
        self.run(self._load.uncounted)
        self.samples = counted

    def summary(self) -> dict[str, Any]:
        parts = np.array(self.samples) / 1e3
        assert bool(self.ended) == self._load.churn
        by_part = {name: percentiles(parts[:, i]) for i, name in enumerate(("schedule", "update"))}
        summed = percentiles(parts.sum(axis=1))
        return {**summed, "parts": by_part, "steps": len(parts), "ended": self.ended, "waiting": self._load.queued}


def percentiles(us: Any) -> dict[str, float]:
    p50, p99 = np.percentile(us, (50, 99))
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def serve(other_end: Connection, pipe: Connection, load: Load, name: str, model: str, warm_up: int) -> None:
    other_end.close()  # or the pipe would never say that the parent is gone
    case = Case(load, name, model, warm_up)
    pipe.send("ready")
    while steps := pipe.recv():
        case.settle()
        case.run(steps)
        pipe.send("ready")
    pipe.send(case.summary())


def started(*task: Any) -> Connection:
    """A process of its own for one case, and the way to it."""
    context = multiprocessing.get_context("fork")  # vLLM takes many seconds to import
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(ours, theirs, *task), daemon=True).start()
    theirs.close()
    return ours


def turns(steps: int, uncounted: int, asked: bool, out: IO[str]) -> Iterator[int]:
    """How many counted steps each turn has: what stdin says, or as many as fit into `steps`."""
    if not asked:
        yield from [TURN] * (steps // (TURN + uncounted))
        return
    print("ready", file=out, flush=True)
    while turn := int(sys.stdin.readline() or 0):
        yield turn
        print("ready", file=out, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True, help="decoding rows")
    parser.add_argument("--steps", type=int, default=200, help="of each case, at most, with those not counted")
    parser.add_argument("--warm-up", type=int, default=100, help="steps before")
    parser.add_argument("--queued", type=int, default=10_000, help="requests that wait in `queued`; 0: no such case")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--mean-output", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--uncounted", type=int, default=3, help="first steps of each turn")
    parser.add_argument("--in-turns", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    output = args.steps + args.warm_up + 2 * TURN
    load = Load(args.rows, args.prompt, args.mean_output, output, args.block_size, args.seed, args.uncounted)
    loads = {"steady": load, "churn": replace(load, churn=True)}
    if args.queued:
        loads["queued"] = replace(load, churn=True, queued=args.queued)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        pipes = {(name, case): started(loads[case], name, model, args.warm_up) for name in AHEAD for case in loads}
        for pipe in pipes.values():
            pipe.recv()
    for steps in turns(args.steps, args.uncounted, args.in_turns, out):
        for pipe in pipes.values():
            pipe.send(steps)
            pipe.recv()
    results: dict[str, dict[str, Any]] = {name: {} for name in AHEAD}
    for (name, case), pipe in pipes.items():
        pipe.send(0)
        results[name][case] = pipe.recv()
    conditions = {
        "vllm": vllm.__version__.partition("+")[0],
        "python": platform.python_version(),
        "collector": f"gc.freeze() before the first request, thresholds {gc.get_threshold()}",
        "log_stats": True,
        "queued": args.queued,
        "uncounted_steps_of_a_turn": args.uncounted,
    }
    print(json.dumps({"conditions": conditions, "results": results}), file=out, flush=True)


if __name__ == "__main__":
    main()
