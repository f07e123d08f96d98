"""Times of tokens, whatever way requests take; and nothing kept of those that have ended."""

import random
from dataclasses import replace

import numpy as np
import pytest

from common.messages import Sampling, StepPlan, StepResult, Timings, u32
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.messages import Child, FinishReason, Submit, TokenBatch
from scheduler_svc.metrics.observer import MetricsObserver
from scheduler_svc.observer import StepRecord

MS = 1_000_000


def submit(key: int, at_ms: int) -> Submit:
    return Submit(key, f"r{key}", u32([1]), Sampling(seed=1, max_tokens=9), at_ms * MS)


def batch(keys: list[int], counts: list[int] | None = None) -> TokenBatch:
    counts = [1] * len(keys) if counts is None else counts
    zeros = np.zeros(len(keys))
    return TokenBatch(
        np.array(keys, dtype=np.uint64), u32(counts), u32([7] * sum(counts)), zeros.astype(np.uint8), u32(zeros)
    )


def record(executor_id: int = 0, planned_ms: int = 0, decode: int = 0, prefill: int = 0) -> StepRecord:
    none = np.empty(0, dtype=np.uint64)
    return StepRecord(executor_id, StepPlan(1, 1, 0, 0), planned_ms * MS, none, none, decode, prefill, 0, 0, 0)


class Feed:
    """Steps of any executor and worker, at times in ms."""

    def __init__(self) -> None:
        self.seen = MetricsObserver()

    def step(self, at_ms: int, keys: list[int], executor_id: int = 0, counts: list[int] | None = None) -> None:
        workers = sorted({key >> 48 for key in keys})
        whole = dict(zip(keys, counts or [1] * len(keys), strict=True))
        batches = {
            w: batch([k for k in keys if k >> 48 == w], [whole[k] for k in keys if k >> 48 == w]) for w in workers
        }
        self.seen.on_delivered(StepOutcome(batches, (), record(executor_id)), at_ms * MS)

    def first(self) -> tuple[int, float]:
        return self.seen.first_token.count, round(self.seen.first_token.sum_s * 1000, 6)

    def between(self) -> tuple[int, float]:
        return self.seen.between_tokens.count, round(self.seen.between_tokens.sum_s * 1000, 6)


@pytest.fixture
def feed() -> Feed:
    made = Feed()
    for key in (1, 2, 3, (1 << 48) + 1):
        made.seen.on_submit(submit(key, 0), 0)
    return made


def test_first_tokens_and_those_after(feed: Feed) -> None:
    feed.step(100, [1])
    feed.step(110, [1, 2])
    assert (feed.first(), feed.between()) == ((2, 210), (1, 10))
    feed.step(130, [1, 2])
    feed.step(160, [1, 2])
    assert feed.between() == (5, 10 + 2 * 20 + 2 * 30)


def test_a_step_without_a_token_for_it_makes_the_interval_longer(feed: Feed) -> None:
    feed.step(100, [1, 2])
    feed.step(110, [2])
    feed.step(120, [2])
    feed.step(150, [1, 2])
    assert (feed.first(), feed.between()) == ((2, 200), (4, 10 + 10 + 30 + 50))
    feed.step(160, [1, 2], counts=[0, 1])  # an entry without a token
    feed.step(170, [1, 2])
    assert feed.between() == (7, 100 + 10 + 10 + 20)


def test_workers_and_executors_do_not_mix(feed: Feed) -> None:
    other = (1 << 48) + 1
    feed.step(100, [1, other])
    feed.step(105, [2], executor_id=1)
    feed.step(120, [1, other])
    feed.step(125, [2], executor_id=1)
    assert (feed.first(), feed.between()) == ((3, 305), (3, 60))


def test_what_an_executor_took_with_it_goes_on_elsewhere(feed: Feed) -> None:
    feed.step(100, [1, 2])
    feed.seen.on_executor(0, "draining", "", 101 * MS)
    feed.seen.on_executor(0, "lost", "", 110 * MS)
    feed.seen.on_executor(0, "lost", "", 115 * MS)
    feed.step(150, [1], executor_id=1)
    feed.step(160, [2])
    assert (feed.first(), feed.between()) == ((2, 200), (2, 110))


def test_endings_are_counted_and_forgotten(feed: Feed) -> None:
    feed.step(100, [1, 2, 3])
    feed.step(110, [2, 3])
    feed.seen.on_end(1, FinishReason.EOS, "", 120 * MS)
    feed.seen.on_end(2, None, "RequestAborted", 130 * MS)
    feed.seen.on_end(3, FinishReason.EOS, "", 140 * MS)
    feed.seen.on_end((1 << 48) + 1, None, "DeadlinePassed", 140 * MS)
    feed.step(150, [1, 2, 3])  # late tokens are nobody's
    assert feed.seen.finished == {"eos": 2} and feed.seen.failed == {"RequestAborted": 1, "DeadlinePassed": 1}
    assert (feed.seen.duration.count, round(feed.seen.duration.sum_s, 6)) == (2, 0.26)
    feed.step(160, [])
    assert not feed.seen._arrival_ns and not feed.seen._last_ns


def test_intervals_are_those_of_each_request_whatever_the_steps() -> None:
    """Against the plain way: one time remembered for each request."""
    draw = random.Random(5)
    feed, now, want, firsts = Feed(), 0, 0.0, 0.0
    last: dict[int, int] = {}
    live = list(range(1, 13))
    for key in live:
        feed.seen.on_submit(submit(key, 0), 0)
    count = 0
    for _ in range(300):
        now += draw.randrange(1, 20)
        if draw.random() < 0.05:
            feed.seen.on_executor(0, "lost", "", now * MS)
        keys = list(live) if draw.random() < 0.6 else [key for key in live if draw.random() < 0.7]
        feed.step(now, keys)
        for key in keys:
            if key in last:
                want, count = want + now - last[key], count + 1
            else:
                firsts += now
            last[key] = now
        if draw.random() < 0.03 and live:
            gone = live.pop(draw.randrange(len(live)))
            feed.seen.on_end(gone, FinishReason.EOS, "", now * MS)
    assert feed.between() == (count, want) and feed.first()[1] == firsts


def test_steps_are_counted_by_executor() -> None:
    feed = Feed()
    timings = Timings(device_start_ns=5 * MS, device_end_ns=9 * MS)
    feed.seen.on_result(record(0, 10, 4, 16), StepResult(1, 1, timings=timings), 20 * MS, 21 * MS, 0)
    feed.seen.on_result(record(1, 10, 2, 0), StepResult(1, 1, timings=timings), 20 * MS, 21 * MS, 0)
    first, second = feed.seen.executors[0], feed.seen.executors[1]
    assert (first.decode_tokens, first.prefill_tokens, second.decode_tokens) == (4, 16, 2)
    assert first.device.sum_s == pytest.approx(0.004) and first.turn.sum_s == pytest.approx(0.010)


def test_each_choice_of_a_request_is_timed() -> None:
    feed = Feed()
    feed.seen.on_submit(replace(submit(1, 0), children=(Child(2, 5), Child(3, 6))), 0)
    feed.step(10, [1])
    feed.step(14, [1, 2, 3])
    assert feed.first() == (3, 38.0) and feed.between() == (1, 4.0)
    for key in (1, 2, 3):
        feed.seen.on_end(key, FinishReason.EOS, "", 20 * MS)
    assert feed.seen.duration.count == 3
