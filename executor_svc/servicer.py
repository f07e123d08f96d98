"""stepwire.executor.v1.Executor over any StepExecutor: handshake, lease, takeover; a Session serves the rest.

Lives on the I/O loop. Until `attach` and after `drain` the service answers UNAVAILABLE.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from common.clock import Clock, SystemClock
from common.errors import Draining, ProtocolError, StepwireError, Unavailable
from common.messages import PROTOCOL_VERSION, Hello, Welcome
from common.wire import encode_from_executor
from common.wire_handshake import decode_hello, encode_info
from executor_svc.lease import Holder, Lease
from executor_svc.session import Session, SessionLimits, StepTraceSink
from executor_svc.step_executor import StepExecutor
from executor_svc.step_threads import EpochRun, StepThreads
from stepwire.executor.v1 import executor_pb2 as pb
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Executor"].full_name

RunContext = grpc.aio.ServicerContext[pb.ToExecutor, pb.FromExecutor]
OutputsContext = grpc.aio.ServicerContext[pb.OutputsRequest, pb.OutputChunk]
InfoContext = grpc.aio.ServicerContext[pb.GetInfoRequest, pb.GetInfoResponse]


class BadFirstMessage(StepwireError):
    """The stream did not begin with a well-formed Hello."""

    status = "INVALID_ARGUMENT"
    reason = "MALFORMED"


class ExecutorServicer(pb_grpc.ExecutorServicer):
    """One scheduler at a time; one Run stream of it is current, and that stream is the epoch."""

    def __init__(
        self, limits: SessionLimits | None = None, clock: Clock | None = None, trace: StepTraceSink | None = None
    ) -> None:
        self._limits = limits or SessionLimits()
        self._clock = clock or SystemClock()
        self._trace = trace
        self._lease = Lease(self._limits.lease_ns)
        self._executor: StepExecutor | None = None
        self._threads: StepThreads | None = None
        self._session: Session | None = None
        self._no_session = asyncio.Event()
        self._no_session.set()
        self._draining = ""

    def attach(self, executor: StepExecutor, threads: StepThreads) -> None:
        """The executor is loaded and its threads run: schedulers may come."""
        self._executor, self._threads = executor, threads

    async def drain(self, reason: str, deadline_s: float) -> bool:
        """Takes no new stream; tells the scheduler, which finishes its steps in flight and closes. Idempotent.

        After `deadline_s` the stream is ended with UNAVAILABLE. Returns whether the scheduler closed it in time.
        """
        self._draining = self._draining or reason
        if self._session is not None:
            self._session.announce_drain(reason, int(deadline_s * 1000))
        try:
            await asyncio.wait_for(self._no_session.wait(), deadline_s)
        except TimeoutError:
            await self.stop(grpc.StatusCode.UNAVAILABLE, f"{reason}: the time to drain is over")
            return False
        return True

    async def stop(self, code: grpc.StatusCode, details: str) -> None:
        """Takes no new stream and ends the current one after what was answered so far is out (bounded)."""
        self._draining = self._draining or details
        if (session := self._session) is not None:
            await session.flush()
            session.end(code, details)

    # ------------------------------------------------------------------------------------------------------- the RPCs

    async def Run(self, request_iterator: object, context: RunContext) -> None:  # type: ignore[override]
        try:
            session = await self._handshake(context)
        except StepwireError as error:
            # While it loads a scheduler asks again and again; the others are worth a line.
            level = logging.DEBUG if isinstance(error, Unavailable) else logging.INFO
            log.log(level, "refused a stream of %s: %s", context.peer(), error.message)
            await context.abort(grpc.StatusCode[error.status], error.message)
        tasks = [
            asyncio.ensure_future(session.read_loop(context.read)),
            asyncio.ensure_future(session.write_loop(context.write)),
        ]
        for task in tasks:
            task.add_done_callback(lambda done: self._loop_done(session, done))
        try:
            code, details = await asyncio.shield(session.ended)
        finally:
            session.end(grpc.StatusCode.CANCELLED, "the peer went away")
            for task in tasks:
                task.cancel()
            if self._session is session:
                self._session = None
                self._no_session.set()
            log.info("epoch %d ended: %s", session.holder.epoch, session.ended.result()[1] or "closed by the scheduler")
        if code is grpc.StatusCode.OK:
            self._lease.release(session.holder)
        else:
            await self._abort(context, code, details)

    async def Outputs(self, request: pb.OutputsRequest, context: OutputsContext) -> None:  # type: ignore[override]
        session = self._session
        if session is None or (session.holder.scheduler_id, session.holder.epoch) != (
            request.scheduler_id,
            request.epoch,
        ):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"no Run stream of epoch {request.epoch} is open")
        await context.send_initial_metadata(())
        loop = asyncio.ensure_future(session.outputs_loop(context.write))
        try:
            await _first_of(loop, session.ended)
        finally:
            loop.cancel()
        if loop.done() and not loop.cancelled() and isinstance(error := loop.exception(), ProtocolError):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)

    async def GetInfo(self, request: pb.GetInfoRequest, context: InfoContext) -> pb.GetInfoResponse:
        executor = self._executor
        if executor is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting: the executor is not loaded yet")
        holder = self._lease.holder(self._clock.monotonic_ns())
        return pb.GetInfoResponse(
            info=encode_info(executor.info),
            incarnation=executor.incarnation,
            holder_scheduler_id=holder.scheduler_id if holder else b"",
            holder_epoch=holder.epoch if holder else 0,
            draining=bool(self._draining),
        )

    # ------------------------------------------------------------------------------------------------------ handshake

    async def _handshake(self, context: RunContext) -> Session:
        """Reads Hello, takes the lease, ends the stream before, starts the epoch. Raises StepwireError."""
        hello = await self._read_hello(context)
        executor, threads = self._check(hello)
        holder = Holder(hello.scheduler_id, hello.epoch, context.peer())
        self._lease.take(holder, self._clock.monotonic_ns())
        if (old := self._session) is not None:
            old.end(
                grpc.StatusCode.ABORTED,
                f"epoch {old.holder.epoch} was taken over by epoch {holder.epoch} "
                f"of scheduler {holder.scheduler_id.hex()} at {holder.peer}",
            )
        depth = min(hello.pipeline_depth, self._limits.max_pipeline_depth)
        session = Session(holder, depth, threads, self._limits, self._clock, self._lease.renew, self._trace)
        self._session = session
        self._no_session.clear()
        try:
            run = EpochRun(replace(hello, pipeline_depth=depth), session.deliver)
            begun = threads.begin_epoch(run)
            await _first_of(begun, session.ended)
            if session.ended.done():
                code, details = session.ended.result()
                await self._abort(context, code, details)
            kept = await begun
        except BaseException:
            if self._session is session:
                self._session = None
                self._no_session.set()
            raise
        self._lease.renew(holder, self._clock.monotonic_ns())
        welcome = Welcome(
            incarnation=executor.incarnation,
            info=executor.info,
            pipeline_depth=depth,
            kv_kept=kept,
            monotonic_ns=self._clock.monotonic_ns(),
            wall_ns=self._clock.wall_ns(),
        )
        session.begin(run, encode_from_executor(welcome))
        log.info("epoch %d of scheduler %s at %s", holder.epoch, holder.scheduler_id.hex(), holder.peer)
        return session

    async def _read_hello(self, context: RunContext) -> Hello:
        try:
            message = cast(object, await asyncio.wait_for(context.read(), self._limits.hello_wait_s))
        except TimeoutError:
            raise BadFirstMessage(f"no Hello within {self._limits.hello_wait_s} s") from None
        except DecodeError as error:
            raise BadFirstMessage(f"MALFORMED: not a ToExecutor message: {error}") from None
        if not isinstance(message, pb.ToExecutor) or message.WhichOneof("message") != "hello":
            raise BadFirstMessage("MALFORMED: the first message of a stream is Hello")
        if message.hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {message.hello.protocol_version} is not spoken here, only {PROTOCOL_VERSION}",
                field="hello.protocol_version",
                limit=str(PROTOCOL_VERSION),
            )
        try:
            return decode_hello(message.hello)
        except ProtocolError as error:
            raise BadFirstMessage(f"MALFORMED: {error.message}", field=error.field) from None

    def _check(self, hello: Hello) -> tuple[StepExecutor, StepThreads]:
        if self._draining:
            raise Draining(f"draining: {self._draining}")
        if self._executor is None or self._threads is None:
            raise Unavailable("starting: the executor is not loaded yet")
        have = self._executor.info.model_hash
        if hello.expected_model_hash not in ("", have):
            raise ProtocolError(
                f"the scheduler expects model hash {hello.expected_model_hash}, this executor has {have} "
                f"({self._executor.info.model_id})",
                field="hello.expected_model_hash",
            )
        return self._executor, self._threads

    def _loop_done(self, session: Session, task: asyncio.Future[None]) -> None:
        """A reader or writer that broke ends its session: gRPC's own errors mean the peer is gone."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, grpc.aio.BaseError):
            log.error("a stream's loop failed", exc_info=error)
        session.end(grpc.StatusCode.INTERNAL, f"stream failed: {error!r}")

    async def _abort(self, context: RunContext, code: grpc.StatusCode, details: str) -> None:
        """Ends the stream; a peer that takes nothing any more is not waited for."""
        try:
            await asyncio.wait_for(context.abort(code, details), self._limits.flush_wait_s)
        except TimeoutError:
            raise asyncio.CancelledError from None  # gRPC keeps the status queued and ends the handler quietly


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
