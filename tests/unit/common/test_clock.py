import pytest

from common.clock import ManualClock, SystemClock


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5)
    wall = clock.wall_ns()
    assert clock.monotonic_ns() == clock.monotonic_ns() == 5
    clock.advance_ns(7)
    assert (clock.monotonic_ns(), clock.wall_ns() - wall) == (12, 7)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance_ns(-1)


def test_system_clock_does_not_go_back() -> None:
    clock = SystemClock()
    assert clock.monotonic_ns() <= clock.monotonic_ns()
    assert clock.wall_ns() > 1_700_000_000_000_000_000
