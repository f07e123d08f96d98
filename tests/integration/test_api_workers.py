"""The scheduler with its API in processes of their own: real processes, killed and stopped, around the toy executor."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.choice_seed import choice_seed
from stepwire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.integration.engine_harness import oracle, prompts, seeded
from tests.integration.protocol_harness import run
from tests.integration.test_protocol_process import (
    Process,
    bound,
    generate_request,
    process,
    ready,
    scheduler,
    toy,
    written,
)

LONG = 200


@dataclass
class Service:
    """A scheduler with two workers. `addresses`: the shared one, then each worker's own."""

    child: Process
    addresses: list[str]

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.child.child.pid).children()

    def worker(self, place: int) -> psutil.Process:
        """The one that listens on the address of its own in this place."""
        port = int(self.addresses[1 + place].rpartition(":")[2])
        (found,) = [
            p
            for p in self.workers()
            if any(c.laddr.port == port for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        ]
        return found


@contextlib.asynccontextmanager
async def service(directory: Path, *args: str, delay_ms: int = 5) -> AsyncIterator[Service]:
    with toy(directory, "--delay-ms", str(delay_ms)) as executor:
        address = await bound(directory, executor)
        with scheduler(directory, address, "--api-workers", "2", *args) as child:
            yield Service(child, (await written(directory / "api", child)).split("\n"))


def call(channel: grpc.aio.Channel, request_id: str, max_tokens: int = LONG) -> Any:
    request = generate_request(max_tokens)
    request.request_id = request_id
    return inference_pb2_grpc.InferenceStub(channel).Generate(request)


async def first_token(stream: Any) -> list[int]:
    while not (message := await stream.read()).delta.token_ids:
        pass
    return list(message.delta.token_ids)


async def rest(stream: Any) -> list[int]:
    tokens = []
    while (message := await stream.read()) is not grpc.aio.EOF:
        tokens += message.delta.token_ids
    return tokens


async def stats(channel: grpc.aio.Channel) -> admin_pb2.GetStatsResponse:
    stub: Any = admin_pb2_grpc.AdminStub(channel)
    answer: admin_pb2.GetStatsResponse = await stub.GetStats(admin_pb2.GetStatsRequest())
    return answer


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Waits for what another process does; the test's deadline bounds it."""
    while not await condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.01)


async def again_ready(channel: grpc.aio.Channel) -> None:
    """Its worker has just been killed and another takes its place."""
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, "it listens only once it knows the core's state"


async def everything_free(channel: grpc.aio.Channel) -> bool:
    """No request holds anything; free_blocks counts those that could be taken, cached ones too."""
    answer = await stats(channel)
    (executor,) = answer.executors
    return (
        not answer.running
        and not answer.waiting
        and executor.free_rows == executor.num_rows
        and executor.free_blocks == executor.num_blocks
        and not executor.limbo_blocks
    )


def test_every_worker_answers_for_the_whole_service(tmp_path: Path) -> None:
    """Abort, GetStats, health and Drain do not depend on which worker is asked."""

    async def main() -> None:
        async with service(tmp_path) as served:
            shared, *own = served.addresses
            assert len({shared, *own}) == 3 and len(served.workers()) == 2
            async with contextlib.AsyncExitStack() as stack:
                one, two = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in own]
                either = await stack.enter_async_context(grpc.aio.insecure_channel(shared))
                for channel in (one, two, either):
                    await ready(channel)
                    assert await rest(call(channel, "r", 12)) == oracle(prompts(1)[0], seeded(1, 12))
                stream = call(one, "elsewhere")
                await first_token(stream)
                for channel in (one, two, either):
                    assert (await stats(channel)).running == 1
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await rest(call(two, "elsewhere"))
                assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
                stub: Any = inference_pb2_grpc.InferenceStub(two)
                assert (await stub.Abort(inference_pb2.AbortRequest(request_id="elsewhere"))).found
                with pytest.raises(grpc.aio.AioRpcError) as aborted:
                    await rest(stream)
                assert aborted.value.code() is grpc.StatusCode.CANCELLED
                await until(lambda: everything_free(two))
                watch = admin_pb2_grpc.AdminStub(two).WatchSteps(admin_pb2.WatchStepsRequest(max_steps=3))
                asked = asyncio.ensure_future(rest(call(one, "watched", 24)))
                assert len([step async for step in watch]) == 3
                await asked
                admin: Any = admin_pb2_grpc.AdminStub(two)
                stream = call(one, "last", 40)
                await first_token(stream)
                assert (await admin.Drain(admin_pb2.DrainRequest(deadline_ms=20_000))).unfinished == 0
                with pytest.raises(grpc.aio.AioRpcError) as late:
                    await rest(call(one, "late"))
                assert late.value.code() is grpc.StatusCode.UNAVAILABLE

    run(main(), 60.0)


def test_choices_and_cache_resets_reach_the_core_from_any_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as served, contextlib.AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in served.addresses[1:]]
            for channel in (one, two):
                await ready(channel)
            request = generate_request(12)
            request.n = 3
            got: dict[int, list[int]] = {}
            async for message in inference_pb2_grpc.InferenceStub(one).Generate(request):
                got.setdefault(message.index, []).extend(message.delta.token_ids)
            assert got == {i: oracle(prompts(1)[0], seeded(choice_seed(1, i), 12)) for i in range(3)}
            request = generate_request(LONG)
            request.n, request.request_id = 3, "all"
            stream = inference_pb2_grpc.InferenceStub(one).Generate(request)
            await first_token(stream)
            admin: Any = admin_pb2_grpc.AdminStub(two)
            answer = await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
            assert answer.dropped_blocks + answer.forgotten_blocks > 0
            stub: Any = inference_pb2_grpc.InferenceStub(two)
            assert (await stub.Abort(inference_pb2.AbortRequest(request_id="all"))).found
            with pytest.raises(grpc.aio.AioRpcError) as aborted:
                await rest(stream)
            assert aborted.value.code() is grpc.StatusCode.CANCELLED
            await until(lambda: everything_free(two))
            assert (await stats(two)).requests_aborted == 3

    run(main(), 60.0)


def test_a_killed_worker_takes_only_its_own_streams_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as served, contextlib.AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in served.addresses[1:]]
            await ready(one)
            await ready(two)
            await until(lambda: everything_free(two))
            victims = [call(one, f"victim-{i}") for i in range(4)]
            survivor = call(two, "survivor", 150)
            for stream in victims:
                await first_token(stream)
            tokens = await first_token(survivor)
            killed = {p.pid for p in served.workers()}
            served.worker(0).send_signal(signal.SIGKILL)
            for stream in victims:
                with pytest.raises(grpc.aio.AioRpcError) as lost:
                    await rest(stream)
                assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            assert tokens + await rest(survivor) == oracle(prompts(1)[0], seeded(1, 150))
            await until(lambda: everything_free(two))
            # Another process has its place, its port, and ids of its own.
            await again_ready(one)
            assert await rest(call(one, "victim-0", 12)) == oracle(prompts(1)[0], seeded(1, 12))
            assert {p.pid for p in served.workers()} - killed
            assert "fork()" not in served.child.log, "gRPC's handlers run in the child that becomes a worker"
            answer = await stats(one)
            assert (answer.requests_aborted, answer.requests_failed) == (4, 0)

    run(main(), 60.0)


def test_a_worker_that_reads_nothing_does_not_hold_the_core(tmp_path: Path) -> None:
    """Stopped by a signal: the other worker's streams go on; once it runs again its own do, too."""

    async def main() -> None:
        async with service(tmp_path) as served, contextlib.AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in served.addresses[1:]]
            await ready(one)
            await ready(two)
            streams = {channel: call(channel, name) for channel, name in ((one, "one"), (two, "two"))}
            tokens = {channel: await first_token(stream) for channel, stream in streams.items()}
            port = int(served.addresses[1].rpartition(":")[2])
            (stopped,) = [p for p in served.workers() if port in {c.laddr.port for c in p.net_connections("tcp")}]
            stopped.suspend()
            want = oracle(prompts(1)[0], seeded(1, LONG))
            assert tokens[two] + await rest(streams[two]) == want
            stopped.resume()
            assert tokens[one] + await rest(streams[one]) == want

    run(main(), 60.0)


def test_sigterm_drains_all_workers_and_leaves_with_0(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as served, contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(grpc.aio.insecure_channel(a)) for a in served.addresses[1:]]
            streams = []
            for i, channel in enumerate(channels):
                await ready(channel)
                streams.append(call(channel, str(i), 60))
            tokens = [await first_token(stream) for stream in streams]
            workers = served.workers()
            # As Ctrl-C in a terminal or a service manager does: to every process at once.
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            served.child.signal(signal.SIGTERM)
            for stream, first in zip(streams, tokens, strict=True):
                assert first + await rest(stream) == oracle(prompts(1)[0], seeded(1, 60))
            assert await asyncio.to_thread(served.child.wait) == 0, served.child.log
            assert not any(worker.is_running() for worker in workers)
            assert "is killed" not in served.child.log and "Traceback" not in served.child.log

    run(main(), 60.0)


def test_workers_do_not_outlive_a_killed_core(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as served:
            async with grpc.aio.insecure_channel(served.addresses[1]) as channel:
                await ready(channel)
                stream = call(channel, "r")
                await first_token(stream)
                workers = served.workers()
                served.child.signal(signal.SIGKILL)
                with pytest.raises(grpc.aio.AioRpcError) as lost:
                    await rest(stream)
                assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 20)
            assert not alive

    run(main(), 60.0)


@pytest.mark.slow
def test_a_core_that_stands_still_is_not_alive(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(tmp_path) as served, grpc.aio.insecure_channel(served.addresses[1]) as channel:
            await ready(channel)
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="stepwire.liveness"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            served.child.signal(signal.SIGSTOP)
            try:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == 2
            finally:
                served.child.signal(signal.SIGCONT)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await ready(channel)

    run(main(), 60.0)


def test_unix_addresses_get_a_number_for_each_worker_and_the_first_serves_the_path(tmp_path: Path) -> None:
    async def main() -> None:
        with toy(tmp_path) as executor:
            address = await bound(tmp_path, executor)
            listen = f"unix:{tmp_path}/api.sock"
            own = ["--api-workers", "2", "--listen", listen, "--executors", address]
            with process("tests.fakes.toy_scheduler_main", [*own, "--address-file", str(tmp_path / "api")],
                         tmp_path / "scheduler.log") as child:  # fmt: skip
                addresses = (await written(tmp_path / "api", child)).split("\n")
                assert addresses == [listen, f"{listen}.1", f"{listen}.2"]
                for each in addresses:
                    async with grpc.aio.insecure_channel(each) as channel:
                        await ready(channel)
                        assert len(await rest(call(channel, "r", 8))) == 8

    run(main(), 60.0)


def test_a_port_taken_by_another_server_is_a_clear_error(tmp_path: Path) -> None:
    """Even by one that would share it: else each would get half of the other's callers."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        args = ["--api-workers", "2", "--listen", address, "--executors", "127.0.0.1:1"]
        with process("tests.fakes.toy_scheduler_main", args, tmp_path / "log") as child:
            assert child.wait() == 2
            assert f"can not listen on {address}" in child.log and "Traceback" not in child.log


def test_a_worker_that_can_not_start_ends_the_scheduler(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    args = ["--api-workers", "2", "--listen", "127.0.0.1:0", "--executors", "127.0.0.1:1"]
    with process("tests.fakes.toy_scheduler_main", [*args, "--auth-tokens-file", str(tokens)], tmp_path / "log") as c:
        assert c.wait() == 2
        assert str(tokens) in c.log and "Traceback" not in c.log


def test_nobody_starts_a_worker_by_hand(tmp_path: Path) -> None:
    with process("scheduler_svc.workers", [], tmp_path / "log") as child:
        assert child.wait() == 2
        assert "--api-workers" in child.log


def test_a_place_lost_since_the_start_ends_nobody_elses_streams(tmp_path: Path) -> None:
    """A worker that dies then has no successor until its address can be had again; the others serve on."""

    async def main() -> None:
        path = tmp_path / "s"
        with toy(tmp_path) as executor:
            address = await bound(tmp_path, executor)
            own = ["--api-workers", "2", "--listen", f"unix:{path}", "--executors", address]
            with process("tests.fakes.toy_scheduler_main",
                         [*own, "--worker-listen", "127.0.0.1:0", "--address-file", str(tmp_path / "api")],
                         tmp_path / "scheduler.log") as child:  # fmt: skip
                _, first, port_1, _, port_2 = (await written(tmp_path / "api", child)).split("\n")
                served = Service(child, ["", port_1, port_2])
                async with grpc.aio.insecure_channel(first) as one, grpc.aio.insecure_channel(port_2) as two:
                    await ready(one)
                    await ready(two)
                    dead = served.worker(0)
                    with socket.socket(socket.AF_UNIX) as other:
                        dead.kill()
                        await asyncio.to_thread(os.unlink, f"{path}.1")
                        other.bind(f"{path}.1")
                        other.listen()
                        while child.log.count("another starts in") < 2:  # noqa: ASYNC110 - another process writes it
                            await asyncio.sleep(0.01)
                        stream = inference_pb2_grpc.InferenceStub(two).Generate(generate_request(12))
                        assert await rest(stream) == oracle(prompts(1)[0], seeded(1, 12))
                    await again_ready(one)

    run(main(), 60.0)


def test_a_later_worker_accepts_the_tokens_of_the_start(tmp_path: Path) -> None:
    """Or a caller would be let in or not as the kernel chooses among workers."""

    async def main() -> None:
        tokens = tmp_path / "tokens"
        tokens.write_text("correct-horse\n")
        bearer = (("authorization", "Bearer correct-horse"),)
        async with service(tmp_path, "--auth-tokens-file", str(tokens)) as served, contextlib.AsyncExitStack() as stack:
            one = await stack.enter_async_context(grpc.aio.insecure_channel(served.addresses[1]))
            await ready(one)
            tokens.write_text("battery-staple\n")
            served.worker(0).kill()
            while "another starts in" not in served.child.log:  # noqa: ASYNC110 - written by another process
                await asyncio.sleep(0.01)
            await again_ready(one)
            stream = inference_pb2_grpc.InferenceStub(one).Generate(generate_request(12), metadata=bearer)
            assert await rest(stream) == oracle(prompts(1)[0], seeded(1, 12))

    run(main(), 60.0)
