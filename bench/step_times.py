"""Records the steps of a running service under a mixed load of its own, for `stepwire simulate --fit`.

    stepwire up
    python -m bench.step_times --out steps.jsonl --note "2 cores, bfloat16"
    stepwire simulate --fit steps.jsonl --save-model my-device.json
    stepwire simulate --step-model my-device.json --rate 5

Nothing else may use the service meanwhile. Fresh random prompts of random lengths, first one request at a time, then
more and more at once. A step counts when its plan lay ready before the result of the step before it was back (the
pipeline was full) and takes what the device took and the gap before it: what the executor can do, without network or
idle time. The context it read is told from the KV blocks in use.

    python -m bench.step_times --out steps.jsonl --alone

On a machine that others use too: the executor alone in this process, one thread, its CPU time. That says what the work
costs, not what the service takes: without the gaps between steps and the second core.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc

from bench import executor_steps
from bench.load import Workload, one
from bench.serving import asking, commit
from common.messages import ExecutorInfo
from common.wire_handshake import decode_info
from scheduler_svc.simulate.fit import fit_steps, read_steps, write_steps
from scheduler_svc.simulate.step_model import Shape
from stepwire.executor.v1 import executor_pb2 as executor_pb
from stepwire.executor.v1 import executor_pb2_grpc as executor_rpc
from stepwire.v1 import admin_pb2 as admin_pb
from stepwire.v1 import admin_pb2_grpc as admin_rpc
from stepwire_client._gen.stepwire.v1 import inference_pb2_grpc as rpc

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Load:
    """prompt and output: random lengths up to these."""

    seconds: float
    prompt: int
    output: int
    seed: int


@dataclass(frozen=True)
class Recorded:
    """steps: lines of a file for `--fit`."""

    conditions: dict[str, str | int | float]
    shape: Shape
    steps: list[dict[str, object]]


async def record(address: str, executor: str, load: Load) -> Recorded:
    """Runs the load against a service."""
    async with grpc.aio.insecure_channel(address) as channel, grpc.aio.insecure_channel(executor) as private:
        executor_stub: executor_rpc.ExecutorAsyncStub = executor_rpc.ExecutorStub(private)
        answer = await executor_stub.GetInfo(executor_pb.GetInfoRequest())
        info = decode_info(answer.info)
        admin: admin_rpc.AdminAsyncStub = admin_rpc.AdminStub(channel)
        seen: list[admin_pb.WatchStepsResponse] = []

        async def watch() -> None:
            async for step in admin.WatchSteps(admin_pb.WatchStepsRequest()):
                seen.append(step)

        watching = asyncio.ensure_future(watch())
        try:
            await _drive(rpc.InferenceStub(channel), load, info.vocab_size, info.max_num_seqs, info.max_context)
        finally:
            watching.cancel()
    steps = measured(seen, info.num_blocks, info.block_size)
    return Recorded(
        _conditions(info, load, "device work and the gap before it, pipeline full"),
        executor_steps.shape_of(info),
        steps,
    )


async def _drive(stub: "rpc.InferenceAsyncStub", load: Load, vocab: int, most: int, context: int) -> None:
    rng = random.Random(load.seed)
    ask = asking(stub)
    levels = [level for level in CONCURRENCY if level <= most]

    async def caller(until: float) -> None:
        while time.monotonic() < until:
            output = rng.randint(8, load.output)
            prompt = rng.randint(8, min(load.prompt, context - output))
            await one(ask, Workload(1, 1, prompt, output), vocab, rng)

    for level in levels:
        until = time.monotonic() + load.seconds / len(levels)
        await asyncio.gather(*(caller(until) for _ in range(level)))


def alone(load: Load) -> Recorded:
    """As `record`, without a service."""
    executor = executor_steps.build("")
    info = executor.info
    levels = tuple(level for level in CONCURRENCY if level <= info.max_num_seqs)
    steps = executor_steps.steps_of(executor, levels, load.seconds / len(levels), (load.prompt, load.output))
    return Recorded(
        _conditions(info, load, "CPU time of one thread, the executor alone"), executor_steps.shape_of(info), steps
    )


def _conditions(info: ExecutorInfo, load: Load, what: str) -> dict[str, str | int | float]:
    return {
        "model": info.model_id, "device": info.device, "dtype": info.dtype, "numerics": info.numerics, "time": what,
        "concurrency": "1 to 64, growing", "prompt_tokens": f"8 to {load.prompt}",
        "output_tokens": f"8 to {load.output}", "seconds": load.seconds, "commit": commit(),
    }  # fmt: skip


def measured(seen: list[admin_pb.WatchStepsResponse], num_blocks: int, block_size: int) -> list[dict[str, object]]:
    """Lines of a file for `--fit`: of the steps of one executor, those that found the pipeline full."""
    found: list[dict[str, object]] = []
    for before, step in pairwise(seen):
        follows = step.step_id == before.step_id + 1 and step.epoch == before.epoch and not step.skipped
        if not follows or step.planned_ns >= before.result_ns or not step.decode_tokens + step.prefill_tokens:
            continue
        # A sequence's last block is half full on average.
        context = (num_blocks - step.free_blocks) * block_size - step.num_sequences * block_size // 2
        found.append(
            {
                "decode_tokens": step.decode_tokens,
                "prefill_tokens": step.prefill_tokens,
                "context_tokens": max(context, 0),
                "duration_us": (step.device_ns + step.device_idle_ns) / 1000,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051", help="the scheduler's API")
    parser.add_argument("--executor", default="127.0.0.1:50052", help="the executor, asked what it holds")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load, all levels together")
    parser.add_argument("--prompt", type=int, default=384, help="longest prompt")
    parser.add_argument("--output", type=int, default=48, help="most tokens generated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="the CPU executor and the default model in this process")
    parser.add_argument("--note", default="", help="conditions only you know: machine, threads, what else ran")
    parser.add_argument("--out", required=True, help="where the steps go, JSON lines")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args()
    load = Load(args.seconds, args.prompt, args.output, args.seed)
    recorded = alone(load) if args.alone else asyncio.run(record(args.address, args.executor, load))
    conditions = recorded.conditions | {"note": args.note}
    header = {"conditions": conditions, "executor": recorded.shape.model_dump()}
    write_steps(Path(args.out), header, recorded.steps)
    fit = fit_steps(*read_steps(Path(args.out)), name="measured")
    results = {**fit.model.costs[0].model_dump(), "residual": fit.model.residual}
    result = {"conditions": conditions, "results": results}
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
