"""The worker between calls and core: what is sent, exactly when, and that nothing is left behind."""

import asyncio

import pytest

from common.clock import ManualClock
from common.errors import (
    DuplicateRequest,
    Overloaded,
    RequestAborted,
    StepwireError,
    Unavailable,
)
from common.messages import Sampling
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import (
    WORKER_SHIFT,
    Cancel,
    Child,
    CoreState,
    Drain,
    Ended,
    Finish,
    FinishReason,
    Submit,
)
from scheduler_svc.token_stream import StreamWants, TokenStream
from tests.unit.api.fakes import EOS, FakeCore, batch
from tests.unit.api.worker_scene import LIMITS, PROMPT, opened, run


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


def test_a_refused_request_with_several_choices_has_nothing_to_cancel() -> None:
    async def test(worker: ApiWorker, core: FakeCore, clock: ManualClock) -> None:
        await worker.wait_accepted([opened(worker, "same")])
        child = Child(worker.next_key(), 2)
        submit = Submit(worker.next_key(), "same", PROMPT, Sampling(seed=1, max_tokens=0), 0, children=(child,))
        states = [TokenStream(StreamWants(PROMPT, None, 258), LIMITS) for _ in submit.keys]
        streams = worker.open(submit, states)
        with pytest.raises(DuplicateRequest):
            await worker.wait_accepted(streams)
        for stream in streams:
            worker.close(stream)
        assert len(streams) == 2 and worker.num_streams == 1 and core.of(Cancel) == []

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
        assert not worker._calls

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
