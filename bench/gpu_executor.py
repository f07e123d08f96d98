"""An executor process of bench.gpu: first it replays plans alone, then the very same executor serves.

    python -P -m bench.gpu_executor TASK FLAGS...

TASK is a JSON object: `out` (a file for the result) and `replays`, a list of name, load, depth, chunk, repeats, all as
in `Replay`. FLAGS are the executor's own.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from bench.gpu_load import Load, percentiles
from bench.plans import greedy, make_plans, random_requests
from bench.replay import Replayer
from common.config import load_config
from common.messages import StepMode, StepResult
from common.model_files.catalog import resolve
from executor_svc.app import ServeOptions, serve
from executor_svc.config import ExecutorConfig
from executor_svc.environment import prepare_environment
from executor_svc.load_progress import StartProgress
from executor_svc.process_end import leave
from executor_svc.session import SessionLimits
from executor_svc.step_executor import StepExecutor

if TYPE_CHECKING:
    from executor_svc.runner import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replay:
    """One workload, `repeats` times after one that warms up; the median counts. chunk: as max_prefill_chunk."""

    name: str
    load: Load
    depth: int
    chunk: int
    repeats: int = 3


def measure(executor: StepExecutor, replays: Sequence[Replay]) -> list[dict[str, Any]]:
    player = Replayer(executor)
    rows = []
    for wanted in replays:
        load = wanted.load
        requests = random_requests(load.requests, load.prompt, greedy(load.output), executor.info.vocab_size)
        plans = make_plans(
            executor.info, requests, depth=wanted.depth, at_once=load.at_once, prefill_chunk=wanted.chunk
        )
        player.replay(plans, depth=wanted.depth)
        runs = sorted((player.replay(plans, depth=wanted.depth) for _ in range(wanted.repeats)), key=lambda r: r.wall_s)
        run = runs[len(runs) // 2]
        if run.num_tokens != load.requests * load.output:
            raise RuntimeError(f"{wanted.name}: {run.num_tokens} tokens of {load.requests * load.output}")
        rows.append(
            {
                "workload": wanted.name,
                "pipeline_depth": wanted.depth,
                "steps": len(plans),
                "output_tokens_per_s": round(run.num_tokens / run.wall_s, 1),
                "ms_per_token": round(run.wall_s * 1e3 / load.output, 4),
                **summarise([result for result in run.results if result.mode is not StepMode.NONE]),
            }
        )
    return rows


def memory_plan(executor: "Runner") -> str:
    """Where the device's memory went."""
    import torch

    cache, tables = executor.cache.data, executor.state.block_tables
    sizes = {"KV cache": cache.numel() * cache.element_size(), "block tables": 4 * tables.numel()}
    if cache.is_cuda:
        free, total = torch.cuda.mem_get_info(cache.device)
        allocated, reserved = torch.cuda.memory_allocated(cache.device), torch.cuda.memory_reserved(cache.device)
        sizes["weights and other tensors"] = allocated - sum(sizes.values())
        sizes |= {"held beside them": reserved - allocated, "outside of torch": total - free - reserved, "free": free}
    return ", ".join(f"{name} {size / 1e9:.3f}" for name, size in sizes.items())


def summarise(results: Sequence[StepResult]) -> dict[str, Any]:
    """Of one replay: what steps took where, and how many in which mode."""
    timings = [result.timings for result in results]
    device = np.array([t.device_end_ns - t.device_start_ns for t in timings])
    prepare = np.array([t.launched_ns - t.prepare_start_ns for t in timings])
    idle = np.array([t.device_idle_ns for t in timings[1:]])
    return {
        "device_us": percentiles(device / 1e3),
        "prepare_us": percentiles(prepare / 1e3),
        "idle_us": percentiles(idle / 1e3),
        "modes": {mode.name: sum(result.mode is mode for result in results) for mode in StepMode},
    }


def main(argv: list[str]) -> int:
    task = json.loads(argv[0])
    config = load_config(ExecutorConfig, argv[1:]).config
    logging.basicConfig(level="INFO", format="%(asctime)s executor %(levelname)s %(message)s", stream=sys.stderr)
    prepare_environment(config.numerics)
    limits = SessionLimits()

    def build() -> StepExecutor:
        from executor_svc.assemble import build_executor  # torch, once the environment is prepared

        progress = StartProgress()
        files = resolve(config.model, progress, load_format=config.load_format)
        executor = build_executor(config, files, limits.max_pipeline_depth, progress)
        log.info("memory, GB: %s", memory_plan(executor))
        replays = [Replay(**(values | {"load": Load(**values["load"])})) for values in task["replays"]]
        draft = Path(task["out"]).with_suffix(".new")
        draft.write_text(json.dumps(measure(executor, replays)))
        draft.replace(task["out"])
        return executor

    options = ServeOptions(config.listen, config.drain_s, config.address_file, limits, config.metrics_listen)
    return uvloop.run(serve(options, build))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
