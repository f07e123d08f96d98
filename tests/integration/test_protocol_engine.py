"""Engine loop, executor client and servicer together over real gRPC: whatever happens to the stream, the tokens are the
oracle's."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc
import numpy as np
import pytest

from common.errors import DuplicateRequest, Overloaded, RequestAborted, Unavailable
from common.messages import (
    ExecutorInfo,
    Hello,
    OutputKind,
    PlanError,
    PlanErrorCode,
    StepPlan,
    StepResult,
    Welcome,
    u32,
)
from common.wire import decode_hello, encode_from_executor
from executor_svc.servicer import ExecutorServicer, RunContext
from executor_svc.step_executor import PendingStep
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outcome import Ending
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client import StreamOptions
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
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc
from tests.fakes.toy_executor import ToyExecutor, crashed, toy_info
from tests.fakes.toy_tokens import toy_logits
from tests.integration.engine_harness import QUICK_STREAM, CollectingWorker, engine, oracle, prompts, seeded
from tests.integration.protocol_harness import run, serving


def assert_oracle(worker: CollectingWorker, count: int) -> None:
    for key, prompt in enumerate(prompts(count), 1):
        assert worker.errors.get(key) is None
        assert worker.tokens[key] == oracle(prompt, seeded(key)), key
        assert worker.reasons[key] is FinishReason.MAX_TOKENS


def submit_all(worker: CollectingWorker, count: int) -> list[int]:
    for key, prompt in enumerate(prompts(count), 1):
        worker.submit(key, prompt, seeded(key))
    return list(range(1, count + 1))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_are_the_oracles(depth: int) -> None:
    async def main() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served, engine(served.address, depth=depth) as (loop, worker):
            await worker.ready()
            await worker.done(submit_all(worker, 20))
            assert_oracle(worker, 20)
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)
            (stats,) = loop.stats().executors
            assert stats.connected and stats.steps > 0 and stats.rtt_ns > 0 and stats.epoch == 1

    run(main())


def test_executor_not_there_yet_is_waited_for() -> None:
    async def main() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served:
            address = served.address
        async with engine(address) as (_, worker):
            await asyncio.sleep(0)
            assert not worker.states[-1].ready
            worker.submit(1, [5, 6], seeded(1))
            await worker.done([1])
            assert isinstance(worker.errors[1], Unavailable)  # nobody knows yet what fits
            async with serving(ToyExecutor(), listen=address):
                await worker.ready()
                worker.submit(2, prompts(1)[0], seeded(2))
                await worker.done([2])
                assert worker.tokens[2] == oracle(prompts(1)[0], seeded(2))

    run(main())


def test_name_that_does_not_resolve_is_a_peer_that_is_down() -> None:
    async def main() -> None:
        async with (
            serving(ToyExecutor()) as served,
            engine("no-such-host.invalid:50052", served.address) as (loop, worker),
        ):
            await worker.ready()
            await worker.done(submit_all(worker, 3))
            assert_oracle(worker, 3)
            assert [e.connected for e in loop.stats().executors] == [False, True]

    run(main())


def test_two_executors_share_the_work() -> None:
    async def main() -> None:
        async with (
            serving(ToyExecutor()) as one,
            serving(ToyExecutor()) as two,
            engine(one.address, two.address) as (loop, worker),
        ):
            await until(lambda: all(e.connected for e in loop.stats().executors))
            await worker.done(submit_all(worker, 40))
            assert_oracle(worker, 40)
            assert all(e.steps > 0 for e in loop.stats().executors)

    run(main())


def test_executor_replaced_in_the_middle_loses_nothing() -> None:
    """The process is gone with all its state; another takes its place at the address."""

    async def main() -> None:
        toy = ToyExecutor()
        async with serving(toy) as served:
            address = served.address
            loop_context = engine(address)
            loop, worker = await loop_context.__aenter__()
            await worker.ready()
            keys = submit_all(worker, 12)
            await worker.until(lambda: any(len(t) > 5 for t in worker.tokens.values()))
        assert not all(key in worker.reasons for key in keys)
        async with serving(crashed(toy), listen=address):
            await worker.done(keys)
            assert_oracle(worker, 12)
            assert loop.stats().executors[0].epoch >= 2
            await loop_context.__aexit__(None, None, None)

    run(main())


class Sabotage(Scheduler):
    """Makes plan number `at` of the first epoch undecodable or wrong, as the executor sees it."""

    def __init__(self, at: int, spoil: Callable[[StepPlan], StepPlan]) -> None:
        super().__init__(CoreConfig())
        self._at = at
        self._spoil = spoil
        self.errors: list[PlanErrorCode] = []

    def schedule(self, executor_id: int, now_ns: int, trace_context: bytes = b"") -> StepRecord | None:
        record = super().schedule(executor_id, now_ns, trace_context)
        if record is not None and (record.plan.epoch, record.plan.step_id) == (1, self._at):
            return replace(record, plan=self._spoil(record.plan))
        return record

    def plan_failed(self, executor_id: int, error: PlanError, now_ns: int) -> tuple[Ending, ...]:
        self.errors.append(error.code)
        return super().plan_failed(executor_id, error, now_ns)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda plan: replace(plan, num_tokens=plan.num_tokens + 1), None),
        (lambda plan: replace(plan, decode_rows=u32([*plan.decode_rows.tolist(), 79])), None),
        (lambda plan: replace(plan, step_id=plan.step_id + 1), PlanErrorCode.STEP_GAP),
        (lambda plan: replace(plan, epoch=9), PlanErrorCode.STALE_EPOCH),
        (lambda plan: replace(plan, prefill_rows=u32([1])), PlanErrorCode.MALFORMED),
    ],
)
def test_bad_plan_with_the_next_on_the_wire_corrupts_nothing(
    spoil: Callable[[StepPlan], StepPlan], code: PlanErrorCode | None
) -> None:
    async def main() -> None:
        core = Sabotage(6, spoil)
        toy = ToyExecutor()
        async with serving(toy) as served, engine(served.address, core=core) as (loop, worker):
            await worker.ready()
            await worker.done(submit_all(worker, 8))
            assert_oracle(worker, 8)
            assert len(core.errors) == 1 and code in (None, core.errors[0])
            (stats,) = loop.stats().executors
            assert stats.epoch == 2
            assert (toy.corrupt_reads, toy.limbo_violations) == (0, 0)

    run(main())


class SilentServicer(ExecutorServicer):
    """Says Welcome and then nothing any more."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    async def Run(self, request_iterator: object, context: RunContext) -> None:  # type: ignore[override]
        hello = decode_hello((await context.read()).hello)
        self.epochs.append(hello.epoch)
        welcome = Welcome(7, toy_info(), hello.pipeline_depth, False, 1, 1)
        await context.write(encode_from_executor(welcome))
        await asyncio.get_running_loop().create_future()


def test_dead_peer_is_noticed_by_missed_pongs() -> None:
    async def main() -> None:
        silent = SilentServicer()
        server = grpc.aio.server()
        pb_grpc.add_ExecutorServicer_to_server(silent, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stream = StreamOptions(welcome_wait_s=10.0, ping_interval_s=0.02, max_missed_pongs=3)
        async with engine(address, stream=stream) as (_, worker):
            await worker.until(lambda: [s.ready for s in worker.states] == [False, True, False, True])
            assert silent.epochs[:2] == [1, 2]
        await server.stop(None)

    run(main())


def test_welcome_that_does_not_come_is_not_waited_for_for_ever() -> None:
    gate = threading.Event()

    class SlowToBegin(ToyExecutor):
        def begin_epoch(self, hello: Hello) -> bool:
            assert hello.epoch > 1 or gate.wait(20)
            return super().begin_epoch(hello)

    async def main() -> None:
        stream = replace(QUICK_STREAM, welcome_wait_s=0.2)
        async with serving(SlowToBegin()) as served, engine(served.address, stream=stream) as (loop, worker):
            await until(lambda: loop.stats().executors[0].epoch >= 2)
            gate.set()
            await worker.ready()

    run(main())


# ------------------------------------------------------------------------------------------------------ one at a time


def test_second_scheduler_waits_until_the_first_is_gone() -> None:
    async def main() -> None:
        async with serving(ToyExecutor()) as served:
            async with engine(served.address, scheduler_id=b"1" * 16) as (_, first):
                await first.ready()
                second_engine = engine(served.address, scheduler_id=b"2" * 16)
                second_loop, second = await second_engine.__aenter__()
                await until(lambda: second_loop.stats().executors[0].epoch >= 3)  # tries again and again
                await first.done(submit_all(first, 6))
                assert_oracle(first, 6)
                assert not any(state.ready for state in second.states)
            # The first gave the executor back when it stopped; its lease is not waited for.
            await second.ready()
            await second.done(submit_all(second, 6))
            assert_oracle(second, 6)
            await second_engine.__aexit__(None, None, None)

    run(main())


def test_executor_with_another_model_is_not_used() -> None:
    async def main() -> None:
        async with (
            serving(ToyExecutor()) as served,
            engine(served.address, expected_model_hash="another") as (loop, worker),
        ):
            await until(lambda: loop.stats().executors[0].epoch >= 3)
            assert not any(state.ready for state in worker.states)

    run(main())


# ---------------------------------------------------------------------------------------------------- what workers ask


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


def submit_message(key: int, prompt: list[int]) -> Submit:
    return Submit(key=key, request_id=f"request-{key}", prompt=u32(prompt), sampling=seeded(key), arrival_ns=0)


def test_full_box_refuses_but_takes_what_makes_room() -> None:
    port = LocalPort(lambda: None, max_messages=2)
    port.send(submit_message(1, [5]))
    port.send(submit_message(2, [5]))
    with pytest.raises(Overloaded):
        port.send(submit_message(3, [5]))
    port.send(Cancel(1))
    assert len(port.take()) == 3
    port.send(GetStats(1, 0))


# ------------------------------------------------------------------------------------------------------------ draining


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


# ------------------------------------------------------------------------------------------------------------ observer


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


# ---------------------------------------------------------------------------------------------------------- pipelining


class Delaying:
    """A StepExecutor whose every result comes 20 ms of manual time after its plan (`serial`: or after the result before
    it, if that is later, as on a busy device); the test turns the clock."""

    DELAY_NS = 20_000_000

    def __init__(self, serial: bool) -> None:
        self._serial = serial
        self._toy = ToyExecutor()
        self._turn = threading.Condition()
        self.now_ns = 0
        self._delaying = True
        self.busy_ns = 0  # until the last token
        self.due_ns: list[int] = []  # of the result of each plan launched
        self.log: list[tuple[str, int]] = []

    @property
    def info(self) -> ExecutorInfo:
        return self._toy.info

    @property
    def incarnation(self) -> int:
        return self._toy.incarnation

    def begin_epoch(self, hello: Hello) -> bool:
        return self._toy.begin_epoch(hello)

    def execute(self, plan: StepPlan, received_ns: int) -> PendingStep:
        pending = self._toy.execute(plan, received_ns)
        with self._turn:
            begin_ns = max(self.now_ns, self.due_ns[-1]) if self._serial and self.due_ns else self.now_ns
            self.due_ns.append(begin_ns + self.DELAY_NS)
            self.log.append(("plan", plan.step_id))
            return DelayedStep(self, pending, plan.step_id, self.due_ns[-1])

    def close(self) -> None:
        self._toy.close()

    def wait_until(self, due_ns: int, step_id: int) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: self.now_ns >= due_ns or not self._delaying, 20)
            self.log.append(("result", step_id))

    def has_launched(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.due_ns) >= count

    def stop_delaying(self) -> None:
        with self._turn:
            self._delaying = False
            self._turn.notify_all()

    def turn_to(self, now_ns: int) -> None:
        with self._turn:
            self.now_ns = now_ns
            self._turn.notify_all()


@dataclass(frozen=True)
class DelayedStep:
    device: Delaying
    pending: PendingStep
    step_id: int
    due_ns: int

    def wait(self) -> StepResult:
        self.device.wait_until(self.due_ns, self.step_id)
        return self.pending.wait()


def run_delayed(depth: int, num_steps: int, *, serial: bool) -> Delaying:
    """One sequence of `num_steps` steps. Time moves only when all that can happen at the present moment has happened:
    the pipeline is full, or no more steps are wanted."""
    device = Delaying(serial)

    async def main() -> None:
        async with serving(device) as served, engine(served.address, depth=depth) as (_, worker):
            await worker.ready()
            worker.submit(1, [5, 6, 7], seeded(1, num_steps))
            for step in range(1, num_steps + 1):
                await until(device.has_launched(min(step - 1 + depth, num_steps)))
                device.turn_to(device.due_ns[step - 1])
                await worker.until(worker.has_tokens(1, step))
            assert worker.tokens[1] == oracle([5, 6, 7], seeded(1, num_steps))
            device.busy_ns = device.now_ns
            device.stop_delaying()  # the last plan only releases the row

    run(main())
    return device


def test_next_plan_is_on_the_wire_before_the_result() -> None:
    device = run_delayed(2, 20, serial=True)
    for step in range(1, 20):
        assert device.log.index(("plan", step + 1)) < device.log.index(("result", step))


def test_depth_2_has_at_least_1_8_times_the_throughput_of_depth_1() -> None:
    steps = 40
    one, two = run_delayed(1, steps, serial=False), run_delayed(2, steps, serial=False)
    assert one.busy_ns == steps * Delaying.DELAY_NS
    assert one.busy_ns / two.busy_ns >= 1.8


async def until(condition: Callable[[], bool]) -> None:
    """For what the other threads do; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - no event crosses from those threads
        await asyncio.sleep(0.001)


def held_by(gate: threading.Event) -> Callable[[StepPlan], None]:
    def wait(plan: StepPlan) -> None:
        assert gate.wait(20)

    return wait
