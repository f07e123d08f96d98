"""Large host memory: zeros, aligned, and of the kind that huge pages are given for."""

from pathlib import Path

import pytest
import torch

from executor_svc.host_memory import HUGE_PAGE, Arena, huge_zeros, take_pages

MAPS = Path("/proc/self/maps")


def test_zeros_begin_at_a_huge_page() -> None:
    memory = huge_zeros(3 * HUGE_PAGE + 5)
    assert memory.shape == (3 * HUGE_PAGE + 5,)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert not memory.any()


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
def test_memory_is_private() -> None:
    """Shared memory is given huge pages only where the whole system is set up for it."""
    memory = huge_zeros(HUGE_PAGE)
    address = memory.data_ptr()
    for line in MAPS.read_text().splitlines():
        borders, access = line.split()[:2]
        begin, end = (int(border, 16) for border in borders.split("-"))
        if begin <= address < end:
            assert access == "rw-p"
            return
    pytest.fail("the memory is in no mapping")


def test_pages_taken_ahead_keep_what_was_written() -> None:
    memory = huge_zeros(6 * HUGE_PAGE + 12)
    memory[3 * HUGE_PAGE] = 7
    assert take_pages(memory, 3, 60) in (memory.nbytes, 0)  # 0: a system that does not know the call
    assert memory[3 * HUGE_PAGE] == 7
    assert int(memory.sum()) == 7
    assert take_pages(memory, 3, 0) == 0


def test_small_pieces_lie_side_by_side() -> None:
    arena = Arena()
    first, second = arena.take(100), arena.take(100)
    assert second.data_ptr() - first.data_ptr() == 128
    first.fill_(1)
    assert not torch.any(second)
