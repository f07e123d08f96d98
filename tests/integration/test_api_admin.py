"""stepwire.v1.Admin: counters, steps, drain."""

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from scheduler_svc.api.health import LIVENESS
from scheduler_svc.messages import ExecutorStats, Stats, StepSeen, WatchSteps
from stepwire.v1 import admin_pb2 as admin
from stepwire.v1 import inference_pb2 as pb
from tests.integration.api_scene import failing, reason, run, scene, until
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


def test_watching_steps() -> None:
    async def test() -> None:
        async with scene() as s:
            call = s.admin.WatchSteps(admin.WatchStepsRequest(max_steps=2))
            await until(lambda: len(s.core.of(WatchSteps)) == 1)
            for step_id in (1, 2, 3):
                s.core.tell(StepSeen("e", 1, step_id, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13))
            steps = [step async for step in call]
            assert [step.step_id for step in steps] == [1, 2]
            assert (steps[0].executor, steps[0].decode_tokens, steps[0].device_idle_ns) == ("e", 4, 13)
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))
            endless = s.admin.WatchSteps(admin.WatchStepsRequest())
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, True))
            endless.cancel()
            await until(lambda: s.core.of(WatchSteps)[-1] == WatchSteps(0, False))

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
