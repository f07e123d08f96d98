"""Large memory on the host in huge pages, where the system has them: without, a step that reads all weights spends
nearly half its time looking addresses up (measured on a virtual machine, where each look-up is two)."""

import ctypes
import mmap
import sys
import time
from contextlib import suppress
from typing import Final

import torch

HUGE_PAGE: Final = 2 << 20
_SLAB: Final = 16 * HUGE_PAGE
_ALIGNMENT: Final = 64
_POPULATE_WRITE: Final = 23  # Linux 5.14, madvise(2); named in Python's mmap from 3.13 on


def huge_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros, aligned to a huge page; costs memory only as it is touched, a huge page at a time."""
    # Private: shared memory, which is mmap's default, gets huge pages only where the whole system is set up for it.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = mmap.mmap(-1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            whole.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(whole, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    return raw[start : start + num_bytes]


def take_pages(memory: torch.Tensor, parts: int, seconds: float) -> int:
    """Has the system give pages of `memory` (host, of `parts` equal ones that fill from their beginnings) until all are
    there or `seconds` are over; what they hold stays. Returns the bytes that were taken.

    Otherwise the step that first writes a page waits until it is cleared, and a new block of the KV cache may lie in as
    many of them as there are layers' keys and values.
    """
    if sys.platform != "linux":
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    end = time.monotonic() + seconds
    begin, size, taken = memory.data_ptr(), memory.nbytes // parts, 0
    for offset in range(0, size, HUGE_PAGE):
        count = min(HUGE_PAGE, size - offset)
        for part in range(parts):
            at = begin + part * size + offset
            first = at // mmap.PAGESIZE * mmap.PAGESIZE
            if time.monotonic() >= end or advise(first, at + count - first, _POPULATE_WRITE):
                return taken
            taken += count
    return taken


class Arena:
    """Hands out memory that stays: small pieces lie side by side, so that they share huge pages."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], aligned to a cache line."""
        if num_bytes >= _SLAB:
            return huge_zeros(num_bytes)
        if self._used + num_bytes > self._slab.numel():
            self._slab, self._used = huge_zeros(_SLAB), 0
        start = self._used
        self._used = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self._slab[start : start + num_bytes]
