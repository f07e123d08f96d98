"""Plans, results, bulk outputs and ends of a stream as the executor serves them, over real gRPC."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Never

import grpc
import pytest

from common.messages import (
    Draining,
    PlanErrorCode,
    Pong,
    Sampling,
    StepPlan,
    StepResult,
)
from common.wire import encode_to_executor
from common.wire_result import decode_output_chunk
from executor_svc.session import SessionLimits
from stepwire.executor.v1 import executor_pb2 as pb
from tests.fakes.toy_executor import ToyExecutor, toy_info
from tests.fakes.toy_tokens import expected_tokens
from tests.integration.protocol_harness import Peer, admit_plan, decode_plan, empty_plan, held_by, run, serving

A, B = b"a" * 16, b"b" * 16
GREEDY = Sampling(seed=1, max_tokens=16, temperature=0.0)
PROMPT = [5, 6, 7, 8]


def oracle(count: int) -> list[int]:
    return expected_tokens(PROMPT, replace(GREEDY, max_tokens=count), vocab_size=1000, eos_ids=(2,))


def test_every_plan_gets_one_answer_in_order_pings_at_once() -> None:
    gate = threading.Event()

    async def main() -> None:
        toy = ToyExecutor(on_wait=held_by(gate))
        async with serving(toy) as served, Peer(served.address) as peer:
            await peer.hello(depth=2)
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY))
            await peer.send(decode_plan(1, 2, 0))
            await peer.ping(7)
            pong = await peer.read()  # while both results are held back
            assert isinstance(pong, Pong) and pong.id == 7 and pong.received_ns <= pong.sent_ns
            gate.set()
            first, second = await peer.result(), await peer.result()
            assert [first.step_id, second.step_id] == [1, 2]
            assert [*first.tokens.tolist(), *second.tokens.tolist()] == oracle(2)
            assert first.timings.sent_ns >= first.timings.received_ns > 0
            await peer.send(empty_plan(1, 3))
            assert (await peer.result()).step_id == 3

    run(main())


def test_bad_plan_ends_the_epoch_and_corrupts_nothing() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            await peer.hello(depth=4)
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY))
            await peer.send(decode_plan(1, 2, 0))
            await peer.send(decode_plan(1, 3, 9))  # row 9 holds nothing
            await peer.send(decode_plan(1, 4, 0))  # already on the wire
            tokens = [*(await peer.result()).tokens.tolist(), *(await peer.result()).tokens.tolist()]
            refused = await peer.error()
            assert (refused.step_id, refused.code) == (3, PlanErrorCode.UNKNOWN_ROW)
            later = await peer.error()
            assert (later.step_id, later.code) == (4, PlanErrorCode.EPOCH_ENDED)
            async with Peer(served.address) as again:
                await again.hello(epoch=2)
                plan = admit_plan(2, 1, PROMPT + tokens, GREEDY, prompt_len=len(PROMPT), admission_id=2)
                await again.send(plan)
                tokens += (await again.result()).tokens.tolist()
                for step in range(2, 6):
                    await again.send(decode_plan(2, step, 0))
                    tokens += (await again.result()).tokens.tolist()
            assert tokens == oracle(len(tokens))

    run(main())


def test_malformed_column_names_its_field() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            await peer.hello(depth=4)
            message = encode_to_executor(admit_plan(1, 1, PROMPT, GREEDY))
            message.plan.admit[0].blocks = b"\1\2\3"
            await peer.call.write(message)
            await peer.send(empty_plan(1, 2))
            error = await peer.error()
            assert (error.code, error.field) == (PlanErrorCode.MALFORMED, "admit[0].blocks")
            assert (await peer.error()).code is PlanErrorCode.EPOCH_ENDED

    run(main())


def test_more_plans_than_granted_are_refused() -> None:
    gate = threading.Event()

    async def main() -> None:
        toy = ToyExecutor(on_wait=held_by(gate))
        async with serving(toy) as served, Peer(served.address) as peer:
            await peer.hello(depth=1)
            await peer.send(empty_plan(1, 1))
            await peer.send(empty_plan(1, 2))
            await peer.ping()
            assert isinstance(await peer.read(), Pong)  # the executor has seen both plans
            gate.set()
            assert (await peer.result()).step_id == 1
            error = await peer.error()
            assert (error.step_id, error.code, error.limit) == (2, PlanErrorCode.BUDGET, 1)

    run(main())


def test_step_gap_and_stale_epoch() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served:
            for epoch, plan, code in (
                (1, empty_plan(1, 2), PlanErrorCode.STEP_GAP),
                (2, empty_plan(1, 1), PlanErrorCode.STALE_EPOCH),
            ):
                async with Peer(served.address) as peer:
                    await peer.hello(epoch=epoch)
                    await peer.send(plan)
                    assert (await peer.error()).code is code

    run(main())


def test_device_failure_is_answered_and_fatal() -> None:
    async def main() -> None:
        toy = ToyExecutor()
        toy.fail_steps.add(1)
        async with serving(toy) as served, Peer(served.address) as peer:
            await peer.hello(depth=2)
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY))
            await peer.send(decode_plan(1, 2, 0))
            assert (await peer.error()).code is PlanErrorCode.DEVICE_FAILED
            assert (await peer.error()).code is PlanErrorCode.EPOCH_ENDED
            assert served.fatal == ["the toy device was told to fail"]

    run(main())


def test_an_executor_that_breaks_is_answered_and_fatal() -> None:
    class Broken(ToyExecutor):
        def execute(self, plan: StepPlan, received_ns: int) -> Never:
            raise ZeroDivisionError("an engine bug")

    async def main() -> None:
        async with serving(Broken()) as served, Peer(served.address) as peer:
            await peer.hello()
            await peer.send(empty_plan(1, 1))
            error = await peer.error()
            assert error.code is PlanErrorCode.DEVICE_FAILED and "an engine bug" in error.text
            assert len(served.fatal) == 1

    run(main())


def test_trace_sink_sees_plan_and_sent_result() -> None:
    seen: list[tuple[StepPlan, StepResult]] = []

    class Sink:
        def on_step(self, plan: StepPlan, result: StepResult) -> None:
            seen.append((plan, result))

    async def main() -> None:
        async with serving(ToyExecutor(), trace=Sink()) as served, Peer(served.address) as peer:
            await peer.hello()
            await peer.send(replace(empty_plan(1, 1), trace_context=b"t" * 25))
            result = await peer.result()
            await peer.ping()
            await peer.read()
            ((plan, told),) = seen
            assert plan.trace_context == b"t" * 25 and astuple(told.timings) == astuple(result.timings)

    run(main())


def test_outputs_come_before_their_result() -> None:
    async def main() -> None:
        toy = ToyExecutor(toy_info(vocab_size=200_000))  # 800 kB of logits: several chunks
        async with serving(toy) as served, Peer(served.address) as peer:
            await peer.hello()
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY, raw_logits=True))
            outputs = peer.outputs(1)  # later than the plan: the result waits for it
            chunks = [
                decode_output_chunk(c)
                for c in [await outputs.read() for _ in range(4)]
                if isinstance(c, pb.OutputChunk)
            ]
            result = await peer.result()
            assert result.output_bytes == sum(len(c.data) for c in chunks) == 800_000
            assert [c.offset for c in chunks] == [0, 262144, 524288, 786432]
            assert {c.total_bytes for c in chunks} == {800_000}

    run(main())


def test_outputs_without_their_stream_end_the_epoch() -> None:
    async def main() -> None:
        limits = SessionLimits(outputs_wait_s=0.1)
        async with serving(ToyExecutor(), limits=limits) as served, Peer(served.address) as peer:
            await peer.hello()
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY, raw_logits=True))
            code, details = await peer.ended()
            assert code is grpc.StatusCode.FAILED_PRECONDITION and "no Outputs stream is open" in details

    run(main())


def test_outputs_stream_belongs_to_the_open_epoch() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            await peer.hello(epoch=2)
            for call in (peer.outputs(1), Peer(served.address, B).outputs(2)):
                with pytest.raises(grpc.aio.AioRpcError, match="no Run stream"):
                    await call.read()
            first = peer.outputs(2)
            await first.initial_metadata()
            with pytest.raises(grpc.aio.AioRpcError, match="open already"):
                await peer.outputs(2).read()

    run(main())


def test_outbox_over_its_depth_closes_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        limits = SessionLimits(outbox_depth=8)
        async with serving(ToyExecutor(), limits=limits) as served, Peer(served.address) as peer:
            await peer.hello()
            # Never reads. A write to the closed stream may fail or not, and then reports the client's own status, so
            # the executor's words are read from its log.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for number in range(200_000):
                    await peer.ping(number)
                    if "ended" in caplog.text:
                        break
            assert "epoch 1 ended: outbox over its depth of 8" in caplog.text

    run(main())


def test_oversized_message_ends_the_stream_and_nothing_else() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served:
            async with Peer(served.address) as peer:
                await peer.hello()
                await peer.send(replace(empty_plan(1, 1), trace_context=bytes(5_000_000)))
                assert (await peer.ended())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            async with Peer(served.address) as again:
                await again.hello(epoch=2)

    run(main())


def test_drain_tells_the_scheduler_finishes_steps_and_refuses_new_streams() -> None:
    gate = threading.Event()

    async def main() -> None:
        toy = ToyExecutor(on_wait=held_by(gate))
        async with serving(toy) as served, Peer(served.address) as peer:
            await peer.hello()
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY))
            await peer.ping()
            await peer.read()
            draining = asyncio.ensure_future(served.servicer.drain("SIGTERM", 20.0))
            message = await peer.read()
            assert message == Draining("SIGTERM", 20_000)
            async with Peer(served.address, B) as stranger:
                await stranger.send(stranger.hello_message(1))
                assert (await stranger.ended())[0] is grpc.StatusCode.UNAVAILABLE
            await peer.call.done_writing()
            gate.set()
            assert (await peer.result()).tokens.tolist() == oracle(1)
            assert await peer.ended() == (grpc.StatusCode.OK, "")
            assert await draining is True

    run(main())


def test_drain_deadline_ends_a_stream_that_stays() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            await peer.hello()
            assert await served.servicer.drain("SIGTERM", 0.05) is False
            code, details = await peer.ended()
            assert code is grpc.StatusCode.UNAVAILABLE and "SIGTERM" in details

    run(main())


def test_unix_socket(tmp_path: object) -> None:
    async def main() -> None:
        toy = ToyExecutor(incarnation=77)
        async with serving(toy, listen=f"unix:{tmp_path}/executor.sock") as served, Peer(served.address) as peer:
            welcome = await peer.hello()
            assert (welcome.incarnation, welcome.info) == (77, toy.info)
            await peer.send(admit_plan(1, 1, PROMPT, GREEDY))
            assert (await peer.result()).tokens.tolist() == oracle(1)

    run(main())
