"""Engine loop, executor client and servicer together over real gRPC: whatever happens to the stream, the tokens are the
oracle's."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from common.errors import Unavailable
from common.messages import (
    Hello,
    PlanError,
    PlanErrorCode,
    StepPlan,
    Welcome,
    u32,
)
from common.wire import encode_from_executor
from common.wire_handshake import decode_hello
from executor_svc.servicer import ExecutorServicer, RunContext
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outcome import Ending
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client import StreamOptions
from scheduler_svc.observer import StepRecord
from scheduler_svc.stream_parts import ClockEstimate
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc
from tests.fakes.toy_executor import ToyExecutor, crashed, toy_info
from tests.integration.engine_harness import QUICK_STREAM, assert_oracle, engine, oracle, prompts, seeded, submit_all
from tests.integration.protocol_harness import held_by, run, serving, until


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


def test_an_idle_executor_takes_over_from_one_that_is_lost() -> None:
    """Nobody asks the scheduler for anything meanwhile: the loss itself has to make it plan elsewhere."""

    async def main() -> None:
        gate = threading.Event()
        async with (
            serving(ToyExecutor(on_wait=held_by(gate))) as one,
            serving(ToyExecutor()) as two,
            engine(one.address, two.address) as (loop, worker),
        ):
            await until(lambda: all(e.connected for e in loop.stats().executors))
            worker.submit(1, prompts(1)[0], seeded(1))
            await until(lambda: loop.stats().executors[0].in_flight_steps > 0)
            assert one.server is not None
            await one.server.stop(None)
            gate.set()
            await worker.done([1])
            assert_oracle(worker, 1)
            assert [e.connected for e in loop.stats().executors] == [False, True]

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


def test_an_idle_executor_that_answers_pings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than a silent one would be."""
    pongs: list[int] = []
    add = ClockEstimate.add

    def counting(self: ClockEstimate, *times: int) -> None:
        pongs.append(times[0])
        add(self, *times)

    monkeypatch.setattr(ClockEstimate, "add", counting)

    async def main() -> None:
        async with serving(ToyExecutor()) as served, engine(served.address) as (loop, worker):
            await worker.ready()
            await until(lambda: len(pongs) > QUICK_STREAM.max_missed_pongs + 4)
            assert [state.ready for state in worker.states] == [False, True]
            assert loop.stats().executors[0].epoch == 1

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
