"""The parts of a step on the executor, as named in traces. Both services name them: the executor for steps traced live,
the scheduler for slow steps rebuilt from their result.
"""

from collections.abc import Iterator
from typing import Final

from common.messages import StepResult

MAX_PARTS: Final = 5


def executor_parts(result: StepResult) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of each part the step had, in executor monotonic ns; at most MAX_PARTS.

    "answer" is the way of a finished result to the network: waiter thread, I/O thread, serialising.
    """
    t = result.timings
    for name, start, end in (
        ("host prepare", t.prepare_start_ns, t.prepare_end_ns),
        ("copy in", t.copy_in_start_ns, t.copy_in_end_ns),
        ("device run", t.device_start_ns, t.device_end_ns),
        ("copy out", t.device_end_ns, t.copy_out_end_ns),
        ("answer", t.copy_out_end_ns, t.sent_ns),
    ):
        if start and end:
            yield name, start, end
