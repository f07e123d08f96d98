"""Hello and Welcome, lease and takeover, over real gRPC, against the toy executor."""

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest

from common.clock import ManualClock
from common.messages import (
    Draining,
    Hello,
    Pong,
    Sampling,
    Welcome,
)
from common.wire import encode_to_executor
from executor_svc.session import SessionLimits
from stepwire.executor.v1 import executor_pb2 as pb
from tests.fakes.toy_executor import ToyExecutor
from tests.fakes.toy_tokens import expected_tokens
from tests.integration.protocol_harness import Peer, admit_plan, decode_plan, empty_plan, run, serving

A, B = b"a" * 16, b"b" * 16
GREEDY = Sampling(seed=1, max_tokens=16, temperature=0.0)
PROMPT = [5, 6, 7, 8]


def oracle(count: int) -> list[int]:
    return expected_tokens(PROMPT, replace(GREEDY, max_tokens=count), vocab_size=1000, eos_ids=(2,))


def test_welcome_says_what_the_executor_is() -> None:
    async def main() -> None:
        toy = ToyExecutor(incarnation=77)
        async with serving(toy) as served, Peer(served.address) as peer:
            welcome = await peer.hello(epoch=3, depth=9)
            assert (welcome.incarnation, welcome.info) == (77, toy.info)
            assert welcome.pipeline_depth == SessionLimits().max_pipeline_depth
            info = await peer.stub.GetInfo(pb.GetInfoRequest())
            assert (info.holder_scheduler_id, info.holder_epoch, info.incarnation) == (A, 3, 77)

    run(main())


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (pb.ToExecutor(ping=pb.Ping(id=1)), grpc.StatusCode.INVALID_ARGUMENT, "first message"),
        (pb.ToExecutor(), grpc.StatusCode.INVALID_ARGUMENT, "first message"),
        (
            pb.ToExecutor(hello=pb.Hello(protocol_version=2, scheduler_id=A, epoch=1, pipeline_depth=1)),
            grpc.StatusCode.FAILED_PRECONDITION,
            "version 2 is not spoken",
        ),
        (
            pb.ToExecutor(hello=pb.Hello(protocol_version=1, scheduler_id=b"short", epoch=1, pipeline_depth=1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello.scheduler_id",
        ),
        (
            pb.ToExecutor(hello=pb.Hello(protocol_version=1, scheduler_id=A, pipeline_depth=1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello.epoch",
        ),
        (
            pb.ToExecutor(
                hello=pb.Hello(
                    protocol_version=1, scheduler_id=A, epoch=1, pipeline_depth=1, expected_model_hash="other"
                )
            ),
            grpc.StatusCode.FAILED_PRECONDITION,
            "expects model hash other, this executor has toy-0",
        ),
    ],
)
def test_bad_first_message_is_refused(message: pb.ToExecutor, code: grpc.StatusCode, words: str) -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            await peer.call.write(message)
            got, details = await peer.ended()
            assert got is code and words in details
            async with Peer(served.address) as next_peer:
                await next_peer.hello()

    run(main())


def test_second_hello_is_malformed() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            await peer.hello()
            await peer.send(peer.hello_message(2))
            code, details = await peer.ended()
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "MALFORMED" in details

    run(main())


def test_bytes_that_are_no_message_end_the_stream() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as peer:
            raw = peer.channel.stream_stream("/stepwire.executor.v1.Executor/Run", bytes, pb.FromExecutor.FromString)
            for first in (b"\xff\xff", encode_to_executor(peer.hello_message(1)).SerializeToString()):
                call = raw()
                await call.write(first)
                if first != b"\xff\xff":
                    assert isinstance(await call.read(), pb.FromExecutor)
                    await call.write(b"\xff\xff")
                with pytest.raises(grpc.aio.AioRpcError, match="not a ToExecutor message") as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main())


def test_no_hello_is_not_waited_for_for_ever() -> None:
    async def main() -> None:
        async with serving(ToyExecutor(), limits=SessionLimits(hello_wait_s=0.05)) as served, Peer(served.address) as p:
            await p.call.wait_for_connection()
            code, details = await p.ended()
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "no Hello" in details

    run(main())


def test_own_scheduler_takes_over_a_half_open_stream() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as old, Peer(served.address) as new:
            await old.hello(epoch=1)
            await old.send(admit_plan(1, 1, PROMPT, GREEDY))  # and then it reads nothing any more
            await new.hello(epoch=2)
            await new.send(admit_plan(2, 1, PROMPT, GREEDY, admission_id=2))
            assert (await new.result()).tokens.tolist() == oracle(1)
            code, details = await old.ended()
            assert code is grpc.StatusCode.ABORTED
            assert "taken over by epoch 2" in details and A.hex() in details

    run(main())


def test_the_end_of_the_old_stream_leaves_the_one_that_took_over() -> None:
    """It ends later than the other begins."""

    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as old, Peer(served.address) as new:
            await old.hello(epoch=1)
            await new.hello(epoch=2)
            assert (await old.ended())[0] is grpc.StatusCode.ABORTED
            assert await served.servicer.drain("going", 0.05) is False, "nobody closed it"
            assert isinstance(await new.read(), Draining)

    run(main())


def test_takeover_does_not_wait_for_a_peer_whose_window_is_full() -> None:
    async def main() -> None:
        limits = SessionLimits(outbox_depth=1_000_000)
        async with serving(ToyExecutor(), limits=limits) as served, Peer(served.address) as old:
            await old.hello(epoch=1)
            for number in range(4000):  # more pongs than any flow-control window takes
                await old.ping(number)
            async with Peer(served.address) as new:
                await new.hello(epoch=2)
                await new.send(empty_plan(2, 1))
                assert (await new.result()).epoch == 2

    run(main())


class SlowToBegin(ToyExecutor):
    """Sets `begun` when an epoch begins, and goes on when `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()

    def begin_epoch(self, hello: Hello) -> bool:
        self.begun.set()
        assert self.gate.wait(20)
        return super().begin_epoch(hello)


def test_takeover_while_the_device_still_drains() -> None:
    toy = SlowToBegin()

    async def main() -> None:
        async with serving(toy) as served, Peer(served.address) as old, Peer(served.address) as new:
            await old.send(old.hello_message(1))
            await asyncio.to_thread(toy.begun.wait, 20)
            await new.send(new.hello_message(2))
            code, details = await old.ended()
            assert code is grpc.StatusCode.ABORTED and "taken over by epoch 2" in details
            toy.gate.set()
            assert isinstance(await new.read(), Welcome)
            await new.send(empty_plan(2, 1))
            assert (await new.result()).epoch == 2

    run(main())


def test_the_lease_begins_anew_with_welcome() -> None:
    """The holder can send nothing while the device still drains, which may take longer than a lease."""
    toy, clock = SlowToBegin(), ManualClock()

    async def main() -> None:
        async with (
            serving(toy, clock=clock) as served,
            Peer(served.address) as holder,
            Peer(served.address, B) as stranger,
        ):
            await holder.send(holder.hello_message(1))
            await asyncio.to_thread(toy.begun.wait, 20)
            clock.advance_ns(6_000_000_000)
            toy.gate.set()
            assert isinstance(await holder.read(), Welcome)
            await stranger.send(stranger.hello_message(1))
            code, details = await stranger.ended()
            assert code is grpc.StatusCode.FAILED_PRECONDITION and "held by" in details

    run(main())


def test_epoch_must_rise() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, Peer(served.address) as first, Peer(served.address) as second:
            await first.hello(epoch=4)
            await second.send(second.hello_message(4))
            code, details = await second.ended()
            assert code is grpc.StatusCode.FAILED_PRECONDITION and "epoch 4 does not rise" in details
            await first.send(empty_plan(4, 1))
            await first.result()

    run(main())


def test_stranger_is_refused_and_nothing_is_cleared() -> None:
    async def main() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served, Peer(served.address) as holder, Peer(served.address, B) as stranger:
            await holder.hello(epoch=1)
            await holder.send(admit_plan(1, 1, PROMPT, GREEDY))
            tokens = (await holder.result()).tokens.tolist()
            await stranger.send(stranger.hello_message(9))
            code, details = await stranger.ended()
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert f"held by scheduler {A.hex()}" in details
            assert toy.rows_in_use == 1
            for step in range(2, 5):
                await holder.send(decode_plan(1, step, 0))
                tokens += (await holder.result()).tokens.tolist()
            assert tokens == oracle(4)

    run(main())


def test_stranger_is_accepted_when_the_lease_is_over_and_the_old_stream_ends() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with (
            serving(ToyExecutor(), clock=clock) as served,
            Peer(served.address) as holder,
            Peer(served.address, B) as early,
            Peer(served.address, B) as late,
        ):
            await holder.hello()
            clock.advance_ns(4_000_000_000)
            await holder.ping()
            assert isinstance(await holder.read(), Pong)  # any message renews the lease
            clock.advance_ns(4_999_999_999)
            await early.send(early.hello_message(1))
            code, details = await early.ended()
            assert code is grpc.StatusCode.FAILED_PRECONDITION and "held by" in details
            clock.advance_ns(1)
            await late.hello(epoch=2)
            code, details = await holder.ended()
            assert code is grpc.StatusCode.ABORTED and B.hex() in details

    run(main())


def test_lease_outlives_a_broken_stream_but_not_a_closed_one() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served:
            async with Peer(served.address) as broken:
                await broken.hello()
            async with Peer(served.address, B) as stranger:
                await stranger.send(stranger.hello_message(1))
                assert (await stranger.ended())[0] is grpc.StatusCode.FAILED_PRECONDITION
            async with Peer(served.address) as again:
                await again.hello(epoch=2)
                await again.call.done_writing()
                assert await again.ended() == (grpc.StatusCode.OK, "")
            async with Peer(served.address, B) as stranger:
                await stranger.hello(epoch=1)

    run(main())


def test_blocks_are_kept_only_when_both_agree() -> None:
    async def main() -> None:
        async with serving(ToyExecutor(incarnation=5)) as served:
            kept = []
            for epoch, fields in enumerate(
                [
                    {"keep_kv": True, "known_incarnation": 5},  # nobody was here before, so nothing can be its own
                    {"keep_kv": True, "known_incarnation": 5},
                    {"keep_kv": True, "known_incarnation": 6},
                    {"keep_kv": False, "known_incarnation": 5},
                ]
            ):
                async with Peer(served.address) as peer:
                    kept.append((await peer.hello(epoch=epoch + 1, **fields)).kv_kept)
            assert kept == [False, True, False, False]

    run(main())
