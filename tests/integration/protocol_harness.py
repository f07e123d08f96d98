"""An executor service in this process, and a bare client that speaks the step protocol message by message."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import uvloop

from common.clock import Clock, SystemClock
from common.grpc_options import PRIVATE_MAX_MESSAGE_BYTES, channel_options, server_options
from common.messages import (
    Admit,
    FromExecutor,
    Hello,
    Ping,
    PlanError,
    Sampling,
    StepPlan,
    StepResult,
    ToExecutor,
    Welcome,
    u32,
)
from common.wire import decode_from_executor, encode_to_executor
from executor_svc.servicer import ExecutorServicer
from executor_svc.session import SessionLimits, StepTraceSink
from executor_svc.step_executor import StepExecutor
from executor_svc.step_threads import StepThreads
from stepwire.executor.v1 import executor_pb2 as pb
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc

DEADLINE_S = 30.0

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
    """Runs a test's coroutine on uvloop, as the services do, with a deadline."""

    async def bounded() -> T:
        async with asyncio.timeout(deadline_s):
            return await main

    return uvloop.run(bounded())


@dataclass
class Served:
    address: str
    servicer: ExecutorServicer
    fatal: list[str] = field(default_factory=list)
    server: grpc.aio.Server | None = None


@asynccontextmanager
async def serving(
    executor: StepExecutor,
    *,
    limits: SessionLimits | None = None,
    clock: Clock | None = None,
    trace: StepTraceSink | None = None,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[Served]:
    """`executor` behind the real servicer on a real port."""
    servicer = ExecutorServicer(limits, clock, trace)
    server = grpc.aio.server(options=server_options(PRIVATE_MAX_MESSAGE_BYTES))
    pb_grpc.add_ExecutorServicer_to_server(servicer, server)
    port = server.add_insecure_port(listen)
    await server.start()
    served = Served(listen if listen.startswith("unix:") else f"127.0.0.1:{port}", servicer, server=server)
    threads = StepThreads(executor, asyncio.get_running_loop(), served.fatal.append)
    threads.start()
    servicer.attach(executor, threads)
    try:
        yield served
    finally:
        await server.stop(None)
        assert await threads.stop(5.0)


class Peer:
    """One scheduler as the executor sees it; reads nothing that a test does not ask for."""

    def __init__(self, address: str, scheduler_id: bytes = b"a" * 16) -> None:
        self.scheduler_id = scheduler_id
        self.channel = grpc.aio.insecure_channel(
            address,
            options=[*channel_options(16 * PRIVATE_MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.stub: pb_grpc.ExecutorAsyncStub = pb_grpc.ExecutorStub(self.channel)
        self.call = self.stub.Run()
        self._clock = SystemClock()

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self.channel.close()

    def hello_message(self, epoch: int, depth: int = 2, **fields: Any) -> Hello:
        return Hello(self.scheduler_id, epoch, depth, self._clock.monotonic_ns(), self._clock.wall_ns(), **fields)

    async def hello(self, epoch: int = 1, depth: int = 2, **fields: Any) -> Welcome:
        """Hello and its Welcome. Raises AioRpcError when refused."""
        await self.send(self.hello_message(epoch, depth, **fields))
        message = await self.read()
        assert isinstance(message, Welcome)
        return message

    async def send(self, message: ToExecutor) -> None:
        await self.call.write(encode_to_executor(message))

    async def read(self) -> FromExecutor:
        """The next message. Raises AioRpcError when the stream ended with a status, EOFError when it ended OK."""
        message = await self.call.read()
        if not isinstance(message, pb.FromExecutor):
            raise EOFError
        return decode_from_executor(message)

    async def result(self) -> StepResult:
        message = await self.read()
        assert isinstance(message, StepResult), message
        return message

    async def error(self) -> PlanError:
        message = await self.read()
        assert isinstance(message, PlanError), message
        return message

    async def ping(self, number: int = 1) -> None:
        await self.send(Ping(number, self._clock.monotonic_ns()))

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Reads whatever still comes; the status the stream ended with."""
        try:
            while True:
                await self.read()
        except EOFError:
            return grpc.StatusCode.OK, ""
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""

    def outputs(self, epoch: int) -> "grpc.aio.UnaryStreamCall[pb.OutputsRequest, pb.OutputChunk]":
        return self.stub.Outputs(pb.OutputsRequest(scheduler_id=self.scheduler_id, epoch=epoch))


def empty_plan(epoch: int, step_id: int) -> StepPlan:
    return StepPlan(epoch, step_id, 0, 0)


def admit_plan(
    epoch: int,
    step_id: int,
    tokens: list[int],
    sampling: Sampling,
    *,
    row: int = 0,
    prompt_len: int = 0,
    admission_id: int = 1,
    blocks: int = 8,
    raw_logits: bool = False,
) -> StepPlan:
    """Admits one sequence into `row` with `blocks` blocks of its own and prefills all of it."""
    admit = Admit(
        row=row,
        admission_id=admission_id,
        tokens=u32(tokens),
        length=len(tokens),
        prompt_len=prompt_len or len(tokens),
        computed_len=0,
        blocks=u32(range(row * blocks, (row + 1) * blocks)),
        sampling=sampling,
    )
    return StepPlan(
        epoch,
        step_id,
        0,
        len(tokens),
        admit=(admit,),
        prefill_rows=u32([row]),
        prefill_starts=u32([0]),
        prefill_counts=u32([len(tokens)]),
        raw_logits_rows=u32([row] if raw_logits else []),
        raw_logits_positions=u32([len(tokens)] if raw_logits else []),
    )


def decode_plan(epoch: int, step_id: int, *rows: int) -> StepPlan:
    return StepPlan(epoch, step_id, 0, len(rows), decode_rows=u32(rows))


async def until(condition: Callable[[], bool]) -> None:
    """For what the other threads do; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - no event crosses from those threads
        await asyncio.sleep(0.001)


def held_by(gate: threading.Event) -> Callable[[StepPlan], None]:
    def wait(plan: StepPlan) -> None:
        assert gate.wait(20)

    return wait
