"""The least a streamed token can cost in Python: `grpc.aio` and a handler that only writes bytes.

    python -P -m bench.streaming_bare STREAMS STEP_NS MAX_TOKENS ADDRESS_FILE

Beside it a cost in microseconds means the same on a busy machine and on an idle one. Once STREAMS streams are open it
writes `running` beside ADDRESS_FILE and, every STEP_NS, a message as long as the service's to each of them.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import uvloop

from bench.streaming_executor import ticks
from common.grpc_options import PUBLIC_MAX_MESSAGE_BYTES, server_options
from common.serving import write_address
from scheduler_svc.api.responses import plain_delta
from scheduler_svc.app import quieten_collector


class Bare:
    """One waiting future per stream is all there is."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._waiters: dict[int, asyncio.Future[bytes]] = {}
        self.num_streams = 0

    async def serve(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        self.num_streams += 1
        number = self.num_streams
        for _ in range(self._max_tokens):
            self._waiters[number] = asyncio.get_running_loop().create_future()
            yield await self._waiters[number]

    def step(self) -> None:
        message = plain_delta(0, " w500", [ticks(time.monotonic_ns())])
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(message)


async def run(streams: int, step_ns: int, max_tokens: int, file: Path) -> None:
    bare = Bare(max_tokens)
    server = grpc.aio.server(options=server_options(PUBLIC_MAX_MESSAGE_BYTES))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(bare.serve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("stepwire.v1.Inference", {"Generate": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_address(file, f"127.0.0.1:{port}")
    while bare.num_streams < streams:  # noqa: ASYNC110 - the client opens them
        await asyncio.sleep(0.05)
    quieten_collector()
    write_address(file.with_name("running"), "all")
    while True:
        bare.step()
        await asyncio.sleep(step_ns / 1e9)


def main(argv: list[str]) -> None:
    streams, step_ns, max_tokens, file = argv
    uvloop.run(run(int(streams), int(step_ns), int(max_tokens), Path(file)))


if __name__ == "__main__":
    main(sys.argv[1:])
