"""The load of `bench.streaming`: streams that all begin at once, on an executor whose tokens tell when they were made.

    python -P -m bench.streaming_client ADDRESS CHANNELS STREAMS MAX_TOKENS SEED OUT

Opens STREAMS streams over CHANNELS connections and reads them to their end. OUT (.npy) gets one row for each token:
its stream, its arrival (monotonic ns) and its delay since the step's result (ns).
"""

import asyncio
import json
import random
import sys
import time

import numpy as np
import uvloop

from bench.http2 import connect, prefixed
from bench.streaming_executor import TICK_NS, VOCAB
from stepwire.v1 import inference_pb2 as pb


def request(seed: int, max_tokens: int) -> bytes:
    rng = random.Random(seed)
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[rng.randrange(1, VOCAB) for _ in range(16)]),
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )
    return prefixed(message.SerializeToString())


async def run(address: str, channels: int, streams: int, max_tokens: int, seed: int) -> list[tuple[int, int, int]]:
    requests = [request(seed + i, max_tokens) for i in range(streams)]
    shares = [requests[i::channels] for i in range(channels)]
    connections = await connect(address, shares, [len(share) for share in shares])
    for connection in connections:
        connection.begin()
    await asyncio.gather(*(connection.done for connection in connections))
    return [arrival for connection in connections for arrival in connection.arrivals]


def main(argv: list[str]) -> int:
    address, channels, streams, max_tokens, seed, out = argv
    start_ns = time.monotonic_ns()
    arrivals = uvloop.run(run(address, int(channels), int(streams), int(max_tokens), int(seed)))
    rows = np.array(arrivals, np.int64).reshape(-1, 3)
    rows[:, 2] = (rows[:, 1] // TICK_NS - rows[:, 2]) % VOCAB * TICK_NS
    np.save(out, rows)
    share = time.process_time_ns() / (time.monotonic_ns() - start_ns)
    print(json.dumps({"tokens": len(arrivals), "cpu_share": round(share, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
