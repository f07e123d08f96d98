"""One Run stream after its Welcome: what comes in, what waits to go out. Lives on the I/O loop.

The I/O loop answers pings itself and at once. Results leave in order, each after its bulk chunks are on the Outputs
stream. Nothing here makes the runner wait: a peer that does not read fills the outbox, and a full outbox ends the
stream.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from common.clock import Clock
from common.errors import ProtocolError
from common.messages import Draining, PlanError, PlanErrorCode, StepPlan, StepResult
from common.wire import encode_from_executor
from common.wire_plan import decode_plan
from executor_svc.lease import LEASE_NS, Holder
from executor_svc.step_threads import Answer, EpochRun, StepThreads
from stepwire.executor.v1 import executor_pb2 as pb

# On a broken connection gRPC reports "no more messages" and "cancelled" in either order; a stream is taken as properly
# closed only when no cancellation follows within this time.
HALF_CLOSE_GRACE_S = 0.1


class StepTraceSink(Protocol):
    """Told of every step after its result was handed to gRPC, on the I/O thread: must be cheap."""

    def on_step(self, plan: StepPlan, result: StepResult) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Times in seconds unless they say otherwise. `outbox_depth` counts messages not yet handed to gRPC."""

    max_pipeline_depth: int = 4
    outbox_depth: int = 64
    lease_ns: int = LEASE_NS
    hello_wait_s: float = 5.0
    outputs_wait_s: float = 5.0
    flush_wait_s: float = 1.0


class Session:
    """`ended` resolves once, to the status the stream ends with; whoever ends it does not wait for the network."""

    def __init__(
        self,
        holder: Holder,
        depth: int,
        threads: StepThreads,
        limits: SessionLimits,
        clock: Clock,
        renew: Callable[[Holder, int], None],
        trace: StepTraceSink | None,
    ) -> None:
        self.holder = holder
        self.ended: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        self._depth = depth
        self._threads = threads
        self._limits = limits
        self._clock = clock
        self._renew = renew
        self._trace = trace
        self._run: EpochRun | None = None
        self._unanswered = 0
        self._closing = False
        self._control: deque[pb.FromExecutor] = deque()
        self._outbox: deque[tuple[Answer, int]] = deque()  # with the chunk count that must be out before it
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._chunks: deque[pb.OutputChunk] = deque()
        self._chunks_made = 0
        self._chunks_sent = 0
        self._chunk_wake = asyncio.Event()
        self._outputs_open = False

    # ------------------------------------------------------------------------------------------------------- control

    def begin(self, run: EpochRun, welcome: pb.FromExecutor) -> None:
        """The epoch's device state is ready; `welcome` is the first message out."""
        self._run = run
        self._flushed.clear()
        self._control.appendleft(welcome)  # a Draining may have been announced meanwhile
        self._wake.set()

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """Idempotent; the first caller's status counts."""
        if not self.ended.done():
            self.ended.set_result((code, details))

    def announce_drain(self, reason: str, deadline_ms: int) -> None:
        self._send_control(encode_from_executor(Draining(reason, deadline_ms)))

    async def flush(self) -> None:
        """Waits, at most `flush_wait_s`, until all that was answered so far is handed to gRPC."""
        try:
            await asyncio.wait_for(self._flushed.wait(), self._limits.flush_wait_s)
        except TimeoutError:
            return

    # -------------------------------------------------------------------------------------------------------- inward

    async def read_loop(self, read: Callable[[], Awaitable[object]]) -> None:
        """Runs until the stream has no more messages; ends the session on a message it can not take."""
        while True:
            try:
                message = await read()
            except DecodeError as error:
                self.end(grpc.StatusCode.INVALID_ARGUMENT, f"MALFORMED: not a ToExecutor message: {error}")
                return
            if not isinstance(message, pb.ToExecutor):
                break
            now_ns = self._clock.monotonic_ns()
            self._renew(self.holder, now_ns)
            match message.WhichOneof("message"):
                case "plan":
                    self._take_plan(message.plan, now_ns)
                case "ping":
                    ping = message.ping
                    pong = pb.Pong(id=ping.id, ping_sent_ns=ping.sent_ns, received_ns=now_ns)
                    self._send_control(pb.FromExecutor(pong=pong))
                case "hello":
                    self.end(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED: a stream has one Hello, this is the second")
                case _:
                    self.end(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED: empty or unknown ToExecutor message")
        await asyncio.sleep(HALF_CLOSE_GRACE_S)
        self._closing = True
        self._end_if_closed()

    def _take_plan(self, message: pb.StepPlan, now_ns: int) -> None:
        run = self._run
        if run is None:
            self.end(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED: a plan before Welcome")
            return
        self._unanswered += 1
        self._flushed.clear()
        if self._unanswered > self._depth + self._limits.outbox_depth:
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._unanswered} plans wait for an answer")
        elif self._unanswered > self._depth:
            text = f"{self._unanswered} plans in flight where {self._depth} were granted"
            self._threads.refuse(run, self._refusal(message, PlanErrorCode.BUDGET, text, limit=self._depth))
        else:
            try:
                plan = decode_plan(message)
            except ProtocolError as error:
                refusal = self._refusal(message, PlanErrorCode.MALFORMED, error.message, field=error.field)
                self._threads.refuse(run, refusal)
            else:
                self._threads.step(run, plan, now_ns)

    @staticmethod
    def _refusal(plan: pb.StepPlan, code: PlanErrorCode, text: str, *, field: str = "", limit: int = 0) -> PlanError:
        return PlanError(plan.epoch, plan.step_id, code, text, field=field, limit=limit)

    # ------------------------------------------------------------------------------------------------------- outward

    def deliver(self, answer: Answer) -> None:
        """Takes the next answer from the threads."""
        if self.ended.done():
            return
        self._chunks.extend(answer.chunks)
        self._chunks_made += len(answer.chunks)
        self._outbox.append((answer, self._chunks_made))
        if answer.chunks:
            self._chunk_wake.set()
            asyncio.get_running_loop().call_later(self._limits.outputs_wait_s, self._check_chunks, self._chunks_made)
        self._check_depth()
        self._wake.set()

    def _send_control(self, message: pb.FromExecutor) -> None:
        if not self.ended.done():
            self._flushed.clear()
            self._control.append(message)
            self._check_depth()
            self._wake.set()

    def _check_depth(self) -> None:
        if len(self._outbox) + len(self._control) > self._limits.outbox_depth:
            limit = self._limits.outbox_depth
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, f"outbox over its depth of {limit}: the stream is not read")

    def _check_chunks(self, wanted: int) -> None:
        """`outputs_wait_s` after chunks were made they must be out: they hold back their step's result."""
        if self._chunks_sent < wanted:
            why = "the Outputs stream is not read" if self._outputs_open else "no Outputs stream is open"
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if self._outputs_open else grpc.StatusCode.FAILED_PRECONDITION
            self.end(code, f"bulk outputs waited {self._limits.outputs_wait_s} s: {why}")

    async def write_loop(self, write: Callable[[pb.FromExecutor], Awaitable[None]]) -> None:
        while True:
            if self._control:
                message = self._control.popleft()
                if message.HasField("pong"):
                    message.pong.sent_ns = self._clock.monotonic_ns()
                await write(message)
            elif self._outbox and self._outbox[0][1] <= self._chunks_sent:
                await self._write_answer(self._outbox.popleft()[0], write)
            else:
                if not self._outbox and not self._unanswered:
                    self._flushed.set()
                self._end_if_closed()
                self._wake.clear()
                await self._wake.wait()

    async def _write_answer(self, answer: Answer, write: Callable[[pb.FromExecutor], Awaitable[None]]) -> None:
        sent_ns = self._clock.monotonic_ns()
        if answer.result is not None:
            answer.message.result.timings.sent_ns = sent_ns
        self._unanswered -= 1  # before the write: the peer may send its next plan as soon as it has this
        await write(answer.message)
        if self._trace is not None and answer.plan is not None and answer.result is not None:
            result = answer.result
            self._trace.on_step(answer.plan, replace(result, timings=replace(result.timings, sent_ns=sent_ns)))

    def _end_if_closed(self) -> None:
        if self._closing and not self._unanswered and not self._control:
            self.end(grpc.StatusCode.OK, "")

    # ---------------------------------------------------------------------------------------------------------- bulk

    async def outputs_loop(self, write: Callable[[pb.OutputChunk], Awaitable[None]]) -> None:
        """Serves the Outputs stream until cancelled. Raises ProtocolError when one is open already."""
        if self._outputs_open:
            raise ProtocolError("this epoch's Outputs stream is open already")
        self._outputs_open = True
        try:
            while True:
                while self._chunks:
                    await write(self._chunks.popleft())
                    self._chunks_sent += 1
                    self._wake.set()
                self._chunk_wake.clear()
                await self._chunk_wake.wait()
        finally:
            self._outputs_open = False
