"""What a window of steps adds up to."""

from dataclasses import replace

import pytest

from deploy import top_steps
from deploy.top_steps import Board, ExecutorSummary, Spread
from tests.unit.deploy.top_scene import EXECUTOR, stats, step


def only(board: Board, now_s: float, columns: int = 0) -> ExecutorSummary:
    (executor,) = board.summary(now_s, columns).executors
    return executor


def test_percentiles_are_by_nearest_rank() -> None:
    assert Spread.of([]) is None
    assert Spread.of([7]) == Spread(7, 7, 7, 7)
    assert Spread.of(range(1, 101)) == Spread(50, 95, 99, 100)
    assert Spread.of([3, 1, 2]) == Spread(2, 3, 3, 3)


def test_rates_and_counts_are_of_what_the_window_covers() -> None:
    board = Board(10, 100.0)
    for n in range(1, 41):  # ten a second, for four seconds
        board.add(step(n, prefill_tokens=16 * (n % 2), running=n), 100 + n / 10)
    seen = only(board, 104.0)
    assert (seen.steps, seen.last_step, seen.running) == (40, 40, 40)
    assert seen.steps_per_s == pytest.approx(10)
    assert seen.decode_tokens_per_s == seen.generated_tokens_per_s == pytest.approx(40)
    assert seen.prefill_tokens_per_s == pytest.approx(80)
    assert seen.prefill_tokens == Spread(0, 16, 16, 16)
    assert seen.device_ms == Spread(10, 10, 10, 10) and seen.turn_ms == Spread(12, 12, 12, 12)
    assert seen.device_idle == pytest.approx(0.9) and seen.kv_used == pytest.approx(0.25)
    assert board.summary(104.0).seconds == pytest.approx(4)


def test_old_steps_leave_the_window() -> None:
    board = Board(2, 100.0)
    for n in range(1, 101):
        board.add(step(n), 100 + n / 10)
    assert only(board, 110.0).steps == 20
    assert only(board, 111.05).steps == 10
    gone = only(board, 200.0)
    assert (gone.steps, gone.steps_per_s, gone.device_ms, gone.device_idle) == (0, 0.0, None, 1.0)
    assert gone.last_step == 100


def test_lost_steps_count_as_if_they_were_like_the_others() -> None:
    board = Board(10, 100.0)
    board.add(step(1), 101.0)
    board.add(step(5, skipped=3), 102.0)
    seen = only(board, 102.0)
    assert (seen.steps, seen.lost_steps) == (2, 3)
    assert seen.steps_per_s == pytest.approx(2.5) and seen.decode_tokens_per_s == pytest.approx(10)
    assert seen.device_idle == pytest.approx(1 - 0.01 * 2.5)
    assert board.summary(102.0).lost_steps == 3


def test_a_full_window_is_shorter_and_its_rates_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_steps, "MAX_STEPS", 50)
    board = Board(60, 100.0)
    for n in range(1, 1001):
        board.add(step(n), 100 + n / 100)
    seen = only(board, 110.0)
    assert seen.steps == 50 and seen.steps_per_s == pytest.approx(100, rel=0.05)


def test_the_hit_rate_is_of_what_was_admitted_in_the_window() -> None:
    board = Board(5, 100.0)
    board.add(step(1, admitted_tokens=100, cached_tokens=0), 101.0)
    assert only(board, 101.0).hit_rate == 0
    board.add(step(2, admitted_tokens=100, cached_tokens=80), 105.5)
    board.add(replace(step(1, admitted_tokens=100, cached_tokens=100), executor="e:2"), 105.6)
    summary = board.summary(107.0)
    assert [executor.hit_rate for executor in summary.executors] == [0.8, 1.0]
    assert summary.hit_rate == pytest.approx(0.9)
    assert board.summary(120.0).hit_rate is None


def test_preemptions_are_counted_also_when_the_scheduler_began_anew() -> None:
    board = Board(10, 100.0)
    for n, total in enumerate((7, 7, 9, 10, 2, 2), 1):  # what came before the first step is not the window's
        board.add(step(n, preemptions=total), 100.0 + n)
    assert (only(board, 106.0).preempted, only(board, 106.0).preemptions) == (5, 2)
    assert board.summary(106.0).preempted == 5


def test_the_slowest_steps_come_first() -> None:
    board = Board(10, 100.0)
    for n, ms in enumerate((5, 90, 7, 30, 8, 6, 4, 3), 1):
        board.add(step(n, device_ns=ms * 1_000_000, prefill_tokens=ms), 100.0 + n)
    slowest = only(board, 109.0).slowest
    assert [(s.step_id, s.device_ms, s.prefill_tokens, s.age_s) for s in slowest[:2]] == [
        (2, 90, 90, 7),
        (4, 30, 30, 5),
    ]
    assert len(slowest) == top_steps.NUM_SLOWEST


def test_lines_have_a_mean_for_each_slice_and_do_not_change_as_they_move() -> None:
    board = Board(4, 100.0)
    for at_s, tokens in ((100.1, 2), (100.2, 4), (102.5, 8), (103.9, 0)):
        board.add(step(1, decode_tokens=tokens), at_s)
    assert only(board, 103.95, 4).decode_line == (3, None, 8, 0)
    assert only(board, 104.05, 4).decode_line == (None, 8, 0, None)
    assert only(board, 103.95).decode_line == ()


def test_an_idle_service_is_told_by_its_statistics() -> None:
    board = Board(10, 100.0)
    assert board.summary(100.0).executors == () and board.summary(100.0).stats is None
    busy = replace(EXECUTOR, free_rows=13, free_blocks=40)
    board.take_stats(stats(busy, waiting=2), 101.0)
    seen = only(board, 102.0)
    assert (seen.executor, seen.connected, seen.steps, seen.running, seen.free_blocks) == ("e:1", True, 0, 3, 40)
    assert board.summary(102.0).waiting == 2 and seen.device_ms is None and seen.device_idle == 1


def test_the_newer_of_step_and_statistics_counts() -> None:
    board = Board(10, 100.0)
    board.take_stats(stats(waiting=5), 100.0)
    board.add(step(1, running=4, waiting=9, free_blocks=60), 100.5)
    assert (only(board, 101.0).running, only(board, 101.0).free_blocks, board.summary(101.0).waiting) == (4, 60, 9)
    board.take_stats(stats(waiting=0), 102.0)  # it ended since: no step tells so
    assert (only(board, 102.5).running, only(board, 102.5).free_blocks, board.summary(102.5).waiting) == (0, 100, 0)


def test_a_problem_is_over_when_something_comes() -> None:
    board = Board(10, 100.0)
    board.problem = "gone"
    assert board.summary(101.0).problem == "gone"
    board.add(step(1), 101.0)
    assert board.summary(101.0).problem == ""
    board.problem = "gone"
    board.take_stats(stats(), 101.0)
    assert board.summary(101.0).problem == ""


def test_an_executor_that_left_is_still_shown() -> None:
    board = Board(10, 100.0)
    board.add(step(1), 101.0)
    board.take_stats(stats(replace(EXECUTOR, connected=False)), 102.0)
    assert not only(board, 102.0).connected
