"""Readiness and liveness mean different things."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from common.clock import ManualClock
from scheduler_svc.api.health import LIVENESS, READINESS, HealthMonitor, HealthServicer
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import ExecutorStats, Stats
from tests.unit.api.fakes import READY, FakeCore

SECOND = 1_000_000_000


class Scene:
    """A monitor with liveness after 30 s of silence and a stall after 60 s without a step."""

    def __init__(self, is_alive: Callable[[], bool] = lambda: True) -> None:
        self.clock = ManualClock()
        self.worker = ApiWorker(self.clock, answer_timeout_s=0.01)
        self.core = FakeCore(self.worker)
        self.health = HealthServicer()
        self.monitor = HealthMonitor(self.worker, self.health, is_alive=is_alive)

    @property
    def ready(self) -> bool:
        (answer,) = {self.health.is_serving(service) for service in READINESS}
        assert answer is not None
        return answer

    @property
    def alive(self) -> bool | None:
        return self.health.is_serving(LIVENESS)

    def after(self, seconds: int, stats: Stats | None) -> tuple[bool, bool | None]:
        self.clock.advance_ns(seconds * SECOND)
        self.monitor.observe(stats)
        return self.ready, self.alive


def stats(steps: int, running: int = 1, connected: bool = True) -> Stats:
    return Stats(running=running, executors=(ExecutorStats("e", connected, steps=steps),))


def test_an_executor_is_readiness_and_not_liveness() -> None:
    scene = Scene()
    assert scene.ready and scene.alive
    scene.core.tell(replace(READY, ready=False))
    assert not scene.ready and scene.alive
    scene.core.tell(READY)
    assert scene.ready


def test_draining_and_stopping_are_not_ready_but_alive() -> None:
    scene = Scene()
    scene.core.tell(replace(READY, draining=True))
    assert not scene.ready and scene.alive
    scene.core.tell(READY)
    scene.monitor.stop()
    assert not scene.ready and scene.alive


def test_a_silent_core_is_not_alive_until_it_answers_again() -> None:
    scene = Scene()
    assert scene.after(29, None) == (True, True)
    assert scene.after(1, None) == (False, False)
    assert scene.after(1, stats(1)) == (True, True)


def test_time_alone_turns_liveness_off() -> None:
    scene = Scene()
    scene.clock.advance_ns(30 * SECOND)
    scene.monitor.refresh()
    assert not scene.alive


def test_work_without_steps_is_a_stall_not_a_death() -> None:
    scene = Scene()
    assert scene.after(1, stats(7)) == (True, True)
    for _ in range(11):
        assert scene.after(5, stats(7)) == (True, True)
    assert scene.after(5, stats(7)) == (False, True)
    assert scene.after(5, stats(8)) == (True, True)


def test_idle_or_without_executor_is_no_stall() -> None:
    scene = Scene()
    for idle in (stats(7, running=0), stats(7, connected=False)):
        for _ in range(30):
            assert scene.after(5, idle) == (True, True)


def test_the_engines_own_word_counts() -> None:
    words = [True]
    scene = Scene(lambda: words[0])
    assert scene.alive
    words[0] = False
    scene.monitor.refresh()
    assert not scene.alive and not scene.ready


def test_probing_asks_the_core() -> None:
    async def test() -> None:
        scene = Scene()
        scene.clock.advance_ns(29 * SECOND)
        await scene.monitor.probe()
        assert scene.after(2, None) == (True, True), "the answer counted"
        scene.core.mute = True
        scene.clock.advance_ns(30 * SECOND)
        await scene.monitor.probe()
        assert not scene.alive

    asyncio.run(test())
