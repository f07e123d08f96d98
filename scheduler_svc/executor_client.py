"""The scheduler's end of one executor stream. One stream is one epoch; one channel per stream, so that a connection
found dead is never used again. Everything on the core's loop thread; nothing blocks it."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from common.clock import Clock
from common.errors import ExecutorLost, ProtocolError, StepwireError
from common.grpc_options import PRIVATE_MAX_MESSAGE_BYTES, Option, channel_options
from common.messages import (
    Draining,
    FromExecutor,
    Hello,
    Ping,
    PlanError,
    Pong,
    StepPlan,
    StepResult,
    ToExecutor,
    Welcome,
)
from common.wire import decode_from_executor, encode_to_executor
from common.wire_result import decode_output_chunk
from scheduler_svc.liveness import until_next_beat
from scheduler_svc.stream_parts import ClockEstimate, Exchange, OutputJoiner
from stepwire.executor.v1 import executor_pb2 as pb
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

# Beside the shared options: executors are reached directly, and two streams must never share a dead connection. What a
# step can bring is known, so the window is set to hold it: probing for it wakes gRPC's threads with every step.
_OPTIONS: list[Option] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", PRIVATE_MAX_MESSAGE_BYTES),
]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`welcome_wait_s` covers connecting and the executor's wait for its device. `ping_interval_s`: in each a step goes
    there and back, or a ping. `max_missed_pongs` of them without any message from the executor mean that it is dead."""

    welcome_wait_s: float = 30.0
    ping_interval_s: float = 1.0
    max_missed_pongs: int = 5
    outputs_wait_s: float = 5.0


async def open_stream(
    address: str, hello: Hello, clock: Clock, estimate: ClockEstimate, options: StreamOptions
) -> "ExecutorStream":
    """Connects, says Hello, awaits Welcome, opens Outputs. `estimate` outlives streams and is fed by this one's pings.

    Raises ExecutorLost when the executor can not be reached (a name that does not resolve included) or does not answer
    in time, ProtocolError with its words when it refuses.
    """
    stream = ExecutorStream(address, hello, clock, estimate, options)
    try:
        await asyncio.wait_for(stream.shake_hands(), options.welcome_wait_s)
    except TimeoutError:
        await stream.close()
        raise ExecutorLost(f"{address}: no Welcome within {options.welcome_wait_s} s") from None
    except BaseException:
        await stream.close()
        raise
    return stream


class ExecutorStream:
    """`send` never waits; one task calls `receive`. After `receive` raised, only `close` is left."""

    def __init__(
        self, address: str, hello: Hello, clock: Clock, estimate: ClockEstimate, options: StreamOptions
    ) -> None:
        self._address = address
        self._hello = hello
        self._clock = clock
        self._estimate = estimate
        self._options = options
        self._channel = grpc.aio.insecure_channel(
            address, options=[*channel_options(PRIVATE_MAX_MESSAGE_BYTES), *_OPTIONS]
        )
        self._stub: pb_grpc.ExecutorAsyncStub = pb_grpc.ExecutorStub(self._channel)
        self._call = self._stub.Run()
        self._welcome: Welcome | None = None
        self._outbox: deque[pb.ToExecutor | None] = deque()  # None: half-close
        self._wake = asyncio.Event()
        self._silent_intervals = 0
        self._exchange = Exchange()
        self._dead = ""  # why we gave the stream up ourselves
        self._joiner = OutputJoiner()
        self._chunk_came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def welcome(self) -> Welcome:
        """What the executor said. Asserts that hands were shaken."""
        assert self._welcome is not None
        return self._welcome

    async def shake_hands(self) -> None:
        """Raises ExecutorLost or ProtocolError."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the read below tells why it failed
            await self._call.write(encode_to_executor(self._hello))
        message = await self._read()
        if not isinstance(message, Welcome):
            raise ProtocolError(f"{self._address}: {type(message).__name__} where Welcome should be")
        if message.protocol_version != self._hello.protocol_version:
            raise ProtocolError(f"{self._address}: speaks protocol version {message.protocol_version}")
        if not message.incarnation or not 1 <= message.pipeline_depth <= self._hello.pipeline_depth:
            raise ProtocolError(f"{self._address}: Welcome without an incarnation or with a depth not asked for")
        self._welcome = message
        for loop in (self._write_loop(), self._ping_loop(), self._outputs_loop()):
            self._start(loop)

    def send(self, plan: StepPlan) -> None:
        """Puts a plan on its way. A stream that is lost swallows it; `receive` tells."""
        self._post(plan)
        self._exchange.sent(plan.step_id, self._clock)

    def half_close(self) -> None:
        """Sends no more plans after those sent. The executor answers what it has, gives the lease back and closes."""
        self._outbox.append(None)
        self._wake.set()

    async def receive(self) -> StepResult | PlanError | Draining | None:
        """The next answer, with its bulk outputs joined; None when the executor closed the stream properly.

        Raises ExecutorLost when the stream is over, ProtocolError when the executor broke the protocol.
        """
        while True:
            match message := await self._read():
                case StepResult():
                    self._exchange.answered(message.step_id, message.timings, self._estimate, self._clock)
                    return await self._with_outputs(message) if message.output_bytes else message
                case PlanError() | Draining() | None:
                    return message
                case Pong():
                    now_ns = self._clock.monotonic_ns()
                    self._estimate.add(message.ping_sent_ns, message.received_ns, message.sent_ns, now_ns)
                case Welcome():
                    raise ProtocolError(f"{self._address}: a second Welcome")

    async def close(self) -> None:
        """Ends the stream at once, whatever its state."""
        self._dead = self._dead or "closed here"
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    # ------------------------------------------------------------------------------------------------------- reading

    async def _read(self) -> FromExecutor | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _lost(self._address, error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._dead and task is not None and not task.cancelling():  # the call was cancelled, not this task
                raise ExecutorLost(f"{self._address}: {self._dead}") from None
            raise
        if not isinstance(message, pb.FromExecutor):
            return None
        self._silent_intervals = 0
        return decode_from_executor(message)

    async def _with_outputs(self, result: StepResult) -> StepResult:
        try:
            async with asyncio.timeout(self._options.outputs_wait_s):
                while not self._joiner.has(result.step_id, result.output_bytes):
                    self._chunk_came.clear()
                    await self._chunk_came.wait()
        except TimeoutError:
            raise ExecutorLost(f"{self._address}: bulk outputs of step {result.step_id} did not come") from None
        return replace(result, outputs=self._joiner.take(result.step_id))

    async def _outputs_loop(self) -> None:
        request = pb.OutputsRequest(scheduler_id=self._hello.scheduler_id, epoch=self._hello.epoch)
        async for chunk in self._stub.Outputs(request):
            self._joiner.add(decode_output_chunk(chunk))
            self._chunk_came.set()

    # ------------------------------------------------------------------------------------------------------- writing

    def _post(self, message: ToExecutor) -> None:
        self._outbox.append(encode_to_executor(message))
        self._wake.set()

    async def _write_loop(self) -> None:
        while True:
            while self._outbox:
                if (message := self._outbox.popleft()) is None:
                    await self._call.done_writing()
                    return
                await self._call.write(message)
            self._wake.clear()
            await self._wake.wait()

    async def _ping_loop(self) -> None:
        """Neither side hears nothing for two intervals, which keeps the lease and tells that the executor lives."""
        number, interval_s = 0, self._options.ping_interval_s
        loop = asyncio.get_running_loop()
        while True:
            if self._silent_intervals >= self._options.max_missed_pongs:
                self._give_up(f"no message for {self._silent_intervals} intervals of {interval_s} s")
                return
            self._silent_intervals += 1
            if not self._exchange.start_interval():
                number += 1
                self._post(Ping(number, self._clock.monotonic_ns()))
            await asyncio.sleep(until_next_beat(loop.time(), interval_s))

    # --------------------------------------------------------------------------------------------------------- tasks

    def _start(self, loop: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(loop)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """A loop that broke ends the stream; when the call is over anyway, `receive` knows better why."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, StepwireError):
            self._give_up(error.message)
        elif isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
            log.debug("%s: %r", self._address, error)
        else:
            log.error("%s: a stream's loop failed", self._address, exc_info=error)
            self._give_up(f"a stream's loop failed: {error!r}")

    def _give_up(self, why: str) -> None:
        self._dead = self._dead or why
        self._call.cancel()


def _lost(address: str, error: grpc.aio.AioRpcError) -> StepwireError:
    text = f"{address}: {error.details() or error.code().name}"
    if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
        return ProtocolError(text)
    return ExecutorLost(text)
