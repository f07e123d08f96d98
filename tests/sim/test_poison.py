"""A request that kills the executor whenever it is computed, and is named by no error."""

from collections.abc import Callable

import pytest

from common.errors import SequenceFailed
from common.messages import PlanError, PlanErrorCode, StepPlan
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.suspects import MAX_DEATHS, MAX_LONE_DEATHS
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

Kills = Callable[[Sim, StepPlan], bool]


def _computes(keys: set[int]) -> Kills:
    """The executor dies of every step that computes a token of these."""

    def kills(sim: Sim, plan: StepPlan) -> bool:
        rows = sim.scheduler.executors[0].rows
        return any(int(rows.keys[row]) in keys for row in (*plan.decode_rows.tolist(), *plan.prefill_rows.tolist()))

    return kills


def _reaches(key: int, length: int) -> Kills:
    """The executor dies of the step that would choose the request's token at `length`."""

    def kills(sim: Sim, plan: StepPlan) -> bool:
        rows = sim.scheduler.executors[0].rows
        sampled = [*plan.decode_rows.tolist(), *plan.prefill_rows.tolist()]
        return any(int(rows.keys[row]) == key and rows.high(row) > length for row in sampled)

    return kills


def _run(sim: Sim, kills: Kills, how: str, max_deaths: int = 100) -> int:
    """Until all requests ended; how often the executor died."""
    deaths = 0
    for _ in range(5000):
        if not sim.scheduler.num_live:
            return deaths
        record = sim.plan()
        fatal = record is not None and kills(sim, record.plan)
        if record is None or len(sim.pending) >= sim.depth or fatal:
            if fatal:
                for _ in range(len(sim.pending) - 1):
                    sim.deliver()
                assert record is not None
                deaths += 1
                if how == "process dies":
                    sim.disconnect()
                else:
                    code = PlanErrorCode.DEVICE_FAILED if how == "device fails" else PlanErrorCode.MALFORMED
                    error = PlanError(record.plan.epoch, record.plan.step_id, code, "no")
                    sim._end(sim.scheduler.plan_failed(sim.executor_id, error, sim.now_ns))
                sim.replace_executor()
                sim.connect()
                assert deaths <= max_deaths, "executors die for ever"
            else:
                sim.deliver()
    raise AssertionError("no end")


HOW = ["process dies", "device fails", "plan refused"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_the_guilty_one_is_found_and_the_innocent_lose_nothing(how: str, policy: str) -> None:
    sim = Sim(CoreConfig(policy=policy))
    good = [sim.submit(range(5 + i, 15 + i), 12, tenant="ab"[i % 2], ignore_eos=True) for i in range(6)]
    poison = sim.submit([99, *range(50, 60)], 12, ignore_eos=True)
    good += [sim.submit(range(5 + i, 15 + i), 12, tenant="ab"[i % 2], ignore_eos=True) for i in range(6, 12)]
    deaths = _run(sim, _computes({poison}), how)
    assert isinstance(sim.clients[poison].error, SequenceFailed)
    assert all(sim.clients[key].reason for key in good)
    assert deaths == MAX_DEATHS
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("how", HOW)
def test_several_guilty_ones(how: str) -> None:
    sim = Sim(CoreConfig(pipeline_depth=3, max_num_seqs=5), toy_info(num_blocks=60))
    poison: set[int] = set()
    good: set[int] = set()
    for i in range(20):
        key = sim.submit(range(5 + i, 15 + i), 10, ignore_eos=True)
        (poison if i % 7 == 3 else good).add(key)
    deaths = _run(sim, _computes(poison), how)
    assert all(isinstance(sim.clients[key].error, SequenceFailed) for key in poison)
    assert all(sim.clients[key].reason for key in good)
    assert deaths <= MAX_DEATHS * len(poison)
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize("how", HOW)
def test_one_that_kills_at_a_certain_length(how: str) -> None:
    """Each new admission succeeds up to there; that is no progress."""
    sim = Sim(CoreConfig(max_prefill_chunk=4))
    good = [sim.submit(range(5 + i, 15 + i), 30, ignore_eos=True) for i in range(5)]
    poison = sim.submit(range(50, 60), 30, ignore_eos=True)
    deaths = _run(sim, _reaches(poison, 25), how)
    assert isinstance(sim.clients[poison].error, SequenceFailed) and len(sim.clients[poison].tokens) >= 14
    assert all(sim.clients[key].reason for key in good)
    assert deaths <= MAX_DEATHS
    sim.run()
    sim.assert_tokens()
    sim.assert_all_free()


@pytest.mark.parametrize(("how", "limit"), [("process dies", MAX_LONE_DEATHS), ("plan refused", MAX_DEATHS)])
def test_alone_in_the_world_it_ends_as_well(how: str, limit: int) -> None:
    """Nothing tells it from a broken device, so it gets more tries when it could be one."""
    sim = Sim()
    poison = sim.submit([5, 6, 7], 5)
    assert _run(sim, _computes({poison}), how) == limit
    assert isinstance(sim.clients[poison].error, SequenceFailed)
    key = sim.submit([5, 6, 8], 5)
    sim.run()
    assert sim.clients[key].reason
    sim.assert_all_free()


def test_an_executor_that_is_restarted_now_and_then_makes_nobody_guilty() -> None:
    sim = Sim(CoreConfig(max_num_seqs=4))
    keys = [sim.submit(range(5 + i, 15 + i), 25, ignore_eos=True) for i in range(10)]
    for step in range(2000):
        if not sim.scheduler.num_live:
            break
        sim.fill()
        sim.deliver()
        if step % 6 == 5:  # time for a prefill and a few tokens
            sim.disconnect()
            sim.replace_executor()
            sim.connect()
    assert all(sim.clients[key].reason for key in keys)
    sim.run()
    sim.assert_tokens()


def test_a_suspect_can_be_cancelled_while_it_waits_and_while_it_is_tried() -> None:
    sim = Sim()
    keys = [sim.submit(range(5 + i, 15 + i), 10, ignore_eos=True) for i in range(4)]
    for _ in range(2):
        sim.plan()
        sim.disconnect()
        sim.replace_executor()
        sim.connect()
    assert all(s.is_suspect for s in sim.scheduler.live_sequences())
    sim.plan()
    assert sim.scheduler.num_running == 1, "one at a time"
    sim.cancel(keys[0])
    sim.cancel(keys[2])
    sim.run()
    assert sim.clients[keys[1]].reason and sim.clients[keys[3]].reason
    sim.assert_tokens()
    sim.assert_all_free()


def test_a_suspect_is_tried_where_everyone_has_shown_not_to_be_the_one() -> None:
    """Who has not delivered since its admission could be guilty as well: who of them, nobody could tell."""
    first = Sim(CoreConfig(max_prefill_chunk=4))
    other = Sim(beside=first)
    long = first.submit(range(5, 25), 8, ignore_eos=True)
    other.plan()
    suspect = first.submit(range(30, 40), 8, ignore_eos=True)
    for _ in range(2):
        first.connect()
        first.plan()
        first.disconnect()
    waiting = next(s for s in first.scheduler.live_sequences() if s.key == suspect)
    assert waiting.is_suspect and waiting.row < 0
    while not first.clients[long].tokens:
        other.fill()
        assert waiting.row < 0
        other.deliver()
    other.fill()
    assert waiting.row >= 0 and waiting.executor_id == other.executor_id
    other.run()
    assert first.clients[long].reason and first.clients[suspect].reason
    first.assert_tokens()
