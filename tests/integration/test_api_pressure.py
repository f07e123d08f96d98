"""More calls than the service can take, over real gRPC, and what operators are told of it."""

import asyncio
import threading

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_svc.core.config import CoreConfig
from stepwire.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.toy_executor import ToyExecutor
from tests.integration.api_scene import failing, reason, rest, until
from tests.integration.engine_harness import oracle, seeded
from tests.integration.protocol_harness import run, serving
from tests.integration.test_api_core import PROMPT, Whole, held_by, request, tokens, whole

CALLS = 400


async def _outcome(w: Whole, seed: int, **fields: str) -> list[int] | grpc.aio.AioRpcError:
    try:
        return tokens(await rest(w.stub.Generate(request(seed, **fields))))  # type: ignore[arg-type]
    except grpc.aio.AioRpcError as error:
        return error


def _retry_ms(error: grpc.aio.AioRpcError) -> int:
    status = rpc_status.from_call(error)
    for detail in status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return int(info.retry_delay.ToMilliseconds())
    raise AssertionError("no RetryInfo")


def test_a_flood_of_calls_is_answered_and_leaves_nothing_behind() -> None:
    async def test() -> None:
        gate = threading.Event()
        config = CoreConfig(max_queued_requests=16)
        async with serving(ToyExecutor(on_wait=held_by(gate))) as served, whole(served.address, core=config) as w:
            tasks_before = len(asyncio.all_tasks())
            calls = [asyncio.ensure_future(_outcome(w, seed)) for seed in range(CALLS)]
            await until(lambda: sum(call.done() for call in calls) >= CALLS - 64)
            assert w.worker.num_streams <= 64 and w.engine.stats().waiting <= 16, "refused calls hold nothing"
            gate.set()
            outcomes = await asyncio.gather(*calls)
            served_ones = [seed for seed, outcome in enumerate(outcomes) if isinstance(outcome, list)]
            assert len(served_ones) >= 16
            for seed, outcome in enumerate(outcomes):
                if isinstance(outcome, grpc.aio.AioRpcError):
                    assert outcome.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(outcome) == "OVERLOADED"
                    assert 100 <= _retry_ms(outcome) <= 60_000
                else:
                    assert outcome == oracle(PROMPT, seeded(seed))
            await w.at_rest()
            await until(lambda: len(asyncio.all_tasks()) <= tasks_before + 8)

    run(test())


def test_who_waits_too_long_in_the_queue_is_told_even_when_no_step_ends() -> None:
    async def test() -> None:
        gate = threading.Event()
        config = CoreConfig(max_queue_time_ms=50, max_num_seqs=1)
        async with serving(ToyExecutor(on_wait=held_by(gate))) as served, whole(served.address, core=config) as w:
            running = w.stub.Generate(request(1))
            await until(lambda: w.engine.stats().running == 1)
            error = await failing(w.stub.Generate(request(3)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _retry_ms(error) >= 100
            gate.set()
            assert tokens(await rest(running)) == oracle(PROMPT, seeded(1))
            assert w.engine.stats().requests_expired == 1
            await w.at_rest()

    run(test())


def test_operators_see_tenants_and_the_queue() -> None:
    async def test() -> None:
        config = CoreConfig(policy="fair", tenant_weights={"a": 2.0})
        async with serving(ToyExecutor()) as served, whole(served.address, core=config) as w:
            answers = [await _outcome(w, seed, tenant="a" if seed % 2 else "") for seed in range(6)]
            assert all(answer == oracle(PROMPT, seeded(seed)) for seed, answer in enumerate(answers))
            await w.at_rest()
            stats = await admin_pb2_grpc.AdminStub(w.channel).GetStats(admin_pb2.GetStatsRequest())
            told = {tenant.tenant: tenant for tenant in stats.tenants}
            assert {name: (t.requests, t.waiting, t.running, t.weight) for name, t in told.items()} == {
                "": (3, 0, 0, 1.0),
                "a": (3, 0, 0, 2.0),
            }
            assert all(t.generated_tokens == 3 * 24 for t in told.values())
            assert stats.drain_rate > 0 and stats.queued_tokens == 0 and stats.requests_expired == 0

    run(test())
