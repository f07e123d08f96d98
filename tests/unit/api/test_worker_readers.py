"""Readers of what the worker has: slow ones, bounds on what lies unread, watchers, tokens held back or handed over."""

import asyncio
from collections.abc import Sequence

import pytest

from common.clock import ManualClock
from common.errors import (
    DeadlinePassed,
    Overloaded,
    SequenceFailed,
    SlowReader,
)
from common.messages import Sampling
from scheduler_svc.api.pacer import Pacer
from scheduler_svc.api.worker import MAX_WATCH_BACKLOG, ApiWorker
from scheduler_svc.messages import (
    Cancel,
    FinishReason,
    StepSeen,
    Submit,
    WatchSteps,
)
from scheduler_svc.text_cursor import TextCursor
from scheduler_svc.token_stream import TOKEN_BYTES, StreamWants, TokenStream
from tests.unit.api.fakes import EOS, ByteDecoder, FakeCore, batch
from tests.unit.api.worker_scene import LIMITS, MAX_UNREAD_BYTES, PROMPT, opened, run


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


def test_the_sweep_bounds_what_too_little_came_in_for_to_be_looked_at() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        large, small = opened(worker, "large"), opened(worker, "small")
        tokens = MAX_UNREAD_BYTES // TOKEN_BYTES
        clock.advance_ns(1000)
        core.tell(batch([(large.key, b"x" * (tokens - 20), 0), (small.key, b"y" * 10, 0)]))
        assert core.of(Cancel) == [], "an eighth of the limit came in, and it is not reached"
        clock.advance_ns(1000)
        core.tell(batch([(large.key, b"x" * 10, 0), (small.key, b"y" * 10, 0)]))
        assert core.of(Cancel) == []
        clock.advance_ns(1000)
        worker.check_streams()
        assert core.of(Cancel) == [Cancel(large.key)]

    run(test)


def test_what_lies_unread_is_added_up_once_per_eighth_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It walks over all streams, so it must not happen with every step."""

    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        looked: list[int] = []
        look = worker._bound_unread

        def looking(before_ns: int) -> None:
            looked.append(before_ns)
            look(before_ns)

        monkeypatch.setattr(worker, "_bound_unread", looking)
        stream = opened(worker)
        tokens = MAX_UNREAD_BYTES // 8 // TOKEN_BYTES
        for _ in range(4 * tokens):
            core.emit(stream.key, b"x")
            await stream.next()
        assert len(looked) == 3, "the fourth eighth is full, not passed"

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


async def turns() -> None:
    """A few turns of the loop: what can happen without waiting for a timer has happened."""
    for _ in range(4):
        await asyncio.sleep(0)


class Holding(Pacer):
    """As in a process that is always behind."""

    def on_step(self, now_ns: int, num_entries: int) -> bool:
        return True


def test_what_is_held_back_comes_at_once_after_the_interval() -> None:
    """But first tokens and ends never wait."""

    async def main() -> None:
        worker = ApiWorker(ManualClock(), pacer=Holding(300_000_000))
        core = FakeCore(worker)
        stream = opened(worker)
        await worker.wait_accepted([stream])
        first = asyncio.ensure_future(stream.next())
        await turns()
        core.emit(stream.key, b"a")
        await turns()
        assert first.done() and first.result().text == "a"
        waiting = asyncio.ensure_future(stream.next())
        await turns()
        for byte in b"bcd":
            core.emit(stream.key, [byte])
            await turns()
            assert not waiting.done()
        assert (await waiting).text == "bcd"
        last = asyncio.ensure_future(stream.next())
        await turns()
        core.emit(stream.key, b"e")
        await turns()
        assert not last.done()
        core.emit(stream.key, [EOS], FinishReason.EOS)
        await turns()
        assert last.done() and last.result().text == "e" and last.result().completion is not None

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
