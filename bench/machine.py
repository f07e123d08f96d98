"""What the machine itself gives: bytes read from memory and bfloat16 products per second, by all of torch's threads."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from executor_svc.host_memory import huge_zeros

BUFFER_BYTES: Final = 256 << 20


class Machine:
    """Measured between other things. Memory is read as it is where weights lie: in huge pages, if there are any."""

    def __init__(self) -> None:
        self._buffer = huge_zeros(BUFFER_BYTES).view(torch.float64)
        self._buffer.fill_(1.0)  # pages that were never written are one page
        self._a = torch.ones(512, 1024, dtype=torch.bfloat16)
        self._b = torch.ones(1024, 1024, dtype=torch.bfloat16)
        self.gb_s: list[float] = []
        self.gflop_s: list[float] = []

    def measure(self) -> None:
        seconds = _seconds(self._buffer.sum)
        self.gb_s.append(BUFFER_BYTES / seconds / 1e9)
        seconds = min(_seconds(lambda: torch.nn.functional.linear(self._a, self._b)) for _ in range(5))
        self.gflop_s.append(2 * 512 * 1024 * 1024 / seconds / 1e9)

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            name: {"median": round(float(np.median(values)), 1), "best": round(max(values), 1)}
            for name, values in (("read_gb_s", self.gb_s), ("bf16_gflop_s", self.gflop_s))
        }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
