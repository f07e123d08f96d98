import random

import pytest

from common.errors import ConfigError
from common.messages import Sampling, u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.policies.registry import make_policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.messages import Submit


def _policy(name: str, **fields: int) -> Policy:
    config = CoreConfig(policy=name, **fields)  # type: ignore[arg-type]
    return make_policy(config, Tenants(config))


def _request(order: int, priority: int = 0, length: int = 3, **fields: int) -> Submit:
    values = {"arrival_ns": 0, **fields}
    return Submit(order, str(order), u32([5] * length), Sampling(1, 5), priority=priority, **values)  # type: ignore[arg-type]


def _sequence(order: int, priority: int = 0, policy: str = "fcfs", length: int = 3, **fields: int) -> Sequence:
    request = _request(order, priority, length, **fields)
    return Sequence(request, _policy(policy).rank(request, order))


def _pop(queue: WaitingQueue) -> Sequence:
    sequence = queue.peek()
    assert sequence is not None
    queue.remove(sequence)
    return sequence


def test_lowest_rank_first_whatever_the_order_of_arrival() -> None:
    queue, sequences = WaitingQueue(_policy("fcfs")), [_sequence(i) for i in range(1, 30)]
    for sequence in random.Random(1).sample(sequences, len(sequences)):
        queue.push(sequence)
    assert len(queue) == 29 and queue.num_tokens == 87
    assert [_pop(queue) for _ in range(29)] == sequences
    assert queue.peek() is None and queue.num_tokens == 0


def test_removed_ones_never_come_up_and_do_not_pile_up() -> None:
    queue, sequences = WaitingQueue(_policy("fcfs")), [_sequence(i) for i in range(1, 1001)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[:990]:
        queue.remove(sequence)
    assert len(queue) == 10 and queue._usual._lanes[0].num_entries <= 64
    assert queue.peek() is sequences[990]
    sequences[0].ticket = 0
    queue.push(sequences[0])
    assert _pop(queue) is sequences[0]


def test_whatever_comes_and_goes_the_first_is_the_lowest_rank() -> None:
    """Most in order, some back again or out of turn, some removed wherever they stand."""
    queue, draw = WaitingQueue(_policy("fcfs")), random.Random(2)
    fresh = iter(_sequence(order) for order in range(1, 3001))
    waiting: list[Sequence] = []
    gone: list[Sequence] = []
    for _ in range(8000):
        what = draw.random()
        if what < 0.3 and (sequence := next(fresh, None)) is not None:
            waiting.append(sequence)
            queue.push(sequence)
        elif what < 0.45 and gone:
            waiting.append(gone.pop(draw.randrange(len(gone))))
            queue.push(waiting[-1])
        elif waiting:
            removed = min(waiting, key=lambda s: s.rank) if what < 0.75 else draw.choice(waiting)
            waiting.remove(removed)
            queue.remove(removed)
            gone.append(removed)
        assert queue.peek() is min(waiting, key=lambda s: s.rank, default=None)
        assert len(queue) == len(waiting)


def test_who_comes_in_order_is_searched_by_nobody() -> None:
    queue = WaitingQueue(_policy("fcfs"))
    for order in range(1, 1001):
        queue.push(_sequence(order))
    assert not queue._usual._lanes[0]._heap
    first = _pop(queue)
    queue.push(first)
    assert len(queue._usual._lanes[0]._heap) == 1 and queue.peek() is first


def test_priority_goes_before_arrival() -> None:
    queue = WaitingQueue(_policy("priority"))
    for sequence in (
        _sequence(1, -5, "priority"),
        _sequence(2, 0, "priority"),
        _sequence(3, 2**31 - 1, "priority"),
        _sequence(4, 0, "priority"),
    ):
        queue.push(sequence)
    assert [_pop(queue).key for _ in range(4)] == [3, 2, 4, 1]


def test_ranks_fit_their_column() -> None:
    for priority in (-(2**31), 0, 2**31 - 1):
        for policy in (_policy("priority"), _policy("priority", priority_aging_ms=2**22), _policy("deadline")):
            for year_ns in (0, 10**17):
                request = _request(1, priority, arrival_ns=year_ns, deadline_ns=year_ns * 10**6)
                assert abs(policy.rank(request, 2**39)) < 2**62
                assert abs(policy.evicts_after(policy.rank(request, 2**39)) or 0) < 2**62


def test_shorter_prompts_can_be_asked_for_alone() -> None:
    queue = WaitingQueue(_policy("fcfs"), long_tokens=4)
    long, short = _sequence(1, length=5), _sequence(2, length=4)
    queue.push(long)
    assert queue.peek(usual_only=True) is None
    queue.push(short)
    assert queue.peek() is long and queue.peek(usual_only=True) is short
    queue.remove(long)
    assert queue.peek() is short and len(queue) == 1


def test_lanes_that_come_and_go_do_not_pile_up() -> None:
    config = CoreConfig(policy="fair")
    tenants = Tenants(config)
    queue = WaitingQueue(make_policy(config, tenants))
    first = _sequence(1)
    first.tenant = tenants.join("first")
    queue.push(first)
    for order in range(2, 1000):
        other = _sequence(order)
        other.tenant = tenants.join(f"tenant {order % 7}")
        tenants.admitted(other.tenant, 100)
        queue.push(other)
        assert queue.peek() is first
        queue.remove(other)
        tenants.leave(other.tenant)
    assert len(queue._usual._order) <= 65 and len(queue) == 1


def test_configuration_out_of_range_names_the_field() -> None:
    with pytest.raises(ConfigError) as error:
        CoreConfig(pipeline_depth=0)
    assert error.value.field == "pipeline_depth"
    with pytest.raises(ConfigError):
        Scheduler(CoreConfig(policy="nobody"))
