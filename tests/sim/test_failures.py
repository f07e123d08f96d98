"""Row errors, refused plans, failing devices, results that lie, two executors."""

from dataclasses import replace

import pytest

from common.errors import ProtocolError, SequenceFailed
from common.messages import PlanError, PlanErrorCode, RowError, RowErrorCode, StepPlan, StepResult, Welcome, u32
from scheduler_svc.core.config import CoreConfig
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_row_error_ends_its_request_alone(depth: int) -> None:
    sim = Sim(CoreConfig(pipeline_depth=depth))
    sim.toy.nan_token = 999
    keys = [sim.submit([5 + i, 6, 7], 10) for i in range(4)]
    bad = sim.submit([999, *range(20, 40)], 10)
    sim.run()
    assert isinstance(sim.clients[bad].error, SequenceFailed)
    assert all(sim.clients[key].reason for key in keys)
    assert sim.scheduler.stats().requests_failed == 1
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_row_error_discards_its_unregistered_blocks() -> None:
    sim = Sim(CoreConfig(pipeline_depth=2, max_prefill_chunk=8))
    sim.submit(range(20, 60), 10)
    sim.plan()
    sim.plan()
    sim.deliver()  # the first chunk is good: two blocks
    sim.toy.fail_rows.add(0)
    sim.run()
    again = sim.submit(range(20, 60), 10)
    sim.run()
    # The second chunk was launched before the fault was set; nothing from the failing step on is in the cache.
    assert sim.clients[again].cached <= 16
    sim.assert_tokens()


def _bad_admit(plan: StepPlan) -> StepPlan:
    if not plan.admit:
        return plan
    return replace(plan, admit=(replace(plan.admit[0], computed_len=plan.admit[0].length), *plan.admit[1:]))


def test_a_bad_plan_with_the_next_already_sent_corrupts_nothing() -> None:
    sim = Sim(CoreConfig(pipeline_depth=3))
    sim.submit([5, 6, 7], 20)
    sim.plan()
    sim.deliver()
    sim.submit([8, 9], 20)
    sim.plan()
    sim.submit([10, 11], 20)
    sim.plan(_bad_admit)
    sim.plan()
    assert len(sim.pending) == 3
    assert sim.deliver() is not None, "results before the bad plan stand"
    assert sim.deliver() is None
    assert sim.scheduler.executors[0].up is False
    sim.run()
    assert all(client.reason for client in sim.clients.values())
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_request_named_in_two_plan_errors_ends() -> None:
    sim = Sim()
    good, bad = sim.submit([5, 6, 7], 20), sim.submit([8, 9], 20)
    for round_ in range(2):
        record = sim.scheduler.schedule(sim.executor_id, 0)
        assert record is not None
        rows = sim.scheduler.executors[0].rows
        named = next(a.admission_id for a in record.plan.admit if rows.keys[a.row] == bad)
        error = PlanError(record.plan.epoch, record.plan.step_id, PlanErrorCode.MALFORMED, "no", admission_id=named)
        endings = sim.scheduler.plan_failed(sim.executor_id, error, 0)
        assert [e.key for e in endings] == ([bad] if round_ else [])
        assert sim.scheduler.plan_failed(sim.executor_id, error, 0) == (), "one error ends an epoch once"
        sim.clients[bad].silent = bool(endings)
        sim.connect()
    sim.run()
    assert sim.clients[good].reason is not None
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("code", [PlanErrorCode.BUDGET, PlanErrorCode.DEVICE_FAILED])
def test_a_plan_refused_for_ever_ends_its_requests_unless_the_device_is_to_blame(code: PlanErrorCode) -> None:
    sim = Sim()
    key = sim.submit([5, 6, 7], 20)
    for _ in range(10):
        record = sim.scheduler.schedule(sim.executor_id, 0)
        if record is None:
            break
        error = PlanError(record.plan.epoch, record.plan.step_id, code, "no")
        for ending in sim.scheduler.plan_failed(sim.executor_id, error, 0):
            sim.clients[ending.key].error = ending.error
            sim.clients[ending.key].silent = True
        sim.connect()
    assert isinstance(sim.clients[key].error, SequenceFailed) == (code == PlanErrorCode.BUDGET)
    sim.run()
    sim.assert_all_free()


def test_a_failing_device_loses_nothing() -> None:
    sim = Sim(CoreConfig(pipeline_depth=3))
    for i in range(5):
        sim.submit(range(5 + i, 25 + i), 20)
    for step in (2, 5, 9):
        sim.toy.fail_steps = {step}
        while sim.scheduler.executors[0].up:
            sim.fill()
            sim.deliver()
        sim.toy.fail_steps = set()
        sim.replace_executor()
        sim.connect()
    sim.run()
    assert sim.scheduler.stats().executors[0].epochs_ended == 3
    sim.assert_tokens()
    sim.assert_all_free()


def _lies(result: StepResult) -> dict[str, StepResult]:
    more = u32([*result.emitted_rows, 70])
    return {
        "another step": replace(result, step_id=result.step_id + 1),
        "another epoch": replace(result, epoch=result.epoch + 1),
        "a silent row": replace(result, emitted_rows=result.emitted_rows[1:], tokens=result.tokens[1:]),
        "a row unasked": replace(result, emitted_rows=more, tokens=u32([*result.tokens, 5])),
        "token without row": replace(result, tokens=u32([*result.tokens, 5])),
        "token outside the vocabulary": replace(result, tokens=u32([1000] * len(result.tokens))),
        "error of no row": replace(result, row_errors=(RowError(80, 1, RowErrorCode.NOT_FINITE, ""),)),
        "a row that fails and emits": replace(result, row_errors=(RowError(0, 1, RowErrorCode.NOT_FINITE, ""),)),
        "a row that fails twice": replace(
            result,
            emitted_rows=result.emitted_rows[1:],
            tokens=result.tokens[1:],
            row_errors=(RowError(0, 1, RowErrorCode.NOT_FINITE, ""),) * 2,
        ),
        "two tokens here, none there": replace(result, counts=u32([2, 0])),
    }


@pytest.mark.parametrize("lie", list(_lies(StepResult(1, 1))))
def test_a_result_that_is_no_answer_changes_nothing(lie: str) -> None:
    sim = Sim()
    sim.submit([5, 6, 7], 5)
    sim.submit([8, 9], 5)
    sim.plan()
    _, step = sim.pending.popleft()
    assert not isinstance(step, PlanError)
    result = step.wait()
    with pytest.raises(ProtocolError):
        sim.scheduler.update(sim.executor_id, _lies(result)[lie], 0)
    sim.check()
    sim.update(result)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


def test_an_error_of_a_former_occupant_is_not_the_present_one_s() -> None:
    sim = Sim()
    key = sim.submit([5, 6, 7], 5)
    sim.plan()
    _, step = sim.pending.popleft()
    assert not isinstance(step, PlanError)
    result = replace(step.wait(), row_errors=(RowError(0, 12345, RowErrorCode.NOT_FINITE, ""),))
    sim.update(result)
    sim.run()
    assert sim.clients[key].reason is not None


def test_a_welcome_of_another_epoch_is_refused() -> None:
    sim = Sim()
    start = sim.scheduler.begin_epoch(sim.executor_id)
    welcome = Welcome(1, toy_info(), 2, False, 0, 0)
    with pytest.raises(ProtocolError):
        sim.scheduler.executor_up(sim.executor_id, start.epoch - 1, welcome, 0)
    sim.scheduler.executor_up(sim.executor_id, start.epoch, welcome, 0)
    with pytest.raises(ProtocolError):
        sim.scheduler.executor_up(sim.executor_id, start.epoch, welcome, 0)


def test_epochs_rise_and_name_the_incarnation_whose_blocks_are_known() -> None:
    sim = Sim()
    first = sim.scheduler.begin_epoch(sim.executor_id)
    assert (first.epoch, first.keep_kv, first.known_incarnation) == (2, True, sim.toy.incarnation)
    cold = Sim(CoreConfig(enable_prefix_cache=False)).scheduler.begin_epoch(0)
    assert (cold.keep_kv, cold.known_incarnation) == (False, 0)


def test_kept_blocks_of_another_size_are_not_trusted() -> None:
    sim = Sim()
    sim.submit(range(10, 40), 2)
    sim.run()
    start = sim.scheduler.begin_epoch(sim.executor_id)
    sim.scheduler.executor_up(
        sim.executor_id, start.epoch, Welcome(sim.toy.incarnation, toy_info(block_size=8), 2, True, 0, 0), 0
    )
    assert sim.scheduler.stats().executors[0].cached_blocks == 0


def test_an_executor_that_holds_less_than_the_others_is_refused() -> None:
    one, other = Sim(), Sim(info=replace(Sim().toy.info, max_blocks_per_row=2))
    key = one.submit(range(5, 45), 20)
    other.scheduler, other.clients = one.scheduler, one.clients
    other.executor_id = one.scheduler.add_executor("toy:1")
    with pytest.raises(ProtocolError, match="context"):
        other.connect()
    one.run()
    assert one.clients[key].reason
    one.assert_tokens()


def test_memory_that_runs_out_at_the_same_place_for_ever_ends_the_request() -> None:
    """The first chunk succeeds each time; that is no progress when the second fails each time."""
    sim = Sim(CoreConfig(pipeline_depth=1, max_prefill_chunk=8))
    key = sim.submit(range(5, 25), 20)
    for _ in range(20):
        record = sim.scheduler.schedule(sim.executor_id, 0)
        if record is None:
            break
        if record.plan.step_id == 1:
            sim.update(sim.toy.execute(record.plan, 0).wait())
            continue
        error = PlanError(record.plan.epoch, record.plan.step_id, PlanErrorCode.OUT_OF_MEMORY, "no")
        for ending in sim.scheduler.plan_failed(sim.executor_id, error, 0):
            sim.clients[ending.key].error = ending.error
            sim.clients[ending.key].silent = True
        sim.replace_executor()
        sim.connect()
    assert isinstance(sim.clients[key].error, SequenceFailed)
    sim.run()
    sim.assert_all_free()


def test_two_executors_share_one_queue_and_survive_each_other() -> None:
    one, other = Sim(CoreConfig(max_num_seqs=3)), Sim()
    other.scheduler, other.clients = one.scheduler, one.clients
    other.executor_id = one.scheduler.add_executor("toy:1")
    other.connect()
    for i in range(14):
        one.submit(range(5 + i, 15 + i), 25)
    for _ in range(6):
        for sim in (one, other):
            sim.fill()
            sim.deliver()
    assert one.scheduler.executors[0].num_running and one.scheduler.executors[1].num_running
    one.disconnect()
    while one.scheduler.num_live or other.pending:
        other.fill()
        other.deliver()
    assert all(client.reason for client in one.clients.values())
    other.assert_tokens()
    stats = one.scheduler.stats().executors
    assert [s.connected for s in stats] == [False, True]
    assert stats[1].free_rows == stats[1].num_rows and stats[1].free_blocks == stats[1].num_blocks
