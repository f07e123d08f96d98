"""Time on the device, from graph replays, and the limits it is held against."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_REPEATS = 5
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
        calls[0]()  # compiled, or chosen, outside of the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        best = float("inf")
        for _ in range(_REPEATS):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
    torch.cuda.current_stream().wait_stream(stream)
    return best * 1e3 / (rounds * len(calls))


def measure_bounds(device: torch.device) -> Bounds:
    """Takes 4 GiB of the device for a moment."""
    source = torch.empty((2 << 30) if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = time_us([lambda: target.copy_(source)], least_calls=4)
    size = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product_us = time_us([lambda: a @ b], least_calls=4)
    return Bounds(2 * source.numel() / copy_us * 1e6, 2.0 * size**3 / product_us * 1e6)
