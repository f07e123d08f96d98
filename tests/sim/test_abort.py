"""Cancel and finish: on every path the same clean-up, and nothing is given away while the device may touch it."""

import pytest

from scheduler_svc.core.config import CoreConfig
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


def _in_queue(sim: Sim) -> int:
    sim.submit([5, 6, 7], 20)
    return sim.submit(range(20, 60), 20)


def _in_a_prefill_chunk(sim: Sim) -> int:
    key = sim.submit(range(20, 60), 20)
    sim.plan()
    return key


def _between_chunks(sim: Sim) -> int:
    key = _in_a_prefill_chunk(sim)
    sim.deliver()
    return key


def _with_decodes_in_flight(sim: Sim) -> int:
    key = sim.submit([5, 6, 7], 20)
    for _ in range(3):
        sim.fill()
        sim.deliver()
    sim.fill()
    return key


def _preempted_with_results_under_way(sim: Sim) -> int:
    key = _with_decodes_in_flight(sim)
    executor = sim.scheduler.executors[0]
    row = next(s.row for s in sim.scheduler.live_sequences() if s.key == key)
    sim.scheduler._planner.preempt(executor, row)
    return key


def _waiting_for_an_executor(sim: Sim) -> int:
    key = _with_decodes_in_flight(sim)
    sim.disconnect()
    return key


PLACES = [
    _in_queue,
    _in_a_prefill_chunk,
    _between_chunks,
    _with_decodes_in_flight,
    _preempted_with_results_under_way,
    _waiting_for_an_executor,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("how", ["cancel", "finish"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_leaving_from_anywhere_frees_everything(place, how: str, depth: int) -> None:  # type: ignore[no-untyped-def]
    """sglang#24070: an abort in the queue leaks, and the id stays taken. sglang-jax#984, mini-sglang#111: one in the
    middle of a chunk, or with steps in flight, leaks or frees twice. smg#2426: a late or second one disturbs.
    vllm#31503: none is counted.
    """
    sim = Sim(CoreConfig(pipeline_depth=depth, max_prefill_chunk=8), toy_info(max_num_seqs=1))
    key = place(sim)
    sim.check()
    request_id = sim.clients[key].submit.request_id
    assert (sim.cancel(key) if how == "cancel" else sim.finish(key, 0)) is True
    assert sim.scheduler.keys_of(request_id) == ()
    again = sim.submit(range(20, 60), 20, request_id=request_id)
    assert sim.cancel(key) is False and sim.finish(key, 0) is False, "late and duplicate calls change nothing"
    sim.run()
    assert sim.clients[again].reason is not None
    sim.assert_tokens()
    sim.assert_all_free()
    stats = sim.scheduler.stats()
    assert stats.requests_aborted == (how == "cancel")
    assert stats.requests_failed == 0


def test_unknown_keys_and_ids_are_no_error() -> None:
    """smg#2426. sglang matches ids by their beginning."""
    sim = Sim()
    sim.submit([5, 6], 3, request_id="abc")
    assert sim.scheduler.cancel(999, 0) is False
    assert sim.scheduler.finish(999, 1, 0) is False
    assert sim.scheduler.keys_of("ab") == sim.scheduler.keys_of("abcd") == (), "ids match exactly"
    sim.run()
    sim.assert_tokens()


def test_finish_by_a_worker_is_a_success_and_counts_only_its_tokens() -> None:
    sim = Sim(CoreConfig(pipeline_depth=3))
    key = sim.submit([5, 6, 7], 50)
    for _ in range(8):
        sim.fill()
        sim.deliver()
    assert len(sim.clients[key].tokens) == 8
    sim.finish(key, 5)
    sim.run()
    stats = sim.scheduler.stats()
    assert (stats.requests_finished, stats.requests_aborted, stats.generated_tokens) == (1, 0, 5)
    sim.assert_all_free()


def test_the_row_is_released_in_the_next_plan() -> None:
    sim = Sim()
    key = _with_decodes_in_flight(sim)
    sim.deliver()
    sim.cancel(key)
    record = sim.plan()
    assert record is not None and len(record.plan.release) == 1 and not record.decode_tokens
    sim.run()
    sim.assert_all_free()
