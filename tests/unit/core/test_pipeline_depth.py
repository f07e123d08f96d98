"""The depth follows the way against the step, and stays where it is in between."""

import pytest

from common.messages import Timings
from scheduler_svc.core.pipeline_depth import PipelineDepth

US = 1000
# Clocks of two machines have nothing to do with each other.
APART = 77_000_000


def run(depth: PipelineDepth, step_us: int, way_us: int, count: int = 100) -> int:
    """Results of steps that were planned half a way before they were launched, and queued behind another one."""
    for number in range(count):
        launched = APART + number * step_us * US
        start = launched + step_us * US // 2
        end = start + step_us * US
        planned = number * step_us * US
        depth.update(
            Timings(launched_ns=launched, device_start_ns=start, device_end_ns=end),
            planned,
            planned + way_us * US + end - launched,
        )
    return depth.now


@pytest.mark.parametrize(
    ("step_us", "way_us", "want"), [(900, 1000, 3), (20_000, 900, 2), (900, 300, 2), (400, 380, 3)]
)
def test_three_where_two_do_not_hide_the_way(step_us: int, way_us: int, want: int) -> None:
    assert run(PipelineDepth(3, adapts=True), step_us, way_us) == want


def test_it_comes_back_and_does_not_flutter() -> None:
    depth = PipelineDepth(3, adapts=True)
    assert run(depth, 900, 1000) == 3
    assert run(depth, 900, 600) == 3, "between the borders nothing changes"
    assert run(depth, 900, 200) == 2
    assert run(depth, 900, 600) == 2


@pytest.mark.parametrize(("most", "adapts"), [(1, True), (2, True), (3, False), (4, False)])
def test_what_is_fixed_stays(most: int, adapts: bool) -> None:
    assert run(PipelineDepth(most, adapts=adapts), 100, 1000) == most


def test_steps_without_device_work_tell_nothing() -> None:
    depth = PipelineDepth(3, adapts=True)
    depth.update(Timings(), 0, 1_000_000_000)
    assert depth.now == 2
