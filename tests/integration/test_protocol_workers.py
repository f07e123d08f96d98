"""What workers ask of the core, its drain, and what the observer hears, over real executor streams."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from common.errors import DuplicateRequest, Overloaded, RequestAborted, Unavailable
from common.messages import (
    OutputKind,
    StepResult,
    u32,
)
from scheduler_svc.messages import (
    Abort,
    AbortAnswer,
    Cancel,
    Drain,
    DrainAnswer,
    FinishReason,
    GetStats,
    StatsAnswer,
    StepSeen,
    Submit,
    WatchSteps,
)
from scheduler_svc.observer import NoObserver, StepRecord
from scheduler_svc.ports import LocalPort
from tests.fakes.toy_executor import ToyExecutor, crashed
from tests.fakes.toy_tokens import toy_logits
from tests.integration.engine_harness import assert_oracle, engine, oracle, prompts, seeded, submit_all, submit_message
from tests.integration.protocol_harness import held_by, run, serving


def test_bulk_outputs_are_joined_to_their_tokens() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (_, worker):
            await worker.ready()
            prompt = prompts(1)[0]
            worker.submit(1, prompt, seeded(1, 5), raw_logits=True)
            worker.submit(2, prompt, replace(seeded(2, 3), num_prompt_logprobs=2, prompt_logprobs_from=1))
            await worker.done([1, 2])
            logits = [o for extras in worker.extras[1] for o in extras.outputs]
            assert [o.position for o in logits] == [len(prompt) + i for i in range(5)]
            whole = u32([*prompt, *worker.tokens[1]])
            for output in logits:
                got = np.frombuffer(output.data, dtype="<f4")
                assert output.kind is OutputKind.RAW_LOGITS
                assert np.array_equal(got, toy_logits(whole[: output.position], 1000, (2,)))
            records = [o for extras in worker.extras[2] for o in extras.outputs]
            assert sum(o.count for o in records) == len(prompt) - 1

    run(main())


def test_abort_cancel_duplicate_stats_and_watch() -> None:
    async def main() -> None:
        gate = threading.Event()
        toy = ToyExecutor(on_wait=held_by(gate))
        async with serving(toy) as served, engine(served.address) as (_, worker):
            await worker.ready()
            worker.port.send(WatchSteps(0, True))
            submit_all(worker, 4)
            worker.submit(9, [5], seeded(9))
            worker.port.send(Abort(1, 0, "request-1"))
            worker.port.send(Abort(2, 0, "request"))
            worker.port.send(Abort(3, 0, "request-1"))
            worker.port.send(Cancel(2))
            worker.port.send(Cancel(2))
            gate.set()
            await worker.done([1, 3, 4, 9])
            assert isinstance(worker.errors[1], RequestAborted)
            assert 2 not in worker.reasons and 2 not in worker.errors
            assert [m.found for m in worker.other if isinstance(m, AbortAnswer)] == [True, False, False]
            worker.port.send(GetStats(4, 0))
            await worker.until(lambda: any(isinstance(m, StatsAnswer) for m in worker.other))
            stats = next(m.stats for m in worker.other if isinstance(m, StatsAnswer))
            assert (stats.requests_accepted, stats.requests_aborted, stats.requests_finished) == (5, 2, 3)
            seen = [m for m in worker.other if isinstance(m, StepSeen)]
            assert [s.step_id for s in seen] == list(range(1, len(seen) + 1))
            assert all(s.executor == served.address and s.result_ns > s.planned_ns for s in seen)
            assert all(s.num_blocks == toy.info.num_blocks > s.free_blocks for s in seen)
            assert max(s.running for s in seen) <= 5 and sum(s.generated_tokens for s in seen) >= len(worker.tokens[3])
            assert sum(s.admitted_tokens for s in seen) >= 4 > 0 == sum(s.cached_tokens for s in seen)

    run(main())


def test_duplicate_id_is_refused_and_the_first_is_unharmed() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (_, worker):
            await worker.ready()
            prompt = prompts(1)[0]
            worker.submit(1, prompt, seeded(1))
            worker.port.send(replace(submit_message(2, prompt), request_id="request-1"))
            await worker.done([1, 2])
            assert isinstance(worker.errors[2], DuplicateRequest)
            assert worker.tokens[1] == oracle(prompt, seeded(1))

    run(main())


def test_full_box_refuses_but_takes_what_makes_room() -> None:
    port = LocalPort(lambda: None, max_messages=2)
    port.send(submit_message(1, [5]))
    port.send(submit_message(2, [5]))
    with pytest.raises(Overloaded):
        port.send(submit_message(3, [5]))
    with pytest.raises(Overloaded):
        port.send(WatchSteps(0, True))
    port.send(Cancel(1))
    port.send(WatchSteps(0, False))
    assert len(port.take()) == 4
    port.send(GetStats(1, 0))


def test_drain_lets_requests_finish() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (_, worker):
            await worker.ready()
            keys = submit_all(worker, 6)
            worker.port.send(Drain(1, 0, 20_000))
            worker.submit(9, [5], seeded(9))
            await worker.until(lambda: DrainAnswer(1, 0) in worker.other)
            await worker.done([*keys, 9])
            assert_oracle(worker, 6)
            assert isinstance(worker.errors[9], Unavailable)
            assert worker.states[-1].draining and not worker.states[-1].ready

    run(main())


def test_drain_deadline_ends_the_rest() -> None:
    async def main() -> None:
        gate = threading.Event()
        async with serving(ToyExecutor(on_wait=held_by(gate))) as served, engine(served.address) as (loop, worker):
            await worker.ready()
            keys = submit_all(worker, 3)
            await worker.until(lambda: len(worker.accepted) == 3)
            assert await loop.drain(0.05) == 3
            await worker.done(keys)
            assert all(isinstance(worker.errors[key], Unavailable) for key in keys)
            gate.set()

    run(main())


def test_draining_executor_is_left_and_its_successor_goes_on() -> None:
    async def main() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served, engine(served.address) as (_, worker):
            address = served.address
            await worker.ready()
            keys = submit_all(worker, 12)
            await worker.until(lambda: any(len(t) > 3 for t in worker.tokens.values()))
            assert await served.servicer.drain("SIGTERM", 10.0)
            assert served.server is not None
            await served.server.stop(None)
            async with serving(crashed(toy), listen=address):
                await worker.done(keys)
                assert_oracle(worker, 12)

    run(main())


def test_observer_hears_of_everything_in_order() -> None:
    class Recorder(NoObserver):
        def __init__(self) -> None:
            self.log: list[tuple[object, ...]] = []

        def on_submit(self, request: Submit, now_ns: int) -> None:
            self.log.append(("submit", request.key))

        def trace_context(self, executor_id: int, now_ns: int) -> bytes:
            return b"c" * 25

        def on_plan(self, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None:
            assert record.plan.trace_context == b"c" * 25 and schedule_start_ns <= sent_ns
            self.log.append(("plan", record.plan.step_id))

        def on_result(
            self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
        ) -> None:
            assert record.plan.step_id == result.step_id and received_ns <= updated_ns
            self.log.append(("result", result.step_id))

        def on_tokens(self, key: int, count: int, now_ns: int) -> None:
            self.log.append(("tokens", key))

        def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
            self.log.append(("end", key, reason, error))

        def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
            self.log.append((event, executor_id))

    async def main() -> None:
        recorder = Recorder()
        async with serving(ToyExecutor()) as served, engine(served.address, observer=recorder) as (_, worker):
            await worker.ready()
            worker.port.send(replace(submit_message(1, [5, 6]), trace_context=b"t" * 25, sampling=seeded(1, 3)))
            worker.port.send(replace(submit_message(2, [5, 6]), sampling=seeded(2, 3)))
            await worker.done([1, 2])
        log = recorder.log
        assert log[0] == ("connected", 0) and log[-1] == ("lost", 0)
        assert log[1:3] == [("submit", 1), ("submit", 2)]
        assert log.index(("plan", 2)) < log.index(("result", 1))
        assert log.count(("tokens", 1)) == 3 and ("tokens", 2) not in log
        assert ("end", 1, FinishReason.MAX_TOKENS, "") in log

    run(main())
