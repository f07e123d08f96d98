"""Load on a running service through its public API: tokens per second and latencies of one named workload.

    python -m bench.serving --workload W1            against 127.0.0.1:50051
    python -m bench.serving --workload W2 --json     last line is one object: conditions, results

Prompts are fresh random token ids, decoding is greedy and full length (ignore_eos), every request streams. The client
is one asyncio process; its own CPU share is printed, and a share near 1 means that the client was the limit.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import grpc

from bench.load import WORKLOADS, Ask, Result, Sample, Workload, run
from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from stepwire_client._gen.stepwire.v1 import inference_pb2_grpc as rpc


def asking(stub: "rpc.InferenceAsyncStub", *, detokenize: bool = False) -> Ask:
    """`detokenize`: the answer's text is made too."""

    async def ask(prompt: Sequence[int], output: int, sample: Sample) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=0),
            stop=pb.StopConditions(max_tokens=output, ignore_eos=True),
            output=pb.OutputOptions(detokenize=detokenize),
        )
        async for response in stub.Generate(request):
            sample.arrived(len(sample.arrivals) + len(response.delta.token_ids))

    return ask


async def run_on(address: str, load: Workload, seed: int) -> tuple[pb.GetModelInfoResponse, Result]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: rpc.InferenceAsyncStub = rpc.InferenceStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        return info, await run(asking(stub), load, info.vocab_size, seed)


def commit() -> str:
    root = Path(__file__).resolve().parent.parent
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="W1")
    parser.add_argument("--repeat", type=int, default=3, help="runs; every run is printed, the median is the result")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="conditions only you know: precision, numerics, machine")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args()
    load = WORKLOADS[args.workload]
    runs = []
    model = ""
    cpu, start = time.process_time(), time.perf_counter()
    for i in range(args.repeat):
        info, result = asyncio.run(run_on(args.address, load, args.seed + i))
        model = info.model
        runs.append(result)
        if not args.json:
            print(f"{args.workload} run {i + 1}: {runs[-1]}", flush=True)
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - start)
    runs.sort(key=lambda r: float(str(r["output_tokens_per_s"])))
    conditions = {
        "workload": args.workload,
        **asdict(load),
        "model": model,
        "sampling": "greedy, full length, fresh random prompts, streaming",
        "client_cpu_share": round(cpu_share, 3),
        "runs": args.repeat,
        "commit": commit(),
        "note": args.note,
    }
    result = {"conditions": conditions, "results": runs[len(runs) // 2]}
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
