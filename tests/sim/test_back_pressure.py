"""More is offered than can be served: what is refused knows when to come back, what is taken is served, and memory and
the cost of a step stay where they are."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from common.errors import Overloaded
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.scheduler import Scheduler
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

SECOND = 1_000_000_000


def _size(scheduler: Scheduler) -> int:
    """Everything the core keeps for requests: entries of queue, timers, ids, tenants."""
    queue, expiry = scheduler._queue, scheduler._expiry
    lanes = [queue._front, *queue._usual._lanes.values(), *queue._long._lanes.values()]
    entries = sum(lane.num_entries for lane in lanes) + len(queue._usual._order) + len(queue._long._order)
    timers = len(expiry._timers._heap) + len(expiry._timers._when)
    return entries + timers + len(scheduler._live) + len(scheduler._requests) + len(scheduler._tenants)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "deadline", "priority"])
def test_100_000_offered_requests_leave_no_trace_but_their_answers(policy: str) -> None:
    limit = 200
    config = CoreConfig(policy=policy, max_queued_requests=limit, max_queue_time_ms=4000)
    sim, draw = Sim(config, toy_info(num_blocks=400)), random.Random(3)
    accepted, refused, largest = [], 0, 0
    check, sim.check = sim.check, lambda: None  # type: ignore[method-assign]
    for i in range(100_000):
        deadline: dict[str, Any] = {"deadline_ns": sim.now_ns + draw.randint(1, 40) * SECOND} if i % 3 else {}
        request = sim.request([5 + i % 90, 6, 7], 3, tenant=f"t{i % 1500}", priority=i % 4, ignore_eos=True, **deadline)
        try:
            sim.offer(request)
            accepted.append(request.key)
        except Overloaded as error:
            refused += 1
            assert 100 <= error.retry_after_ms <= 60_000
        if i % 500 == 0:
            sim.pass_time(20)
            sim.fill()
            sim.deliver()
            largest = max(largest, _size(sim.scheduler))
            assert sim.scheduler.num_live <= limit + 16
            if i % 10_000 == 0:
                check()
    assert refused > 50_000 and len(accepted) + refused == 100_000
    assert largest < 16 * (limit + 16) + 2000, "something piles up"
    sim.run()
    check()
    assert all(sim.clients[key].ends == 1 for key in accepted)
    sim.assert_tokens()
    sim.assert_all_free()
    assert _size(sim.scheduler) <= 1200, "what is left: tenants that are remembered, and what heaps keep below 64"


def test_who_waits_too_long_is_sent_away_and_told_when_to_come_back() -> None:
    sim = Sim(CoreConfig(max_num_seqs=1, max_queue_time_ms=50))
    running = sim.submit([5, 6, 7], 40, ignore_eos=True)
    waiting = [sim.submit([6 + i, 6, 7], 5) for i in range(3)]
    for _ in range(6):
        sim.pass_time(10)
        sim.fill()
        sim.deliver()
    for key in waiting:
        error = sim.clients[key].error
        assert isinstance(error, Overloaded) and error.limit == "50" and error.retry_after_ms >= 100
    sim.run()
    assert len(sim.clients[running].tokens) == 40
    assert sim.scheduler.stats().requests_expired == 3
    sim.assert_all_free()


def test_who_has_begun_is_not_sent_away_however_long_it_waits_to_go_on() -> None:
    config = CoreConfig(max_queue_time_ms=50, policy="priority", max_num_seqs=1)
    sim = Sim(config)
    begun = sim.submit([5, 6, 7], 20, ignore_eos=True)
    for _ in range(5):
        sim.fill()
        sim.deliver()
    sim.submit([6, 6, 7], 30, priority=1, ignore_eos=True)
    for _ in range(20):
        sim.pass_time(10)
        sim.fill()
        sim.deliver()
    assert not sim.clients[begun].ends and sim.scheduler.num_waiting == 1
    sim.run()
    assert len(sim.clients[begun].tokens) == 20
    sim.assert_tokens()


def test_the_time_to_come_back_follows_the_drain_rate() -> None:
    rate = DrainRate()
    assert rate.retry_after_ms(1000, 0) == 1000, "nothing is measured"
    for i in range(400):
        rate.admitted(i * SECOND // 20)
    now = 400 * SECOND // 20
    assert rate.per_second(now) == pytest.approx(20, rel=0.1)
    assert rate.retry_after_ms(1000, now) == pytest.approx(25_000, rel=0.1)
    assert rate.retry_after_ms(1, now) == 100
    for i in range(400):  # ten times as fast from now on
        rate.admitted(now + i * SECOND // 200)
    assert rate.retry_after_ms(1000, now + 2 * SECOND) < 15_000
    assert rate.retry_after_ms(1000, now + 600 * SECOND) == 60_000, "nothing moves"


def _served_at(per_second: int) -> Sim:
    """One sequence at a time, so many a second, for 20 s; then one that runs on and nine that wait."""
    sim = Sim(CoreConfig(max_num_seqs=1, max_queued_requests=9, max_queue_time_ms=1000, pipeline_depth=1))
    for i in range(20 * per_second):
        sim.submit([5 + i % 90, 6, 7], 1)
        sim.run()
        sim.pass_time(1000 / per_second)
    sim.submit([5, 6, 7], 100, ignore_eos=True)
    sim.fill()
    for i in range(9):
        sim.submit([6 + i, 6, 7], 5)
    return sim


@pytest.mark.parametrize("per_second", [2, 10])
def test_who_is_refused_is_told_the_time_that_follows_from_the_admissions(per_second: int) -> None:
    """Of nine that wait, half are gone in 4.5 / rate; of eight and fewer accordingly."""
    sim = _served_at(per_second)
    with pytest.raises(Overloaded) as refused:
        sim.submit([5, 6, 7], 5)
    assert refused.value.retry_after_ms == pytest.approx(4500 / per_second, rel=0.2)
    assert sim.scheduler.stats().drain_rate == pytest.approx(per_second, rel=0.2)
    sim.pass_time(1001)
    told = [client.error for client in sim.clients.values() if client.error is not None]
    assert len(told) == 9 and all(isinstance(error, Overloaded) for error in told)
    assert max(error.retry_after_ms for error in told) == pytest.approx(4500 / per_second, rel=0.3)


def test_a_rate_is_right_from_the_first_second_on() -> None:
    rate = DrainRate()
    for i in range(21):
        rate.admitted(i * SECOND // 10)
    assert rate.per_second(2 * SECOND) == pytest.approx(10, rel=0.15)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "deadline", "priority"])
def test_a_step_does_the_same_however_many_wait(policy: str) -> None:
    """Counted, not timed: calls inside the core, while sequences end and others enter."""

    def looks(waiting: int) -> int:
        sim = Sim(CoreConfig(policy=policy, max_queued_requests=200_000, max_num_seqs=4), toy_info(max_num_seqs=4))
        sim.check = lambda: None  # type: ignore[method-assign]
        for i in range(waiting):
            sim.offer(sim.request([5, 6, 7], 6, tenant=f"t{i % 50}", priority=i % 3, ignore_eos=True))
        calls = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call" and "/core/" in frame.f_code.co_filename

        sys.setprofile(count)
        for _ in range(60):  # sequences end and others enter
            sim.fill()
            sim.deliver()
        sys.setprofile(None)
        return calls

    assert looks(30_000) <= 1.1 * looks(300)
