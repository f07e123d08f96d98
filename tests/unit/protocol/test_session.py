"""One Run stream without any network: in which order things leave, and when it is over."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import grpc
import pytest

from common.clock import ManualClock
from common.messages import Hello, Output, OutputKind, StepPlan, StepResult
from common.wire import encode_from_executor, encode_to_executor
from common.wire_result import output_chunks
from executor_svc import session as session_module
from executor_svc.lease import Holder
from executor_svc.session import Session, SessionLimits
from executor_svc.step_threads import Answer, EpochRun, StepThreads
from stepwire.executor.v1 import executor_pb2 as pb

DEADLINE_S = 20.0


class NoThreads:
    """Takes plans; the test answers them."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def step(self, run: EpochRun, plan: StepPlan, received_ns: int) -> None:
        self.plans.append(plan)


class Peer:
    """The other end: what it sends is read by the session, what the session writes is kept in order."""

    def __init__(self) -> None:
        self.threads = NoThreads()
        self.session = Session(
            Holder(b"s" * 16, 1, "peer"), 2, cast(StepThreads, self.threads),
            SessionLimits(flush_wait_s=DEADLINE_S), ManualClock(), lambda holder, now_ns: None, None,
        )  # fmt: skip
        self._inbox: asyncio.Queue[object] = asyncio.Queue()
        self.written: list[str] = []
        self._tasks = [
            asyncio.ensure_future(self.session.read_loop(self._inbox.get)),
            asyncio.ensure_future(self.session.write_loop(self._write)),
        ]

    async def _write(self, message: pb.FromExecutor) -> None:
        self.written.append(message.WhichOneof("message") or "")

    async def _write_chunk(self, chunk: pb.OutputChunk) -> None:
        self.written.append("chunk")

    def open_outputs(self) -> None:
        self._tasks.append(asyncio.ensure_future(self.session.outputs_loop(self._write_chunk)))

    def begin(self) -> None:
        run = EpochRun(Hello(b"s" * 16, 1, 2, 0, 0), self.session.deliver)
        self.session.begin(run, pb.FromExecutor(welcome=pb.Welcome()))

    def plan(self, step_id: int) -> None:
        self._inbox.put_nowait(encode_to_executor(StepPlan(1, step_id, 0, 0)))

    def close(self) -> None:
        self._inbox.put_nowait(grpc.aio.EOF)

    def answer(self, step_id: int, data: bytes = b"") -> None:
        outputs = (Output(step_id, OutputKind.RAW_LOGITS, 0, 1, 1, 1, data),) if data else ()
        result = StepResult(1, step_id, output_bytes=len(data), outputs=outputs)
        chunks = tuple(chunk for output in outputs for chunk in output_chunks(1, output))
        self.session.deliver(Answer(encode_from_executor(result), chunks, None, result))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def turns() -> None:
    """A few turns of the loop: what can happen without waiting for a timer has happened."""
    for _ in range(8):
        await asyncio.sleep(0)


def run(test: Callable[[Peer], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        peer = Peer()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(peer)
        finally:
            await peer.stop()

    asyncio.run(bounded())


def test_welcome_is_first_whatever_was_announced_before_it() -> None:
    async def test(peer: Peer) -> None:
        peer.session.announce_drain("going", 1)
        peer.begin()
        await turns()
        assert peer.written == ["welcome", "draining"]

    run(test)


def test_a_result_leaves_after_its_chunks() -> None:
    async def test(peer: Peer) -> None:
        peer.begin()
        peer.plan(1)
        peer.plan(2)
        await turns()
        peer.answer(1, b"x" * 600_000)
        peer.answer(2)
        await turns()
        assert peer.written == ["welcome"]
        peer.open_outputs()
        await turns()
        assert peer.written == ["welcome", "chunk", "chunk", "chunk", "result", "result"]

    run(test)


def test_flush_waits_for_what_is_not_answered_yet() -> None:
    async def test(peer: Peer) -> None:
        peer.begin()
        peer.plan(1)
        await turns()
        flushing = asyncio.ensure_future(peer.session.flush())
        await turns()
        assert not flushing.done()
        peer.answer(1)
        await flushing
        assert peer.written == ["welcome", "result"]

    run(test)


def test_a_half_closed_stream_ends_with_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HALF_CLOSE_GRACE_S", 0.0)

    async def test(peer: Peer) -> None:
        peer.begin()
        peer.plan(1)
        peer.plan(2)
        peer.close()
        await turns()
        peer.answer(1)
        await turns()
        assert not peer.session.ended.done()
        peer.answer(2)
        assert (await peer.session.ended)[0] is grpc.StatusCode.OK
        assert peer.written == ["welcome", "result", "result"]

    run(test)


def test_a_stream_that_is_cancelled_after_its_end_was_told_was_not_closed_properly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken connection looks like that, and must not give the lease back."""
    monkeypatch.setattr(session_module, "HALF_CLOSE_GRACE_S", DEADLINE_S)

    async def test(peer: Peer) -> None:
        peer.begin()
        peer.close()
        await turns()
        assert not peer.session.ended.done()
        peer.session.end(grpc.StatusCode.CANCELLED, "the peer went away")
        assert (await peer.session.ended)[0] is grpc.StatusCode.CANCELLED

    run(test)
