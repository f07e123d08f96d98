"""Options gRPC does not know are ignored without a word, so their effect is tested, and their spelling."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf import wrappers_pb2

from common.grpc_options import PRIVATE_MAX_MESSAGE_BYTES, Option, channel_options, server_options

DEADLINE_S = 30.0
EAGER_PINGS: list[Option] = [
    ("grpc.keepalive_time_ms", 10),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class Waiting(grpc.GenericRpcHandler):
    """/test/Wait never answers; /test/Echo gives back what it got."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        handler = self._wait if str(handler_call_details.method) == "/test/Wait" else self._echo
        return grpc.unary_unary_rpc_method_handler(handler)

    async def _wait(self, request: bytes, context: object) -> bytes:
        await asyncio.get_running_loop().create_future()
        return request

    async def _echo(self, request: bytes, context: object) -> bytes:
        return request


async def start(options: list[Option]) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=options, handlers=[Waiting()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def raw(channel: grpc.aio.Channel, method: str) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
    return channel.unary_unary(method, bytes, bytes)


def bounded(main: object) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main  # type: ignore[misc]

    asyncio.run(run())


def test_a_pinging_client_is_not_sent_away() -> None:
    """The same client at a server without our options is told "Too many pings"; only then is ours asked."""

    async def main() -> None:
        plain, plain_address = await start([])
        ours, our_address = await start(server_options(PRIVATE_MAX_MESSAGE_BYTES))
        async with (
            grpc.aio.insecure_channel(plain_address, options=EAGER_PINGS) as plain_channel,
            grpc.aio.insecure_channel(our_address, options=EAGER_PINGS) as our_channel,
            grpc.aio.insecure_channel(our_address, options=EAGER_PINGS) as idle_channel,
        ):
            await idle_channel.channel_ready()
            waiting = raw(our_channel, "/test/Wait")(b"")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(plain_channel, "/test/Wait")(b"")
            assert caught.value.details() == "Too many pings"
            assert not waiting.done()
            assert idle_channel.get_state() is grpc.ChannelConnectivity.READY
            waiting.cancel()
        await plain.stop(None)
        await ours.stop(None)

    bounded(main())


@pytest.mark.parametrize("limit", [100_000])
def test_message_limits_are_explicit_on_both_sides(limit: int) -> None:
    async def main() -> None:
        server, address = await start(server_options(limit))
        inside, outside = bytes(limit - 100), bytes(limit + 1)
        async with grpc.aio.insecure_channel(address, options=channel_options(limit)) as channel:
            echo = raw(channel, "/test/Echo")
            assert await echo(inside) == inside
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo(outside)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with grpc.aio.insecure_channel(address, options=channel_options(10 * limit)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(channel, "/test/Echo")(outside)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.stop(None)

    bounded(main())


def test_large_messages_pass_where_the_default_limit_would_refuse() -> None:
    async def main() -> None:
        limit = 8 * 1024 * 1024
        server, address = await start(server_options(limit))
        async with grpc.aio.insecure_channel(address, options=channel_options(limit)) as channel:
            data = wrappers_pb2.BytesValue(value=bytes(6 * 1024 * 1024)).SerializeToString()
            assert await raw(channel, "/test/Echo")(data) == data
        await server.stop(None)

    bounded(main())


def test_a_taken_port_is_not_shared() -> None:
    async def main() -> None:
        server, address = await start(server_options(PRIVATE_MAX_MESSAGE_BYTES))
        second = grpc.aio.server(options=server_options(PRIVATE_MAX_MESSAGE_BYTES))
        with pytest.raises(RuntimeError):
            second.add_insecure_port(address)
        await server.stop(None)

    bounded(main())


@pytest.mark.parametrize("key", sorted({key for key, _ in server_options(1) + channel_options(1)}))
def test_the_core_library_knows_the_option(key: str) -> None:
    (library,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    assert key.encode() + b"\0" in library.read_bytes()
