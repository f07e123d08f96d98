"""A result waits one turn of the loop until its tokens are handed out; what ends meanwhile is told after them."""

import asyncio

from scheduler_svc.engine_loop import EngineLoop, EngineOptions
from scheduler_svc.executor_driver import DriverOptions
from tests.integration.engine_harness import CollectingWorker
from tests.sim.harness import Sim

DEADLINE_NS = 10_000_000_000


def test_who_runs_out_of_time_while_its_tokens_are_held_gets_them_first() -> None:
    async def scene() -> None:
        sim = Sim()
        key = sim.submit(range(20, 30), 8, deadline_ns=DEADLINE_NS)
        loop = EngineLoop(sim.scheduler, EngineOptions(("toy:1",), DriverOptions(b"s" * 16, 2)), sim.clock)
        (driver,) = loop._drivers
        driver.executor_id = sim.executor_id
        worker = CollectingWorker()
        worker.connect(loop.add_worker(worker))
        sim.fill()
        _, step = sim.pending.popleft()
        taken = driver._take_result(step.wait())  # type: ignore[union-attr]
        taken.send(None)
        assert not worker.tokens, "the turn in which the plan is written"
        sim.clock.advance_ns(DEADLINE_NS)
        loop._beat()
        assert len(worker.tokens[key]) == 1 and key in worker.errors
        driver.deliver_held()
        assert len(worker.tokens[key]) == 1, "once"
        taken.close()
        await loop.stop()

    asyncio.run(scene())
