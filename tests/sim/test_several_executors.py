"""Requests that come alone go to the executor with most room."""

from common.messages import Welcome
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def two_executors(max_num_seqs: tuple[int, int]) -> Scheduler:
    core = Scheduler(CoreConfig(pipeline_depth=8))
    for index, most in enumerate(max_num_seqs):
        executor_id = core.add_executor(f"toy:{index}")
        start = core.begin_epoch(executor_id)
        info = toy_info(max_num_seqs=most)
        core.executor_up(executor_id, start.epoch, Welcome(index + 1, info, 8, False, 0, 0), 0)
    return core


def submit(core: Scheduler, requests: Sim) -> list[int]:
    """Fills as the engine loop does; returns who of the executors runs how many."""
    core.submit(requests.request([5, 6, 7], 8), 0)
    for executor_id in core.by_load():
        core.schedule(executor_id, 0)
    return [executor.num_running for executor in core.executors]


def test_one_request_after_the_other_is_spread() -> None:
    core, requests = two_executors((8, 8)), Sim()
    assert [submit(core, requests) for _ in range(4)] == [[1, 0], [1, 1], [2, 1], [2, 2]]


def test_the_larger_executor_takes_more() -> None:
    core, requests = two_executors((2, 8)), Sim()
    assert [submit(core, requests) for _ in range(5)][-1] == [1, 4]
