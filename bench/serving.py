"""Load on a running service through its public API: tokens per second and latencies of one named workload.

    python -m bench.serving --workload W1            against 127.0.0.1:50051
    python -m bench.serving --workload W2 --json     last line is one object: conditions, results

Prompts are fresh random token ids, decoding is greedy and full length (ignore_eos), every request streams. The client
is one asyncio process; its own CPU share is printed, and a share near 1 means that the client was the limit.
"""

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

import grpc

from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from stepwire_client._gen.stepwire.v1 import inference_pb2_grpc as rpc


@dataclass(frozen=True)
class Workload:
    """`concurrency` requests at once, `requests` in all, `prompt` tokens in, `output` tokens out, each.

    `intruder`: tokens of one more prompt, which arrives once all others decode; what they feel of it is the result.
    """

    concurrency: int
    requests: int
    prompt: int
    output: int
    intruder: int = 0


WORKLOADS = {
    "W1": Workload(concurrency=1, requests=4, prompt=128, output=128),
    "W2": Workload(concurrency=8, requests=32, prompt=128, output=128),
    "W3": Workload(concurrency=32, requests=96, prompt=256, output=64),
    "W4": Workload(concurrency=8, requests=8, prompt=128, output=160, intruder=2000),
}


# Tokens that each of the others has before the intruder comes, and tokens the intruder asks for.
SETTLED = 32
INTRUDER_OUTPUT = 4


@dataclass
class Sample:
    """Times of one request, seconds; `arrivals` has one entry per token."""

    sent: float
    arrivals: list[float] = field(default_factory=list)


async def one(
    stub: "rpc.InferenceAsyncStub", load: Workload, vocab: int, rng: random.Random, sample: Sample | None = None
) -> Sample:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[rng.randrange(1000, vocab) for _ in range(load.prompt)]),
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=load.output, ignore_eos=True),
        output=pb.OutputOptions(detokenize=False),
    )
    sample = sample or Sample(0.0)
    sample.sent = time.perf_counter()
    async for response in stub.Generate(request):
        sample.arrivals += [time.perf_counter()] * len(response.delta.token_ids)
    if len(sample.arrivals) != load.output:
        raise RuntimeError(f"{len(sample.arrivals)} tokens where {load.output} were asked for")
    return sample


async def run(address: str, load: Workload, seed: int) -> tuple[pb.GetModelInfoResponse, list[Sample], float]:
    """Warms up with one request, then runs the load. Returns the samples and the wall seconds of the load."""
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: rpc.InferenceAsyncStub = rpc.InferenceStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        await one(stub, Workload(1, 1, load.prompt, 8), info.vocab_size, rng)
        if load.intruder:
            return info, *await with_intruder(stub, load, info.vocab_size, rng)
        left = load.requests
        samples: list[Sample] = []

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                samples.append(await one(stub, load, info.vocab_size, rng))

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(load.concurrency)))
        return info, samples, time.perf_counter() - start


async def with_intruder(
    stub: "rpc.InferenceAsyncStub", load: Workload, vocab: int, rng: random.Random
) -> tuple[list[Sample], float]:
    """The intruder's sample comes last. Seconds: from its arrival to its last token."""
    samples = [Sample(0.0) for _ in range(load.concurrency)]
    others = [asyncio.ensure_future(one(stub, load, vocab, rng, sample)) for sample in samples]
    while any(len(sample.arrivals) < SETTLED for sample in samples):  # noqa: ASYNC110 - samples tell nobody
        await asyncio.sleep(0.005)
    intruder = await one(stub, Workload(1, 1, load.intruder, INTRUDER_OUTPUT), vocab, rng)
    await asyncio.gather(*others)
    return [*samples, intruder], intruder.arrivals[-1] - intruder.sent


def summarise_intrusion(samples: list[Sample], wall: float) -> dict[str, object]:
    """Of the others: tokens that came, and gaps that lay, wholly or in part, while the intruder was served."""
    *others, intruder = samples
    begin, end = intruder.sent, intruder.sent + wall
    gaps = [
        b - a for s in others for a, b in zip(s.arrivals, s.arrivals[1:], strict=False) if a < end and b > begin
    ]  # fmt: skip
    count = sum(begin < at <= end for s in others for at in s.arrivals)
    return {
        "output_tokens_per_s": round(count / wall, 1),
        "intruder_ttft_ms": round((intruder.arrivals[0] - intruder.sent) * 1000, 1),
        "ttft": percentiles([s.arrivals[0] - s.sent for s in others]),
        "itl": percentiles(gaps),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99 in ms of values in seconds."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {f"p{p}_ms": round(cuts[p - 1] * 1000, 2) for p in (50, 95, 99)}


def summarise(samples: list[Sample], wall: float) -> dict[str, object]:
    gaps = [b - a for s in samples for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
    return {
        "output_tokens_per_s": round(sum(len(s.arrivals) for s in samples) / wall, 1),
        "ttft": percentiles([s.arrivals[0] - s.sent for s in samples]),
        "itl": percentiles(gaps),
    }


def commit() -> str:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
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
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for i in range(args.repeat):
        info, samples, wall = asyncio.run(run(args.address, load, args.seed + i))
        model = info.model
        runs.append((summarise_intrusion if load.intruder else summarise)(samples, wall))
        if not args.json:
            print(f"{args.workload} run {i + 1}: {runs[-1]}", flush=True)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / (time.perf_counter() - start)
    runs.sort(key=lambda r: float(str(r["output_tokens_per_s"])))
    conditions = {
        "workload": args.workload,
        **asdict(load),
        "model": model,
        "sampling": "greedy, full length, fresh random prompts, streaming",
        "client_cpu_share": round(cpu, 3),
        "runs": args.repeat,
        "commit": commit(),
        "note": args.note,
    }
    result = {"conditions": conditions, "results": runs[len(runs) // 2]}
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
