"""stepwire.v1.Admin: counters, steps, drain."""

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from scheduler_svc.api.health import LIVENESS
from scheduler_svc.messages import ExecutorStats, Stats, StepSeen, WatchSteps
from stepwire.v1 import admin_pb2 as admin
from stepwire.v1 import inference_pb2 as pb
from stepwire_client import AsyncClient
from tests.integration.api_scene import Scene, failing, reason, run, scene, until
from tests.unit.api.fakes import forever

SERVING = int(health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = int(health_pb2.HealthCheckResponse.NOT_SERVING)
HI = pb.GenerateRequest(text="hi")


def test_stats() -> None:
    async def test() -> None:
        async with scene() as s:
            s.core.stats = Stats(requests_accepted=3, executors=(ExecutorStats("e:1", True, free_blocks=7, rtt_ns=-1),))
            answer = await s.admin.GetStats(admin.GetStatsRequest())
            assert answer.requests_accepted == 3
            assert answer.executors[0] == admin.ExecutorStats(address="e:1", connected=True, free_blocks=7, rtt_ns=-1)

    run(test)


def tell(s: Scene, step_id: int) -> None:
    s.core.tell(StepSeen("e", 1, step_id, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19))


def test_watching_steps() -> None:
    async def test() -> None:
        async with scene() as s:
            call = s.admin.WatchSteps(admin.WatchStepsRequest(max_steps=2))
            await until(lambda: len(s.core.of(WatchSteps)) == 1)
            for step_id in (1, 2, 3):
                tell(s, step_id)
            steps = [step async for step in call]
            assert [step.step_id for step in steps] == [1, 2]
            assert (steps[0].executor, steps[0].decode_tokens, steps[0].device_idle_ns) == ("e", 4, 13)
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))
            endless = s.admin.WatchSteps(admin.WatchStepsRequest())
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, True))
            endless.cancel()
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))

    run(test)


def test_many_steps_in_one_message() -> None:
    """With an interval the first step comes at once, those of the interval together; none is lost or told twice."""

    async def test() -> None:
        async with scene() as s:
            call = s.admin.WatchSteps(admin.WatchStepsRequest(max_steps=6, interval_ms=100))
            await until(lambda: len(s.core.of(WatchSteps)) == 1)
            tell(s, 1)
            first = await call.read()
            assert (first.step_id, len(first.earlier)) == (1, 0)
            for step_id in (2, 3, 4, 5):
                tell(s, step_id)
            second = await call.read()
            assert [step.step_id for step in (*second.earlier, second)] == [2, 3, 4, 5]
            assert second.earlier[0].running == 14 and not second.earlier[0].earlier
            for step_id in (6, 7):
                tell(s, step_id)
            assert (await call.read()).step_id == 6
            assert await call.read() is grpc.aio.EOF
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))

    run(test)


def test_the_client_unpacks_them() -> None:
    async def test() -> None:
        async with scene() as s, AsyncClient(f"127.0.0.1:{s.server.port}") as client:
            stream = client.watch_steps(5, interval_ms=5)
            await until(lambda: len(s.core.of(WatchSteps)) == 1)
            for step_id in range(1, 6):
                tell(s, step_id)
            steps = [step async for step in stream]
            assert [step.step_id for step in steps] == [1, 2, 3, 4, 5]
            assert {(step.num_blocks, step.preemptions, step.generated_tokens) for step in steps} == {(15, 16, 19)}

    run(test)


def test_draining() -> None:
    async def test() -> None:
        async with scene(forever) as s:
            call = s.inference.Generate(HI)
            await call.read()
            assert (await s.admin.Drain(admin.DrainRequest(deadline_ms=5))).unfinished == 1
            assert await s.status("") == NOT_SERVING and await s.status(LIVENESS) == SERVING
            error = await failing(s.inference.Generate(HI))
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "DRAINING"
            call.cancel()

    run(test)
