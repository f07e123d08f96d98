import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from common.messages import U32, u32
from scheduler_svc.core.recent_tokens import SAFE_AGE, SPAN, Later, RecentTokens

NUM_ROWS = 5


@given(st.lists(st.sets(st.integers(0, NUM_ROWS - 1)), max_size=40), st.integers(0, SPAN))
def test_a_row_has_what_came_since_it_was_forgotten(steps: list[set[int]], before: int) -> None:
    recent = RecentTokens(NUM_ROWS)
    told: list[list[int]] = [[] for _ in range(NUM_ROWS)]
    for step in range(before):
        recent.append(np.arange(NUM_ROWS), u32([step] * NUM_ROWS))
    for row in range(NUM_ROWS):
        recent.forget(row)
    for step, some in enumerate(steps):
        index = np.array(sorted(some), dtype=np.int64)
        tokens = u32(100 * step + index)
        recent.append(index, tokens)
        for row, token in zip(index.tolist(), tokens.tolist(), strict=True):
            told[row].append(token)
        if step % 7 == 6:
            recent.forget(3)
            told[3].clear()
    assert [tokens.tolist() for tokens in recent.of([*range(NUM_ROWS)])] == told


@pytest.mark.parametrize("num_rows", [1, 300])
def test_who_forgets_the_oldest_in_time_never_runs_out_of_room(num_rows: int) -> None:
    recent, index = RecentTokens(num_rows), np.arange(num_rows)
    for _ in range(3 * SPAN):
        recent.append(index, u32(index))
        if not recent.room:
            for row in recent.oldest():
                recent.forget(row)
            recent.make_room()
        assert 0 < recent.room <= SAFE_AGE - recent.oldest_age and recent.has_all


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("since", [0, 700])
def test_a_promise_is_kept_before_its_tokens_are_overwritten(since: int, gone: bool) -> None:
    recent, both = RecentTokens(2), np.array([0, 1])
    for step in range(since):
        recent.append(both, u32([step, step]))
    recent.forget(1)
    for step in range(3):
        recent.append(both if step != 1 else both[:1], u32([step, 7 + step] if step != 1 else [step]))
    whole, part = recent.later(1, u32([5, 6]), 0, 3), recent.later(1, u32([]), 1, 2)
    recent.forget(1)
    for _ in range(0 if gone else 2 * SPAN):
        recent.append(both, u32([0, 0]))
    if gone:
        recent.keep_promises()
    assert whole.read().tolist() == [5, 6, 7] and part.read().tolist() == [9]


@pytest.mark.parametrize("forgotten", [0, 1, 8, 10, 14, 15, 16, 500])
def test_a_promise_of_the_greatest_age_is_kept(forgotten: int) -> None:
    """Rows forgotten together, anywhere in a tile, that are promised when their turn comes, 64 steps for the last."""
    num_rows, greatest = 64, 0
    recent, index = RecentTokens(num_rows), np.arange(64)
    promises: list[tuple[int, int, Later]] = []
    for step in range(forgotten + 3 * SPAN):
        if step == forgotten:
            for row in range(num_rows):
                recent.forget(row)
            recent.make_room()
        recent.append(index, u32(num_rows * step + index))
        if not recent.room:
            for row in recent.oldest() if len(promises) < num_rows else ():
                greatest = max(greatest, recent.oldest_age)
                promises.append((row, step + 1, recent.later(row, u32([]), 0, SPAN)))
            for row in recent.oldest():
                recent.forget(row)
            recent.make_room()
        assert recent.has_all
    assert SAFE_AGE - 1 <= greatest <= SAFE_AGE and {row for row, _, _ in promises} == {*range(num_rows)}
    for row, end, later in promises:
        assert later.read().tolist() == [num_rows * step + row for step in range(forgotten, end)]


@pytest.mark.parametrize("begun", range(16))
def test_rows_of_the_safe_age_have_all_and_older_ones_may_not(begun: int) -> None:
    recent, index = RecentTokens(1), np.array([0])
    for step in range(begun):
        recent.append(index, u32([step]))
    recent.forget(0)
    for step in range(SAFE_AGE):
        recent.append(index, u32([step]))
    later = recent.later(0, u32([]), 0, SPAN)
    assert recent.has_all
    for _ in range(2 * SPAN):
        recent.append(index, u32([7]))
    assert later.read().tolist() == [*range(SAFE_AGE)] and not recent.has_all


def test_what_nobody_asks_for_is_not_read() -> None:
    reads: list[int] = []

    class Counting(RecentTokens):
        def between(self, row: int, since: int, until: int) -> U32:
            reads.append(row)
            return super().between(row, since, until)

    recent, row = Counting(1), np.array([0])
    recent.append(row, u32([1]))
    kept, dropped = recent.later(0, u32([]), 0, 1), recent.later(0, u32([]), 0, 1)
    del dropped
    for _ in range(SPAN - 1):
        recent.append(row, u32([2]))
    assert not reads
    recent.append(row, u32([2]))
    assert reads == [0] and kept.read().tolist() == [1] and reads == [0]
