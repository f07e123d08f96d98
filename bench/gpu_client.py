"""One process of a load: streams fresh random prompts, greedy and full length, token ids in and out.

    python -P -m bench.gpu_client OUT

Each line of standard input is a JSON object, see `bench.gpu_load.Share`: it connects, says "ready", and begins at the
next line. OUT (.npz) then gets `sent` (stream, ns) and `arrivals` (stream, ns, token), monotonic, and a line of
standard output the process's CPU. Ends with its input.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import uvloop

from bench.http2 import connect, prefixed
from stepwire.v1 import inference_pb2 as pb


def requests_of(share: Mapping[str, Any]) -> list[bytes]:
    rng = np.random.default_rng(share["seed"])
    prompts = rng.integers(1, share["vocab"], (share["requests"], share["prompt"]))
    return [
        prefixed(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt.tolist()),
                sampling=pb.SamplingParams(temperature=0),
                stop=pb.StopConditions(max_tokens=share["output"], ignore_eos=True),
                output=pb.OutputOptions(detokenize=False),
            ).SerializeToString()
        )
        for prompt in prompts
    ]


def spread(total: int, parts: int) -> list[int]:
    """`total` in even parts, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


async def run(share: Mapping[str, Any], out: str) -> None:
    count = max(1, min(share["connections"], share["at_once"]))
    requests = requests_of(share)
    shares = [requests[i::count] for i in range(count)]
    connections = await connect(share["address"], shares, spread(share["at_once"], count))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    begin_ns, begin_cpu_ns = time.monotonic_ns(), time.process_time_ns()
    for connection in connections:
        connection.begin()
    await asyncio.gather(*(connection.done for connection in connections))
    share_of_cpu = (time.process_time_ns() - begin_cpu_ns) / (time.monotonic_ns() - begin_ns)
    sent = [entry for connection in connections for entry in connection.sent]
    arrivals = [entry for connection in connections for entry in connection.arrivals]
    np.savez(out, sent=np.array(sent, np.int64).reshape(-1, 2), arrivals=np.array(arrivals, np.int64).reshape(-1, 3))
    print(json.dumps({"cpu_share": round(share_of_cpu, 3)}), flush=True)


def main(argv: list[str]) -> int:
    while line := sys.stdin.readline():
        uvloop.run(run(json.loads(line), argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
