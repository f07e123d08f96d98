"""What the machine itself gives: bytes read from memory and bfloat16 products per second, by all of torch's threads."""

import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import torch

from executor_svc.host_memory import huge_zeros

BUFFER_BYTES: Final = 256 << 20


class Machine:
    """Measured between other things. Memory is read as it is where weights lie: in huge pages, if there are any; by a
    scalar product with itself, which of torch's operations comes nearest to what memory gives."""

    def __init__(self, again: Iterable[int] = ()) -> None:
        """`again`: sizes in bytes that are also read time after time, as a step's weights are: what of them stays in a
        cache is not read from memory. Beyond BUFFER_BYTES nothing would."""
        self._buffer = huge_zeros(BUFFER_BYTES).view(torch.float32)
        self._buffer.fill_(1.0)  # pages that were never written are one page
        self._a = torch.ones(512, 1024, dtype=torch.bfloat16)
        self._b = torch.ones(1024, 1024, dtype=torch.bfloat16)
        self.gb_s: list[float] = []
        self.gflop_s: list[float] = []
        self.again_gb_s: dict[int, list[float]] = {size: [] for size in again}

    def measure(self) -> None:
        self.gb_s.append(self._read(BUFFER_BYTES))
        for size, found in self.again_gb_s.items():
            self._read(size)
            found.append(self._read(size))
        seconds = min(_seconds(lambda: torch.nn.functional.linear(self._a, self._b)) for _ in range(5))
        self.gflop_s.append(2 * 512 * 1024 * 1024 / seconds / 1e9)

    def _read(self, size: int) -> float:
        part = self._buffer[: size // self._buffer.itemsize]
        return part.nbytes / _seconds(lambda: torch.dot(part, part)) / 1e9

    def summary(self) -> dict[str, dict[str, float]]:
        return {"read_gb_s": _summary(self.gb_s), "bf16_gflop_s": _summary(self.gflop_s)}

    def again(self, size: int) -> dict[str, float]:
        return _summary(self.again_gb_s[size])


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": round(float(np.median(values)), 1), "best": round(max(values), 1)}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
