"""Tokens wait for each other only in a process that is behind, and then for a bounded time."""

import pytest

from scheduler_svc.api.pacer import Pacer

MS = 1_000_000


def settled(step_ms: float, streams: int, message_us: float, interval_ms: float = 20.0) -> bool:
    """What a pacer says after a hundred such steps."""
    pacer = Pacer(int(interval_ms * MS))
    now_ns = 1
    held = False
    for _ in range(100):
        now_ns += int(step_ms * MS)
        held = pacer.on_step(now_ns, streams)
        pacer.on_written(int(streams * message_us * 1000), streams)
    return held


@pytest.mark.parametrize(
    ("step_ms", "streams", "message_us", "held"),
    [
        (205, 1024, 30, False),  # 15 % of its time
        (51, 256, 30, False),
        (1.5, 16, 30, False),  # 32 %
        (1.5, 64, 30, True),  # 128 %
        (10, 256, 30, True),
        (30, 1024, 30, False),  # behind, but steps are further apart than tokens may wait
    ],
)
def test_only_a_process_that_is_behind_holds_back(step_ms: float, streams: int, message_us: float, held: bool) -> None:
    assert settled(step_ms, streams, message_us) is held
    assert not settled(step_ms, streams, message_us, interval_ms=0)


def test_first_steps_and_steps_after_a_pause_are_not_held_back_for_lack_of_numbers() -> None:
    pacer = Pacer(20 * MS)
    assert not pacer.on_step(1, 1000)
    pacer.on_written(MS, 1000)
    assert not pacer.on_step(60_000 * MS, 10)


def test_it_recovers_when_steps_become_slow_again() -> None:
    pacer = Pacer(20 * MS)
    now_ns = 1
    for step_ms, expected in ((1, True), (19, False)):
        for _ in range(100):
            now_ns += step_ms * MS
            held = pacer.on_step(now_ns, 64)
            pacer.on_written(64 * 30_000, 64)
        assert held is expected
