"""Large host memory: zeros, aligned, and of the kind that huge pages are given for."""

from pathlib import Path

import pytest
import torch

from executor_svc.host_memory import HUGE_PAGE, Arena, huge_zeros

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


def test_small_pieces_lie_side_by_side() -> None:
    arena = Arena()
    first, second = arena.take(100), arena.take(100)
    assert second.data_ptr() - first.data_ptr() == 128
    first.fill_(1)
    assert not torch.any(second)
