"""How many plans are in flight to one executor: two, three while two do not hide the way there and back."""

from common.messages import Timings

# The most that adapting takes.
MAX_ADAPTED = 3
# Three where the way takes more of a step's time than FULL, two again below SPARE: in between nothing changes.
FULL = 0.8
SPARE = 0.5
_GAIN = 0.1


class PipelineDepth:
    """The device never waits while (depth - 1) steps take longer than the way: planned to launched, and from the
    device's end to the result's arrival. Each is measured within one clock, so clocks need not agree. A deeper pipeline
    costs: what is admitted waits a step longer, and one more token is computed for sequences that turn out finished.

    `now`: plans that may be in flight; `most` unless it adapts. Running averages, gain 0.1; 0: not measured yet.
    """

    __slots__ = ("_adapts", "_most", "_step_ns", "_way_ns", "now")

    def __init__(self, most: int, *, adapts: bool) -> None:
        self._most = most
        self._adapts = adapts and most > 2
        self.now = 2 if self._adapts else most
        self._way_ns = self._step_ns = 0.0

    def update(self, timings: Timings, planned_ns: int, result_ns: int) -> None:
        """planned_ns, result_ns: the scheduler's clock. Steps without device work, or whose times are unknown, tell
        nothing."""
        step_ns = timings.device_end_ns - timings.device_start_ns
        if not self._adapts or step_ns <= 0 or timings.launched_ns <= 0:
            return
        way_ns = max(0, result_ns - planned_ns - (timings.device_end_ns - timings.launched_ns))
        gain = _GAIN if self._step_ns else 1.0
        self._step_ns += gain * (step_ns - self._step_ns)
        self._way_ns += gain * (way_ns - self._way_ns)
        if self._way_ns > FULL * self._step_ns:
            self.now = self._most
        elif self._way_ns < SPARE * self._step_ns:
            self.now = 2
