"""Time on the device, from graph replays, and the limits it is held against."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from executor_svc.graph_timing import replayed_ms

# Calls in one graph: enough for tens of microseconds even of the smallest kernel.
_LEAST_CALLS = 32


@dataclass(frozen=True)
class Bounds:
    """bytes_per_s: read and written, of a large copy; flops_per_s: of a large bfloat16 product of random numbers."""

    bytes_per_s: float
    flops_per_s: float


def time_us(calls: Sequence[Callable[[], object]], *, least_calls: int = _LEAST_CALLS) -> float:
    """Microseconds of one call on the device: all of them, in turn, in one CUDA graph; the minimum of five replays.

    The calls differ in the data they read, so that nothing is left in a cache from one round to the next. Without a
    device (a rehearsal): the wall time of the first call, once.
    """
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - begin) * 1e6
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    rounds = max(1, -(-least_calls // len(calls)))
    with torch.cuda.stream(stream):
        us = replayed_ms(calls, rounds) * 1e3
    torch.cuda.current_stream().wait_stream(stream)
    return us


def measure_bounds(device: torch.device) -> Bounds:
    """Takes 4 GiB of the device for a moment."""
    source = torch.empty((2 << 30) if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = time_us([lambda: target.copy_(source)], least_calls=4)
    size = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product_us = time_us([lambda: a @ b], least_calls=4)
    return Bounds(2 * source.numel() / copy_us * 1e6, 2.0 * size**3 / product_us * 1e6)
