import random

import pytest

from common.errors import ConfigError
from common.messages import Sampling, u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.policy import make_policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.messages import Submit


def _sequence(order: int, priority: int = 0, policy: str = "fcfs") -> Sequence:
    request = Submit(order, str(order), u32([5, 6, 7]), Sampling(1, 5), 0, priority=priority)
    return Sequence(request, order, make_policy(policy).rank(order, priority))


def test_lowest_rank_first_whatever_the_order_of_arrival() -> None:
    queue, sequences = WaitingQueue(), [_sequence(i) for i in range(1, 30)]
    for sequence in random.Random(1).sample(sequences, len(sequences)):
        queue.push(sequence)
    assert len(queue) == 29 and queue.num_tokens == 87
    assert [queue.pop() for _ in range(29)] == sequences
    assert queue.peek() is None and queue.num_tokens == 0


def test_removed_ones_never_come_up_and_do_not_pile_up() -> None:
    queue, sequences = WaitingQueue(), [_sequence(i) for i in range(1, 1001)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[:990]:
        queue.remove(sequence)
    assert len(queue) == 10 and len(queue._heap) <= 64
    assert queue.peek() is sequences[990]
    sequences[0].ticket = 0
    queue.push(sequences[0])
    assert queue.pop() is sequences[0]


def test_priority_goes_before_arrival() -> None:
    queue = WaitingQueue()
    for sequence in (
        _sequence(1, -5, "priority"),
        _sequence(2, 0, "priority"),
        _sequence(3, 2**31 - 1, "priority"),
        _sequence(4, 0, "priority"),
    ):
        queue.push(sequence)
    assert [queue.pop().order for _ in range(4)] == [3, 2, 4, 1]


def test_ranks_fit_their_column() -> None:
    for priority in (-(2**31), 0, 2**31 - 1):
        assert abs(make_policy("priority").rank(2**39, priority)) < 2**62


def test_configuration_out_of_range_names_the_field() -> None:
    with pytest.raises(ConfigError) as error:
        CoreConfig(pipeline_depth=0)
    assert error.value.field == "pipeline_depth"
    with pytest.raises(ConfigError):
        Scheduler(CoreConfig(policy="nobody"))
