"""Time on the device, of calls replayed from a CUDA graph, so that launching them costs nothing."""

from collections.abc import Callable, Sequence

import torch

from executor_svc.capturing import capturing

# The minimum of these counts: whatever disturbs a replay makes it longer.
_REPEATS = 5


def replayed_ms(calls: Sequence[Callable[[], object]], rounds: int = 1) -> float:
    """Milliseconds of one call: all of them, in turn, `rounds` times, in one graph; the minimum of five replays.

    The calls should differ in the data they read, and read more than the device's cache holds, or nothing comes from
    memory. On the current CUDA stream, which is not the default one, and which the host waits for.
    """
    calls[0]()  # compiled, or chosen, outside of the capture
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    best = float("inf")
    for _ in range(_REPEATS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best / (rounds * len(calls))
