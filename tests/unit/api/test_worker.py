"""The worker between calls and core: what is sent, exactly when, and that nothing is left behind."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from common.clock import ManualClock
from common.errors import (
    DeadlinePassed,
    DuplicateRequest,
    Overloaded,
    RequestAborted,
    SequenceFailed,
    SlowReader,
    StepwireError,
    Unavailable,
)
from common.messages import Sampling, u32
from scheduler_svc.api.pacer import Pacer
from scheduler_svc.api.stream import RequestStream
from scheduler_svc.api.worker import MAX_WATCH_BACKLOG, ApiWorker
from scheduler_svc.messages import (
    WORKER_SHIFT,
    Cancel,
    CoreState,
    Drain,
    Ended,
    Finish,
    FinishReason,
    StepSeen,
    Submit,
    WatchSteps,
)
from scheduler_svc.text_cursor import TextCursor
from scheduler_svc.token_stream import StreamLimits, StreamWants, TokenStream
from tests.unit.api.fakes import EOS, ByteDecoder, FakeCore, batch

PROMPT = u32([1, 2, 3])
LIMITS = StreamLimits(slow_reader_ns=10_000_000_000)
MAX_UNREAD_BYTES = 8 * 4000


def run(test: Callable[[ApiWorker, FakeCore, ManualClock], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        clock = ManualClock()
        worker = ApiWorker(clock, worker_id=3, answer_timeout_s=0.05, max_unread_bytes=MAX_UNREAD_BYTES)
        async with asyncio.timeout(10):
            await test(worker, FakeCore(worker), clock)

    asyncio.run(limited())


def opened(
    worker: ApiWorker, request_id: str = "r", stops: tuple[str, ...] = (), deadline_ns: int = 0
) -> RequestStream:
    sampling = Sampling(seed=1, max_tokens=0)
    submit = Submit(worker.next_key(), request_id, PROMPT, sampling, 0, deadline_ns=deadline_ns)
    state = TokenStream(StreamWants(PROMPT, TextCursor(ByteDecoder(), stops), 258), LIMITS)
    (stream,) = worker.open(submit, [state])
    return stream


def test_keys_carry_the_worker_and_are_never_reused() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        keys = [worker.next_key() for _ in range(100)]
        assert len(set(keys)) == 100 and {key >> WORKER_SHIFT for key in keys} == {3}

    run(test)


def test_one_batch_reaches_every_stream_with_its_own_tokens() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        streams = [opened(worker, f"r{i}") for i in range(3)]
        for stream in streams:
            await worker.wait_accepted([stream])
        waiting = [asyncio.ensure_future(stream.next()) for stream in streams]
        await asyncio.sleep(0)
        entries = [(stream.key, data, 0) for stream, data in zip(streams, (b"a", b"bc", b"d"), strict=True)]
        core.tell(batch([*entries, (999, b"stranger", 0)]))
        assert [piece.text for piece in await asyncio.gather(*waiting)] == ["a", "bc", "d"]

    run(test)


def test_a_finished_request_is_not_cancelled() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        stream = opened(worker)
        core.emit(stream.key, [EOS], FinishReason.EOS)
        assert (await stream.next()).completion is not None
        worker.close(stream)
        worker.close(stream)
        assert core.of(Cancel) == [] and worker.num_streams == 0

    run(test)


def test_an_unfinished_request_is_cancelled_exactly_once() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        stream = opened(worker)
        await worker.wait_accepted([stream])
        core.emit(stream.key, b"abc")
        worker.close(stream)
        worker.close(stream)
        core.emit(stream.key, b"late tokens of a step in flight")
        core.tell(Ended(stream.key, RequestAborted("late")))
        assert core.of(Cancel) == [Cancel(stream.key)] and worker.num_streams == 0

    run(test)


def test_a_stop_string_frees_the_row_at_once_even_if_nobody_reads() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        stream = opened(worker, stops=("stop",))
        core.emit(stream.key, b"go, s")
        core.emit(stream.key, b"top!")
        assert core.of(Finish) == [Finish(stream.key, 8, FinishReason.STOP_STRING)]
        core.emit(stream.key, b"late")
        piece = await stream.next()
        assert piece.text == "go, " and piece.completion is not None and piece.completion.completion_tokens == 8
        worker.close(stream)
        assert core.of(Cancel) == [] and len(core.of(Finish)) == 1

    run(test)


def test_a_stalled_reader_is_cancelled_in_the_core() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        slow, fast = opened(worker, "slow"), opened(worker, "fast")
        for second in range(11):
            core.tell(batch([(slow.key, b"x", 0), (fast.key, b"y", 0)]))
            assert (await fast.next()).text == "y"
            assert core.of(Cancel) == ([Cancel(slow.key)] if second == 10 else [])
            clock.advance_ns(1_000_000_000)
        with pytest.raises(SlowReader):
            await slow.next()
        worker.close(slow)
        assert len(core.of(Cancel)) == 1

    run(test)


def test_the_sweep_ends_a_stalled_reader_when_no_more_tokens_come() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        running, over = opened(worker, "running"), opened(worker, "over")
        core.emit(running.key, b"x")
        core.emit(over.key, [EOS], FinishReason.EOS)
        clock.advance_ns(10_000_000_000)
        worker.check_streams()
        assert core.of(Cancel) == [Cancel(running.key)], "what is over needs no cancel"
        for stream in (running, over):
            with pytest.raises(SlowReader):
                await stream.next()

    run(test)


def test_the_sweep_ends_what_is_past_its_deadline() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        deadline_ns = clock.monotonic_ns() + 1_000_000_000
        late, over = opened(worker, "late", deadline_ns=deadline_ns), opened(worker, "over", deadline_ns=deadline_ns)
        core.emit(over.key, b"done", FinishReason.MAX_TOKENS)
        worker.check_streams()
        assert core.of(Cancel) == []
        clock.advance_ns(1_000_000_000)
        worker.check_streams()
        worker.check_streams()
        assert core.of(Cancel) == [Cancel(late.key)]
        with pytest.raises(DeadlinePassed):
            await late.next()
        assert (await over.next()).text == "done"

    run(test)


def test_refusals_reach_the_caller() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        first = opened(worker, "same")
        await worker.wait_accepted([first])
        second = opened(worker, "same")
        with pytest.raises(DuplicateRequest):
            await worker.wait_accepted([second])
        worker.close(second)
        core.emit(first.key, b"unharmed")
        assert (await first.next()).text == "unharmed"
        core.full = Overloaded("full")
        with pytest.raises(Overloaded):
            opened(worker, "third")
        assert worker.num_streams == 1 and core.of(Cancel) == []

    run(test)


def test_a_core_that_does_not_answer_is_unavailable() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        core.mute = True
        stream = opened(worker)
        for waiting in (worker.wait_accepted([stream]), worker.stats(), worker.abort("x"), worker.drain(0)):
            with pytest.raises(Unavailable):
                await waiting
        worker.close(stream)
        assert core.of(Cancel) == [Cancel(stream.key)], "it may still have been accepted"

    run(test)


def test_abort_matches_exactly_and_twice_is_harmless() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        one, ten = opened(worker, "req-1"), opened(worker, "req-10")
        assert await worker.abort("req-1") is True
        assert await worker.abort("req-1") is False
        assert await worker.abort("req") is False
        with pytest.raises(RequestAborted):
            await one.next()
        core.emit(ten.key, b"alive")
        assert (await ten.next()).text == "alive"
        worker.close(one)
        assert core.of(Cancel) == [], "an ended request needs no cancel"

    run(test)


def test_a_cancelled_caller_leaves_no_waiting_call_behind() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        core.mute = True
        asking = asyncio.ensure_future(worker.stats(timeout_s=10))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        core.mute = False
        assert (await worker.stats()).running == 0

    run(test)


def seen(step_id: int) -> StepSeen:
    return StepSeen("e", 1, step_id, 1, 0, 1, 0, 9, 0, 0, 0, 0, 0)


def test_watching_is_on_only_while_somebody_watches() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        first, second = worker.open_watch(), worker.open_watch()
        core.tell(seen(1))
        worker.close_watch(first)
        worker.close_watch(first)
        assert core.of(WatchSteps) == [WatchSteps(3, True)]
        assert await second.next(1) == [(0, seen(1))]
        worker.close_watch(second)
        assert core.of(WatchSteps) == [WatchSteps(3, True), WatchSteps(3, False)]

    run(test)


@pytest.mark.parametrize("swept", [False, True])
def test_unread_results_are_bounded_in_total_and_the_largest_goes(swept: bool) -> None:
    """Within an eighth of the limit, whatever the number of streams and without a sweep; readers are left alone."""

    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        streams = [opened(worker, f"r{i}") for i in range(10)]
        reader, *idle = streams
        read = 0
        for _ in range(60):
            clock.advance_ns(1000)
            core.tell(batch([(s.key, b"x" * (20 if s is idle[3] else 10), 0) for s in streams if not s.core_done]))
            if swept:
                worker.check_streams()
            assert sum(s.state.buffered_bytes for s in streams) <= MAX_UNREAD_BYTES * 9 // 8
            read += len((await reader.next()).token_ids)
        assert read == 600
        cancelled = [message.key for message in core.sent if isinstance(message, Cancel)]
        assert cancelled[0] == idle[3].key and 1 < len(cancelled) < 9 and reader.key not in cancelled
        with pytest.raises(SlowReader) as caught:
            await idle[3].next()
        assert caught.value.limit == f"max_unread_bytes={MAX_UNREAD_BYTES}"
        for stream in streams:
            worker.close(stream)
        assert len(core.of(Cancel)) == 10

    run(test)


def test_a_large_step_makes_nobody_a_slow_reader_who_keeps_up() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        streams = [opened(worker, f"r{i}") for i in range(10)]
        step = batch([(s.key, b"x" * 1000, 0) for s in streams])
        for _ in range(3):
            clock.advance_ns(1000)
            core.tell(step)
            assert sum(s.state.buffered_bytes for s in streams) > MAX_UNREAD_BYTES
            for stream in streams:
                assert len((await stream.next()).token_ids) == 1000
        assert core.of(Cancel) == []
        for _ in range(2):
            clock.advance_ns(1000)
            core.tell(step)
        assert len(core.of(Cancel)) == 8, "these were not read in between"
        for stream in streams:
            worker.close(stream)

    run(test)


def test_a_watch_that_the_core_has_no_room_for_leaves_nothing_behind() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        core.full = Overloaded("behind")
        with pytest.raises(Overloaded):
            worker.open_watch()
        core.full = None
        worker.close_watch(worker.open_watch())
        assert core.of(WatchSteps) == [WatchSteps(3, True), WatchSteps(3, False)]

    run(test)


def test_a_slow_watcher_is_told_what_it_lost() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        watch = worker.open_watch()
        for step_id in range(MAX_WATCH_BACKLOG + 5):
            core.tell(seen(step_id))
        got = [*await watch.next(1), *await watch.next(MAX_WATCH_BACKLOG)]
        assert [step.step_id for _, step in got] == list(range(MAX_WATCH_BACKLOG))
        assert [skipped for skipped, _ in got] == [0] * MAX_WATCH_BACKLOG
        core.tell(seen(5000))
        assert await watch.next(9) == [(5, seen(5000))]

    run(test)


class Holding(Pacer):
    """As in a process that is always behind."""

    def on_step(self, now_ns: int, num_entries: int) -> bool:
        return True


def test_what_is_held_back_comes_at_once_after_the_interval() -> None:
    """But first tokens and ends never wait."""

    async def main() -> None:
        worker = ApiWorker(ManualClock(), pacer=Holding(5_000_000))
        core = FakeCore(worker)
        stream = opened(worker)
        await worker.wait_accepted([stream])
        core.emit(stream.key, b"a")
        assert (await stream.next()).text == "a"
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        for byte in b"bcd":
            core.emit(stream.key, [byte])
            await asyncio.sleep(0)
            assert not waiting.done()
        assert (await waiting).text == "bcd"
        core.emit(stream.key, b"e")
        core.emit(stream.key, [EOS], FinishReason.EOS)
        assert (await stream.next()).text == "e"

    async def limited() -> None:
        async with asyncio.timeout(10):
            await main()

    asyncio.run(limited())


def test_a_reader_that_waits_is_handed_its_tokens_as_messages_in_order() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        stream = opened(worker)
        await worker.wait_accepted([stream])
        stream.encode = lambda text, ids: text.encode() + bytes(ids)
        waiting = stream.bell.wait()
        core.emit(stream.key, b"a")
        core.emit(stream.key, b"b")
        core.emit(stream.key, b"c")
        assert await waiting == b"aa"
        assert await stream.bell.wait() is None, "more came while nobody waited"
        piece = stream.state.take()
        assert piece is not None and (piece.text, piece.token_ids) == ("bc", [*b"bc"])
        waiting = stream.bell.wait()
        core.emit(stream.key, "é".encode()[:1])
        assert await waiting == b"\xc3", "a token without text is a message too"
        waiting = stream.bell.wait()
        core.emit(stream.key, "é".encode()[1:])
        assert await waiting == "é".encode() + b"\xa9"
        waiting = stream.bell.wait()
        core.emit(stream.key, [EOS], FinishReason.EOS)
        assert await waiting is None
        piece = stream.state.take()
        assert piece is not None and piece.completion is not None and piece.completion.completion_tokens == 6

    run(test)


def test_a_text_that_can_not_be_made_ends_its_own_stream_alone() -> None:
    class Broken(ByteDecoder):
        def push(self, token_ids: Sequence[int]) -> str:
            raise ZeroDivisionError("a defect in a tokenizer")

    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        sampling = Sampling(seed=1, max_tokens=0)
        submit = Submit(worker.next_key(), "broken", PROMPT, sampling, 0)
        state = TokenStream(StreamWants(PROMPT, TextCursor(Broken()), 258), LIMITS)
        (broken,) = worker.open(submit, [state])
        await worker.wait_accepted([broken])
        well = opened(worker)
        await worker.wait_accepted([well])
        broken.encode = well.encode = lambda text, ids: text.encode()
        waiting = [broken.bell.wait(), well.bell.wait()]
        core.tell(batch([(broken.key, b"x", 0), (well.key, b"y", 0)]))
        assert await waiting[1] == b"y" and await waiting[0] is None
        with pytest.raises(SequenceFailed):
            state.take()

    run(test)


def test_state_and_drain() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        states: list[CoreState] = []
        worker.on_state(states.append)
        opened(worker)
        assert await worker.drain(5) == 1
        assert core.of(Drain) == [Drain(1, 3, 5)]
        assert states[-1].draining and worker.state.draining

    run(test)


def test_errors_before_acceptance_are_not_lost() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        core.mute = True
        stream = opened(worker)
        error: StepwireError = Unavailable("gone")
        core.tell(Ended(stream.key, error))
        with pytest.raises(Unavailable):
            await worker.wait_accepted([stream])

    run(test)
